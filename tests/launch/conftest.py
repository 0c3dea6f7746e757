from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rank_reports import plain_environ

WORKER = Path(__file__).with_name("rank_worker.py")


@pytest.fixture
def environ() -> dict[str, str]:
    return plain_environ()


@pytest.fixture
def worker() -> list[str]:
    """The command of one rank that meets the others over gloo."""
    return [sys.executable, str(WORKER)]


@pytest.fixture
def context_worker() -> list[str]:
    """The command of one rank that only tells its place: starts in a tenth of the time."""
    code = (
        "import os, msgspec; from stepscope.launch.context import detect_rank_context;"
        "os.write(1, msgspec.json.encode(detect_rank_context()) + b'\\n')"
    )
    return [sys.executable, "-c", code]
