"""DLRM over many ranks, plain and optimized: tables sharded table by table, pooled vectors exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from stepscope.bench.workloads.models.dlrm.fast_network import FastDlrm, GatheredTables, even
from stepscope.bench.workloads.models.dlrm.ootb import Dlrm, DlrmTask, TableSizes
from stepscope.bench.workloads.models.dlrm.optimized import DlrmOptimized
from stepscope.bench.workloads.protocol import Batch, Change, Mode, Precision
from stepscope.core.errors import UsageError


class ExchangePooled(torch.autograd.Function):
    """Pooled vectors go to the ranks whose examples they belong to, and their gradients come back.

    From this rank's tables for the examples of all ranks, [ranks · batch, own tables, width], to all tables for the
    examples of this rank, [batch, tables, width], in the order of owners. A rank's loss is the mean over its own
    examples, so gradients are divided by the ranks: together they are those of the mean over all examples.
    """

    @staticmethod
    def forward(ctx: Any, pooled: torch.Tensor, owned: Sequence[int]) -> torch.Tensor:
        ctx.owned = owned
        ranks, width = len(owned), pooled.shape[2]
        batch = len(pooled) // ranks
        sent = [batch * pooled.shape[1] * width] * ranks
        received = [batch * one * width for one in owned]
        flat = _exchange(pooled.contiguous(), sent, received)
        return torch.cat([part.view(batch, -1, width) for part in torch.split(flat, received)], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        owned = ctx.owned
        batch, _, width = gradients[0].shape
        mine = owned[dist.get_rank()]
        parts = [part.reshape(-1) for part in torch.split(gradients[0], list(owned), dim=1)]
        received = [batch * mine * width] * len(owned)
        flat = _exchange(torch.cat(parts), [len(part) for part in parts], received)
        return flat.view(-1, mine, width) / len(owned), None


def _exchange(flat: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    target = flat.new_empty(sum(received))
    dist.all_to_all_single(target, flat.view(-1), received, sent)
    return target


class DenseNetwork(nn.Module):
    """What every rank has: both perceptrons and the interaction between them."""

    def __init__(self, plain: Dlrm) -> None:
        super().__init__()
        self.plain = plain
        plain.tables = nn.ModuleList()

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return self.plain.judge(self.plain.bottom(dense), pooled.unbind(1))


class TableExchange(nn.Module):
    """Which rank has which tables, and how lookups get there and pooled vectors back."""

    def __init__(self, lookups: Sequence[int], owners: Sequence[int], device: torch.device) -> None:
        super().__init__()
        self.ranks = dist.get_world_size()
        self.lookups = lookups
        self.tables_of = [[table for table, owner in enumerate(owners) if owner == rank] for rank in range(self.ranks)]
        self.own = self.tables_of[dist.get_rank()]
        arrived = [table for own in self.tables_of for table in own]
        self.register_buffer("order", torch.tensor(arrived).argsort().to(device), persistent=False)

    def send_lookups(self, indices: torch.Tensor, batch: int) -> list[list[torch.Tensor]]:
        """The lookups of each own table from every rank. A table has as many from each, so sizes need no exchange."""
        parts = torch.split(indices, [batch * one for one in self.lookups])
        sent = [torch.cat([parts[table] for table in own]) if own else parts[0][:0] for own in self.tables_of]
        sizes = [batch * self.lookups[table] for table in self.own]
        received = _exchange(torch.cat(sent), [len(one) for one in sent], [sum(sizes)] * self.ranks)
        by_rank = [torch.split(one, sizes) for one in received.view(self.ranks, -1)]
        return [[one[place] for one in by_rank] for place in range(len(self.own))]

    def send_offsets(self, offsets: torch.Tensor) -> torch.Tensor:
        """[own tables, ranks, batch]: where bags begin in the part of their rank."""
        batch = offsets.shape[1]
        sent = [offsets[own].flatten() for own in self.tables_of]
        received = _exchange(torch.cat(sent), [len(one) for one in sent], [len(self.own) * batch] * self.ranks)
        return received.view(self.ranks, len(self.own), batch).transpose(0, 1)

    def return_pooled(self, local: torch.Tensor) -> torch.Tensor:
        """From [ranks · batch, own tables, width] to all tables for this rank's examples, [batch, tables, width]."""
        owned = [len(one) for one in self.tables_of]
        arrived: torch.Tensor = ExchangePooled.apply(local, owned)  # type: ignore[no-untyped-call]
        return arrived.index_select(1, self.get_buffer("order"))


