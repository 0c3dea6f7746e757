"""What the convolutional networks have in common out of the box: pictures in, layers, one class out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from stepscope.bench.workloads.protocol import Batch, Mode, Task

COARSE = 8
"""Pixels between the points of the smooth part."""
COARSE_FRAMES = 4
SMOOTH_SHARE = 0.85
"""Fraction of the variance; the rest differs from pixel to pixel."""
GREY_SHARE = 0.8
"""Fraction of the variance that the three colours have in common."""
DARKEST = (-2.12, -2.04, -1.80)
BRIGHTEST = (2.25, 2.43, 2.64)
"""Black and white after the usual normalisation by the means and spreads of ImageNet."""


def make_pictures(count: int, extent: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """[count, 3, *extent] with mean 0 and spread 1 a colour, inside what black and white normalise to; `extent` is
    height and width, before them frames where there are some."""
    coarse = [-(-extent[-2] // COARSE) + 1, -(-extent[-1] // COARSE) + 1]
    if len(extent) == 3:
        coarse.insert(0, -(-extent[0] // COARSE_FRAMES) + 1)
    grey = torch.randn(count, 1, *coarse, generator=generator)
    colour = torch.randn(count, 3, *coarse, generator=generator)
    mixed = GREY_SHARE**0.5 * grey + (1 - GREY_SHARE) ** 0.5 * colour
    how = "bilinear" if len(extent) == 2 else "trilinear"
    smooth = torch.nn.functional.interpolate(mixed, size=tuple(extent), mode=how, align_corners=True)
    # Interpolation averages neighbours; without this the spread would depend on the size.
    smooth /= smooth.std()
    pixels = torch.randn(count, 3, *extent, generator=generator)
    pictures = smooth.mul_(SMOOTH_SHARE**0.5).add_(pixels, alpha=(1 - SMOOTH_SHARE) ** 0.5)
    shape = (1, 3, *(1 for _ in extent))
    return pictures.clamp_(torch.tensor(DARKEST).view(shape), torch.tensor(BRIGHTEST).view(shape))


def draw_labels(count: int, classes: int, generator: torch.Generator, *, skew: float) -> torch.Tensor:
    """`skew`: how many times more often the commonest class comes than the rarest, falling evenly between; 1: alike."""
    if skew <= 1:
        return torch.randint(classes, (count,), generator=generator)
    return torch.multinomial(torch.linspace(skew, 1.0, classes), count, replacement=True, generator=generator)


CONVOLUTIONS: dict[int, Any] = {2: nn.Conv2d, 3: nn.Conv3d}
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
        make = CONVOLUTIONS[axes]
        self.conv: nn.Module = make(wide, narrow, kernel, stride=stride, padding=padding, groups=groups, bias=False)
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


class ClassifierHead(nn.Module):
    """Mean over all positions, dropout, and one linear layer."""

    def __init__(self, features: int, classes: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.linear = nn.Linear(features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(self.drop(x.flatten(2).mean(2)))
        return logits


class ResidualNetwork(nn.Module):
    """A stem, pooling, residual blocks one after the other, and a classifier."""

    def __init__(
        self, stem: nn.Module, pool: nn.Module, blocks: Sequence[Residual], features: int, classes: int
    ) -> None:
        super().__init__()
        self.stem = stem
        self.pool = pool
        self.blocks = nn.Sequential(*blocks)
        self.head = ClassifierHead(features, classes)
        start_convolutions(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.pool(self.stem(x))))
        return logits


def start_convolutions(module: nn.Module) -> None:
    """Normal weights by the number of outputs that each one feeds (He et al.); norms start as the identity."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Conv3d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


MOMENTUM = 0.9


class PictureTask(Task):
    """Classification. Sizes: `image_size`, `classes`, `learning_rate`, `weight_decay`, and what the network needs;
    `frames` for clips; `label_skew` where the dataset is uneven."""

    @property
    def extent(self) -> tuple[int, ...]:
        """Extent of one picture: frames where it has some, height, width."""
        side = self.sizes["image_size"]
        return (self.sizes["frames"], side, side) if "frames" in self.sizes else (side, side)

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        pictures = make_pictures(count, self.extent, generator)
        if mode == "infer":
            return {"pictures": pictures}
        labels = draw_labels(count, self.sizes["classes"], generator, skew=self.sizes.get("label_skew", 1.0))
        return {"pictures": pictures, "labels": labels}

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        return cross_entropy(module(batch["pictures"]), batch["labels"])

    def infer(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = module(batch["pictures"])
        return logits

    def make_optimizer(self, module: nn.Module, **how: Any) -> torch.optim.Optimizer:
        rate, decay = self.sizes["learning_rate"], self.sizes["weight_decay"]
        return torch.optim.SGD(module.parameters(), lr=rate, momentum=MOMENTUM, weight_decay=decay, **how)
