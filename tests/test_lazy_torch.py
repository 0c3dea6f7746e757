"""What is listed and planned with torch in its annotations loads it where it is used, and where only."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_torch_is_loaded_when_something_of_it_is_used() -> None:
    script = """
import sys
from stepscope.bench.ops import make_cases
from stepscope.core.lazy_torch import functional, torch
make_cases(names=["all"], shapes=[], sets=["tiny"], device="cpu")
assert "torch" not in sys.modules
assert torch.add(1, 2).item() == 3
assert functional.relu(torch.tensor(-1.0)) == 0
assert sys.modules["torch"].tensor is torch.tensor
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_function_that_is_replaced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept: what torch has now counts."""
    real = pytest.importorskip("torch")
    from stepscope.core.lazy_torch import torch

    monkeypatch.setattr(real, "mm", len)
    assert torch.mm([1, 2]) == 2  # type: ignore[call-overload]
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = torch.nonsense
