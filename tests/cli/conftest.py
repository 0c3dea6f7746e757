from __future__ import annotations

import gc
from pathlib import Path

import pytest
from cli_process import Stepscope, stepscope_here, stepscope_in


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def stepscope(store: Path) -> Stepscope:
    return stepscope_in(store)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For commands whose threads are not the question: they would spin beside the tests of other workers."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module", autouse=True)
def light_garbage_collection() -> None:
    """A measurement collects garbage before each case: what pytest and the libraries hold need not be walked again."""
    gc.freeze()


@pytest.fixture
def here(store: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Stepscope:
    """For calls whose process is not the question: what is killed or plays a fake group goes through `stepscope`."""
    monkeypatch.setenv("STEPSCOPE_STORE", str(store))
    return stepscope_here(capfd)
