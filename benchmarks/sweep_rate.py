"""Cases per second of one sweep, against a fresh process for each case, and how well two sweeps agree.

    python benchmarks/sweep_rate.py [--device cpu|cuda] [--cases 500] [--fresh 10]

The sweep is 500 drawn gemm shapes in quick mode, without reference check and profiler, run twice; the mean counts.
Against fresh processes its time is that of the whole command, interpreter and torch included: a fresh process measures
one such case with the same command. The rate on a GPU is that of the sweep itself, from its first case on: loading
torch and CUDA takes longer than 200 cases. Exit code 1 when a limit is missed: 50 times faster than fresh processes on
a CPU, 40 cases a second on a GPU, and on a GPU a median difference between two sweeps under 3 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from stepscope.store import StoredRun

SHAPES = {"cpu": "m=8~128,n=8~128,k=8~128", "cuda": "m=32~2048,n=32~2048,k=32~2048"}
COMMON = ["bench", "ops", "--op", "gemm", "--quick", "--no-check", "--json"]
WANTED_SPEEDUP, WANTED_RATE, WANTED_SPREAD = 50.0, 40.0, 0.03


class Sweep(NamedTuple):
    command_s: float
    """Seconds of the whole command."""
    cases_s: float
    """From the first case to the end of the last."""
    medians: dict[str, float]
    """By the case's key."""


def run(arguments: list[str], store: Path) -> Sweep:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", *COMMON, *arguments, "--store", str(store)],
        capture_output=True,
        text=True,
        check=True,
    )
    command_s = time.perf_counter() - start
    run = StoredRun(Path(json.loads(done.stdout)["data"]["run"]))
    medians = {case.key: summary.median_s for case in run.cases() if (summary := case.summary())}
    began, ended = (datetime.fromisoformat(one) for one in (run.results[0].started_at, run.results[-1].started_at))
    cases_s = (ended - began).total_seconds() + run.results[-1].elapsed_s
    return Sweep(command_s, cases_s, medians)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--fresh", type=int, default=10, help="fresh processes to time")
    parser.add_argument("--cache", default="warm", choices=["warm", "cold"])
    options = parser.parse_args()
    shape = SHAPES[options.device.partition(":")[0]]
    sweep = ["--device", options.device, "--cache", options.cache, "--shape", shape, "--draws", str(options.cases)]
    with tempfile.TemporaryDirectory(prefix="stepscope-sweep-") as folder:
        store = Path(folder)

        def fresh(count: int) -> list[float]:
            single = ["--device", options.device, "--cache", options.cache]
            shapes = [f"m={16 * (i + 1)},n=64,k=64" for i in range(count)]
            return [run([*single, "--shape", text], store).command_s for text in shapes]

        singles = fresh(options.fresh // 2)
        first, second = run(sweep, store), run(sweep, store)
        singles += fresh(options.fresh - options.fresh // 2)
    whole_rate = options.cases / ((first.command_s + second.command_s) / 2)
    rate, single_s = options.cases / ((first.cases_s + second.cases_s) / 2), statistics.median(singles)
    speedup = single_s * whole_rate
    both = first.medians.keys() & second.medians.keys()
    differences = sorted(abs(second.medians[key] / first.medians[key] - 1) for key in both)
    spread = statistics.median(differences)
    print(f"{options.cases} gemm cases, {options.device}, {options.cache} cache: "
          f"{first.cases_s:.1f} s and {second.cases_s:.1f} s, the whole commands {first.command_s:.1f} s and "
          f"{second.command_s:.1f} s")  # fmt: skip
    print(f"{rate:.1f} cases a second; {whole_rate:.1f} with loading torch")
    print(f"a fresh process a case: {single_s:.2f} s (n={len(singles)}, {min(singles):.2f}–{max(singles):.2f})")
    print(f"the sweep is {speedup:.0f} times faster")
    tail = differences[int(len(differences) * 0.9)]
    print(f"two sweeps differ by {spread:.2%} in the median, {tail:.2%} at the 90th percentile")
    if options.device == "cpu":
        kept = speedup >= WANTED_SPEEDUP
        print(f"limit: {WANTED_SPEEDUP:.0f} times faster: {'kept' if kept else 'MISSED'}")
    else:
        kept = rate >= WANTED_RATE and spread < WANTED_SPREAD
        print(f"limits: {WANTED_RATE:.0f} a second, {WANTED_SPREAD:.0%}: {'kept' if kept else 'MISSED'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
