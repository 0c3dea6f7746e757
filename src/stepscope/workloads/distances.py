"""How far tensors of a fast form are from those of the plain one, relative and by Euclidean norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.workloads.protocol import Outputs

EPSILON = 2.0**-23
"""Of float32, relative."""
FAINT = 1e-3
"""A gradient counts with at least this share of all gradients together: rounding is most of a smaller one."""


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in module.named_parameters() if one.grad is not None}


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Those that are kept with the weights: statistics of norms."""
    kept = module.state_dict(keep_vars=True)
    return {name: one for name, one in module.named_buffers() if name in kept and one.is_floating_point()}


def update_errors(
    got: Mapping[str, torch.Tensor], expected: nn.Module, before: nn.Module, added: Mapping[str, int] | None = None
) -> dict[str, float]:
    """How far each weight is from where it should be, beyond what its last bit explains, to how far it should move.

    `added`: how many rows are added to a weight one after the other; roundings of several add up by chance.
    """
    errors: dict[str, float] = {}
    old = dict(before.named_parameters())
    for name, parameter in expected.named_parameters():
        right = parameter.detach().double()
        if name not in got or got[name].shape != right.shape:
            errors[name] = float("inf")
            continue
        way = right - old[name].detach().double()
        off = float((got[name].double() - right).norm())
        rounded = float(right.norm())
        if added and name in added:
            rows = way.any(dim=1)
            rounded += (added[name] / max(int(rows.sum()), 1)) ** 0.5 * float(right[rows].norm())
        beyond = off if math.isnan(off) else max(off - EPSILON * rounded, 0.0)
        errors[name] = beyond / max(float(way.norm()), 1e-30)
    return errors


def relative_error(got: Outputs, expected: Outputs) -> float:
    """The largest of all outputs; infinite where shapes differ."""
    ours, theirs = _listed(got), _listed(expected)
    if len(ours) != len(theirs):
        return float("inf")
    return max((_distance(a, b) for a, b in zip(ours, theirs, strict=True)), key=as_order, default=float("inf"))


def _listed(outputs: Outputs) -> list[torch.Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def _distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    if got.shape != expected.shape:
        return float("inf")
    expected = expected.double()
    norm = float(expected.norm())
    return float((got.double() - expected).norm()) / max(norm, 1e-30)


def loss_error(got: float, expected: float) -> float:
    return abs(got - expected) / max(abs(expected), 1e-12)


def size_error(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """How far all gradients together, measured along the right ones, are from being as long as those."""
    along = whole = 0.0
    for name, theirs in expected.items():
        right = _dense(theirs).double()
        whole += float(right.norm()) ** 2
        if name in got and got[name].shape == theirs.shape:
            along += float((_dense(got[name]).double() * right).sum())
    return abs(along / max(whole, 1e-30) - 1)


def named_errors(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The relative error of each of the expected; a missing one is infinitely wrong."""
    whole = sum(float(_dense(one).double().norm()) ** 2 for one in expected.values()) ** 0.5
    errors: dict[str, float] = {}
    for name, theirs in expected.items():
        ours = got.get(name)
        if ours is None or ours.shape != theirs.shape:
            errors[name] = float("inf")
            continue
        right = _dense(theirs).double()
        scale = max(float(right.norm()), FAINT * whole, 1e-30)
        errors[name] = float((_dense(ours).double() - right).norm()) / scale
    return errors


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def as_order(error: float) -> float:
    """What is no number is worse than everything."""
    return float("inf") if math.isnan(error) else error
