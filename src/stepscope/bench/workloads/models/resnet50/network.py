"""The network of ResNet-50 v1.5. Imports torch: load it inside functions only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from stepscope.bench.workloads.models.convnets.network import Classifier, ConvNorm, Residual, start_convolutions

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
