"""Inception v3 as a model engineer would train and serve it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stepscope.bench.workloads.models.convnets.ootb import PictureTask

if TYPE_CHECKING:
    import torch
    from torch import nn

AUXILIARY_WEIGHT = 0.4


class InceptionV3(PictureTask):
    def build(self) -> nn.Module:
        from stepscope.bench.workloads.models.inception.network import Inception

        sizes = self.sizes
        return Inception(
            repeats=sizes["repeats"],
            share=sizes["width_divisor"],
            classes=sizes["classes"],
            dropout=sizes["dropout"],
            auxiliary_window=sizes["auxiliary_window"],
        )

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """With the auxiliary classifier's, where the network has one."""
        from torch.nn.functional import cross_entropy

        outputs, labels = module(batch["pictures"]), batch["labels"]
        if not isinstance(outputs, tuple):
            return cross_entropy(outputs, labels)
        logits, auxiliary = outputs
        return cross_entropy(logits, labels) + AUXILIARY_WEIGHT * cross_entropy(auxiliary, labels)
