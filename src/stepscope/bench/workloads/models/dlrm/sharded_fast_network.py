"""The fast modules of one rank. Imports torch at its top: import it inside functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepscope.bench.workloads.models.dlrm.fast_network import FastDlrm, GatheredTables
from stepscope.bench.workloads.models.dlrm.sharded_network import Group, Spread, join_starts


class SpreadTables(nn.Module):
    """All tables as a rank sees them, of which it has some, gathered in one."""

    def __init__(self, plain: Sequence[nn.EmbeddingBag], spread: Spread) -> None:
        super().__init__()
        self.spread = spread
        self.own = GatheredTables([plain[table] for table in spread.own])
        rows = torch.tensor([0, *self.own.rows[:-1]]).cumsum(0)
        self.register_buffer("first_rows", rows.to(self.own.weight.device), persistent=False)

    def forward(self, batch: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """[batch, tables, width]."""
        taken = self.spread.send_lookups(batch["indices"], len(batch["dense"]))
        starts = self.spread.send_offsets(batch["offsets"])
        tables = [torch.cat(one) for one in taken]
        indices = torch.cat([one + row for one, row in zip(tables, self.get_buffer("first_rows"), strict=True)])
        offsets = [join_starts(begins, len(parts[0])) for begins, parts in zip(starts, taken, strict=True)]
        before = 0
        for place, one in enumerate(tables):
            offsets[place] = offsets[place] + before
            before += len(one)
        ends = torch.full((1,), before, dtype=indices.dtype, device=indices.device)
        gathered = {"indices": indices.int(), "offsets": torch.cat([*offsets, ends]).int()}
        return self.spread.return_pooled(self.own(gathered, dtype))

    def arm(self, rate: float | None) -> list[nn.Parameter]:
        return self.own.arm(rate)


class ShardedFastNetwork(nn.Module):
    """Gradients of the dense part are averaged as backward makes them; those of tables have come to their owner."""

    def __init__(self, fast: FastDlrm, group: Group, *, trained: bool) -> None:
        super().__init__()
        self.fast = fast
        self.joined: nn.Module = _Loss(fast)
        if trained:
            own = [*fast.lookup.named_parameters(), *fast.lookup.named_buffers()]
            names = [f"fast.lookup.{name}" for name, _ in own]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.joined, names)  # type: ignore[no-untyped-call]
            self.joined = DistributedDataParallel(self.joined, process_group=group)

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return cast("torch.Tensor", self.joined(batch))


class _Loss(nn.Module):
    def __init__(self, fast: FastDlrm) -> None:
        super().__init__()
        self.fast = fast

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.fast.loss(batch)
