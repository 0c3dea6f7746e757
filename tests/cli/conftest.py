from __future__ import annotations

from pathlib import Path

import pytest
from cli_process import Stepscope, stepscope_in


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def stepscope(store: Path) -> Stepscope:
    return stepscope_in(store)
