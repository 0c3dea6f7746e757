"""OSCAR made fast: lean layers, the last of them only where it is read, compiled and captured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from stepscope.bench.workloads.models.encoders import disclosed
from stepscope.bench.workloads.models.encoders.fast import FastEncoder
from stepscope.bench.workloads.protocol import Change, Mode, Precision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn


class FastOscar(FastEncoder):
    repeated = ("LeanLayer",)

    def adopt(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        from stepscope.bench.workloads.models.oscar.network import LeanOscar

        return LeanOscar(module, mode=mode, precision=precision)

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from torch.nn import functional

        scores = batch["scores"]
        logits = cast("torch.Tensor", self.infer(module, batch)).float()
        return functional.binary_cross_entropy_with_logits(logits, scores) * scores.shape[1]

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        model = cast("Any", module)
        return [model.embeddings, *model.encoder.layers, model.regions, model.classifier]

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
