"""The plain modules. Imports torch at its top: import it inside functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from stepscope.bench.workloads.models.dlrm.tables import Tables

HEADER_BYTES = 4
"""Of a row of 4-bit codes: scale and offset in half precision."""
LEVELS = 15


class Dlrm(nn.Module):
    """One logit an example."""

    def __init__(self, sizes: Mapping[str, Any], tables: Tables) -> None:
        super().__init__()
        width, features = int(sizes["width"]), len(tables.rows) + 1
        gain = float(sizes["weight_gain"])
        self.bottom = make_perceptron([sizes["dense_features"], *sizes["bottom"]], gain, last=nn.ReLU())
        self.tables = nn.ModuleList(make_table(sizes, *one) for one in zip(tables.rows, tables.lookups, strict=True))
        self.top = make_perceptron([features * (features - 1) // 2 + width, *sizes["top"]], gain)
        self.lookups = tables.lookups
        self.register_buffer("lower", torch.tril_indices(features, features, offset=-1), persistent=False)

    def forward(self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        parts = torch.split(indices, [len(dense) * one for one in self.lookups])
        pooled = [table(part, starts) for table, part, starts in zip(self.tables, parts, offsets, strict=True)]
        return self.judge(bottom, pooled)

    def judge(self, bottom: torch.Tensor, pooled: Sequence[torch.Tensor]) -> torch.Tensor:
        """Every pair's dot product, each pair once and none with itself, and the top perceptron over them."""
        features = torch.stack([bottom, *(one.to(bottom.dtype) for one in pooled)], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        lower = self.get_buffer("lower")
        crossed = products[:, lower[0], lower[1]]
        logits: torch.Tensor = self.top(torch.cat([bottom, crossed], dim=1))
        return logits.squeeze(1)


def make_perceptron(widths: Sequence[int], gain: float, last: nn.Module | None = None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        linear = nn.Linear(inputs, outputs)
        nn.init.normal_(linear.weight, std=gain / math.sqrt(inputs))
        nn.init.normal_(linear.bias, std=1 / math.sqrt(outputs))
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1], *([last] if last else []))


def make_table(sizes: Mapping[str, Any], rows: int, lookups: int) -> nn.Module:
    width = int(sizes["width"])
    # Dot products of two pooled vectors then are of size one.
    spread = width**-0.25 / math.sqrt(lookups)
    if sizes["embedding_bits"] == 4:
        return QuantisedBag(rows, width, lookups=lookups, spread=spread)
    kind = WeightedBag if sizes["pooling"] == "learned" else nn.EmbeddingBag
    table = kind(rows, width, mode="sum", sparse=bool(sizes["sparse_gradients"]))
    nn.init.normal_(table.weight, std=spread)
    return table


class WeightedBag(nn.EmbeddingBag):
    """Each row counts with a weight of its own, which is learned."""

    def __init__(self, rows: int, width: int, **options: Any) -> None:
        super().__init__(rows, width, **options)
        # A module of its own: data-parallel wrappers take all that is in a sparse bag to have sparse gradients.
        self.row_weights = RowWeights(rows)

    def forward(  # type: ignore[override]
        self, indices: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        return super().forward(indices, offsets, per_sample_weights=self.row_weights(indices))


class RowWeights(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.weight.gather(0, indices)


class QuantisedBag(nn.Module):
    """Rows of 4-bit codes, low half of a byte first, behind their scale and offset; fixed weights of rows.

    For bags of one length. The packed bytes hold no floats of torch's, so a cast of the module leaves them alone.
    """

    def __init__(self, rows: int, width: int, *, lookups: int, spread: float) -> None:
        super().__init__()
        self.lookups = lookups
        reach = spread * math.sqrt(3) * (0.5 + torch.rand(rows, 1))
        header = torch.cat([2 * reach / LEVELS, -reach], dim=1).half()
        codes = torch.randint(256, (rows, width // 2), dtype=torch.uint8)
        self.register_buffer("packed", torch.cat([header.view(torch.uint8), codes], dim=1))
        self.register_buffer("row_weights", torch.ones(rows))

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        weights = self.get_buffer("row_weights")[indices].unsqueeze(1)
        taken = self.get_buffer("packed")[indices]
        header = taken[:, :HEADER_BYTES].contiguous().view(torch.float16).to(weights.dtype)
        codes = taken[:, HEADER_BYTES:]
        levels = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
        values = (levels * header[:, :1] + header[:, 1:]) * weights
        return values.view(len(offsets), self.lookups, -1).sum(dim=1)


def loss_of(logits: torch.Tensor, labels: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "mse":
        return F.mse_loss(torch.sigmoid(logits.float()), labels)
    return F.binary_cross_entropy_with_logits(logits.float(), labels)
