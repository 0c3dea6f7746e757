"""ResNet-50 v1.5 (He et al., 2015, with the stride in the 3×3 convolution)."""

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

EXPANSION = 4


class ResNet(nn.Module):
    """Bottlenecks of 1×1, 3×3 and 1×1 convolutions; each stage but the first halves the picture."""

    def __init__(self, *, depths: Sequence[int], widths: Sequence[int], stem: int, classes: int) -> None:
        super().__init__()
        self.stem = ConvNorm(3, stem, 7, stride=2, padding=3)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks: list[nn.Module] = []
        wide = stem
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            for place in range(depth):
                stride = 2 if stage and not place else 1
                blocks.append(make_bottleneck(wide, width, stride))
                wide = width * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.head = Classifier(wide, classes)
        start_convolutions(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.pool(self.stem(x))))
        return logits


def make_bottleneck(wide: int, width: int, stride: int) -> Residual:
    out = width * EXPANSION
    branch = [
        ConvNorm(wide, width),
        ConvNorm(width, width, 3, stride=stride, padding=1),
        ConvNorm(width, out, relu=False),
    ]
    changes = stride != 1 or wide != out
    return Residual(branch, ConvNorm(wide, out, stride=stride, relu=False) if changes else None)


class ResNet50(PictureTask):
    def build(self) -> nn.Module:
        sizes = self.sizes
        return ResNet(
            depths=sizes["depths"], widths=sizes["widths"], stem=sizes["stem_width"], classes=sizes["classes"]
        )


class FastResNet50(FastPictures):
    repeated = ("Residual",)
    stem: ClassVar[Stem] = Stem(kernel=7, stride=2, padding=3)
