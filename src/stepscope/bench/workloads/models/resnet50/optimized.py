"""ResNet-50 made fast."""

from __future__ import annotations

from typing import ClassVar

from stepscope.bench.workloads.models.convnets.optimized import FastPictures
from stepscope.bench.workloads.models.convnets.stem import Stem


class FastResNet50(FastPictures):
    repeated = ("Residual",)
    stem: ClassVar[Stem] = Stem(kernel=7, stride=2, padding=3)
