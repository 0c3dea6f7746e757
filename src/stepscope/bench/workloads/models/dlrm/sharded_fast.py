"""The optimized DLRM over many ranks: each rank's tables gathered in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from stepscope.bench.workloads.models.dlrm.fast_network import FastDlrm, GatheredTables, even
from stepscope.bench.workloads.models.dlrm.sharded import ShardedDlrm, TableExchange, join_starts
from stepscope.bench.workloads.protocol import Change, Engine, Mode, Precision
from stepscope.bench.workloads.steps import UpdatesEarly

if TYPE_CHECKING:
    from stepscope.bench.workloads.models.dlrm.ootb import Dlrm
    from stepscope.bench.workloads.models.dlrm.optimized import DlrmOptimized


class ShardedTables(nn.Module):
    """All tables as a rank sees them, of which it has some, gathered in one."""

    def __init__(self, plain: Sequence[nn.EmbeddingBag], exchange: TableExchange) -> None:
        super().__init__()
        self.exchange = exchange
        self.own = GatheredTables([plain[table] for table in exchange.own])
        rows = torch.tensor([0, *self.own.rows[:-1]]).cumsum(0)
        self.register_buffer("first_rows", rows.to(self.own.weight.device), persistent=False)

    def forward(self, batch: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
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
        self.joined: nn.Module = _Loss(fast)
        if trained:
            own = [*fast.lookup.named_parameters(), *fast.lookup.named_buffers()]
            names = [f"fast.lookup.{name}" for name, _ in own]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.joined, names)  # type: ignore[no-untyped-call]
            self.joined = DistributedDataParallel(self.joined)

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return cast("torch.Tensor", self.joined(batch))


class _Loss(nn.Module):
    def __init__(self, fast: FastDlrm) -> None:
        super().__init__()
        self.fast = fast

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.fast.loss(batch)


class ShardedFastDlrm(UpdatesEarly):
    """A table's owner has its gradients of all ranks' examples, so that its backward pass may update it itself."""

    def __init__(self, fast: DlrmOptimized) -> None:
        super().__init__(fast.plain)
        self.fast = fast
        self.sharded = ShardedDlrm(fast.plain)

    def convert(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        plain = cast("Dlrm", module)
        exchange = TableExchange(plain.lookups, self.sharded.owners, plain.get_buffer("lower").device)
        lookup = ShardedTables(cast("list[nn.EmbeddingBag]", list(plain.tables)), exchange)
        fast = self.fast.convert_around(lookup, plain, mode=mode, precision=precision)
        return ShardedFastNetwork(fast, trained=mode == "train")

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        """This rank's examples. Indices stay as they are: where they go is decided table by table."""
        batch = self.sharded.make_batch(count, seed=seed, mode=mode)
        features = batch["dense"].shape[1]
        return {**batch, "dense": functional.pad(batch["dense"], (0, even(features) - features))}

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return cast("torch.Tensor", module(batch))

    def infer(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return _network(module).fast.infer(batch)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return self.fast.make_optimizer(_network(module).fast)

    def make_late_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return self.fast.make_late_optimizer(_network(module).fast)

    def engine(self, mode: Mode) -> Engine:
        return self.fast.engine(mode)

    def list_changes(self, mode: Mode) -> list[Change]:
        return self.fast.list_gathered_changes(mode, _OWN_GATHERED)


_OWN_GATHERED = Change(
    "own tables as one", "a rank's tables lie in one weight; one kernel sums all bags that the ranks have sent for them"
)


def _network(module: Any) -> ShardedFastNetwork:
    return cast("ShardedFastNetwork", module)
