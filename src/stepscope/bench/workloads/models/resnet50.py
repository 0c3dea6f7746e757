"""ResNet-50 v1.5 (He et al., 2015, with the stride in the 3×3 convolution)."""

from __future__ import annotations

from typing import ClassVar

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

EXPANSION = 4


def make_bottleneck(wide: int, width: int, stride: int) -> Residual:
    branch = [
        ConvNorm(wide, width),
        ConvNorm(width, width, 3, stride=stride, padding=1),
        ConvNorm(width, width * EXPANSION, relu=False),
    ]
    return make_residual(wide, branch, width * EXPANSION, stride)


class ResNet50(PictureTask):
    """Bottlenecks of 1×1, 3×3 and 1×1 convolutions; each stage but the first halves the picture."""

    def build(self) -> nn.Module:
        wide = self.sizes["stem_width"]
        stem, blocks = ConvNorm(3, wide, 7, stride=2, padding=3), []
        for stage, (depth, width) in enumerate(zip(self.sizes["depths"], self.sizes["widths"], strict=True)):
            for place in range(depth):
                blocks.append(make_bottleneck(wide, width, 2 if stage and not place else 1))
                wide = width * EXPANSION
        return ResidualNetwork(stem, nn.MaxPool2d(3, stride=2, padding=1), blocks, wide, self.sizes["classes"])


class FastResNet50(FastPictures):
    repeated = ("Residual",)
    stem: ClassVar[Stem] = Stem(kernel=7, stride=2, padding=3)
