"""DLRM out of the box: a list of EmbeddingBags with sparse gradients, two perceptrons, SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from stepscope.bench.workloads.models.dlrm.batches import make_examples
from stepscope.bench.workloads.models.dlrm.tables import read_tables
from stepscope.bench.workloads.protocol import Mode, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.bench.workloads.models.dlrm.network import Dlrm


class DlrmTask(Task):
    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__(sizes)
        self.tables = read_tables(sizes)

    def build(self) -> Dlrm:
        from stepscope.bench.workloads.models.dlrm.network import Dlrm

        return Dlrm(self.sizes, self.tables)

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        return make_examples(self.sizes, self.tables, count, seed=seed, mode=mode)

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from stepscope.bench.workloads.models.dlrm.network import loss_of

        logits = module(batch["dense"], batch["indices"], batch["offsets"])
        return loss_of(logits, batch["labels"], self.sizes["loss"])

    def infer(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The chance of a click."""
        import torch

        return torch.sigmoid(cast("torch.Tensor", module(batch["dense"], batch["indices"], batch["offsets"])))

    def shard(self) -> Task:
        from stepscope.bench.workloads.models.dlrm.sharded import ShardedDlrm

        return ShardedDlrm(self)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        import torch

        return torch.optim.SGD(module.parameters(), lr=self.sizes["learning_rate"])
