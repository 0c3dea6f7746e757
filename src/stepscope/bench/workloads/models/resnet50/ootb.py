"""ResNet-50 as a model engineer would train and serve it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.bench.workloads.models.convnets.ootb import PictureTask

if TYPE_CHECKING:
    from torch import nn


class ResNet50(PictureTask):
    def build(self) -> nn.Module:
        from stepscope.bench.workloads.models.resnet50.network import ResNet

        sizes = self.sizes
        return ResNet(
            depths=sizes["depths"], widths=sizes["widths"], stem=sizes["stem_width"], classes=sizes["classes"]
        )
