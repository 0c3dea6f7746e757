"""What the fast forms of all encoders have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.bench.workloads.models.encoders.optimizers import make_adamw
from stepscope.bench.workloads.protocol import Engine, Mode, Optimized

if TYPE_CHECKING:
    import torch
    from torch import nn


class FastEncoder(Optimized):
    """Made of a `Lean` module, which knows whose weights it has: compiled layer by layer, a step is one graph."""

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        rate, decay = self.sizes["learning_rate"], self.sizes["weight_decay"]
        return make_adamw(module, learning_rate=rate, decay=decay, fused=True)

    def gradients(self, module: nn.Module) -> dict[str, torch.Tensor]:
        from stepscope.bench.workloads.models.encoders.origins import gradients_of

        return gradients_of(module)

    def engine(self, mode: Mode) -> Engine:
        return Engine(compile="default", graph=True, dynamic=False)
