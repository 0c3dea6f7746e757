"""The fast form of XLM-R."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.bench.workloads.models.encoders.lean import LeanEmbeddings, LeanEncoder, choose_products, stream_dtype
from stepscope.bench.workloads.models.encoders.origins import Lean, Origins

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from stepscope.bench.workloads.models.encoders.fp8 import Ranges
    from stepscope.bench.workloads.protocol import Mode, Precision


class LeanXlmr(Lean):
    def __init__(self, plain: Any, *, mode: Mode, precision: Precision, ranges: Ranges | None = None) -> None:
        super().__init__()
        origins, stream = Origins(plain), stream_dtype(mode, precision)
        narrow = choose_products(mode, precision, ranges)
        # Positions count from the one after that of padding.
        first = plain.embeddings.padding_idx + 1
        self.embeddings = LeanEmbeddings(plain.embeddings, first_position=first, stream=stream)
        self.encoder = LeanEncoder(plain.encoder.layer, origins=origins, stream=stream, narrow=narrow)
        origins.trace(self)
        self.train(plain.training)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Of unpadded sequences."""
        features: torch.Tensor = self.encoder(self.embeddings(ids))
        return features

    def read_packed(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of sequences end to end, as packing.pack lays them: [tokens, width]."""
        hidden = self.embeddings(batch["tokens"], places=batch["places"])
        features: torch.Tensor = self.encoder(hidden, batch)
        return features
