from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors here are small; a second thread would only spin beside the ranks and files of other workers."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def light_garbage_collection() -> None:
    """A measurement collects garbage before each case: what pytest and the libraries hold need not be walked again."""
    gc.freeze()
