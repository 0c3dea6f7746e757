"""What `stepscope --help` costs beyond starting Python: interleaved, in fresh processes.

    python benchmarks/cli_startup.py [REPEATS]

The limit is 200 ms more than `python -c pass`; exit code 1 above it.
"""

from __future__ import annotations

import subprocess
import sys
import time

from stepscope.core.units import format_duration
from stepscope.stats import summarize

LIMIT_S = 0.200
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import click": [sys.executable, "-c", "import click"],
    "stepscope --help": [sys.executable, "-m", "stepscope", "--help"],
    "stepscope bench ops --help": [sys.executable, "-m", "stepscope", "bench", "ops", "--help"],
}


def time_once(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> int:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for command in COMMANDS.values():
        time_once(command)  # the first one reads files from disk
    for _ in range(repeats):
        for name, command in COMMANDS.items():
            taken[name].append(time_once(command))
    base = taken["python -c pass"]
    for name, values in taken.items():
        extra = summarize([value - other for value, other in zip(values, base, strict=True)])
        ratio = summarize(values).median_s / summarize(base).median_s
        print(
            f"{name:<28} {format_duration(summarize(values).median_s):>10}  {ratio:5.2f}×  "
            f"{format_duration(extra.median_s):>10} more ({format_duration(extra.ci_low_s)} to "
            f"{format_duration(extra.ci_high_s)}, n={extra.n})"
        )
    more = summarize([value - other for value, other in zip(taken["stepscope --help"], base, strict=True)])
    print(f"stepscope --help: {more.median_s / LIMIT_S:.2f} of the limit of {format_duration(LIMIT_S)}")
    return int(more.median_s > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
