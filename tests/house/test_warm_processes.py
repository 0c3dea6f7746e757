"""What tests start in place of new processes is what was asked for, and is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from warm_processes import ForkedProcess, WarmStarter


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
@pytest.mark.parametrize(("variables", "kind"), [({}, ForkedProcess), ({"OMP_NUM_THREADS": "2"}, subprocess.Popen)])
def test_a_forked_process_is_a_child_and_ends_as_a_new_one_does(
    tmp_path: Path, warm_starter: WarmStarter, variables: dict[str, str], kind: type
) -> None:
    """Here there is no run to measure: the process says so in the folder and exits with 1."""
    with (tmp_path / "log").open("wb") as log:
        process = warm_starter(
            [sys.executable, "-m", "stepscope.run", str(tmp_path), "seal"],
            env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    assert isinstance(process, kind)
    assert psutil.Process(process.pid).ppid() == os.getpid()
    assert process.wait() == 1
    assert (tmp_path / "failures.jsonl").exists()
    assert (tmp_path / "log").read_bytes() == b""
