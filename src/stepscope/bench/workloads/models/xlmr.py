"""XLM-R Large as a feature extractor."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workloads.models.encoders.fp8 import find_ranges
from stepscope.bench.workloads.models.encoders.ootb import draw_lengths, draw_words, name_sizes
from stepscope.bench.workloads.models.encoders.optimized import (
    COMPILED,
    ONE_PROJECTION,
    ROUNDINGS,
    SKIPPED_LOOKUPS,
    WHOLE_GRAPH,
    FastEncoder,
    LeanText,
    pack,
    unpack,
)
from stepscope.bench.workloads.protocol import Batch, Change, Engine, Mode, Outputs, Precision, Task
from stepscope.core.errors import BadInputError

BEGIN, PAD, END = 0, 1, 2
FIRST_WORD = 4


class Xlmr(Task):
    """Trained by cross-entropy over the width of the features against random classes, one a token."""

    parts = ("embeddings", "encoder.layer.*")

    def build(self) -> nn.Module:
        from transformers import XLMRobertaConfig, XLMRobertaModel

        config = XLMRobertaConfig(**name_sizes(self.sizes), type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=PAD)
        return XLMRobertaModel(config, add_pooling_layer=False)  # type: ignore[no-untyped-call]

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        longest = self.sizes["sequence"]
        ids = draw_words((count, longest), first=FIRST_WORD, vocabulary=self.sizes["vocabulary"], generator=generator)
        ids[:, 0], ids[:, -1] = BEGIN, END
        batch = {"input_ids": ids}
        if self.sizes.get("sampled_lengths"):
            batch = pad_to_longest(ids, draw_lengths(count, longest=longest, generator=generator))
        if mode == "train":
            classes = (count, batch["input_ids"].shape[1])
            batch["targets"] = torch.randint(self.sizes["hidden"], classes, generator=generator)
        return batch

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        features = module(input_ids=batch["input_ids"]).last_hidden_state
        return functional.cross_entropy(features.flatten(0, 1), batch["targets"].flatten())

    def infer(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Features of every token; those of padding are zeros."""
        if "attention_mask" not in batch:
            return cast("torch.Tensor", module(input_ids=batch["input_ids"]).last_hidden_state)
        mask = batch["attention_mask"]
        features: torch.Tensor = module(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
        return features * mask.unsqueeze(-1)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=self.sizes["learning_rate"])


def pad_to_longest(ids: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    """As a tokenizer pads a batch: each sequence ends where its length says, the longest decides the width."""
    width = int(lengths.max())
    ids, column = ids[:, :width].clone(), torch.arange(width)
    # A sequence of one token is its beginning alone.
    ids[(column == lengths[:, None] - 1) & (column > 0)] = END
    there = column < lengths[:, None]
    return {"input_ids": ids.masked_fill(~there, PAD), "attention_mask": there.long()}


class LeanXlmr(LeanText):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Features of unpadded sequences."""
        return self.encode(self.embeddings(ids))

    def read_packed(self, batch: Batch) -> torch.Tensor:
        """Features of sequences end to end, as `pack` lays them: [tokens, width]."""
        hidden = self.embeddings(batch["tokens"], places=batch["places"])
        return self.encode(hidden, batch)


PACKED_SEQUENCES = Change(
    "packed sequences",
    "The loader lays sequences end to end without padding, with their positions; attention is computed within each. "
    "Features come back packed as well.",
)
FUSED_SGD = Change("fused optimizer", "SGD updates all weights in few kernels.")


class FastXlmr(FastEncoder):
    parts = ("embeddings", "layers.*")

    def convert(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        ranges = find_ranges(self.plain, module, mode=mode, precision=precision)
        # Positions count from the one after that of padding.
        first = cast("Any", module).embeddings.padding_idx + 1
        return LeanXlmr(module, module, mode=mode, precision=precision, ranges=ranges, first_position=first)

    def collate(self, batch: dict[str, torch.Tensor], *, mode: Mode) -> dict[str, torch.Tensor]:
        if "attention_mask" in batch:
            return pack(batch)
        if (batch["input_ids"] == PAD).any():
            raise BadInputError(
                f"a sequence holds padding (id {PAD}), and this configuration has none",
                hint="one whose name ends in realdist takes padded sequences; so does ootb",
            )
        return batch

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        features = module(batch["input_ids"])
        return functional.cross_entropy(features.flatten(0, 1), batch["targets"].flatten())

    def infer(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        model = cast("LeanXlmr", module)
        return model.read_packed(batch) if "tokens" in batch else cast("torch.Tensor", model(batch["input_ids"]))

    def unpack(self, outputs: Outputs, batch: Batch) -> Outputs:
        if "tokens" not in batch:
            return outputs
        return unpack(cast("torch.Tensor", outputs), batch)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=self.sizes["learning_rate"], fused=True)

    def engine(self, mode: Mode) -> Engine:
        if self._packs:
            # The number of tokens changes from batch to batch, so that one graph cannot hold the step.
            return Engine(compile="default", dynamic=True)
        return super().engine(mode)

    def list_changes(self, mode: Mode) -> list[Change]:
        layout = [PACKED_SEQUENCES] if self._packs else [SKIPPED_LOOKUPS, WHOLE_GRAPH]
        return [ONE_PROJECTION, COMPILED, *ROUNDINGS[mode], *layout, *([FUSED_SGD] if mode == "train" else [])]

    @property
    def _packs(self) -> bool:
        return bool(self.sizes.get("sampled_lengths"))
