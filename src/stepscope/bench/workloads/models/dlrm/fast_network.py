"""The fast modules. Imports torch at its top: import it inside functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from stepscope.bench.workloads.models.dlrm.ootb import (
    HEADER_BYTES,
    Dlrm,
    QuantisedBag,
    TableSizes,
    WeightedBag,
    loss_of,
)
from stepscope.bench.workloads.protocol import Batch

EVEN = 8
"""Inner widths are filled up with zeros to a multiple: tensor cores want rows that begin at 16 bytes."""
RECORD_WORDS = 16
"""A 4-bit row's record is filled up to a multiple of 64 bytes: it lies in as few cache lines as possible."""
CODES_A_WORD = 8


def even(width: int) -> int:
    return -(-width // EVEN) * EVEN


def join_evenly(parts: list[torch.Tensor]) -> torch.Tensor:
    """Along the second axis, with zeros behind them."""
    length = sum(one.shape[1] for one in parts)
    if missing := even(length) - length:
        first = parts[0]
        parts = [*parts, first.new_zeros(first.shape[0], missing, *first.shape[2:])]
    return torch.cat(parts, dim=1)


# Perceptrons


class EvenPerceptron(nn.Module):
    """The linear layers of a plain perceptron, filled up with zeros; a ReLU after each, perhaps not after the last."""

    def __init__(self, plain: nn.Sequential, dtype: torch.dtype, *, keep_masters: bool) -> None:
        super().__init__()
        linears = [one for one in plain if isinstance(one, nn.Linear)]
        self.ends_in_relu = isinstance(plain[-1], nn.ReLU)
        self.shapes = [(one.out_features, one.in_features) for one in linears]
        self.layers = nn.ModuleList(
            even_linear(one, dtype, last=one is linears[-1], keep_master=keep_masters) for one in linears
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self._inner():
            x = F.relu(layer(x))
        return x if self.ends_in_relu else self._last()(x)

    def infer(self, x: torch.Tensor) -> torch.Tensor:
        """Bias and ReLU in the matmul's own kernel, which has no gradient."""
        for layer in self._inner():
            x = torch._addmm_activation(layer.bias, x, layer.weight.t())
        return x if self.ends_in_relu else self._last()(x)

    def _inner(self) -> list[nn.Linear]:
        layers = [cast("nn.Linear", one) for one in self.layers]
        return layers if self.ends_in_relu else layers[:-1]

    def _last(self) -> nn.Linear:
        return cast("nn.Linear", self.layers[-1])

    def plain_gradients(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        for place, ((outputs, inputs), layer) in enumerate(zip(self.shapes, self.layers, strict=True)):
            weight, bias = cast("nn.Linear", layer).weight.grad, cast("nn.Linear", layer).bias.grad
            if weight is not None and bias is not None:
                # Between two linear layers is a ReLU.
                yield f"{prefix}.{2 * place}.weight", weight[:outputs, :inputs].float()
                yield f"{prefix}.{2 * place}.bias", bias[:outputs].float()


def even_linear(plain: nn.Linear, dtype: torch.dtype, *, last: bool, keep_master: bool) -> nn.Linear:
    more_inputs = even(plain.in_features) - plain.in_features
    more_outputs = 0 if last else even(plain.out_features) - plain.out_features
    weight = F.pad(plain.weight.detach(), (0, more_inputs, 0, more_outputs))
    bias = F.pad(plain.bias.detach(), (0, more_outputs))
    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    linear.weight, linear.bias = nn.Parameter(weight.to(dtype)), nn.Parameter(bias.to(dtype))
    if keep_master:
        linear.register_buffer("weight_master", weight.float())
        linear.register_buffer("bias_master", bias.float())
    return linear


class MasterSgd(torch.optim.Optimizer):
    """SGD on full-precision copies of half-precision weights, where a weight has one."""

    def __init__(self, module: nn.Module, rate: float, *, leave: Sequence[nn.Parameter] = ()) -> None:
        left = {id(one) for one in leave}
        named = [(name, one) for name, one in module.named_parameters() if id(one) not in left]
        super().__init__([one for _, one in named], {"lr": rate})
        buffers = dict(module.named_buffers())
        self._masters = [(one, buffers.get(f"{name}_master")) for name, one in named]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        rate = self.param_groups[0]["lr"]
        for weight, master in self._masters:
            if weight.grad is None:
                continue
            if master is None:
                weight.add_(weight.grad, alpha=-rate)
            elif weight.is_cuda:
                from stepscope.bench.workloads.models.dlrm.kernels import descend

                descend(master, weight, weight.grad, rate)
            else:
                master.add_(weight.grad.float(), alpha=-rate)
                weight.copy_(master)


# Lookups


class BagSum(torch.autograd.Function):
    """All bags of all tables, which are one: [batch, tables, width]."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        table: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        tables: int,
        dtype: torch.dtype,
        owner: GatheredTables,
    ) -> torch.Tensor:
        # Not saved for backward, which may write to the table.
        ctx.table, ctx.owner = table, owner
        ctx.save_for_backward(indices, offsets)
        return sum_bags(table, indices, offsets, tables=tables, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        indices, offsets = ctx.saved_tensors
        rate: float | None = ctx.owner.rate
        table: torch.Tensor = ctx.table.detach()
        if rate is None:
            target = torch.zeros_like(table)
            add_to_rows(target, indices, offsets, gradients[0], scale=1.0)
            return target, None, None, None, None, None
        add_to_rows(table, indices, offsets, gradients[0], scale=-rate)
        return (None,) * 6


def sum_bags(
    table: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, *, tables: int, dtype: torch.dtype
) -> torch.Tensor:
    if table.is_cuda:
        from stepscope.bench.workloads.models.dlrm import kernels

        return kernels.sum_bags(table, indices, offsets, tables=tables, dtype=dtype)
    pooled = F.embedding_bag(indices, table.float(), offsets[:-1], mode="sum")
    return pooled.view(tables, -1, table.shape[1]).transpose(0, 1).to(dtype)


def add_to_rows(
    target: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, gradient: torch.Tensor, *, scale: float
) -> None:
    """In place: a bag's gradient, times `scale`, to each row that the bag has."""
    if target.is_cuda:
        from stepscope.bench.workloads.models.dlrm import kernels

        kernels.add_to_rows(target, indices, offsets, gradient, scale=scale)
        return
    bags = torch.repeat_interleave(offsets.diff().long())
    each = gradient.transpose(0, 1).flatten(0, 1).to(target.dtype)
    target.index_add_(0, indices, each[bags], alpha=scale)


class GatheredTables(nn.Module):
    """All tables in one, a row a lookup. Without learned weights the backward pass makes the update of SGD itself."""

    def __init__(self, plain: Sequence[nn.EmbeddingBag]) -> None:
        super().__init__()
        self.count = len(plain)
        self.rows = [one.num_embeddings for one in plain]
        self.weight = nn.Parameter(torch.cat([one.weight.detach() for one in plain]))
        learned = [one.row_weights.weight.detach() for one in plain if isinstance(one, WeightedBag)]
        self.row_weights = nn.Parameter(torch.cat(learned)) if learned else None
        self.rate: float | None = None
        """Learning rate of the update that the backward pass makes itself; None: it leaves a gradient instead."""

    def forward(self, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
        table = self.weight if self.row_weights is None else self.weight * self.row_weights.unsqueeze(1)
        pooled = BagSum.apply(table, batch["indices"], batch["offsets"], self.count, dtype, self)  # type: ignore[no-untyped-call]
        return cast("torch.Tensor", pooled)

    def arm(self, rate: float | None) -> list[nn.Parameter]:
        """From now on backward updates the table, or with None does not; gives what no optimizer has to."""
        self.rate = rate if self.row_weights is None else None
        return [] if self.rate is None else [self.weight]

    def plain_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from _split_gradient(self.weight.grad, "weight", self.rows)
        if self.row_weights is not None:
            yield from _split_gradient(self.row_weights.grad, "row_weights.weight", self.rows)


def _split_gradient(
    gradient: torch.Tensor | None, name: str, rows: Sequence[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    if gradient is not None:
        for place, part in enumerate(torch.split(gradient, list(rows))):
            yield f"tables.{place}.{name}", part


class CountedTables(nn.Module):
    """Equal tables that are short for their lookups: how often each bag has each row, times the table.

    A row's learned weight is multiplied into the row once, instead of once a lookup.
    """

    def __init__(self, plain: Sequence[nn.EmbeddingBag], lookups: int) -> None:
        super().__init__()
        self.lookups = lookups
        self.rows = plain[0].num_embeddings
        more = even(self.rows) - self.rows
        self.weight = nn.Parameter(torch.stack([F.pad(one.weight.detach(), (0, 0, 0, more)) for one in plain]))
        learned = [F.pad(one.row_weights.weight.detach(), (0, more)) for one in plain if isinstance(one, WeightedBag)]
        self.row_weights = nn.Parameter(torch.stack(learned)) if learned else None

    def count(self, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[tables, batch, rows]; whole numbers up to the lookups, which bfloat16 holds exactly up to 256."""
        tables, rows = self.weight.shape[:2]
        bags = indices.view(tables, -1, self.lookups)
        if indices.is_cuda:
            from stepscope.bench.workloads.models.dlrm.kernels import count_rows

            return count_rows(bags, rows, dtype)
        counts = torch.zeros(*bags.shape[:2], rows, dtype=dtype, device=indices.device)
        return counts.scatter_add_(2, bags.long(), torch.ones(bags.shape, dtype=dtype, device=indices.device))

    def forward(self, counts: torch.Tensor) -> torch.Tensor:
        table = self.weight if self.row_weights is None else self.weight * self.row_weights.unsqueeze(2)
        return torch.bmm(counts, table.to(counts.dtype)).transpose(0, 1)

    def plain_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in (("weight", self.weight), ("row_weights.weight", self.row_weights)):
            if parameter is not None and parameter.grad is not None:
                for place, part in enumerate(parameter.grad):
                    yield f"tables.{place}.{name}", part[: self.rows]


class PackedTables(nn.Module):
    """4-bit tables as one array of records: scale and offset, each times the row's weight, then the codes."""

    def __init__(self, plain: Sequence[QuantisedBag], width: int) -> None:
        super().__init__()
        self.count, self.width, self.lookups = len(plain), width, plain[0].lookups
        words = -(-(2 + width // CODES_A_WORD) // RECORD_WORDS) * RECORD_WORDS
        rows = [one.get_buffer("packed").shape[0] for one in plain]
        device = plain[0].get_buffer("packed").device
        records = torch.zeros(sum(rows), words, dtype=torch.int32, device=device)
        for target, one in zip(torch.split(records, rows), plain, strict=True):
            packed = one.get_buffer("packed")
            header = packed[:, :HEADER_BYTES].contiguous().view(torch.float16).float()
            header = header * one.get_buffer("row_weights").float().unsqueeze(1)
            target[:, :2] = header.view(torch.int32)
            target[:, 2 : 2 + width // CODES_A_WORD] = packed[:, HEADER_BYTES:].contiguous().view(torch.int32)
        self.register_buffer("records", records)

    def forward(self, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
        records, indices = self.get_buffer("records"), batch["indices"]
        if records.is_cuda:
            from stepscope.bench.workloads.models.dlrm.kernels import sum_packed_bags

            return sum_packed_bags(
                records, indices, tables=self.count, lookups=self.lookups, width=self.width, dtype=dtype
            )
        taken = records[indices.long()]
        header = taken[:, :2].contiguous().view(torch.float32)
        codes = taken[:, 2 : 2 + self.width // CODES_A_WORD].unsqueeze(2)
        levels = (codes >> torch.arange(0, 32, 4, device=codes.device)) & 15
        values = levels.flatten(1) * header[:, :1] + header[:, 1:]
        pooled = values.view(self.count, -1, self.lookups, self.width).sum(dim=2)
        return pooled.transpose(0, 1).to(dtype)


# Interaction


class LowerProducts(torch.autograd.Function):
    """Dot products of every two features, each pair once. Backward is one matmul with the symmetric gradient, where
    the ootb implementation adds up scattered elements and multiplies twice. Takes an even number of features."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, lower: torch.Tensor, mirror: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(features, mirror)
        return torch.bmm(features, features.transpose(1, 2)).flatten(1).index_select(1, lower)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        features, mirror = ctx.saved_tensors
        count = features.shape[1]
        # The last column stands for what is not among the products: the diagonal, and features of zeros.
        symmetric = F.pad(gradients[0], (0, 1)).index_select(1, mirror).view(-1, count, count)
        return torch.bmm(symmetric, features), None, None


def place_pairs(features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each pair lies in the flat square of products, and which pair each place of the square is. The square has
    an even side."""
    row, column = torch.tril_indices(features, features, offset=-1)
    pairs, side = len(row), even(features)
    mirror = torch.full((side, side), pairs, dtype=torch.long, device=row.device)
    mirror[row, column] = mirror[column, row] = torch.arange(pairs, device=row.device)
    return row * side + column, mirror.flatten()


# The whole


class FastDlrm(nn.Module):
    """Takes arranged batches. `dtype` is that of matmuls and of what lies between the layers."""

    def __init__(
        self, plain: Dlrm, tables: TableSizes, lookup: nn.Module, *, dtype: torch.dtype, loss: str, compiled: bool
    ) -> None:
        super().__init__()
        self.loss_kind = loss
        keep_masters = dtype != torch.float32
        self.bottom = EvenPerceptron(plain.bottom, dtype, keep_masters=keep_masters)
        self.top = EvenPerceptron(plain.top, dtype, keep_masters=keep_masters)
        self.lookup = lookup
        lower, mirror = place_pairs(len(tables.rows) + 1)
        device = plain.get_buffer("lower").device
        self.register_buffer("lower", lower.to(device), persistent=False)
        self.register_buffer("mirror", mirror.to(device), persistent=False)
        self._loss_of = torch.compile(self._trained, dynamic=False) if compiled else self._trained

    @property
    def dtype(self) -> torch.dtype:
        return cast("nn.Linear", self.top.layers[0]).weight.dtype

    def loss(self, batch: Batch) -> torch.Tensor:
        if isinstance(self.lookup, CountedTables):
            looked_up = self.lookup.count(batch["indices"], self.dtype)
        else:
            looked_up = self.lookup(batch, self.dtype)
        return self._loss_of(batch["dense"], looked_up, batch["labels"])

    def _trained(self, dense: torch.Tensor, looked_up: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """What is compiled: everything but the lookups."""
        pooled = self.lookup(looked_up) if isinstance(self.lookup, CountedTables) else looked_up
        bottom = self.bottom(dense.to(self.dtype))
        features = join_evenly([bottom.unsqueeze(1), pooled])
        crossed = LowerProducts.apply(features, self.get_buffer("lower"), self.get_buffer("mirror"))  # type: ignore[no-untyped-call]
        logits = self.top(join_evenly([bottom, crossed]))
        return loss_of(logits.squeeze(1), labels, self.loss_kind)

    def infer(self, batch: Batch) -> torch.Tensor:
        bottom = self.bottom.infer(batch["dense"])
        features = join_evenly([bottom.unsqueeze(1), self.lookup(batch, bottom.dtype)])
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        crossed = products.index_select(1, self.get_buffer("lower"))
        return torch.sigmoid(self.top.infer(join_evenly([bottom, crossed])).squeeze(1))

    def arm(self, rate: float | None) -> list[nn.Parameter]:
        """Backward passes make what updates they can, or with None none; gives the parameters of which no gradient is
        left."""
        arm = getattr(self.lookup, "arm", None)
        return arm(rate) if arm is not None else []

    def plain_gradients(self) -> dict[str, torch.Tensor]:
        found = dict(self.bottom.plain_gradients("bottom"))
        found.update(self.top.plain_gradients("top"))
        if isinstance(self.lookup, GatheredTables | CountedTables):
            found.update(self.lookup.plain_gradients())
        return found
