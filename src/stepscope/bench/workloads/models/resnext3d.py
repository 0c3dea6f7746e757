"""3D ResNeXt-101 over clips of video (Hara, Kataoka and Satoh, 2018)."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from stepscope.bench.workloads.models.convnets.layers import PoolOverTime, Stem
from stepscope.bench.workloads.models.convnets.ootb import (
    ConvNorm,
    PictureTask,
    Residual,
    ResidualNetwork,
    make_residual,
)
from stepscope.bench.workloads.models.convnets.optimized import FastPictures
from stepscope.bench.workloads.protocol import Change, Mode

EXPANSION = 2


def make_bottleneck(wide: int, width: int, stride: int, cardinality: int) -> Residual:
    branch = [
        ConvNorm(wide, width, axes=3),
        ConvNorm(width, width, 3, stride=stride, padding=1, groups=cardinality, axes=3),
        ConvNorm(width, width * EXPANSION, relu=False, axes=3),
    ]
    return make_residual(wide, branch, width * EXPANSION, stride, axes=3)


class ResNeXt3d(PictureTask):
    """Bottlenecks over space and time whose 3×3×3 convolutions have `cardinality` groups; each stage but the first
    halves all three axes."""

    def build(self) -> nn.Module:
        wide, cardinality = self.sizes["stem_width"], self.sizes["cardinality"]
        stem, blocks = ConvNorm(3, wide, 7, stride=(1, 2, 2), padding=3, axes=3), []
        for stage, (depth, width) in enumerate(zip(self.sizes["depths"], self.sizes["widths"], strict=True)):
            for place in range(depth):
                blocks.append(make_bottleneck(wide, width, 2 if stage and not place else 1, cardinality))
                wide = width * EXPANSION
        return ResidualNetwork(stem, nn.MaxPool3d(3, stride=2, padding=1), blocks, wide, self.sizes["classes"])


class FastResNeXt3d(FastPictures):
    repeated = ("Residual",)
    stem: ClassVar[Stem] = Stem(kernel=7, stride=2, padding=3)
    has_groups: ClassVar[bool] = True

    def rearrange(self, module: nn.Module) -> None:
        module.set_submodule("pool", PoolOverTime())

    def own_changes(self, *, mode: Mode) -> list[Change]:
        return [
            Change(
                "pooling by frames",
                "3×3×3 max pooling is 3×3 pooling of each frame and the largest of three neighbours in time; where "
                "several inputs are equally large, the gradient may go to another of them.",
            )
        ]
