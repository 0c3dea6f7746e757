"""DLRM out of the box: a list of EmbeddingBags with sparse gradients, two perceptrons, SGD."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from random import Random
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from stepscope.bench.workloads.protocol import Batch, Mode, Task


class TableSizes(NamedTuple):
    rows: tuple[int, ...]
    lookups: tuple[int, ...]
    """Lookups of one bag, on average."""

    @property
    def starts(self) -> list[int]:
        """Where each begins when all are laid out as one."""
        return [0, *accumulate(self.rows)][:-1]


def read_tables(sizes: Mapping[str, Any]) -> TableSizes:
    """`rows` and `lookups` are one number for `tables` tables or a list; with `table_seed` they are drawn."""
    if "table_seed" in sizes:
        return _draw_tables(sizes)
    rows, lookups = sizes["rows"], sizes["lookups"]
    count = len(rows) if isinstance(rows, list) else int(sizes["tables"])
    every_row = rows if isinstance(rows, list) else [rows] * count
    every_lookup = lookups if isinstance(lookups, list) else [lookups] * count
    cap = sizes.get("row_cap", math.inf)
    return TableSizes(tuple(int(min(one, cap)) for one in every_row), tuple(every_lookup))


def _draw_tables(sizes: Mapping[str, Any]) -> TableSizes:
    """Log-normal rows and lookups: most tables are short and read once or twice, few are long and read by the hundred.

    With `mean_tables` their number is drawn too, from 0.7 to 1.3 of it, and every other seed gives a task whose tables
    all have at least `busy_lookups`.
    """
    seed = int(sizes["table_seed"])
    chance = Random(seed)
    mean = sizes.get("mean_tables")
    count = round(chance.uniform(0.7, 1.3) * mean) if mean else int(sizes["tables"])
    least = int(sizes.get("busy_lookups", 1)) if seed % 2 else 1
    rows: list[int] = []
    lookups: list[int] = []
    while len(rows) < count:
        reads = _draw_whole(chance, sizes["median_lookups"], sizes["lookup_spread"], sizes["lookup_cap"])
        length = _draw_whole(chance, sizes["median_rows"], sizes["row_spread"], sizes["row_cap"])
        if reads >= least:
            rows.append(length)
            lookups.append(reads)
    return TableSizes(tuple(rows), tuple(lookups))


def _draw_whole(chance: Random, median: float, spread: float, cap: int) -> int:
    return max(1, min(cap, round(chance.lognormvariate(math.log(median), spread))))


STRIDE_SHARE = 0.618
"""How far neighbouring ranks lie apart, as a fraction of the rows, so that hot rows do not share cache lines."""


def make_examples(
    sizes: Mapping[str, Any], tables: TableSizes, count: int, *, seed: int, mode: Mode
) -> dict[str, torch.Tensor]:
    """`indices` holds the lookups of table after table; `offsets` [tables, count], where each bag begins in its table's
    part. A table's bags have count · lookups together, whatever the seed."""
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
    if lengths == "fixed":
        return torch.arange(count) * lookups
    places = torch.randint(count * lookups + 1, (count - 1,), generator=generator)
    return torch.cat([torch.zeros(1, dtype=torch.long), places.sort().values])


HEADER_BYTES = 4
"""Header of a row of 4-bit codes: scale and offset in half precision."""
LEVELS = 15


class Dlrm(nn.Module):
    """One logit an example."""

    def __init__(self, sizes: Mapping[str, Any], tables: TableSizes) -> None:
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


class DlrmTask(Task):
    sharded_by = "stepscope.bench.workloads.models.dlrm.sharded:ShardedDlrm"

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__(sizes)
        self.tables = read_tables(sizes)

    def build(self) -> nn.Module:
        return Dlrm(self.sizes, self.tables)

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        return make_examples(self.sizes, self.tables, count, seed=seed, mode=mode)

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        logits = module(batch["dense"], batch["indices"], batch["offsets"])
        return loss_of(logits, batch["labels"], self.sizes["loss"])

    def infer(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """The chance of a click."""
        return torch.sigmoid(cast("torch.Tensor", module(batch["dense"], batch["indices"], batch["offsets"])))

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=self.sizes["learning_rate"])
