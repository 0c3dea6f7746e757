"""What the tests of real launchers share: a clean environment to start from, and reading what the ranks print."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

_LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "SLURM", "TORCHELASTIC_", "STEPSCOPE_")
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def plain_environ() -> dict[str, str]:
    """This process's environment as if no launcher had started it, with one thread a rank."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _RANK_VARIABLES
    }
    return {**kept, "OMP_NUM_THREADS": "1"}


def read_reports(finished: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """One report a rank, by rank."""
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return parse_reports(finished.stdout)


def parse_reports(text: str) -> list[dict[str, Any]]:
    reports = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(reports, key=lambda report: int(report["rank"]))
