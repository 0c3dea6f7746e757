"""The optimizers of the encoders: plain, and with one fused kernel that a CUDA graph can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def make_adamw(module: nn.Module, *, learning_rate: float, decay: float, fused: bool = False) -> torch.optim.Optimizer:
    """Matrices decay; biases and norms do not."""
    import torch

    trained = [one for one in module.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": decay},
        {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
    ]
    how: dict[str, Any] = {"fused": True, "capturable": trained[0].is_cuda} if fused else {}
    return torch.optim.AdamW(groups, lr=learning_rate, **how)


def make_sgd(module: nn.Module, *, learning_rate: float, fused: bool = False) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(module.parameters(), lr=learning_rate, **({"fused": True} if fused else {}))
