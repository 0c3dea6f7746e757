"""This machine's measured ceilings, and whether they are honest.

    python benchmarks/ceilings.py [--device cuda|cpu] [--dtype bfloat16] [--output FILE]

Prints matrix rate and read, write and copy bandwidth, each with its share of the datasheet where the catalogue has one.
On CUDA the large matrix product is timed against `triton.testing.do_bench` too, turn by turn; exit code 1 when they
differ by more than 3 %, or when a bandwidth is above the datasheet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from stepscope.bench.ops import make_peak_cases
from stepscope.bench.ops.producer import OperatorProducer
from stepscope.core.units import format_significant, scale_score
from stepscope.launch.worker import Session
from stepscope.measure import MeasureSettings, WallClock
from stepscope.records import Case, OperatorRequest
from stepscope.run.producer import Prepared
from stepscope.system import collect_system, find_device_peak

TURNS = 5
HEAT_MS = 1000
"""Before do_bench looks, as before our own samples: both see the clocks that last under this load."""
BRIEF = MeasureSettings()
DATASHEET_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
LIMIT = 0.03


def median_s(bench: OperatorProducer, prepared: Prepared, case: Case, *, peer: bool) -> tuple[float, list[float]]:
    """The ceiling's time, and the ratio to do_bench of each turn."""
    times, ratios = [], []
    with prepared.scope or torch.no_grad():
        for _ in range(TURNS if peer else 1):
            result = prepared.time(BRIEF, clock=WallClock(), device=bench.device)
            samples = result.as_samples(case.key)
            times.append(statistics.median(samples.device_seconds() or samples.seconds()))
            if peer:
                from triton.testing import do_bench

                theirs = float(do_bench(prepared.body, warmup=HEAT_MS, rep=300, return_mode="median")) * 1e-3
                ratios.append(times[-1] / theirs)
    return statistics.median(times), ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", action="append", help="[default: float32 and bfloat16, with tf32 on CUDA]")
    parser.add_argument("--output", type=Path, help="write the rows and the system record as JSON")
    options = parser.parse_args()
    cuda = options.device.startswith("cuda")
    dtypes = options.dtype or ["float32", *(["tf32"] if cuda else []), "bfloat16"]
    request = OperatorRequest(settings=BRIEF, device=options.device, check=False)
    bench = OperatorProducer(Session(verb="ops", request=request))
    bench.open()
    peak = find_device_peak(torch.cuda.get_device_name(options.device)) if cuda else None
    rows: list[dict[str, Any]] = []
    kept = True
    for case in make_peak_cases(dtypes, options.device):
        name, dtype = case.benchmark.model, str(case.spec.dtype)
        prepared = bench.prepare(case)
        score = prepared.score
        assert score is not None
        took_s, ratios = median_s(bench, prepared, case, peer=cuda and name == "gemm")
        rate = score.work / took_s
        limit = None
        if peak is not None:
            limit = peak.flops.get(DATASHEET_NAMES.get(dtype, dtype)) if name == "gemm" else peak.memory_bytes_per_s
        row = {"ceiling": name, "dtype": dtype, "seconds": took_s, "rate_per_s": rate, "unit": score.unit,
               "datasheet_per_s": limit, "do_bench_ratios": ratios}  # fmt: skip
        rows.append(row)
        text = f"{name:>7} {dtype:<9} {format_significant(scale_score(rate, score.unit)):>7} {score.unit}"
        if limit:
            text += f"  {rate / limit:.1%} of the datasheet"
            kept &= rate <= limit
        if ratios:
            ratio = statistics.median(ratios)
            text += f"  {ratio:.3f} of do_bench's time ({min(ratios):.3f}–{max(ratios):.3f}, n={len(ratios)})"
            kept &= abs(ratio - 1) <= LIMIT
        print(text, flush=True)
    print("kept" if kept else "MISSED")
    if options.output:
        system = msgspec.to_builtins(collect_system())
        options.output.write_text(json.dumps({"rows": rows, "system": system}, indent=1))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
