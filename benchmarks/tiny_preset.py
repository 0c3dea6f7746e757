"""How long every operator takes at its `tiny` preset in quick mode, both passes, check included.

    python benchmarks/tiny_preset.py

Exit code 1 when one takes longer than a second (torch's import apart).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from stepscope.store import StoredRun

LIMIT_S = 1.0
COMMAND = ["bench", "ops", "--op", "all", "--preset", "tiny", "--pass", "forward", "--pass", "backward", "--quick"]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="stepscope-tiny-") as store:
        done = subprocess.run(
            [sys.executable, "-m", "stepscope", *COMMAND, "--json", "--store", store],
            capture_output=True,
            text=True,
            check=True,
        )
        run = StoredRun(Path(json.loads(done.stdout)["data"]["run"]))
        took_s: dict[str, float] = defaultdict(float)
        for result in run.results:
            took_s[result.case.benchmark.model] += result.elapsed_s
    for name, seconds in sorted(took_s.items(), key=lambda item: -item[1])[:5]:
        print(f"{name:<16} {seconds:.2f} s")
    slowest = max(took_s.values())
    print(
        f"{len(took_s)} operators, {sum(took_s.values()):.1f} s in all; the slowest {slowest:.2f} s of {LIMIT_S:.0f} s"
    )
    return int(slowest > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
