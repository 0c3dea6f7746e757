"""The fast form of BERT with its heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from stepscope.bench.workloads.models.encoders.lean import LeanEmbeddings, LeanEncoder, choose_products, stream_dtype
from stepscope.bench.workloads.models.encoders.origins import Lean, Origins

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stepscope.bench.workloads.models.encoders.fp8 import Ranges
    from stepscope.bench.workloads.protocol import Mode, Precision


class LeanBert(Lean):
    """What both heads stand on."""

    def __init__(self, plain: Any, *, mode: Mode, precision: Precision, ranges: Ranges | None = None) -> None:
        super().__init__()
        origins, stream = Origins(plain), stream_dtype(mode, precision)
        narrow = choose_products(mode, precision, ranges)
        self.embeddings = LeanEmbeddings(plain.bert.embeddings, first_position=0, stream=stream)
        layers = plain.bert.encoder.layer
        self.encoder = LeanEncoder(layers, origins=origins, stream=stream, narrow=narrow)
        self.take_head(plain)
        origins.trace(self)
        self.train(plain.training)

    def take_head(self, plain: Any) -> None:
        raise NotImplementedError

    def read(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        hidden: torch.Tensor = self.encoder(self.embeddings(batch["input_ids"], types=batch["token_type_ids"]))
        return hidden


class LeanPretraining(LeanBert):
    def take_head(self, plain: Any) -> None:
        self.pooler = plain.bert.pooler.dense
        self.transform = plain.cls.predictions.transform.dense
        self.transform_norm = plain.cls.predictions.transform.LayerNorm
        self.decoder = plain.cls.predictions.decoder
        self.next_sentence = plain.cls.seq_relationship

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Words are guessed where they are hidden, and nowhere else."""
        hidden = self.read(batch)
        guesses = self._guess(hidden.flatten(0, 1)[batch["hidden_at"]])
        words = functional.cross_entropy(guesses, batch["hidden_words"])
        return words + functional.cross_entropy(self._relate(hidden), batch["next_sentence_label"])

    def forward(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
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

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        starts, ends = self(batch)
        first = functional.cross_entropy(starts, batch["start_positions"])
        return (first + functional.cross_entropy(ends, batch["end_positions"])) / 2

    def forward(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        starts, ends = self.ends(self.read(batch)).unbind(-1)
        return starts, ends
