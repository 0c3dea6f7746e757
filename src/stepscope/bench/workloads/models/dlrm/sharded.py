"""DLRM over many ranks: tables spread table by table, pooled vectors exchanged, perceptrons replicated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stepscope.bench.workloads.models.dlrm.ootb import DlrmTask
from stepscope.bench.workloads.models.dlrm.tables import Tables
from stepscope.bench.workloads.protocol import Mode, Task
from stepscope.core.errors import UsageError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

    from stepscope.bench.workloads.models.dlrm.network import Dlrm
    from stepscope.bench.workloads.models.dlrm.sharded_network import ShardedNetwork


class ShardedDlrm(Task):
    """The plain task as one rank of a process group sees it; every rank makes the same calls.

    A rank's loss is the mean over its own examples; updates are those of the mean over all ranks' examples.
    """

    def __init__(self, plain: DlrmTask, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(plain.sizes)
        import torch.distributed as dist

        self.plain = plain
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if self.ranks > len(plain.tables.rows):
            raise UsageError(
                f"{self.ranks} ranks cannot share {len(plain.tables.rows)} tables",
                hint="take as many ranks as there are tables, or fewer",
            )
        self.owners = spread_tables(plain.tables, self.ranks)

    def build(self) -> ShardedNetwork:
        return self.keep_own(self.plain.build())

    def keep_own(self, module: Dlrm) -> ShardedNetwork:
        """Keeps this rank's tables of a whole module; the perceptrons become those of the first rank."""
        from stepscope.bench.workloads.models.dlrm.sharded_network import ShardedNetwork

        return ShardedNetwork(module, self.owners, self.group)

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        """This rank's examples, other ones than those of other ranks."""
        return self.plain.make_batch(count, seed=seed * self.ranks + self.rank, mode=mode)

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.plain.loss(module, batch)

    def infer(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.plain.infer(module, batch)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return self.plain.make_optimizer(module)


def spread_tables(tables: Tables, ranks: int) -> list[int]:
    """The owner of each table: those with most lookups first, each to the rank with fewest so far, so that no rank is
    waited for. Every rank gets one where there are enough."""
    load = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(tables.rows)
    for table in sorted(range(len(owners)), key=lambda one: -tables.lookups[one]):
        carried, rank = min(load)
        owners[table] = rank
        load[load.index((carried, rank))] = (carried + tables.lookups[table], rank)
    return owners


def join_batches(tables: Tables, batches: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What the ranks have, one after the other, as one batch of the plain task."""
    import torch

    parts = [torch.split(one["indices"], [len(one["dense"]) * each for each in tables.lookups]) for one in batches]
    offsets, before = [], [0] * len(tables.lookups)
    for batch, own in zip(batches, parts, strict=True):
        offsets.append(batch["offsets"] + torch.tensor(before).unsqueeze(1))
        before = [length + len(part) for length, part in zip(before, own, strict=True)]
    joined = {
        "dense": torch.cat([one["dense"] for one in batches]),
        "indices": torch.cat([torch.cat(one) for one in zip(*parts, strict=True)]),
        "offsets": torch.cat(offsets, dim=1),
    }
    if "labels" in batches[0]:
        joined["labels"] = torch.cat([one["labels"] for one in batches])
    return joined
