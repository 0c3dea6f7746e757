"""The examples run as a newcomer would start them, and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMISED = {
    "compare_two_runs.py": r"gemm/\S+: (better|worse|no difference found|not enough data)",
    "explain_a_step.py": r"1 rank, 3 steps recorded\n.*step takes",
    "sweep_a_collective.py": r"65536 bytes: \d+\.\d+ GB/s bus bandwidth\npage: ",
    "time_a_callable.py": r"[\d.]+ µs, 9\d% interval [\d.]+ to [\d.]+ µs, n = \d+",
}


def test_every_example_is_tried() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == PROMISED.keys()


@pytest.mark.parametrize("name", PROMISED)
def test_an_example_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(PROMISED[name], done.stdout), done.stdout
