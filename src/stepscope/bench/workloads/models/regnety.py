"""RegNet-Y, eight sizes (Radosavovic et al., 2020)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from stepscope.bench.workloads.models.convnets.layers import Stem
from stepscope.bench.workloads.models.convnets.ootb import (
    ConvNorm,
    PictureTask,
    Residual,
    ResidualNetwork,
    make_residual,
)
from stepscope.bench.workloads.models.convnets.optimized import FastPictures

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


def make_block(wide: int, width: int, stride: int, group_width: int) -> Residual:
    branch = [
        ConvNorm(wide, width),
        ConvNorm(width, width, 3, stride=stride, padding=1, groups=width // group_width),
        Gate(width, round(SQUEEZE * wide)),
        ConvNorm(width, width, relu=False),
    ]
    return make_residual(wide, branch, width, stride)


class RegNetY(PictureTask):
    """Four stages, each of which halves the picture; 3×3 convolutions in groups of a fixed width, gated."""

    def build(self) -> nn.Module:
        sizes = self.sizes
        wide = sizes["stem_width"]
        stem, blocks = ConvNorm(3, wide, 3, stride=2, padding=1), []
        for depth, width in zip(sizes["depths"], sizes["widths"], strict=True):
            for place in range(depth):
                blocks.append(make_block(wide, width, 1 if place else 2, sizes["group_width"]))
                wide = width
        network = ResidualNetwork(stem, nn.Identity(), blocks, wide, sizes["classes"])
        nn.init.normal_(network.head.linear.weight, std=0.01)
        nn.init.zeros_(network.head.linear.bias)
        return network


class FastRegNetY(FastPictures):
    repeated = ("Residual",)
    stem: ClassVar[Stem] = Stem(kernel=3, stride=2, padding=1)
    has_groups: ClassVar[bool] = True
