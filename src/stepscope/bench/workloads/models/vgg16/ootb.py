"""VGG-16 as a model engineer would train and serve it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.bench.workloads.models.convnets.ootb import PictureTask

if TYPE_CHECKING:
    from torch import nn


class Vgg16(PictureTask):
    def build(self) -> nn.Module:
        from stepscope.bench.workloads.models.vgg16.network import Vgg

        sizes = self.sizes
        return Vgg(
            depths=sizes["depths"],
            widths=sizes["widths"],
            hidden=sizes["hidden"],
            classes=sizes["classes"],
            dropout=sizes["dropout"],
        )
