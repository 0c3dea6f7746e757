"""3D ResNeXt-101 made fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from stepscope.bench.workloads.models.convnets.optimized import FastPictures
from stepscope.bench.workloads.models.convnets.stem import Stem
from stepscope.bench.workloads.protocol import Change, Mode

if TYPE_CHECKING:
    from torch import nn


class FastResNeXt3d(FastPictures):
    repeated = ("Residual",)
    stem: ClassVar[Stem] = Stem(kernel=7, stride=2, padding=3)
    has_groups: ClassVar[bool] = True

    def rearrange(self, module: nn.Module) -> None:
        from stepscope.bench.workloads.models.convnets.fast_network import PoolOverTime

        module.set_submodule("pool", PoolOverTime())

    def own_changes(self, *, mode: Mode) -> list[Change]:
        return [
            Change(
                "pooling by frames",
                "3×3×3 max pooling is 3×3 pooling of each frame and the largest of three neighbours in time; where "
                "several inputs are equally large, the gradient may go to another of them.",
            )
        ]
