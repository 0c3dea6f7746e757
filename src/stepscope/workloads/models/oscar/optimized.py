"""OSCAR made fast: lean layers, the last of them only where it is read, compiled and captured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from stepscope.workloads.models.encoders import disclosed
from stepscope.workloads.models.encoders.optimizers import make_adamw
from stepscope.workloads.protocol import Change, Engine, Mode, Optimized, Precision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn


class FastOscar(Optimized):
    repeated = ("LeanLayer",)

    def adopt(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        from stepscope.workloads.models.oscar.network import LeanOscar

        return LeanOscar(module, mode=mode, precision=precision)

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from torch.nn import functional

        scores = batch["scores"]
        logits = cast("torch.Tensor", self.infer(module, batch)).float()
        return functional.binary_cross_entropy_with_logits(logits, scores) * scores.shape[1]

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        rate, decay = self.sizes["learning_rate"], self.sizes["weight_decay"]
        return make_adamw(module, learning_rate=rate, decay=decay, fused=True)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        model = cast("Any", module)
        return [model.embeddings, *model.encoder.layers, model.regions, model.classifier]

    def gradients(self, module: nn.Module) -> dict[str, torch.Tensor]:
        from stepscope.workloads.models.encoders.origins import gradients_of

        return gradients_of(module)

    def engine(self, mode: Mode) -> Engine:
        return Engine(compile="default", graph=True, dynamic=False)

    def changes(self, *, mode: Mode, precision: Precision) -> list[Change]:
        found = [
            disclosed.ONE_PROJECTION,
            Change(
                "last layer where it is read",
                "The last layer is computed for the first token alone: the answer is read from nothing else.",
            ),
            disclosed.SKIPPED_LOOKUPS,
            disclosed.COMPILED,
            disclosed.WHOLE_GRAPH,
            *disclosed.precision_changes(mode, precision),
        ]
        if mode == "train":
            found.append(disclosed.fused_optimizer("AdamW"))
        return found
