from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stepscope.core.errors import UsageError
from stepscope.measure import best_device, device, require_device


def test_the_best_device_needs_no_torch_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_ACCELERATOR_NODES", ("/dev/there-is-no-such-node",))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert best_device() == "cpu"


@pytest.mark.parametrize("works", [True, False])
def test_the_best_device_is_one_that_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, works: bool) -> None:
    """A driver alone is not enough: torch may be built without it."""
    import torch

    monkeypatch.setattr(device, "_ACCELERATOR_NODES", (str(tmp_path),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: works)
    assert best_device() == ("cuda" if works else "cpu")


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    require_device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no CUDA device"):
        require_device("cuda")
    with pytest.raises(UsageError, match="not a device"):
        require_device("tpu")
