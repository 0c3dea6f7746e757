"""RegNet-Y, eight sizes (Radosavovic et al., 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from stepscope.bench.workloads.models.convnets.layers import Stem
from stepscope.bench.workloads.models.convnets.ootb import (
    Classifier,
    ConvNorm,
    PictureTask,
    Residual,
    start_convolutions,
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


class RegNet(nn.Module):
    """Four stages, each of which halves the picture; 3×3 convolutions in groups of a fixed width, gated."""

    def __init__(
        self, *, depths: Sequence[int], widths: Sequence[int], group_width: int, stem: int, classes: int
    ) -> None:
        super().__init__()
        self.stem = ConvNorm(3, stem, 3, stride=2, padding=1)
        blocks: list[nn.Module] = []
        wide = stem
        for depth, width in zip(depths, widths, strict=True):
            for place in range(depth):
                blocks.append(make_block(wide, width, 1 if place else 2, group_width))
                wide = width
        self.blocks = nn.Sequential(*blocks)
        self.head = Classifier(wide, classes)
        start_convolutions(self)
        nn.init.normal_(self.head.linear.weight, std=0.01)
        nn.init.zeros_(self.head.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.stem(x)))
        return logits


def make_block(wide: int, width: int, stride: int, group_width: int) -> Residual:
    branch = [
        ConvNorm(wide, width),
        ConvNorm(width, width, 3, stride=stride, padding=1, groups=width // group_width),
        Gate(width, round(SQUEEZE * wide)),
        ConvNorm(width, width, relu=False),
    ]
    changes = stride != 1 or wide != width
    return Residual(branch, ConvNorm(wide, width, stride=stride, relu=False) if changes else None)


class RegNetY(PictureTask):
    def build(self) -> nn.Module:
        sizes = self.sizes
        return RegNet(
            depths=sizes["depths"],
            widths=sizes["widths"],
            group_width=sizes["group_width"],
            stem=sizes["stem_width"],
            classes=sizes["classes"],
        )


class FastRegNetY(FastPictures):
    repeated = ("Residual",)
    stem: ClassVar[Stem] = Stem(kernel=3, stride=2, padding=1)
    has_groups: ClassVar[bool] = True
