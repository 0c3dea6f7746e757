"""3D ResNeXt-101 over clips of video (Hara, Kataoka and Satoh, 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from stepscope.bench.workloads.models.convnets.layers import PoolOverTime, Stem
from stepscope.bench.workloads.models.convnets.ootb import (
    Classifier,
    ConvNorm,
    PictureTask,
    Residual,
    start_convolutions,
)
from stepscope.bench.workloads.models.convnets.optimized import FastPictures
from stepscope.bench.workloads.protocol import Change, Mode

EXPANSION = 2


class ResNeXt(nn.Module):
    """Bottlenecks over space and time whose 3×3×3 convolutions have `cardinality` groups; each stage but the first
    halves all three axes."""

    def __init__(
        self, *, depths: Sequence[int], widths: Sequence[int], stem: int, cardinality: int, classes: int
    ) -> None:
        super().__init__()
        self.stem = ConvNorm(3, stem, 7, stride=(1, 2, 2), padding=3, axes=3)
        self.pool: nn.Module = nn.MaxPool3d(3, stride=2, padding=1)
        blocks: list[nn.Module] = []
        wide = stem
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            for place in range(depth):
                stride = 2 if stage and not place else 1
                blocks.append(make_bottleneck(wide, width, stride, cardinality))
                wide = width * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.head = Classifier(wide, classes)
        start_convolutions(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.pool(self.stem(x))))
        return logits


def make_bottleneck(wide: int, width: int, stride: int, cardinality: int) -> Residual:
    out = width * EXPANSION
    branch = [
        ConvNorm(wide, width, axes=3),
        ConvNorm(width, width, 3, stride=stride, padding=1, groups=cardinality, axes=3),
        ConvNorm(width, out, relu=False, axes=3),
    ]
    changes = stride != 1 or wide != out
    return Residual(branch, ConvNorm(wide, out, stride=stride, relu=False, axes=3) if changes else None)


class ResNeXt3d(PictureTask):
    def build(self) -> nn.Module:
        sizes = self.sizes
        return ResNeXt(
            depths=sizes["depths"],
            widths=sizes["widths"],
            stem=sizes["stem_width"],
            cardinality=sizes["cardinality"],
            classes=sizes["classes"],
        )


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
