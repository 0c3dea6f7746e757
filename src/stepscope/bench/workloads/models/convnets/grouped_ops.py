"""A grouped convolution over clips as an operator that torch.compile takes whole: our kernels on CUDA, torch elsewhere.

Imports torch: load it inside functions only.
"""

# Operators take their arguments in order.
# ruff: noqa: PLR0917

from __future__ import annotations

from typing import Any

import torch

from stepscope.bench.workloads.models.convnets.grouped import convolved_shape

LAST = torch.channels_last_3d


@torch.library.custom_op("stepscope::grouped_conv", mutates_args=())
def grouped_conv(
    x: torch.Tensor, weight: torch.Tensor, stride: list[int], padding: list[int], groups: int, tf32: bool
) -> torch.Tensor:
    """Of [N, C, T, H, W], without bias; the result is stored channels last."""
    if x.is_cuda:
        from stepscope.bench.workloads.models.convnets import grouped_kernels

        return grouped_kernels.forward(x, weight, stride, padding, groups, tf32)
    y = torch.nn.functional.conv3d(x, weight, stride=stride, padding=padding, groups=groups)
    return y.contiguous(memory_format=LAST)


@grouped_conv.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, stride: list[int], padding: list[int], groups: int, tf32: bool
) -> torch.Tensor:
    shape = convolved_shape(x.shape, weight.shape, stride, padding)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=LAST)


@torch.library.custom_op("stepscope::grouped_conv_backward", mutates_args=())
def grouped_conv_backward(
    slope: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    groups: int,
    tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the input, stored channels last, and of the weight."""
    if x.is_cuda:
        from stepscope.bench.workloads.models.convnets import grouped_kernels

        back = grouped_kernels.backward_input(slope, x, weight, stride, padding, groups, tf32)
        return back, grouped_kernels.backward_weight(slope, x, weight, stride, padding, groups, tf32)
    back, change, _ = torch.ops.aten.convolution_backward(
        slope, x, weight, None, stride, padding, [1, 1, 1], False, [0, 0, 0], groups, [True, True, False]
    )
    return back.contiguous(memory_format=LAST), change.contiguous()


@grouped_conv_backward.register_fake
def _(
    slope: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    groups: int,
    tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, memory_format=LAST), torch.empty_like(weight, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, *ctx.rest = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    back, change = grouped_conv_backward(slope, x, weight, *ctx.rest)
    return back, change, None, None, None, None


grouped_conv.register_autograd(_backward, setup_context=_keep)
