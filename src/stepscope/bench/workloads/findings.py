"""What a check of an optimized implementation found, and how far its tensors may be from those of the plain one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from stepscope.bench.workloads.protocol import Batch, Outputs, Precision
from stepscope.core.lazy_torch import torch


class Tolerance(NamedTuple):
    """Largest |a - b| / |b|, by Euclidean norm; of gradients, of any one parameter."""

    outputs: float
    loss: float
    gradients: float
    band: float
    """Convergence run: largest distance of the losses, as a fraction of how far the loss moved in all."""


TOLERANCES: dict[Precision, Tolerance] = {
    "fp32": Tolerance(1e-4, 1e-4, 2e-3, 0.05),
    "tf32": Tolerance(5e-3, 5e-3, 5e-2, 0.10),
    "fp16": Tolerance(1e-2, 1e-2, 1e-1, 0.15),
    "bf16": Tolerance(3e-2, 2e-2, 2e-1, 0.20),
    "fp8": Tolerance(2e-1, 1e-1, 5e-1, 0.30),
}


_COARSEST = Tolerance(2e-1, 1e-1, 0.9, 0.30)
"""A gradient of zeros is wrong by 1."""
HIGHEST: dict[Precision, Tolerance] = {
    "fp32": TOLERANCES["tf32"], "tf32": TOLERANCES["bf16"], "fp16": _COARSEST, "bf16": _COARSEST, "fp8": _COARSEST
}  # fmt: skip
"""Up to which rounding may raise the limits of training; a network that amplifies it further cannot be checked."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison."""

    what: str
    """`outputs`, `one example`, `differences of examples`; `loss`, `gradients`, `statistics`, `convergence`,
    `size of gradients` or `update`."""
    precision: Precision | Literal["fp64"]
    error: float
    limit: float
    where: str = ""
    """The parameter or step with the largest error."""
    noise: float | None = None
    """How far rounding alone takes the ootb implementation, where that was looked at."""

    @property
    def passed(self) -> bool:
        """False for errors that are no number, too."""
        return self.error <= self.limit


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        return bool(self.findings) and all(one.passed for one in self.findings)

    @property
    def failures(self) -> list[Finding]:
        return [one for one in self.findings if not one.passed]


EPSILON = 2.0**-23
"""Relative rounding of float32."""
CHANCE = 3.3
"""Standard deviations that a normal number exceeds once in a thousand times."""
ALIKE = 1e-6
"""Examples whose outputs differ by less than this share of them are the same but for rounding."""
FAINT = 1e-3
"""A gradient counts with at least this share of all gradients together: rounding is most of a smaller one."""


def gradients_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in module.named_parameters() if one.grad is not None}


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those that are kept with the weights: statistics of norms."""
    kept = module.state_dict(keep_vars=True)
    return {name: one for name, one in module.named_buffers() if name in kept and one.is_floating_point()}


def update_errors(
    got: Batch, expected: torch.nn.Module, before: torch.nn.Module, added: Mapping[str, int] | None = None
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


def example_error(got: Outputs, expected: Outputs, examples: int) -> float:
    """Error of the worst example. One that should be smaller than most counts as if it were as large as they are."""
    errors = []
    for ours, theirs in _by_example(got, expected, examples):
        sizes = theirs.norm(dim=1)
        usual = float(sizes.square().mean().sqrt())
        errors.append(float(((ours - theirs).norm(dim=1) / sizes.clamp(min=max(usual, 1e-30))).max()))
    return max(errors, key=as_order, default=0.0)


class Difference(NamedTuple):
    """How far what tells outputs of examples apart is off."""

    error: float = 0.0
    """How far it is, measured along what it should be, from being as large as that."""
    chance: float = 0.0
    """What an error of the same size would make of that if it pointed anywhere, in all but one of a thousand cases."""


def compare_differences(got: Outputs, expected: Outputs, examples: int) -> Difference:
    """Outputs may be mostly what all examples share: then an error that is small beside the whole may still be one
    example's answer for another. Rounding points everywhere, so that little of it is along any one direction."""
    found: list[Difference] = []
    for ours, theirs in _by_example(got, expected, examples):
        right, own = theirs - theirs.mean(0), ours - ours.mean(0)
        size = float(right.norm())
        if size > ALIKE * float(theirs.norm()):
            error = abs(float((own * right).sum()) / size**2 - 1)
            directions = right.numel() - right.shape[1]
            found.append(Difference(error, CHANCE * float((own - right).norm()) / size / directions**0.5))
    return max(found, key=lambda one: as_order(one.error), default=Difference())


def _by_example(got: Outputs, expected: Outputs, examples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Those outputs that have a row for each of several examples; what differs in shape is another comparison's."""
    ours, theirs = _listed(got), _listed(expected)
    return [
        (a.double().flatten(1), b.double().flatten(1))
        for a, b in ((_as_rows(a), _as_rows(b)) for a, b in zip(ours, theirs, strict=False))
        if a.shape == b.shape and b.shape[0] == examples > 1
    ]


def _as_rows(one: torch.Tensor) -> torch.Tensor:
    return one.unsqueeze(-1) if one.dim() == 1 else one


def _listed(outputs: Outputs) -> list[torch.Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def _distance(got: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """`least`: the expected counts as if it were as large."""
    if got.shape != expected.shape:
        return float("inf")
    expected = expected.double()
    return float((got.double() - expected).norm()) / max(float(expected.norm()), least, 1e-30)


def loss_error(got: float, expected: float) -> float:
    return abs(got - expected) / max(abs(expected), 1e-12)


def size_error(got: Batch, expected: Batch) -> float:
    """How far all gradients together, measured along the right ones, are from being as long as those."""
    along = whole = 0.0
    for name, theirs in expected.items():
        right = _dense(theirs).double()
        whole += float(right.norm()) ** 2
        if name in got and got[name].shape == theirs.shape:
            along += float((_dense(got[name]).double() * right).sum())
    return abs(along / max(whole, 1e-30) - 1)


def named_errors(got: Batch, expected: Batch) -> dict[str, float]:
    """The relative error of each of the expected; a missing one is infinitely wrong."""
    whole = sum(float(_dense(one).double().norm()) ** 2 for one in expected.values()) ** 0.5
    return {
        name: _distance(_dense(got[name]), _dense(theirs), FAINT * whole) if name in got else float("inf")
        for name, theirs in expected.items()
    }


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def as_order(error: float) -> float:
    """What is no number is worse than everything."""
    return float("inf") if math.isnan(error) else error
