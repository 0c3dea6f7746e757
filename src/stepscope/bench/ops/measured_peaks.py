"""What this machine can do at best, measured: matrix rate, and read, write and copy bandwidth, each apart.

Ceilings are ordinary cases of a run, so that every share that is printed can be traced to its samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepscope.bench.ops.operator import MATRIX_FLOATS
from stepscope.measure import MeasureSettings, device_kind
from stepscope.records import Benchmark, Case, Parameter
from stepscope.records.kinds import OperatorSpec

_BRIEF = MeasureSettings(
    target_width=0.01, min_time_s=0.1, max_time_s=1.0, min_samples=7, few_samples=3, warmup_max_time_s=0.5, window=2
)
CEILING_SETTINGS = {
    "cpu": _BRIEF,
    # What lasts, not what the first 50 ms give: a product that fills a GPU reaches its power limit, and slows down.
    "cuda": msgspec.structs.replace(
        _BRIEF, min_time_s=0.3, min_sample_s=1e-2, warmup_min_time_s=1.0, warmup_max_time_s=2.0
    ),
}

MATRIX_SIDE = {"cpu": 1536, "cuda": 8192}
"""Of the square product: large enough that more makes it no faster, small enough to be done soon."""
STREAM_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
"""Read, written or copied: many times any cache."""


_LAYOUTS = {"float8_e4m3fn": "nt"}
"""The only one that has products of this dtype."""


def make_ceiling_cases(dtypes: Sequence[str], device: str) -> list[Case]:
    """The matrix rate of each dtype asked for that has matrix products, and three bandwidths."""
    kind = device_kind(device)
    side, size = MATRIX_SIDE[kind], STREAM_BYTES[kind]
    cases = [
        _ceiling("gemm", {"m": side, "n": side, "k": side, "layout": _LAYOUTS.get(dtype, "nn")}, dtype, device)
        for dtype in dict.fromkeys(dtypes)
        if dtype in (*MATRIX_FLOATS, "float8_e4m3fn", "int8")
    ]
    cases.append(_ceiling("read", {"size": size}, "float32", device))
    cases.append(_ceiling("memset", {"size": size}, "int8", device))
    cases.append(_ceiling("memcpy", {"size": size, "kind": "d2d"}, "int8", device))
    return cases


def _ceiling(model: str, shape: dict[str, Parameter], dtype: str, device: str) -> Case:
    benchmark = Benchmark(
        model=model,
        implementation="micro",
        mode="forward",
        config="ceiling",
        owner="operators",
        description="a ceiling of this machine",
    )
    spec = OperatorSpec(
        op=model, direction="forward", shape=shape, dtype=dtype, device=device, cache="cold", measured_peak=True
    )
    return Case(benchmark=benchmark, spec=spec)
