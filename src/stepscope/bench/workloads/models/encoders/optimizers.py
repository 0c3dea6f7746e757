"""The optimizers of the encoders: plain, and with one fused kernel that a CUDA graph can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def make_adamw(module: nn.Module, *, learning_rate: float, decay: float, fused: bool = False) -> torch.optim.Optimizer:
    import torch

    how: dict[str, Any] = {"fused": True, "capturable": next(module.parameters()).is_cuda} if fused else {}
    return torch.optim.AdamW(decayed_groups(module, decay), lr=learning_rate, **how)


def decayed_groups(module: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    trained = [one for one in module.parameters() if one.requires_grad]
    return [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": decay},
        {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
    ]


def make_sgd(module: nn.Module, *, learning_rate: float, fused: bool = False) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(module.parameters(), lr=learning_rate, **({"fused": True} if fused else {}))
