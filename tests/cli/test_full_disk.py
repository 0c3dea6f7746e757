"""A store on a disk that fills up, and on one that cannot be written: real mounts, made and removed by the test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import Stepscope

from stepscope.store import StoredRun, run_folders, verify_run

pytestmark = pytest.mark.usefixtures("one_thread")

GEMM = ("bench", "ops", "--op", "gemm", "--min-time", "100ms", "--max-time", "100ms", "--max-samples", "60")


def mount(options: str, target: Path) -> None:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(target)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "disk"
    place.mkdir()
    mount("size=64k", place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_keeps_finished_cases_and_the_run_resumes_after_making_room(here: Stepscope, disk: Path) -> None:
    ballast = disk / "ballast"
    ballast.write_bytes(b"x" * 20_000)
    shapes = [word for m in range(8, 8 + 30) for word in ("--shape", f"m={m},n=8,k=8")]
    sweep = (*GEMM, *shapes, "--store", str(disk / "runs"))
    full = here(*sweep, "--json")
    assert full.code == 1
    assert full.error["kind"] == "store_write"
    assert "No space left" in full.error["message"]
    assert "--resume" in full.error["hint"]
    (folder,) = run_folders(disk / "runs")
    kept = [result.case.key for result in StoredRun(folder).results]
    assert 0 < len(kept) < 30
    assert all(len(case.seconds()) > 0 for case in StoredRun(folder).cases()), "every kept case has its samples"
    assert StoredRun(folder).status == "interrupted"

    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
    done = here(*sweep, "--resume", "--json")
    assert done.code == 0
    keys = [result.case.key for result in StoredRun(folder).results]
    assert keys[: len(kept)] == kept
    assert len(keys) == len(set(keys)) == 30
    assert verify_run(StoredRun(folder)) == []


def test_a_read_only_store(here: Stepscope, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    answer = here(*GEMM, "--store", str(disk / "runs"), "--json")
    assert (answer.code, answer.error["kind"]) == (2, "store_not_writable")
    assert "--store" in answer.error["hint"]