class ShardedNetwork(nn.Module):
    """One rank's tables and its copy of the dense network, whose gradients are averaged as backward makes them."""

    def __init__(self, plain: Dlrm, owners: Sequence[int]) -> None:
        super().__init__()
        self.exchange = TableExchange(plain.lookups, owners, plain.get_buffer("lower").device)
        every = list(plain.tables)
        self.tables = nn.ModuleDict({str(table): every[table] for table in self.exchange.own})
        self.dense = DistributedDataParallel(DenseNetwork(plain))

    def forward(self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        batch = len(dense)
        taken = self.exchange.send_lookups(indices, batch)
        starts = self.exchange.send_offsets(offsets)
        pooled = [
            table(torch.cat(mine), join_starts(begins, len(mine[0])))
            for table, mine, begins in zip(self.tables.values(), taken, starts, strict=True)
        ]
        width = cast("nn.Linear", self._dense().plain.bottom[-2]).out_features
        local = torch.stack(pooled, dim=1) if pooled else dense.new_zeros(self.exchange.ranks * batch, 0, width)
        return cast("torch.Tensor", self.dense(dense, self.exchange.return_pooled(local)))

    def _dense(self) -> DenseNetwork:
        return cast("DenseNetwork", self.dense.module)


def join_starts(begins: torch.Tensor, length: int) -> torch.Tensor:
    """Order of one table: from [ranks, batch] in each rank's part to all of them in the parts together."""
    return (begins + length * torch.arange(len(begins), device=begins.device).unsqueeze(1)).flatten()


class ShardedDlrm(DlrmTask):
    """The plain task as one rank of a process group sees it; every rank makes the same calls.

    A rank's loss is the mean over its own examples; updates are those of the mean over all ranks' examples.
    """

    def __init__(self, plain: DlrmTask) -> None:
        super().__init__(plain.sizes)
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        if self.ranks > len(self.tables.rows):
            raise UsageError(
                f"{self.ranks} ranks cannot share {len(self.tables.rows)} tables",
                hint="take as many ranks as there are tables, or fewer",
            )
        self.owners = shard_tables(self.tables, self.ranks)

    def build(self) -> nn.Module:
        """Keeps this rank's tables of a whole module; the perceptrons become those of the first rank."""
        return ShardedNetwork(cast("Dlrm", super().build()), self.owners)

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        """This rank's examples, other ones than those of other ranks."""
        return super().make_batch(count, seed=seed * self.ranks + self.rank, mode=mode)


def shard_tables(tables: TableSizes, ranks: int) -> list[int]:
    """The owner of each table: those with most lookups first, each to the rank with fewest so far, so that no rank is
    waited for. Every rank gets one where there are enough."""
    load = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(tables.rows)
    for table in sorted(range(len(owners)), key=lambda one: -tables.lookups[one]):
        carried, rank = min(load)
        owners[table] = rank
        load[load.index((carried, rank))] = (carried + tables.lookups[table], rank)
    return owners


# Optimized: each rank's tables gathered in one


class ShardedTables(nn.Module):
    """All tables as a rank sees them, of which it has some, gathered in one."""

    def __init__(self, plain: Sequence[nn.EmbeddingBag], exchange: TableExchange) -> None:
        super().__init__()
        self.exchange = exchange
        self.own = GatheredTables([plain[table] for table in exchange.own])
        rows = torch.tensor([0, *self.own.rows[:-1]]).cumsum(0)
        self.register_buffer("first_rows", rows.to(self.own.weight.device), persistent=False)

    def forward(self, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
        """[batch, tables, width]."""
        taken = self.exchange.send_lookups(batch["indices"], len(batch["dense"]))
        starts = self.exchange.send_offsets(batch["offsets"])
        tables = [torch.cat(one) for one in taken]
        indices = torch.cat([one + row for one, row in zip(tables, self.get_buffer("first_rows"), strict=True)])
        offsets = [join_starts(begins, len(parts[0])) for begins, parts in zip(starts, taken, strict=True)]
        before = 0
        for place, one in enumerate(tables):
            offsets[place] = offsets[place] + before
            before += len(one)
        ends = torch.full((1,), before, dtype=indices.dtype, device=indices.device)
        gathered = {"indices": indices.int(), "offsets": torch.cat([*offsets, ends]).int()}
        return self.exchange.return_pooled(self.own(gathered, dtype))

    def arm(self, rate: float | None) -> list[nn.Parameter]:
        return self.own.arm(rate)


class ShardedFastNetwork(nn.Module):
    """Gradients of the dense part are averaged as backward makes them; those of tables have come to their owner."""

    def __init__(self, fast: FastDlrm, *, trained: bool) -> None:
        super().__init__()
        self.fast = fast
        self.infer = fast.infer
        self.loss: nn.Module = _Loss(fast)
        if trained:
            own = [*fast.lookup.named_parameters(), *fast.lookup.named_buffers()]
            names = [f"fast.lookup.{name}" for name, _ in own]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.loss, names)  # type: ignore[no-untyped-call]
            self.loss = DistributedDataParallel(self.loss)


class _Loss(nn.Module):
    def __init__(self, fast: FastDlrm) -> None:
        super().__init__()
        self.fast = fast

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.fast.loss(batch)


class ShardedFastDlrm(DlrmOptimized):
    """A table's owner has its gradients of all ranks' examples, so that its backward pass may update it itself."""

    def __init__(self, fast: DlrmOptimized) -> None:
        super().__init__(fast.plain)
        self.sharded = ShardedDlrm(fast.plain)

    def convert(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        plain = cast("Dlrm", module)
        exchange = TableExchange(plain.lookups, self.sharded.owners, plain.get_buffer("lower").device)
        lookup = ShardedTables(cast("list[nn.EmbeddingBag]", list(plain.tables)), exchange)
        fast = self.convert_around(lookup, plain, mode=mode, precision=precision)
        return ShardedFastNetwork(fast, trained=mode == "train")

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        """This rank's examples. Indices stay as they are: where they go is decided table by table."""
        batch = self.sharded.make_batch(count, seed=seed, mode=mode)
        features = batch["dense"].shape[1]
        return {**batch, "dense": functional.pad(batch["dense"], (0, even(features) - features))}

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return super().make_optimizer(cast("ShardedFastNetwork", module).fast)

    def make_late_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return super().make_late_optimizer(cast("ShardedFastNetwork", module).fast)

    def list_changes(self, mode: Mode) -> list[Change]:
        return self.list_gathered_changes(mode, _OWN_GATHERED)


_OWN_GATHERED = Change(
    "own tables as one", "a rank's tables lie in one weight; one kernel sums all bags that the ranks have sent for them"
)
