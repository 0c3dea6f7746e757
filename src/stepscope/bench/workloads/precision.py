"""What a precision means: how weights are held and matmuls are rounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from stepscope.bench.workloads.protocol import Batch, Optimized, Precision, Setting, Task

if TYPE_CHECKING:
    import torch
    from torch import nn


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
def math_of(setting: Setting) -> Iterator[None]:
    """Around the forward pass: in training bf16 and fp8 are autocast over fp32 weights; tf32 rounds matmuls."""
    import torch

    with ExitStack() as scope:
        scope.enter_context(matmul_rounding(setting.precision))
        if setting.mode == "train" and setting.precision in ("bf16", "fp8"):
            # A cache of cast weights would outlive a captured graph.
            kind = setting.device.partition(":")[0]
            scope.enter_context(torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=False))
        if setting.mode == "infer":
            scope.enter_context(torch.inference_mode())
        yield


def storage_dtype(setting: Setting) -> torch.dtype:
    """Dtype of weights and float inputs: halves are stored as such for inference, and for pure-half training."""
    import torch

    if setting.precision == "fp16":
        return torch.float16
    if setting.precision in ("bf16", "fp8") and setting.mode == "infer":
        return torch.bfloat16
    return torch.float32


def shape_module(task: Task, module: nn.Module, setting: Setting) -> nn.Module:
    """As it is run: in its optimized implementation where the task is one, its weights as the precision holds them."""
    import torch

    module.train(setting.mode == "train")
    if isinstance(task, Optimized):
        module = task.convert(module, mode=setting.mode, precision=setting.precision)
    dtype = storage_dtype(setting)
    return module if dtype == torch.float32 else module.to(dtype)


def build_module(task: Task, setting: Setting, *, seed: int) -> nn.Module:
    import torch

    torch.manual_seed(seed)
    with torch.device(setting.device):
        module = task.build()
    return shape_module(task, module, setting)


def to_device(batch: Batch, setting: Setting) -> dict[str, torch.Tensor]:
    """Floats take the dtype of the weights; whole numbers stay."""
    dtype = storage_dtype(setting)
    moved = {name: one.to(setting.device, non_blocking=True) for name, one in batch.items()}
    return {name: one.to(dtype) if one.is_floating_point() else one for name, one in moved.items()}
