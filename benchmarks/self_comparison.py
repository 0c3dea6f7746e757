"""Does comparing a benchmark with itself raise false alarms on this machine, and is a planted change found?

    python benchmarks/self_comparison.py [RUNS]

Measures the same cases in RUNS runs (15) of four fresh processes each and compares every run with every other: 105
comparisons. Then it asks a comparison how many processes would show a change of 10 %, measures two runs with so many,
makes every sample of the second 10 % longer, and compares those. The numbers are planned with an upper bound of the
spread, so that one round is nearly always enough; a second is allowed, with as many as the first asks for. Exit code 1
when there are more alarms than chance allows, or when the planted change is not found in every case.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from itertools import combinations
from pathlib import Path

import msgspec

from stepscope.compare.verdict import DEFAULT_FAMILY_LEVEL, Comparison, compare_cases
from stepscope.store import MeasuredCase, StoredRun

BENCH = [
    sys.executable, "-m", "stepscope", "bench", "ops",
    "--op", "gemm", "--shape", "m=256,n=256,k=256", "--shape", "m=128,n=128,k=128", "--shape", "m=64,n=512,k=64",
    "--max-time", "300ms", "--json",
]  # fmt: skip
PROCESSES = 4
PLANTED = 0.10
MOST_ROUNDS = 2


def allowed_alarms(repeats: int, level: float) -> int:
    """The most that chance gives in 99 of 100 such experiments, were the comparisons independent."""
    chance, total, count = (1 - level) ** repeats, 0.0, 0
    while True:
        total += chance
        if total >= 0.99:
            return count
        chance *= (repeats - count) / (count + 1) * level / (1 - level)
        count += 1


def measure(store: Path, processes: int) -> list[MeasuredCase]:
    command = [*BENCH, "--processes", str(processes), "--store", str(store)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return StoredRun(Path(msgspec.json.decode(done.stdout)["data"]["run"])).cases()


def plant(cases: list[MeasuredCase]) -> list[MeasuredCase]:
    """The same cases, every sample longer."""
    return [
        case._replace(
            samples=[
                msgspec.structs.replace(one, duration_s=[value * (1 + PLANTED) for value in one.duration_s])
                for one in case.samples
            ]
        )
        for case in cases
    ]


def find_planted(store: Path, comparison: Comparison) -> Comparison:
    """Measures both sides anew with as many processes as the comparison before asked for, until it is decided."""
    for _ in range(MOST_ROUNDS):
        needed = max([PROCESSES, *(row.processes_needed for row in comparison.rows if row.processes_needed)])
        comparison = compare_cases(measure(store, needed), plant(measure(store, needed)), resolution=PLANTED)
        found = [f"{row.verdict} {row.ratio or 0:.3f}×" for row in comparison.rows]
        print(f"a planted {PLANTED:.0%} with the {needed} processes per side that were asked for: {found}", flush=True)
        if all(row.verdict == "worse" for row in comparison.rows):
            break
    return comparison


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch)
        runs = [measure(store, PROCESSES) for _ in range(count)]
        comparisons = [compare_cases(a, b) for a, b in combinations(runs, 2)]
        verdicts = Counter(row.verdict for comparison in comparisons for row in comparison.rows)
        alarmed = sum(any(row.verdict in {"better", "worse"} for row in one.rows) for one in comparisons)
        allowed = allowed_alarms(len(comparisons), DEFAULT_FAMILY_LEVEL)
        ratios = sorted(row.ratio for comparison in comparisons for row in comparison.rows if row.ratio)
        print(f"{len(comparisons)} comparisons of a benchmark with itself, {len(runs[0])} cases each: {dict(verdicts)}")
        print(f"ratios from {ratios[0]:.3f} to {ratios[-1]:.3f}")
        print(f"comparisons with an alarm: {alarmed}; allowed at a level of {DEFAULT_FAMILY_LEVEL:.0%}: {allowed}")
        planted = find_planted(store, compare_cases(*runs[:2], resolution=PLANTED))
    return int(alarmed > allowed or any(row.verdict != "worse" for row in planted.rows))


if __name__ == "__main__":
    sys.exit(main())
