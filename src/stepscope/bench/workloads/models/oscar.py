"""OSCAR: a BERT encoder over text, object tags and image regions; visual question answering."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertModel

from stepscope.bench.workloads.models.bert import draw_pairs
from stepscope.bench.workloads.models.encoders.ootb import AdamWTask, draw_words, name_sizes
from stepscope.bench.workloads.models.encoders.optimized import (
    ONE_PROJECTION,
    SKIPPED_LOOKUPS,
    FastEncoder,
    LeanText,
    as_stream,
    drop,
)
from stepscope.bench.workloads.protocol import Batch, Change, Mode, Precision


class Oscar(nn.Module):
    """Regions take no position and no type; they stand after the text, and the first token is asked for the answer."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        self.bert = BertModel(BertConfig(**name_sizes(sizes)))  # type: ignore[no-untyped-call]
        self.region_embedding = nn.Linear(sizes["region_features"], sizes["hidden"])
        self.region_dropout = nn.Dropout(sizes["hidden_dropout"])
        self.dropout = nn.Dropout(sizes["classifier_dropout"])
        self.classifier = nn.Linear(sizes["hidden"], sizes["answers"])

    def forward(self, ids: torch.Tensor, types: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
        text = self.bert.embeddings(input_ids=ids, token_type_ids=types)
        image = self.region_dropout(self.region_embedding(regions))
        hidden = self.bert.encoder(torch.cat([text, image], dim=1)).last_hidden_state
        pooled = cast("nn.Module", self.bert.pooler)(hidden)
        logits: torch.Tensor = self.classifier(self.dropout(pooled))
        return logits


class LeanOscar(LeanText):
    def take_head(self, plain: Any) -> None:
        self.regions = plain.region_embedding
        self.pooler = plain.bert.pooler.dense
        self.classifier = plain.classifier
        self.region_drop_rate = plain.region_dropout.p
        self.drop_rate = plain.dropout.p

    def forward(self, ids: torch.Tensor, types: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
        text = self.embeddings(ids, types=types)
        image = as_stream(drop(self.regions(regions), self.region_drop_rate, self.training), self.stream)
        first = self.encode_first(torch.cat([text, image], dim=1))
        pooled = torch.tanh(self.pooler(first))
        logits: torch.Tensor = self.classifier(drop(pooled, self.drop_rate, self.training))
        return logits


BOX_FEATURES = 6
"""Corners and size of a region, as shares of the image; the last of its features."""
GIVEN_ANSWERS = 3
"""Answers of one question that people agreed on, at most."""
SCORES = (0.3, 0.6, 0.9, 1.0)
"""Score of an answer that one, two, three or more of ten people gave."""


class OscarAnswers(AdamWTask):
    """Every place is filled: text and tags, then image regions."""

    parts = ("bert.embeddings", "bert.encoder.layer.*", "region_embedding", "classifier")

    def build(self) -> nn.Module:
        return Oscar(self.sizes)

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        sizes, generator = self.sizes, torch.Generator().manual_seed(seed)
        batch = draw_pairs(count, sizes["sequence"], sizes["vocabulary"], generator)
        shape = (count, sizes["regions"], sizes["region_features"])
        # What a detector's last layer gives is not negative.
        regions = torch.randn(shape, generator=generator).clamp_(min=0)
        regions[..., -BOX_FEATURES:] = torch.rand(*shape[:-1], BOX_FEATURES, generator=generator)
        batch["regions"] = regions
        if mode == "train":
            batch["scores"] = self._draw_scores(count, generator)
        return batch

    def _draw_scores(self, count: int, generator: torch.Generator) -> torch.Tensor:
        answers = self.sizes["answers"]
        which = draw_words((count, GIVEN_ANSWERS), first=0, vocabulary=answers, generator=generator)
        score = torch.tensor(SCORES)[torch.randint(len(SCORES), which.shape, generator=generator)]
        return torch.zeros(count, answers).scatter_(1, which, score)

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Summed over the answers, as the published training does."""
        scores = batch["scores"]
        return functional.binary_cross_entropy_with_logits(self.infer(module, batch), scores) * scores.shape[1]

    def infer(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        return cast("torch.Tensor", module(batch["input_ids"], batch["token_type_ids"], batch["regions"]))


LAST_LAYER_WHERE_READ = Change(
    "last layer where it is read",
    "The last layer is computed for the first token alone: the answer is read from nothing else.",
)


class FastOscar(FastEncoder):
    parts = ("embeddings", "layers.*", "regions", "classifier")

    def convert(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        return LeanOscar(module, cast("Any", module).bert, mode=mode, precision=precision)

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        scores = batch["scores"]
        logits = cast("torch.Tensor", self.infer(module, batch)).float()
        return functional.binary_cross_entropy_with_logits(logits, scores) * scores.shape[1]

    def list_changes(self, mode: Mode) -> list[Change]:
        return [ONE_PROJECTION, LAST_LAYER_WHERE_READ, SKIPPED_LOOKUPS, *super().list_changes(mode)]
