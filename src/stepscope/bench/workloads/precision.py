"""What a precision means: how weights are held and matmuls are rounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from stepscope.bench.workloads.protocol import Optimized

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.bench.workloads.protocol import Mode, Precision, Task


@contextmanager
def matmul_rounding(precision: Precision) -> Iterator[None]:
    """How matmuls of float32 are rounded: fp32 is fp32. Around the whole step: backward has matmuls, too."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    # What autocast leaves in float32 is rounded, too: it is less than what was asked for.
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "fp32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def math_of(precision: Precision, *, mode: Mode, device: str) -> Iterator[None]:
    """Around the forward pass: in training bf16 and fp8 are autocast over fp32 weights; tf32 rounds matmuls."""
    import torch

    kind = device.partition(":")[0]
    with ExitStack() as scope:
        scope.enter_context(matmul_rounding(precision))
        if mode == "train" and precision in ("bf16", "fp8"):
            # A cache of cast weights would outlive a captured graph.
            scope.enter_context(torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=False))
        if mode == "infer":
            scope.enter_context(torch.inference_mode())
        yield


def storage_dtype(precision: Precision, mode: Mode) -> torch.dtype:
    """Dtype of weights and float inputs: halves are stored as such for inference, and for pure-half training."""
    import torch

    if precision == "fp16":
        return torch.float16
    if precision in ("bf16", "fp8") and mode == "infer":
        return torch.bfloat16
    return torch.float32


def shape_module(task: Task, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
    """As it is run: in its optimized implementation where the task is one, its weights as the precision holds them."""
    import torch

    module.train(mode == "train")
    if isinstance(task, Optimized):
        module = task.convert(module, mode=mode, precision=precision)
    dtype = storage_dtype(precision, mode)
    return module if dtype == torch.float32 else module.to(dtype)


def build_module(task: Task, *, mode: Mode, precision: Precision, device: str, seed: int) -> nn.Module:
    import torch

    torch.manual_seed(seed)
    with torch.device(device):
        module = task.build()
    return shape_module(task, module, mode=mode, precision=precision)


def cast_batch(batch: Mapping[str, torch.Tensor], precision: Precision, mode: Mode) -> dict[str, torch.Tensor]:
    """Floats take the dtype of the weights; whole numbers stay."""
    dtype = storage_dtype(precision, mode)
    return {name: one.to(dtype) if one.is_floating_point() else one for name, one in batch.items()}
