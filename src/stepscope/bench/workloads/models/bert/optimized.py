"""BERT made fast: lean layers, words guessed only where they are hidden, compiled and captured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from stepscope.bench.workloads.models.bert.ootb import IGNORED
from stepscope.bench.workloads.models.encoders import disclosed
from stepscope.bench.workloads.models.encoders.fast import FastEncoder
from stepscope.bench.workloads.protocol import Change, Mode, Precision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from stepscope.bench.workloads.protocol import Outputs


class FastBert(FastEncoder):
    repeated = ("LeanLayer",)

    def adopt(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        from stepscope.bench.workloads.models.bert.network import LeanAnswers, LeanPretraining
        from stepscope.bench.workloads.models.encoders.fp8 import find_ranges

        make = LeanPretraining if self._pretrains else LeanAnswers
        return make(
            module,
            mode=mode,
            precision=precision,
            ranges=find_ranges(self.plain, module, mode=mode, precision=precision),
        )

    def arrange(self, batch: dict[str, torch.Tensor], *, mode: Mode) -> dict[str, torch.Tensor]:
        """The loader says where words are hidden: their number is the same in every batch, their places are not."""
        if "labels" not in batch:
            return batch
        labels = batch.pop("labels").flatten()
        places = (labels != IGNORED).nonzero().squeeze(1)
        return {**batch, "hidden_at": places, "hidden_words": labels[places]}

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return cast("torch.Tensor", cast("Any", module).loss(batch))

    def infer(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> Outputs:
        return cast("tuple[torch.Tensor, ...]", module(batch))

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return list(cast("Any", module).encoder.layers)

    def changes(self, *, mode: Mode, precision: Precision) -> list[Change]:
        found = [
            disclosed.ONE_PROJECTION,
            disclosed.SKIPPED_LOOKUPS,
            disclosed.COMPILED,
            disclosed.WHOLE_GRAPH,
            *disclosed.precision_changes(mode, precision),
        ]
        if mode == "train":
            found.append(disclosed.fused_optimizer("AdamW"))
            if self._pretrains:
                found.append(
                    Change(
                        "head where it counts",
                        "The words of the vocabulary are scored only at the hidden places, which the loader lists; "
                        "their number must be the same in every batch.",
                    )
                )
        return found

    @property
    def _pretrains(self) -> bool:
        return bool(self.sizes["head"] == "pretraining")
