from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors here are small; a second thread would only spin beside the ranks and files of other workers."""
    torch.set_num_threads(1)
