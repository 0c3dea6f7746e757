"""Inception v3 made fast."""

from __future__ import annotations

from typing import ClassVar

from stepscope.bench.workloads.models.convnets.optimized import FastPictures
from stepscope.bench.workloads.models.convnets.stem import Stem


class FastInceptionV3(FastPictures):
    stem: ClassVar[Stem] = Stem(kernel=3, stride=2, padding=0)
    stem_at: ClassVar[str] = "stem.0.conv"
