"""Curves with a known truth, and communication runs that carry them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from builders import case_of, make_result, make_samples, make_system
from stepscope.costs.collective import CollectiveCurve
from stepscope.costs.curves import CurvePoint
from stepscope.records import Benchmark, Case, Failure, System, make_request
from stepscope.store import RunWriter, StoredRun, create_run

Truth = Callable[[float], float]

LATENCY_S = 20e-6
ROOT_S = 2e-8
BANDWIDTH = 100e9
DOUBLING = [1024 * 2**i for i in range(21)]


def alpha_beta(size: float) -> float:
    return LATENCY_S + size / BANDWIDTH


def square_root(size: float) -> float:
    return LATENCY_S + ROOT_S * math.sqrt(size) + size / BANDWIDTH


def kinked(size: float) -> float:
    """A slow protocol up to 64 KiB, then a plateau, then a fast one."""
    if size < 65536:
        return LATENCY_S + size / 5e9
    return max(kinked(65535), LATENCY_S / 2 + size / BANDWIDTH)


def measure(truth: Truth, sizes: Sequence[int] = DOUBLING, *, noise: float = 0.0, seed: int = 1) -> list[CurvePoint]:
    """`noise` is the standard deviation of the logarithm of a time."""
    chance = random.Random(seed)
    return [CurvePoint(size, truth(size) * math.exp(chance.gauss(0, noise))) for size in sizes]


def make_curve(points: Sequence[CurvePoint], **changes: Any) -> CollectiveCurve:
    content: dict[str, Any] = {
        "operation": "all_reduce",
        "members": 8,
        "backend": "nccl",
        "dtype": "float32",
        "device": "cuda",
        "system": "8× Test GPU",
    }
    return CollectiveCurve(**{**content, **changes}, points=list(points))


def make_comms_case(
    size_bytes: int, *, operation: str = "all_reduce", ranks: int = 2, backend: str = "gloo", **parameters: Any
) -> Case:
    benchmark = Benchmark(
        model=operation, implementation="micro", mode=backend, config=f"{ranks}ranks", owner="communication"
    )
    content = {"size_bytes": size_bytes, "dtype": "float32", "device": "cpu", **parameters}
    return case_of(benchmark, content, world_size=ranks)


def write_comms_run(
    store: Path,
    cases: Sequence[Case],
    truth: Truth = square_root,
    *,
    system: System | None = None,
    wrong: Sequence[Case] = (),
    verb: str = "comms",
    timing: str = "slowest_rank",
    **observed: Any,
) -> StoredRun:
    """Two ranks of which the second is the slower one; its times are the truth. `wrong` cases failed."""
    folder = create_run(
        store, verb=verb, name="all_reduce", command=["stepscope"], request=make_request(verb, {}), cases=list(cases)
    )
    with RunWriter(folder) as writer:
        writer.write_system(system or make_system())
        for case in cases:
            size = int(str(case.parameters["size_bytes"]))
            failure = Failure(kind="wrong_result", message="3 elements are wrong") if case in wrong else None
            slow = [truth(size) * factor for factor in (0.99, 1.0, 1.01)]
            samples = [make_samples(case, [t / 2 for t in slow], rank=0), make_samples(case, slow, rank=1)]
            facts = {"size_bytes": size, "bus_factor": 1.0, "members": case.world_size, **observed}
            writer.append(make_result(case, failure=failure, timing=timing, observed=facts), samples)
        writer.finish()
    return StoredRun(folder)
