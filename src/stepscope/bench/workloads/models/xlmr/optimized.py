"""XLM-R made fast: lean layers, packed sequences, compiled and captured."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from stepscope.bench.workloads.models.encoders import disclosed
from stepscope.bench.workloads.models.encoders.fast import FastEncoder
from stepscope.bench.workloads.models.encoders.optimizers import make_sgd
from stepscope.bench.workloads.models.xlmr.ootb import PAD
from stepscope.bench.workloads.protocol import Change, Engine, Mode, Precision
from stepscope.core.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from stepscope.bench.workloads.models.xlmr.network import LeanXlmr
    from stepscope.bench.workloads.protocol import Outputs


class FastXlmr(FastEncoder):
    repeated = ("LeanLayer",)

    def adopt(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        from stepscope.bench.workloads.models.encoders.fp8 import find_ranges
        from stepscope.bench.workloads.models.xlmr.network import LeanXlmr

        ranges = find_ranges(self.plain, module, mode=mode, precision=precision)
        return LeanXlmr(module, mode=mode, precision=precision, ranges=ranges)

    def arrange(self, batch: dict[str, torch.Tensor], *, mode: Mode) -> dict[str, torch.Tensor]:
        from stepscope.bench.workloads.models.encoders.packing import pack

        if "attention_mask" in batch:
            return pack(batch)
        if (batch["input_ids"] == PAD).any():
            raise BadInputError(
                f"a sequence holds padding (id {PAD}), and this configuration has none",
                hint="one whose name ends in realdist takes padded sequences; so does ootb",
            )
        return batch

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from torch.nn import functional

        features = module(batch["input_ids"])
        return functional.cross_entropy(features.flatten(0, 1), batch["targets"].flatten())

    def infer(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        model = cast("LeanXlmr", module)
        return model.read_packed(batch) if "tokens" in batch else cast("torch.Tensor", model(batch["input_ids"]))

    def restore(self, outputs: Outputs, batch: Mapping[str, torch.Tensor]) -> Outputs:
        from stepscope.bench.workloads.models.encoders.packing import unpack

        if "tokens" not in batch:
            return outputs
        return unpack(cast("torch.Tensor", outputs), batch)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return make_sgd(module, learning_rate=self.sizes["learning_rate"], fused=True)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        model = cast("LeanXlmr", module)
        return [model.embeddings, *model.encoder.layers]

    def engine(self, mode: Mode) -> Engine:
        if self._packs:
            # The number of tokens changes from batch to batch, so that one graph cannot hold the step.
            return Engine(compile="default", dynamic=True)
        return super().engine(mode)

    def changes(self, *, mode: Mode, precision: Precision) -> list[Change]:
        found = [disclosed.ONE_PROJECTION, disclosed.COMPILED, *disclosed.precision_changes(mode, precision)]
        if self._packs:
            found.append(
                Change(
                    "packed sequences",
                    "The loader lays sequences end to end without padding, with their positions; attention is "
                    "computed within each. Features come back packed as well.",
                )
            )
        else:
            found += [disclosed.SKIPPED_LOOKUPS, disclosed.WHOLE_GRAPH]
        if mode == "train":
            found.append(disclosed.fused_optimizer("SGD"))
        return found

    @property
    def _packs(self) -> bool:
        return bool(self.sizes.get("sampled_lengths"))
