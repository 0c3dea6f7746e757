"""RegNet-Y as a model engineer would train and serve it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.bench.workloads.models.convnets.ootb import PictureTask

if TYPE_CHECKING:
    from torch import nn


class RegNetY(PictureTask):
    def build(self) -> nn.Module:
        from stepscope.bench.workloads.models.regnety import network

        sizes = self.sizes
        return network.RegNetY(
            depths=sizes["depths"],
            widths=sizes["widths"],
            group_width=sizes["group_width"],
            stem=sizes["stem_width"],
            classes=sizes["classes"],
        )
