"""Kernels by the profiler, in a process of their own.

Once the profiler has been used on a GPU, every later launch of the process takes about twice as long: wall times taken
there would be those of the profiler. So a child process looks at the kernels of all cases first and leaves them in the
run's folder; the process that measures only reads them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from stepscope.records import KernelUse
from stepscope.store import StoredRun
from stepscope.store.folder import whole_lines

KERNELS_FILE = "kernels.jsonl"


class ProfiledCase(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file."""

    case: str
    """Key of the case."""
    kernels: list[KernelUse] = []
    kernel_s: list[float] = []
    """Seconds of all kernels of a call, for each profiled call."""
    failure: str | None = None


def read_profiled(folder: Path) -> dict[str, ProfiledCase]:
    """By the case's key; empty where nothing was profiled."""
    path = folder / KERNELS_FILE
    if not path.exists():
        return {}
    decoder = msgspec.json.Decoder(ProfiledCase)
    lines = [decoder.decode(line) for _, line in whole_lines(path.read_bytes())]
    return {one.case: one for one in lines}


def profile_in_child(folder: Path) -> dict[str, ProfiledCase]:
    """Profile what the run's plan still lacks. A child that dies leaves what it has: its cases have no kernels."""
    run = StoredRun(folder)
    missing = {case.key for case in run.plan.cases} - {result.case.key for result in run.results}
    if not missing <= read_profiled(folder).keys():
        subprocess.run([sys.executable, "-m", "stepscope.bench.ops.profiling", str(folder)], check=False)
    return read_profiled(folder)
