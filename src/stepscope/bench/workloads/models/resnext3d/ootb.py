"""3D ResNeXt-101 as a model engineer would train and serve it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.bench.workloads.models.convnets.ootb import PictureTask

if TYPE_CHECKING:
    from torch import nn


class ResNeXt3d(PictureTask):
    def build(self) -> nn.Module:
        from stepscope.bench.workloads.models.resnext3d import network

        sizes = self.sizes
        return network.ResNeXt3d(
            depths=sizes["depths"],
            widths=sizes["widths"],
            stem=sizes["stem_width"],
            cardinality=sizes["cardinality"],
            classes=sizes["classes"],
        )
