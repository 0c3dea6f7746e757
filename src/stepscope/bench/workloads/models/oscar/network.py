"""OSCAR for visual question answering, plain and fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import BertModel

from stepscope.bench.workloads.models.bert.ootb import make_config
from stepscope.bench.workloads.models.encoders.lean import LeanEmbeddings, LeanEncoder, as_stream, drop, stream_dtype
from stepscope.bench.workloads.models.encoders.origins import Lean, Origins

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stepscope.bench.workloads.protocol import Mode, Precision


class Oscar(nn.Module):
    """Regions take no position and no type; they stand after the text, and the first token is asked for the answer."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        self.bert = BertModel(make_config(sizes))  # type: ignore[no-untyped-call]
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


class LeanOscar(Lean):
    def __init__(self, plain: Any, *, mode: Mode, precision: Precision) -> None:
        super().__init__()
        origins, self.stream = Origins(plain), stream_dtype(mode, precision)
        self.embeddings = LeanEmbeddings(plain.bert.embeddings, first_position=0, stream=self.stream)
        self.regions = plain.region_embedding
        self.encoder = LeanEncoder(plain.bert.encoder.layer, origins=origins, stream=self.stream)
        self.pooler = plain.bert.pooler.dense
        self.classifier = plain.classifier
        self.region_drop_rate = plain.region_dropout.p
        self.drop_rate = plain.dropout.p
        origins.trace(self)
        self.train(plain.training)

    def forward(self, ids: torch.Tensor, types: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
        text = self.embeddings(ids, types=types)
        image = as_stream(drop(self.regions(regions), self.region_drop_rate, self.training), self.stream)
        first = self.encoder.first_token(torch.cat([text, image], dim=1))
        pooled = torch.tanh(self.pooler(first))
        logits: torch.Tensor = self.classifier(drop(pooled, self.drop_rate, self.training))
        return logits
