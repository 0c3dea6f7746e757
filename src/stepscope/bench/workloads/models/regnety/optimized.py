"""RegNet-Y made fast."""

from __future__ import annotations

from typing import ClassVar

from stepscope.bench.workloads.models.convnets.optimized import FastPictures
from stepscope.bench.workloads.models.convnets.stem import Stem


class FastRegNetY(FastPictures):
    repeated = ("Residual",)
    stem: ClassVar[Stem] = Stem(kernel=3, stride=2, padding=1)
    has_groups: ClassVar[bool] = True
