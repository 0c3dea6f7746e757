"""Layers that the convolutional networks share. Imports torch: load it inside functions only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

CONVOLUTIONS = {2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
Extent = int | tuple[int, ...]
FAINT = 0.1
"""Scale with which a residual branch starts. Goyal et al. (2017) start at 0; at exactly 0 a network that is timed
without training would multiply by zeros, and at 1 rounding grows from block to block until it drowns the gradients."""


class ConvNorm(nn.Module):
    """Convolution without bias, batch norm and, if asked for, ReLU, over images (2) or clips (3 axes)."""

    def __init__(
        self,
        wide: int,
        narrow: int,
        kernel: Extent = 1,
        *,
        stride: Extent = 1,
        padding: Extent = 0,
        groups: int = 1,
        relu: bool = True,
        axes: int = 2,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.conv: nn.Module = CONVOLUTIONS[axes](
            wide,
            narrow,
            kernel,  # type: ignore[arg-type]
            stride=stride,  # type: ignore[arg-type]
            padding=padding,  # type: ignore[arg-type]
            groups=groups,
            bias=False,
        )
        self.norm: nn.Module = NORMS[axes](narrow, eps=eps)
        self.relu = relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.conv(x))
        return functional.relu(y, inplace=True) if self.relu else y


class Residual(nn.Module):
    """A branch of layers, the last of them with a norm, added to the input, or to its projection where the shape
    changes; then ReLU."""

    def __init__(self, branch: Sequence[nn.Module], shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)
        last = branch[-1]
        assert isinstance(last, ConvNorm)
        nn.init.constant_(last.norm.weight, FAINT)  # type: ignore[arg-type]
        self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        around = x if self.shortcut is None else self.shortcut(x)
        return functional.relu(self.branch(x) + around, inplace=True)


class Classifier(nn.Module):
    """Mean over all positions, dropout, and one linear layer."""

    def __init__(self, features: int, classes: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.linear = nn.Linear(features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(self.drop(x.flatten(2).mean(2)))
        return logits


def start_convolutions(module: nn.Module) -> None:
    """Normal weights by the number of outputs that each one feeds (He et al.); norms start as the identity."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Conv3d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
