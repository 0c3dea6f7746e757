"""VGG-16 without batch norm (Simonyan and Zisserman, 2014)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stepscope.bench.workloads.models.convnets.layers import Stem
from stepscope.bench.workloads.models.convnets.ootb import PictureTask, start_convolutions
from stepscope.bench.workloads.models.convnets.optimized import FastPictures

GRID = 7
"""Positions along each side that the classifier takes."""


class Vgg(nn.Module):
    """3×3 convolutions with ReLU, halved by max pooling after each stage; three linear layers over all positions."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, dropout = sizes["hidden"], sizes["dropout"]
        layers: list[nn.Module] = []
        wide = 3
        for depth, width in zip(sizes["depths"], sizes["widths"], strict=True):
            for _ in range(depth):
                layers += [nn.Conv2d(wide, width, 3, padding=1), nn.ReLU(inplace=True)]
                wide = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(GRID)
        self.classifier = nn.Sequential(
            nn.Linear(wide * GRID * GRID, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, sizes["classes"]),
        )
        start_convolutions(self)
        for layer in self.classifier:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.pool(self.features(x)).flatten(1))
        return logits


class Vgg16(PictureTask):
    def build(self) -> nn.Module:
        return Vgg(self.sizes)


class FastVgg16(FastPictures):
    stem = Stem(kernel=3, stride=1, padding=1)
    stem_at = "features.0"
    has_norms = False
