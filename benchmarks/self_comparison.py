"""Does comparing a benchmark with itself raise false alarms on this machine, as it is, with its noise?

    python benchmarks/self_comparison.py [REPEATS]

Measures the same cases REPEATS + 1 times in fresh processes and compares each run with the next at the default
level (1 % for any alarm in a family). Prints every verdict; exit code 1 when there are more alarms than chance allows.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

from stepscope.compare import DEFAULT_FAMILY_LEVEL, compare_cases
from stepscope.store import StoredRun, run_folders

BENCH = [
    sys.executable, "-m", "stepscope", "bench", "ops",
    "--op", "gemm", "--shape", "m=256,n=256,k=256", "--shape", "m=128,n=128,k=128", "--shape", "m=64,n=512,k=64",
    "--max-time", "1s",
]  # fmt: skip


def allowed_alarms(repeats: int, level: float) -> int:
    """The most that chance gives in 99 of 100 such experiments: families are independent, alarms binomial."""
    chance, total, count = (1 - level) ** repeats, 0.0, 0
    while True:
        total += chance
        if total >= 0.99:
            return count
        chance *= (repeats - count) / (count + 1) * level / (1 - level)
        count += 1


def main() -> int:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch)
        for _ in range(repeats + 1):
            subprocess.run([*BENCH, "--store", str(store)], check=True, capture_output=True)
        runs = [StoredRun(folder) for folder in run_folders(store)]
        comparisons = [compare_cases(a.cases(), b.cases()) for a, b in pairwise(runs)]
    verdicts = Counter(row.verdict for comparison in comparisons for row in comparison.rows)
    ratios = sorted(row.ratio for comparison in comparisons for row in comparison.rows if row.ratio)
    alarmed = sum(any(row.verdict in {"better", "worse"} for row in c.rows) for c in comparisons)
    allowed = allowed_alarms(repeats, DEFAULT_FAMILY_LEVEL)
    print(f"{repeats} comparisons of a benchmark with itself, {len(comparisons[0].rows)} cases each: {dict(verdicts)}")
    print(f"ratios from {ratios[0]:.3f} to {ratios[-1]:.3f}")
    print(f"families with an alarm: {alarmed}; allowed at a level of {DEFAULT_FAMILY_LEVEL:.0%}: {allowed}")
    return int(alarmed > allowed)


if __name__ == "__main__":
    sys.exit(main())
