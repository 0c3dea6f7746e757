"""Whole commands of two checkouts in turn: CPU and wall time of one relative to the other.

    python benchmarks/side_by_side.py BEFORE AFTER [--traces FOLDER] [--repeats 7] [--only WORD] [--stores FOLDER]

BEFORE and AFTER are checkouts with an environment of their own (`make setup`); each keeps its own store: in FOLDER, for
later calls. A row is the median of the paired ratios AFTER / BEFORE with their whole range.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

GEMM = "bench ops --op gemm --shape m=256,n=256,k=256"
COMMANDS = {
    "--help": "--help",
    "bench ops --help": "bench ops --help",
    "one operator": f"{GEMM} --quick",
    "60 operator cases": "bench ops --op gemm --shape m=8~128,n=8~128,k=8~128 --draws 60 --min-samples 3 --quick",
    "three fresh processes": f"{GEMM} --quick --processes 3",
    "all_reduce, 2 ranks": "bench comms --collective all_reduce --sizes 1K:1M:x32 --ranks 2 --quick",
    "a pattern, 2 ranks": "bench pattern ddp --set scale=0.001 --ranks 2 --quick",
    "a tiny model": "bench workload dlrm/ootb/train/small.1dev-embed32-fp32 --scale tiny --quick",
    "runs list": "runs list",
    "report of a run, text": "report {newest}",
    "report of a run, page": "report {newest} -o {out}.html",
    "compare": "compare {second} {newest}",
    "sql": "runs sql SELECT+count(*)+FROM+cases",
}
TRACE_COMMANDS = {
    "summary, cached": "trace summary {trace}",
    "summary, read anew": "trace summary {trace} --no-cache",
    "page": "trace report {trace} -o {out}.html",
    "critical path": "trace critical-path {trace}",
    "convert": "trace convert {trace} {out}.csv",
}


class Cost(NamedTuple):
    cpu_s: float
    wall_s: float
    code: int


def run_once(checkout: Path, words: list[str], folder: Path) -> Cost:
    store = folder / "store"
    environment = {
        **os.environ,
        "STEPSCOPE_STORE": str(store),
        "STEPSCOPE_TRACE_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }
    runs = [str(one) for one in sorted(store.iterdir())] if store.is_dir() else []
    newest, second = (runs[-1], runs[-2]) if len(runs) > 1 else ("", "")
    words = [one.format(newest=newest, second=second, out=folder / "out").replace("+", " ") for one in words]
    command = [str(checkout / ".venv" / "bin" / "python"), "-m", "stepscope", *words]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode not in {0, 3, 4}:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode} in {checkout}:\n{done.stderr[-2000:]}")
    return Cost(cpu_s, time.perf_counter() - start, done.returncode)


def list_commands(traces: Path | None) -> dict[str, str]:
    named = dict(COMMANDS)
    for trace in sorted(traces.glob("*.json*")) if traces else []:
        size = f"{trace.name} ({trace.stat().st_size / 1e6:.1f} MB)"
        named |= {f"{what}: {size}": text.replace("{trace}", str(trace)) for what, text in TRACE_COMMANDS.items()}
    return named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--stores", type=Path)
    asked = parser.parse_args()
    sides = {"before": asked.before.resolve(), "after": asked.after.resolve()}
    # Else one side would compile its modules in every process.
    for checkout in sides.values():
        subprocess.run(
            [str(checkout / ".venv/bin/python"), "-m", "compileall", "-q", str(checkout / "src")], check=True
        )
    place = asked.stores.resolve() if asked.stores else Path(tempfile.mkdtemp(prefix="side-by-side-"))
    print(f"{'command':58} {'CPU':>7} {'interval':>15} {'wall':>7} {'interval':>15} {'before CPU':>11}")
    try:
        for side in sides:
            (place / side).mkdir(parents=True, exist_ok=True)
        for name, text in list_commands(asked.traces).items():
            if asked.only not in name:
                continue
            words = text.split()
            costs: dict[str, list[Cost]] = {side: [] for side in sides}
            for turn in range(asked.repeats + 1):  # the first reads from disk and compiles
                for side in list(sides) if turn % 2 else reversed(list(sides)):
                    cost = run_once(sides[side], words, place / side)
                    if turn:
                        costs[side].append(cost)
            print(format_row(name, costs), flush=True)
    finally:
        if not asked.stores:
            shutil.rmtree(place, ignore_errors=True)


def format_row(name: str, costs: dict[str, list[Cost]]) -> str:
    cells = []
    for field in ("cpu_s", "wall_s"):
        ratios = sorted(
            getattr(b, field) / getattr(a, field) for a, b in zip(costs["before"], costs["after"], strict=True)
        )
        low, high = ratios[0], ratios[-1]
        cells.append(f"{ratios[len(ratios) // 2]:7.3f} {f'{low:.3f}–{high:.3f}':>15}")
    typical = sorted(one.cpu_s for one in costs["before"])[len(costs["before"]) // 2]
    return f"{name:58} {cells[0]} {cells[1]} {typical:9.2f} s"


if __name__ == "__main__":
    main()
