"""The network of the 3D ResNeXt. Imports torch: load it inside functions only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from stepscope.bench.workloads.models.convnets.network import Classifier, ConvNorm, Residual, start_convolutions

EXPANSION = 2


class ResNeXt3d(nn.Module):
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
