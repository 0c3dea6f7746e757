"""VGG-16 made fast."""

from __future__ import annotations

from typing import ClassVar

from stepscope.bench.workloads.models.convnets.optimized import FastPictures
from stepscope.bench.workloads.models.convnets.stem import Stem


class FastVgg16(FastPictures):
    stem: ClassVar[Stem] = Stem(kernel=3, stride=1, padding=1)
    stem_at: ClassVar[str] = "features.0"
    has_norms: ClassVar[bool] = False
