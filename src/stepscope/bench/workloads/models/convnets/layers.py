"""Layers of the optimized convolutional networks, under the names of the plain ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import pad

from stepscope.bench.workloads.models.convnets.grouped import NATIVE, Way, convolve_frames, grouped_conv, merge_groups
from stepscope.bench.workloads.models.convnets.ootb import ConvNorm

CHANNEL_STEP = 8
"""Halves of 16 bytes: the least that the matrix units' loads take at once."""


class Stem(NamedTuple):
    """Shape of the first convolution along height and width; a time axis is left as it is."""

    kernel: int
    stride: int
    padding: int

    @property
    def _first(self) -> int:
        """Block in which the window of output 0 begins: 0 or before the picture."""
        return -self.padding // self.stride

    @property
    def block_kernel(self) -> int:
        return (self.kernel - 1 - self.padding) // self.stride - self._first + 1

    @property
    def lead(self) -> int:
        """Pixels of a block before the window's first."""
        return -self.padding % self.stride

    def channels(self, colours: int) -> int:
        return -(-colours * self.stride**2 // CHANNEL_STEP) * CHANNEL_STEP

    def margins(self, side: int) -> tuple[int, int]:
        """Zeros before and after a side, so that the convolution over blocks needs no padding of its own."""
        outputs = (side + 2 * self.padding - self.kernel) // self.stride + 1
        before = -self._first * self.stride
        return before, (outputs - 1 + self.block_kernel) * self.stride - before - side

    def lay_out(self, pictures: torch.Tensor) -> torch.Tensor:
        """[N, 3, (T,) H, W] as padded blocks, [N, channels, (T,) rows, columns], stored channels last."""
        top, bottom = self.margins(pictures.shape[-2])
        left, right = self.margins(pictures.shape[-1])
        padded = pad(pictures, (left, right, top, bottom))
        count, colours, *frames, height, width = padded.shape
        s = self.stride
        rows, columns = height // s, width // s
        blocks = padded.reshape(count, colours, -1, rows, s, columns, s)
        laid = padded.new_zeros(count, blocks.shape[2], rows, columns, self.channels(colours))
        # In the order of the weights' channels: row in the block, column in the block, colour.
        used = laid[..., : s * s * colours].view(*laid.shape[:-1], s, s, colours)
        used.copy_(blocks.permute(0, 2, 3, 5, 4, 6, 1))
        return laid.view(count, *frames, rows, columns, -1).movedim(-1, 1)

    def move_weights(self, weight: torch.Tensor) -> torch.Tensor:
        """[O, 3, (T,) k, k] as weights over blocks. Gradients flow through."""
        s, side = self.stride, self.block_kernel
        colours = weight.shape[1]
        after = s * side - self.kernel - self.lead
        padded = pad(weight, (self.lead, after, self.lead, after))
        blocks = padded.reshape(*padded.shape[:-2], side, s, side, s)
        moved = blocks.movedim((-3, -1), (1, 2)).flatten(1, 3)
        spare = self.channels(colours) - s * s * colours
        return pad(moved, (*[0, 0] * (moved.dim() - 2), 0, spare))


def fold_norms(module: nn.Module) -> None:
    """In place; right for inference only."""
    for layer in module.modules():
        if isinstance(layer, ConvNorm):
            assert isinstance(layer.conv, nn.Conv2d | nn.Conv3d)
            assert isinstance(layer.norm, nn.BatchNorm2d | nn.BatchNorm3d)
            weight, bias = fold_one(layer.conv, layer.norm)
            layer.conv.weight = nn.Parameter(weight)
            layer.conv.bias = nn.Parameter(bias)
            layer.norm = nn.Identity()
    torch.nn.Module.eval(module)


def fold_one(conv: nn.Conv2d | nn.Conv3d, norm: nn.BatchNorm2d | nn.BatchNorm3d) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of the convolution that gives what both give, computed in float64."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    kind = conv.weight.dtype
    scale = norm.weight.detach().double() / (norm.running_var.double() + norm.eps).sqrt()
    weight = conv.weight.detach().double() * scale.view(-1, *[1] * (conv.weight.dim() - 1))
    bias = norm.bias.detach().double() - norm.running_mean.double() * scale
    return weight.to(kind), bias.to(kind)


CONVOLVE = {4: functional.conv2d, 5: functional.conv3d}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class StemOnBlocks(nn.Module):
    """The first convolution over pictures that are laid out as blocks; holds the plain weights."""

    def __init__(self, conv: nn.Conv2d | nn.Conv3d, stem: Stem) -> None:
        super().__init__()
        self.weight = conv.weight
        self.bias = conv.bias
        self.stem = stem
        self.padding = (*conv.padding[:-2], 0, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.stem.move_weights(self.weight)
        return CONVOLVE[x.dim()](x, weight, self.bias, padding=self.padding)

    def freeze(self) -> nn.Conv2d | nn.Conv3d:
        """For inference: the moved weights are made once."""
        return hold_weights(self.stem.move_weights(self.weight), self.bias, padding=self.padding)


class GroupedConv(nn.Module):
    """A grouped convolution computed in the way that was chosen; holds the plain weights."""

    def __init__(
        self, conv: nn.Conv2d | nn.Conv3d, way: Way = NATIVE, *, in_bf16: bool = False, tf32: bool = False
    ) -> None:
        """`in_bf16`: our own kernels compute in bfloat16 whatever they are given, as autocast has libraries do."""
        super().__init__()
        self.weight = conv.weight
        self.bias = conv.bias
        self.stride = tuple(conv.stride)
        self.padding = tuple(int(side) for side in conv.padding)
        self.groups = conv.groups
        self.way = way
        self.in_bf16 = in_bf16
        self.tf32 = tf32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = merge_groups(self.weight, self.groups, self.way.merged)
        groups = self.groups // self.way.merged
        if self.way.kind == "kernel":
            return self._by_kernel(x, weight, groups)
        if self.way.kind == "frames":
            y = convolve_frames(x, weight, stride=self.stride, padding=self.padding, groups=groups)
            return self._with_bias(y).contiguous(memory_format=torch.channels_last_3d)
        planar = self.way.kind == "planar"
        if planar:
            x, weight = x.contiguous(), weight.contiguous()
        y = CONVOLVE[x.dim()](x, weight, self.bias, stride=self.stride, padding=self.padding, groups=groups)
        return y.contiguous(memory_format=LAST[x.dim()]) if planar else y

    def freeze(self) -> GroupedConv:
        """For inference: groups are merged once."""
        self.weight = nn.Parameter(merge_groups(self.weight.detach(), self.groups, self.way.merged))
        self.groups //= self.way.merged
        self.way = self.way._replace(merged=1)
        return self

    def _by_kernel(self, x: torch.Tensor, weight: torch.Tensor, groups: int) -> torch.Tensor:
        if self.in_bf16:
            x, weight = x.bfloat16(), weight.bfloat16()
        flat = x.dim() == 4
        if flat:
            x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        stride, padding = [1] * flat + [*self.stride], [0] * flat + [*self.padding]
        y: torch.Tensor = grouped_conv(x, weight, stride, padding, groups, self.tf32)
        return self._with_bias(y.squeeze(2) if flat else y)

    def _with_bias(self, y: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return y
        return y + self.bias.to(y.dtype).view(-1, *[1] * (y.dim() - 2))


class PoolOverTime(nn.Module):
    """3×3×3 max pooling with stride 2 as pooling of each frame and the largest of three neighbours."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, width, frames = x.shape[:3]
        pictures = x.movedim(1, 2).reshape(count * frames, width, *x.shape[3:])
        pooled = functional.max_pool2d(pictures, 3, stride=2, padding=1)
        pooled = pooled.view(count, frames, *pooled.shape[1:])
        pooled = functional.pad(pooled, (*[0, 0] * 3, 1, 1), value=float("-inf"))
        outputs = (frames - 1) // 2 + 1
        last = 2 * outputs - 1
        before, middle, after = (pooled[:, a : a + last : 2] for a in range(3))
        largest = torch.maximum(torch.maximum(before, middle), after)
        return largest.movedim(2, 1)


def hold_weights(
    weight: torch.Tensor, bias: torch.Tensor | None, *, padding: tuple[int | str, ...]
) -> nn.Conv2d | nn.Conv3d:
    """A convolution with stride 1 and these weights."""
    kind = nn.Conv2d if weight.dim() == 4 else nn.Conv3d
    out, wide, *window = weight.shape
    conv = kind(wide, out, window, padding=padding, bias=bias is not None, device="meta")  # type: ignore[arg-type]
    conv.weight = nn.Parameter(weight.detach().contiguous())
    if bias is not None:
        conv.bias = nn.Parameter(bias.detach())
    return conv
