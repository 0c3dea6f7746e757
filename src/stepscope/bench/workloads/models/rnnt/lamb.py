"""LAMB: Adam's direction, with a step in proportion to each weight's own size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

EPSILON = 1e-6


class Lamb(torch.optim.Optimizer):
    """One weight after the other. Gradients are first clipped to a norm over all weights."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-3,
        max_norm: float = 1.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "max_norm": max_norm})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parameters = [one for one in group["params"] if one.grad is not None]
            norm = torch.stack([one.grad.norm() for one in parameters]).norm()
            share = (group["max_norm"] / (norm + EPSILON)).clamp(max=1.0)
            for parameter in parameters:
                self._update(parameter, parameter.grad * share, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["mean"] = torch.zeros_like(parameter)
            state["square"] = torch.zeros_like(parameter)
        state["step"] += 1
        slow, slower = group["betas"]
        state["mean"].mul_(slow).add_(gradient, alpha=1 - slow)
        state["square"].mul_(slower).addcmul_(gradient, gradient, value=1 - slower)
        mean = state["mean"] / (1 - slow ** state["step"])
        spread = (state["square"] / (1 - slower ** state["step"])).sqrt()
        change = mean / (spread + EPSILON) + group["weight_decay"] * parameter
        size, length = parameter.norm(), change.norm()
        trust = torch.where((size > 0) & (length > 0), size / length, 1.0)
        parameter.sub_(group["lr"] * trust * change)


class ForeachLamb(Lamb):
    """All weights by a few kernels; the count of steps lies on the device, so that a captured step counts on."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parameters = [one for one in group["params"] if one.grad is not None]
            self._update_all(parameters, [one.grad for one in parameters], group)

    def _update_all(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        slow, slower = group["betas"]
        count, means, squares = self._states(parameters)
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        share = (group["max_norm"] / (norm + EPSILON)).clamp(max=1.0)
        gradients = list(torch._foreach_mul(gradients, share))

        count += 1
        torch._foreach_lerp_(means, gradients, 1 - slow)
        torch._foreach_mul_(squares, slower)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - slower)
        spreads = list(torch._foreach_sqrt(squares))
        torch._foreach_div_(spreads, (1 - slower**count).sqrt().float())
        torch._foreach_add_(spreads, EPSILON)
        changes = list(torch._foreach_div(means, (1 - slow**count).float()))
        torch._foreach_div_(changes, spreads)
        torch._foreach_add_(changes, parameters, alpha=group["weight_decay"])

        sizes, lengths = torch.stack(torch._foreach_norm(parameters)), torch.stack(torch._foreach_norm(changes))
        trust = torch.where((sizes > 0) & (lengths > 0), sizes / lengths, 1.0) * group["lr"]
        torch._foreach_mul_(changes, list(trust.unbind()))
        torch._foreach_sub_(parameters, changes)

    def _states(self, parameters: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        first = self.state[parameters[0]]
        if not first:
            # 0.999 to the power of a few steps is too near to one for single precision.
            first["step"] = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
            for one in parameters:
                self.state[one].update(mean=torch.zeros_like(one), square=torch.zeros_like(one))
        states = [self.state[one] for one in parameters]
        return first["step"], [one["mean"] for one in states], [one["square"] for one in states]
