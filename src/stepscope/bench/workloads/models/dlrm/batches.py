"""Synthetic examples: dense features, bags of skewed indices, and clicks that depend on the dense features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from stepscope.bench.workloads.models.dlrm.tables import Tables
    from stepscope.bench.workloads.protocol import Mode

STRIDE_SHARE = 0.618
"""Of the rows: how far neighbouring ranks lie apart, so that hot rows do not share cache lines."""


def make_examples(
    sizes: Mapping[str, Any], tables: Tables, count: int, *, seed: int, mode: Mode
) -> dict[str, torch.Tensor]:
    """`indices` holds the lookups of table after table; `offsets` [tables, count], where each bag begins in its table's
    part. A table's bags have count · lookups together, whatever the seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(count, sizes["dense_features"], generator=generator)
    indices = [
        draw_rows(count * lookups, rows, sizes["zipf_exponent"], generator)
        for rows, lookups in zip(tables.rows, tables.lookups, strict=True)
    ]
    offsets = [_draw_offsets(count, lookups, sizes["lengths"], generator) for lookups in tables.lookups]
    batch = {"dense": dense, "indices": torch.cat(indices), "offsets": torch.stack(offsets)}
    if mode == "train":
        taste = dense.sum(dim=1) / math.sqrt(dense.shape[1])
        clicked = torch.rand(count, generator=generator) < torch.sigmoid(2 * taste - 1)
        batch["labels"] = clicked.float()
    return batch


def draw_rows(count: int, rows: int, exponent: float, generator: torch.Generator) -> torch.Tensor:
    """Rank r = 1, 2, … with a probability ∝ ∫ x^−exponent from r to r + 1; ranks are spread over the table."""
    import torch

    drawn = torch.rand(count, dtype=torch.float64, generator=generator)
    bend = 1.0 - exponent
    if abs(bend) < 1e-9:
        place = torch.exp(drawn * math.log(rows + 1))
    else:
        place = (1 + drawn * ((rows + 1) ** bend - 1)) ** (1 / bend)
    ranks = place.long().sub_(1).clamp_(0, rows - 1)
    return ranks.mul_(_stride(rows)).remainder_(rows)


def _stride(rows: int) -> int:
    stride = max(1, int(STRIDE_SHARE * rows))
    while math.gcd(stride, rows) != 1:
        stride += 1
    return stride


def _draw_offsets(count: int, lookups: int, lengths: str, generator: torch.Generator) -> torch.Tensor:
    """`fixed`: every bag has as many lookups; `drawn`: any way to share them out is equally likely, so lengths are
    geometric."""
    import torch

    if lengths == "fixed":
        return torch.arange(count) * lookups
    places = torch.randint(count * lookups + 1, (count - 1,), generator=generator)
    return torch.cat([torch.zeros(1, dtype=torch.long), places.sort().values])
