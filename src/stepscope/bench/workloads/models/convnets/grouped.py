"""Ways to compute a grouped convolution, all with the same result: which is fast depends on the library and the device.

Libraries have good kernels for dense convolutions and often poor ones for many narrow groups, most of all over three
axes. Several groups can be computed as one wider group whose weights are zero between them; a window over time can
be computed as a convolution over each frame, added up over neighbours; and there are kernels of our own.
"""
# ruff: noqa: PLR0917

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

WIDE = (64, 128)
"""Channels a group at which libraries' dense kernels begin to be efficient."""
DENSEST = 1024
"""Channels beyond which no convolution is made dense: its zeros would outweigh everything."""
TILE = (32, 64)
"""Channels a group that suit our own kernels."""


class Way(NamedTuple):
    kind: Literal["native", "planar", "merged", "frames", "kernel"] = "native"
    """As the library does it; so with channels first; with groups merged; frame by frame; by kernels of our own."""
    merged: int = 1
    """How many groups are computed as one."""

    def describe(self) -> str:
        many = f", {self.merged} groups as one" if self.merged > 1 else ""
        return {
            "native": "the library's grouped convolution",
            "planar": "the library's with channels first, stored otherwise before and after",
            "merged": f"the library's{many}",
            "frames": f"frame by frame, added over time{many}",
            "kernel": f"Triton kernels{many}",
        }[self.kind]


NATIVE = Way()


def list_ways(groups: int, width: int, *, axes: int, kernels: bool) -> list[Way]:
    """Those worth timing for groups of `width` channels."""
    ways = [NATIVE, Way("planar")]
    merges = [*(_merge_to(groups, width, wide) for wide in WIDE), groups]
    ways += [Way("merged", merge) for merge in dict.fromkeys(merges) if merge > 1 and merge * width <= DENSEST]
    if axes == 3:
        frames = [1, _merge_to(groups, width, WIDE[0])]
        ways += [Way("frames", merge) for merge in dict.fromkeys(frames)]
    if kernels:
        tiles = [_merge_to(groups, width, tile) for tile in TILE]
        ways += [Way("kernel", merge) for merge in dict.fromkeys(tiles) if merge == 1 or merge * width <= WIDE[-1]]
    return ways


def _merge_to(groups: int, width: int, wide: int) -> int:
    """The fewest groups, of those that divide them all, that are `wide` channels together; all if none are."""
    return next((n for n in range(1, groups + 1) if groups % n == 0 and n * width >= wide), groups)


def convolved_shape(
    x: Sequence[int], weight: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[int, ...]:
    """Shape of the outputs: [N, O, …]."""
    sides = zip(x[2:], padding, weight[2:], stride, strict=True)
    return (x[0], weight[0], *((side + 2 * pad - window) // step + 1 for side, pad, window, step in sides))


def merge_groups(weight: Tensor, groups: int, merged: int) -> Tensor:
    """[O, I, …] of `groups` as [O, I·merged, …] of groups/merged: zero between what belonged to different groups."""
    if merged == 1:
        return weight
    out, wide, *window = weight.shape
    blocks = weight.view(groups // merged, merged, out // groups, 1, wide, *window)
    own = torch.eye(merged, dtype=weight.dtype, device=weight.device).view(1, merged, 1, merged, 1, *[1] * len(window))
    return (blocks * own).reshape(out, merged * wide, *window)


def convolve_frames(
    x: Tensor, weight: Tensor, *, stride: tuple[int, ...], padding: tuple[int, ...], groups: int
) -> Tensor:
    """A convolution over clips as one over frames that gives each moment of the window its own channels."""
    count, wide, frames, height, width = x.shape
    out, narrow, moments, *window = weight.shape
    apart = weight.view(groups, out // groups, narrow, moments, *window).movedim(3, 1)
    flat = apart.reshape(out * moments, narrow, *window)
    pictures = x.movedim(1, 2).reshape(count * frames, wide, height, width)
    parts = conv2d(pictures, flat, stride=stride[1:], padding=padding[1:], groups=groups)
    parts = parts.view(count, frames, groups, moments, out // groups, *parts.shape[-2:])
    parts = pad(parts, (0, 0) * 5 + (padding[0], padding[0]))
    outputs = (frames + 2 * padding[0] - moments) // stride[0] + 1
    last = (outputs - 1) * stride[0] + 1
    summed = sum(parts[:, a : a + last : stride[0], :, a] for a in range(moments))
    assert isinstance(summed, Tensor)
    return summed.flatten(2, 3).movedim(2, 1)


# Operators take their arguments in order.


LAST = torch.channels_last_3d


@torch.library.custom_op("stepscope::grouped_conv", mutates_args=())
def grouped_conv(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], groups: int, tf32: bool) -> Tensor:
    """Convolution of [N, C, T, H, W] without bias; the result is stored channels last."""
    if x.is_cuda:
        from stepscope.bench.workloads.models.convnets import grouped_kernels

        shape = convolved_shape(x.shape, weight.shape, stride, padding)
        return grouped_kernels.forward(x, weight, shape, stride, padding, groups, tf32)
    y = torch.nn.functional.conv3d(x, weight, stride=stride, padding=padding, groups=groups)
    return y.contiguous(memory_format=LAST)


@grouped_conv.register_fake
def _(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], *_: Any) -> Tensor:
    shape = convolved_shape(x.shape, weight.shape, stride, padding)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=LAST)


@torch.library.custom_op("stepscope::grouped_conv_backward", mutates_args=())
def grouped_conv_backward(
    slope: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], groups: int, tf32: bool
) -> tuple[Tensor, Tensor]:
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
def _(slope: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=LAST), torch.empty_like(weight, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.rest = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    back, change = grouped_conv_backward(slope, x, weight, *ctx.rest)
    return back, change, None, None, None, None


grouped_conv.register_autograd(_backward, setup_context=_keep)
