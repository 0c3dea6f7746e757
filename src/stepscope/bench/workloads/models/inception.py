"""Inception v3 (Szegedy et al., 2015)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from stepscope.bench.workloads.models.convnets.layers import Stem
from stepscope.bench.workloads.models.convnets.ootb import ClassifierHead, ConvNorm, PictureTask
from stepscope.bench.workloads.models.convnets.optimized import FastPictures
from stepscope.bench.workloads.protocol import Batch

EPS = 1e-3
AUXILIARY_STRIDE = 3


def unit(wide: int, narrow: int, kernel: int | tuple[int, int] = 1, *, stride: int = 1, same: bool = True) -> ConvNorm:
    """`same`: padded so that the picture keeps its size at stride 1."""
    tall, broad = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (tall // 2, broad // 2) if same else 0
    return ConvNorm(wide, narrow, (tall, broad), stride=stride, padding=padding, eps=EPS)


class Branches(nn.Module):
    """Ways through one module, side by side; their channels are concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Smoothed(nn.Module):
    """Mean over 3×3 positions (those outside count as zeros), then a 1×1 convolution."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.project = unit(wide, narrow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.project(functional.avg_pool2d(x, 3, stride=1, padding=1))
        return y


class Auxiliary(nn.Module):
    """A second classifier half-way through, for training alone."""

    def __init__(self, wide: int, widths: Sequence[int], window: int, classes: int) -> None:
        super().__init__()
        self.window = window
        self.project = unit(wide, widths[0])
        self.gather = unit(widths[0], widths[1], window, same=False)
        self.head = ClassifierHead(widths[1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.avg_pool2d(x, self.window, stride=AUXILIARY_STRIDE)
        logits: torch.Tensor = self.head(self.gather(self.project(x)))
        return logits


def make_stem(share: int) -> nn.Sequential:
    widths = [width // share for width in (32, 32, 64, 80, 192)]
    return nn.Sequential(
        unit(3, widths[0], 3, stride=2, same=False),
        unit(widths[0], widths[1], 3, same=False),
        unit(widths[1], widths[2], 3),
        nn.MaxPool2d(3, stride=2),
        unit(widths[2], widths[3]),
        unit(widths[3], widths[4], 3, same=False),
        nn.MaxPool2d(3, stride=2),
    )


def make_square(wide: int, pooled: int, share: int) -> Branches:
    """Branches of 1×1, 5×5 and twice 3×3."""
    a, b, c = 64 // share, 48 // share, 96 // share
    return Branches(
        unit(wide, a),
        nn.Sequential(unit(wide, b), unit(b, a, 5)),
        nn.Sequential(unit(wide, a), unit(a, c, 3), unit(c, c, 3)),
        Smoothed(wide, pooled),
    )


def make_first_reduction(wide: int, share: int) -> Branches:
    a, b, c = 64 // share, 96 // share, 384 // share
    return Branches(
        unit(wide, c, 3, stride=2, same=False),
        nn.Sequential(unit(wide, a), unit(a, b, 3), unit(b, b, 3, stride=2, same=False)),
        nn.MaxPool2d(3, stride=2),
    )


def make_crossed(wide: int, middle: int, share: int) -> Branches:
    """7×7 windows as pairs of 1×7 and 7×1."""
    m, out = middle // share, 192 // share
    return Branches(
        unit(wide, out),
        nn.Sequential(unit(wide, m), unit(m, m, (1, 7)), unit(m, out, (7, 1))),
        nn.Sequential(unit(wide, m), unit(m, m, (7, 1)), unit(m, m, (1, 7)), unit(m, m, (7, 1)), unit(m, out, (1, 7))),
        Smoothed(wide, out),
    )


def make_second_reduction(wide: int, share: int) -> Branches:
    a, b = 192 // share, 320 // share
    return Branches(
        nn.Sequential(unit(wide, a), unit(a, b, 3, stride=2, same=False)),
        nn.Sequential(
            unit(wide, a), unit(a, a, (1, 7)), unit(a, a, (7, 1)), unit(a, a, 3, stride=2, same=False)
        ),
        nn.MaxPool2d(3, stride=2),
    )  # fmt: skip


def make_spread(wide: int, share: int) -> Branches:
    """The last modules: 3×3 windows as 1×3 beside 3×1."""
    a, b, c, d = 320 // share, 384 // share, 448 // share, 192 // share
    return Branches(
        unit(wide, a),
        nn.Sequential(unit(wide, b), Branches(unit(b, b, (1, 3)), unit(b, b, (3, 1)))),
        nn.Sequential(unit(wide, c), unit(c, b, 3), Branches(unit(b, b, (1, 3)), unit(b, b, (3, 1)))),
        Smoothed(wide, d),
    )


class Inception(nn.Module):
    """Published widths are divided by `width_divisor`; `repeats`: how many modules of each of the three kinds; an
    `auxiliary_window` of 0 leaves the auxiliary classifier out."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        repeats, share, classes = sizes["repeats"], sizes["width_divisor"], sizes["classes"]
        self.stem = make_stem(share)
        wide = 192 // share
        early: list[nn.Module] = []
        for place in range(repeats[0]):
            pooled = (64 if place else 32) // share
            early.append(make_square(wide, pooled, share))
            wide = (64 + 64 + 96) // share + pooled
        early.append(make_first_reduction(wide, share))
        wide += (96 + 384) // share
        for middle in _crossed_widths(repeats[1]):
            early.append(make_crossed(wide, middle, share))
            wide = 4 * 192 // share
        self.early = nn.Sequential(*early)
        widths, window = (128 // share, 768 // share), sizes["auxiliary_window"]
        self.auxiliary = Auxiliary(wide, widths, window, classes) if window else None
        late: list[nn.Module] = [make_second_reduction(wide, share)]
        wide += (320 + 192) // share
        for _ in range(repeats[2]):
            late.append(make_spread(wide, share))
            wide = (320 + 4 * 384 + 192) // share
        self.late = nn.Sequential(*late)
        self.head = ClassifierHead(wide, classes, dropout=sizes["dropout"])
        _start(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Logits; while training also those of the auxiliary classifier, if there is one."""
        half_way = self.early(self.stem(x))
        logits: torch.Tensor = self.head(self.late(half_way))
        if self.training and self.auxiliary is not None:
            return logits, self.auxiliary(half_way)
        return logits


def _crossed_widths(count: int) -> list[int]:
    """Inner widths grow from 128 over 160 to 192."""
    return [128, *[160] * max(count - 2, 0), *[192] * (count > 1)]


def _start(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.1 if isinstance(layer, nn.Conv2d) else 0.02)


AUXILIARY_WEIGHT = 0.4


class InceptionV3(PictureTask):
    def build(self) -> nn.Module:
        return Inception(self.sizes)

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """With the auxiliary classifier's, where the network has one."""
        outputs, labels = module(batch["pictures"]), batch["labels"]
        if not isinstance(outputs, tuple):
            return cross_entropy(outputs, labels)
        logits, auxiliary = outputs
        return cross_entropy(logits, labels) + AUXILIARY_WEIGHT * cross_entropy(auxiliary, labels)


class FastInceptionV3(FastPictures):
    stem = Stem(kernel=3, stride=2, padding=0)
    stem_at = "stem.0.conv"
