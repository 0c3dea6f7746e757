"""Modes of the process that a case sets for itself and leaves as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def math_mode(dtype: str, direction: str) -> Iterator[None]:
    """float32 is float32: matrix units round to tf32 only in cases that ask for tf32. Only backward needs gradients."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = dtype == "tf32"
    try:
        with torch.set_grad_enabled(direction == "backward"):
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
