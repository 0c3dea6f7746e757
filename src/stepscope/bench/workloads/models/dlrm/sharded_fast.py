"""The optimized DLRM over many ranks: each has some of the tables as one, and its copy of the fast dense part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from stepscope.bench.workloads.models.dlrm.sharded import ShardedDlrm
from stepscope.bench.workloads.protocol import Change, Engine, Mode, Precision
from stepscope.bench.workloads.steps import UpdatesEarly

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.bench.workloads.models.dlrm.network import Dlrm
    from stepscope.bench.workloads.models.dlrm.optimized import DlrmOptimized
    from stepscope.bench.workloads.models.dlrm.sharded_fast_network import ShardedFastNetwork


class ShardedFastDlrm(UpdatesEarly):
    """A table's owner has its gradients of all ranks' examples, so that its backward pass may update it itself."""

    def __init__(self, fast: DlrmOptimized) -> None:
        super().__init__(fast.plain)
        self.fast = fast
        self.sharded = ShardedDlrm(fast.plain)

    def adopt(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        from stepscope.bench.workloads.models.dlrm.sharded_fast_network import ShardedFastNetwork, SpreadTables
        from stepscope.bench.workloads.models.dlrm.sharded_network import Spread

        plain = cast("Dlrm", module)
        group = self.sharded.group
        spread = Spread(plain.lookups, self.sharded.owners, group, plain.get_buffer("lower").device)
        lookup = SpreadTables(cast("list[nn.EmbeddingBag]", list(plain.tables)), spread)
        fast = self.fast.adopt_around(lookup, plain, mode=mode, precision=precision)
        return ShardedFastNetwork(fast, group, trained=mode == "train")

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        """This rank's examples. Indices stay as they are: where they go is decided table by table."""
        from torch.nn import functional

        from stepscope.bench.workloads.models.dlrm.fast_network import even

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

    def changes(self, *, mode: Mode, precision: Precision) -> list[Change]:
        return self.fast.list_sharded_changes(mode=mode, precision=precision)


def _network(module: Any) -> ShardedFastNetwork:
    return cast("ShardedFastNetwork", module)
