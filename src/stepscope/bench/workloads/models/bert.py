"""BERT, base and large: pre-training and question answering."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workloads.models.encoders.fp8 import find_ranges
from stepscope.bench.workloads.models.encoders.ootb import AdamWTask, draw_words, name_sizes
from stepscope.bench.workloads.models.encoders.optimized import ONE_PROJECTION, SKIPPED_LOOKUPS, FastEncoder, LeanText
from stepscope.bench.workloads.protocol import Batch, Change, Mode, Outputs, Precision

BEGIN, BREAK, MASK = 101, 102, 103
FIRST_WORD = 104
IGNORED = -100
"""Label of a token that is not to be guessed."""


class Bert(AdamWTask):
    """With the head that `sizes["head"]` names: `pretraining` (masked words and next sentence) or `answers` (where an
    answer begins and ends). Every sequence is full."""

    # The head stays with the embeddings, whose weights it shares.
    parts = ("bert.encoder.layer.*",)

    def build(self) -> nn.Module:
        from transformers import BertConfig, BertForPreTraining, BertForQuestionAnswering

        make = BertForPreTraining if self.sizes["head"] == "pretraining" else BertForQuestionAnswering
        return make(BertConfig(**name_sizes(self.sizes)))

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        batch = draw_pairs(count, self.sizes["sequence"], self.sizes["vocabulary"], generator)
        if mode == "infer":
            return batch
        if self.sizes["head"] == "pretraining":
            batch |= hide_words(batch["input_ids"], self.sizes["guessed"], self.sizes["vocabulary"], generator)
            batch["next_sentence_label"] = torch.randint(2, (count,), generator=generator)
        else:
            ends = torch.randint(self.sizes["sequence"], (count, 2), generator=generator).sort(dim=1).values
            batch["start_positions"], batch["end_positions"] = ends.unbind(1)
        return batch

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        return cast("torch.Tensor", module(**batch).loss)

    def infer(self, module: nn.Module, batch: Batch) -> Outputs:
        outputs = module(**batch)
        if self.sizes["head"] == "pretraining":
            return outputs.prediction_logits, outputs.seq_relationship_logits
        return outputs.start_logits, outputs.end_logits


def draw_pairs(count: int, tokens: int, vocabulary: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Two pieces of text each, the first of them between a quarter and three quarters of the whole."""
    ids = draw_words((count, tokens), first=FIRST_WORD, vocabulary=vocabulary, generator=generator)
    breaks = torch.randint(tokens // 4, tokens - tokens // 4, (count, 1), generator=generator)
    ids.scatter_(1, breaks, BREAK)
    ids[:, 0], ids[:, -1] = BEGIN, BREAK
    return {"input_ids": ids, "token_type_ids": (torch.arange(tokens) > breaks).long()}


def hide_words(ids: torch.Tensor, guessed: int, vocabulary: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """So many words of each sequence are to be guessed: 8 of 10 are masked, one is another word, one is left."""
    order = torch.rand(ids.shape, generator=generator).masked_fill_(ids < FIRST_WORD, -1.0)
    chosen = order.topk(guessed, dim=1).indices
    words = ids.gather(1, chosen)
    luck = torch.rand(chosen.shape, generator=generator)
    others = draw_words(chosen.shape, first=FIRST_WORD, vocabulary=vocabulary, generator=generator)
    shown = torch.where(luck < 0.8, MASK, torch.where(luck < 0.9, others, words))
    return {
        "input_ids": ids.scatter(1, chosen, shown),
        "labels": torch.full_like(ids, IGNORED).scatter_(1, chosen, words),
    }


class LeanBert(LeanText):
    """What both heads stand on."""

    def read(self, batch: Batch) -> torch.Tensor:
        return self.encode(self.embeddings(batch["input_ids"], types=batch["token_type_ids"]))


class LeanPretraining(LeanBert):
    def take_head(self, plain: Any) -> None:
        self.pooler = plain.bert.pooler.dense
        self.transform = plain.cls.predictions.transform.dense
        self.transform_norm = plain.cls.predictions.transform.LayerNorm
        self.decoder = plain.cls.predictions.decoder
        self.next_sentence = plain.cls.seq_relationship

    def loss(self, batch: Batch) -> torch.Tensor:
        """Words are guessed where they are hidden, and nowhere else."""
        hidden = self.read(batch)
        guesses = self._guess(hidden.flatten(0, 1)[batch["hidden_at"]])
        words = functional.cross_entropy(guesses, batch["hidden_words"])
        return words + functional.cross_entropy(self._relate(hidden), batch["next_sentence_label"])

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.read(batch)
        return self._guess(hidden), self._relate(hidden)

    def _guess(self, hidden: torch.Tensor) -> torch.Tensor:
        guesses: torch.Tensor = self.decoder(self.transform_norm(functional.gelu(self.transform(hidden))))
        return guesses

    def _relate(self, hidden: torch.Tensor) -> torch.Tensor:
        related: torch.Tensor = self.next_sentence(torch.tanh(self.pooler(hidden[:, 0])))
        return related


class LeanAnswers(LeanBert):
    def take_head(self, plain: Any) -> None:
        self.ends = plain.qa_outputs

    def loss(self, batch: Batch) -> torch.Tensor:
        starts, ends = self(batch)
        first = functional.cross_entropy(starts, batch["start_positions"])
        return (first + functional.cross_entropy(ends, batch["end_positions"])) / 2

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        starts, ends = self.ends(self.read(batch)).unbind(-1)
        return starts, ends


HEAD_WHERE_IT_COUNTS = Change(
    "head where it counts",
    "The words of the vocabulary are scored only at the hidden places, which the loader lists; their number must be "
    "the same in every batch.",
)


class FastBert(FastEncoder):
    parts = ("layers.*",)

    def convert(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        make = LeanPretraining if self._pretrains else LeanAnswers
        ranges = find_ranges(self.plain, module, mode=mode, precision=precision)
        return make(module, cast("Any", module).bert, mode=mode, precision=precision, ranges=ranges)

    def collate(self, batch: dict[str, torch.Tensor], *, mode: Mode) -> dict[str, torch.Tensor]:
        """The loader says where words are hidden: their number is the same in every batch, their places are not."""
        if "labels" not in batch:
            return batch
        labels = batch.pop("labels").flatten()
        places = (labels != IGNORED).nonzero().squeeze(1)
        return {**batch, "hidden_at": places, "hidden_words": labels[places]}

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        return cast("torch.Tensor", cast("Any", module).loss(batch))

    def infer(self, module: nn.Module, batch: Batch) -> Outputs:
        return cast("tuple[torch.Tensor, ...]", module(batch))

    def list_changes(self, mode: Mode) -> list[Change]:
        own = [HEAD_WHERE_IT_COUNTS] if mode == "train" and self._pretrains else []
        return [ONE_PROJECTION, SKIPPED_LOOKUPS, *super().list_changes(mode), *own]

    @property
    def _pretrains(self) -> bool:
        return bool(self.sizes["head"] == "pretraining")
