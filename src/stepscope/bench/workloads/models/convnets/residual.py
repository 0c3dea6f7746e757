"""Residual networks: ResNet-50, 3D ResNeXt-101 and RegNet-Y."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import nn

from stepscope.bench.workloads.models.convnets.layers import PoolOverTime, Stem
from stepscope.bench.workloads.models.convnets.ootb import ConvNorm, PictureTask, Residual, ResidualNetwork
from stepscope.bench.workloads.models.convnets.optimized import FastPictures
from stepscope.bench.workloads.protocol import Change


class ResidualTask(PictureTask):
    """A stem, then stages of `depths` blocks that are `widths` wide; each stage but perhaps the first halves the
    picture."""

    expansion: ClassVar[int] = 1
    """How many times as wide as inside a block is what it gives."""
    halves_first: ClassVar[bool] = False
    axes: ClassVar[int] = 2

    @abstractmethod
    def make_stem(self, width: int) -> list[nn.Module]:
        """The first convolution, and what pools after it."""

    @abstractmethod
    def make_branch(self, wide: int, width: int, stride: int) -> list[nn.Module]: ...

    def build(self) -> ResidualNetwork:
        wide = self.sizes["stem_width"]
        stem, pool = self.make_stem(wide)
        blocks: list[Residual] = []
        for stage, (depth, width) in enumerate(zip(self.sizes["depths"], self.sizes["widths"], strict=True)):
            for place in range(depth):
                stride = 2 if (stage or self.halves_first) and not place else 1
                out = width * self.expansion
                branch, changes = self.make_branch(wide, width, stride), stride != 1 or wide != out
                around = ConvNorm(wide, out, stride=stride, relu=False, axes=self.axes) if changes else None
                blocks.append(Residual(branch, around))
                wide = out
        return ResidualNetwork(stem, pool, blocks, wide, self.sizes["classes"])


class ResNet50(ResidualTask):
    """ResNet-50 v1.5 (He et al., 2015, with the stride in the 3×3 convolution): bottlenecks of 1×1, 3×3 and 1×1
    convolutions."""

    expansion = 4

    def make_stem(self, width: int) -> list[nn.Module]:
        return [ConvNorm(3, width, 7, stride=2, padding=3), nn.MaxPool2d(3, stride=2, padding=1)]

    def make_branch(self, wide: int, width: int, stride: int) -> list[nn.Module]:
        return [
            ConvNorm(wide, width),
            ConvNorm(width, width, 3, stride=stride, padding=1),
            ConvNorm(width, width * self.expansion, relu=False),
        ]


class ResNeXt3d(ResidualTask):
    """3D ResNeXt-101 over clips of video (Hara, Kataoka and Satoh, 2018): bottlenecks over space and time whose 3×3×3
    convolutions have `cardinality` groups."""

    expansion = 2
    axes = 3

    def make_stem(self, width: int) -> list[nn.Module]:
        return [ConvNorm(3, width, 7, stride=(1, 2, 2), padding=3, axes=3), nn.MaxPool3d(3, stride=2, padding=1)]

    def make_branch(self, wide: int, width: int, stride: int) -> list[nn.Module]:
        return [
            ConvNorm(wide, width, axes=3),
            ConvNorm(width, width, 3, stride=stride, padding=1, groups=self.sizes["cardinality"], axes=3),
            ConvNorm(width, width * self.expansion, relu=False, axes=3),
        ]


SQUEEZE = 0.25
"""Width of a gate's hidden layer as a share of what its block takes in."""


class Gate(nn.Module):
    """Squeeze and excitation: each channel is scaled by a number that depends on the whole picture."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(width, hidden, 1)
        self.excite = nn.Conv2d(hidden, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))
        return x * torch.sigmoid(self.excite(hidden))


class RegNetY(ResidualTask):
    """RegNet-Y, eight sizes (Radosavovic et al., 2020): 3×3 convolutions in groups of a fixed width, gated."""

    halves_first = True

    def make_stem(self, width: int) -> list[nn.Module]:
        return [ConvNorm(3, width, 3, stride=2, padding=1), nn.Identity()]

    def make_branch(self, wide: int, width: int, stride: int) -> list[nn.Module]:
        return [
            ConvNorm(wide, width),
            ConvNorm(width, width, 3, stride=stride, padding=1, groups=width // self.sizes["group_width"]),
            Gate(width, round(SQUEEZE * wide)),
            ConvNorm(width, width, relu=False),
        ]

    def build(self) -> ResidualNetwork:
        network = super().build()
        nn.init.normal_(network.head.linear.weight, std=0.01)
        nn.init.zeros_(network.head.linear.bias)
        return network


class FastResidual(FastPictures):
    repeated = ("Residual",)


class FastResNet50(FastResidual):
    stem = Stem(kernel=7, stride=2, padding=3)


class FastRegNetY(FastResidual):
    stem = Stem(kernel=3, stride=2, padding=1)
    has_groups = True


class FastResNeXt3d(FastResidual):
    stem = Stem(kernel=7, stride=2, padding=3)
    has_groups = True
    own_changes = (
        Change(
            "pooling by frames",
            "3×3×3 max pooling is 3×3 pooling of each frame and the largest of three neighbours in time; where "
            "several inputs are equally large, the gradient may go to another of them.",
        ),
    )

    def rearrange(self, module: nn.Module) -> None:
        module.set_submodule("pool", PoolOverTime())
