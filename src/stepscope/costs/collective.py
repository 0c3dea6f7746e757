"""What a collective costs: a curve fitted to one operation in one group on one system, and how far to trust it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from stepscope.costs.curves import Curve, ModelName, bandwidth_of, model_of, steepness
from stepscope.costs.fitting import FITS, Point
from stepscope.costs.held_out import (
    FEWEST_SIZES,
    Extrapolation,
    HeldOut,
    Trial,
    choose_model,
    fit_best,
    hold_out,
    hold_out_largest,
    hold_out_models,
    summarize_trials,
)

LEVEL = 0.9
"""Share of unseen sizes that an interval is meant to cover."""


class CollectiveSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all points of a curve; only the message size differs."""

    operation: str
    members: int
    """Ranks of the group that communicates."""
    hosts: int | None = None
    """None: not known."""
    backend: str
    dtype: str
    device: str
    """Where the buffers lie: `cpu`, `cuda`."""
    variant: dict[str, str] = {}
    """Further parameters of the cases (`reduction`, `placement`, `pattern` …); those at their default are not named."""
    timing: str = "slowest_rank"
    """Whose time it is, as the cases' results say it; `published` for tables, which seldom do."""
    version: int = 1
    """Of the benchmark: what two versions measure is not one curve."""
    system: str
    """What a person calls the machine."""
    fingerprint: str | None = None
    """Of the system record; None for a table that came without one."""
    configuration: str | None = None
    """Of the variables and settings that change results, such as `NCCL_ALGO`."""

    @property
    def call(self) -> str:
        """The operation and what is unusual about it: `all_reduce[reduction=max]`."""
        unusual = [f"{name}={value}" for name, value in self.variant.items()]
        unusual += ["device time"] if "device" in self.timing else []
        return f"{self.operation}[{', '.join(unusual)}]" if unusual else self.operation

    @property
    def label(self) -> str:
        return f"{self.call}, {self.members} ranks, {self.backend}, {self.dtype}"


class CollectiveCurve(CollectiveSetting, frozen=True, kw_only=True):
    """Measured points that belong together."""

    points: list[Point]
    """By size, each size once."""
    sources: list[str] = []
    """Ids of the runs, or what a table says of its origin."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """How one form did. The one to use is chosen by these errors, so the chosen one's are a little flattering."""

    held_out: HeldOut
    extrapolation: Extrapolation | None = None
    """None where there are too few sizes to try."""


class CostEstimate(NamedTuple):
    value_s: float
    low_s: float
    high_s: float
    inside_range: bool
    """False: the size lies outside those the curve was fitted on, and the value is an extrapolation."""


class CollectiveCost(CollectiveSetting, frozen=True, kw_only=True):
    """Time of one call against message size, as `bench comms` counts both. Use `predict`."""

    curve: Curve
    smallest_bytes: int
    largest_bytes: int
    """The sizes it was fitted on lie between these."""
    sizes: int
    held_out: HeldOut
    """Of the whole procedure: each size was kept from the choice of the form too, not from its fit alone."""
    level: float
    """Share of the held-out sizes that the interval covers, counted so that it holds for a new one."""
    log_spread: float
    """The interval is the value divided and multiplied by e to this power."""
    candidates: dict[ModelName, Candidate]
    sources: list[str] = []

    def __post_init__(self) -> None:
        if not 0 < self.smallest_bytes < self.largest_bytes:
            raise ValueError(f"{self.smallest_bytes} to {self.largest_bytes} bytes is no range of sizes")
        if not 0 <= self.log_spread < math.inf:
            raise ValueError(f"log_spread {self.log_spread} is not a number of 0 or more")
        if self.model not in self.candidates:
            raise ValueError(f"the candidates have no {self.model}, which the curve is")

    @property
    def model(self) -> ModelName:
        return model_of(self.curve)

    @property
    def latency_s(self) -> float:
        return self.curve.latency_s

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Size over time of a very large message (algorithm bandwidth); None where no size mattered."""
        return bandwidth_of(self.curve)

    def predict(self, size_bytes: float) -> CostEstimate:
        """Raises ValueError for a size below 0."""
        if not 0 <= size_bytes < math.inf:
            raise ValueError(f"a message of {size_bytes} bytes cannot be")
        value = self.curve.predict(size_bytes)
        inside = self.smallest_bytes <= size_bytes <= self.largest_bytes
        if inside:
            factor = math.exp(self.log_spread)
            low, high = value / factor, value * factor
        else:
            low, high = self._bounds_outside(size_bytes)
        return CostEstimate(value, min(low, value), max(high, value), inside)

    def _bounds_outside(self, size_bytes: float) -> tuple[float, float]:
        """What holds without trusting the form: time never falls as messages grow, and time per byte never rises.

        Above the range also: where size already counts it will not count less, so time goes on rising at least as
        steeply (both axes logarithmic) as it did at the end.
        """
        factor = math.exp(self.log_spread)
        if size_bytes < self.smallest_bytes:
            at_edge = self.curve.predict(self.smallest_bytes)
            return at_edge * size_bytes / self.smallest_bytes / factor, at_edge * factor
        at_edge = self.curve.predict(self.largest_bytes)
        ratio = size_bytes / self.largest_bytes
        return at_edge * ratio ** steepness(self.curve, self.largest_bytes) / factor, at_edge * ratio * factor


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A curve that was not fitted, and why."""

    label: str
    system: str
    reason: str
    sources: list[str] = []


class CollectiveFit(NamedTuple):
    costs: list[CollectiveCost]
    refused: list[Refusal]


def fit_collectives(curves: Iterable[CollectiveCurve]) -> CollectiveFit:
    """Each curve by itself: one that cannot be fitted does not hold up the others."""
    costs, refused = [], []
    for curve in curves:
        reason = find_refusal(curve)
        if reason is None:
            costs.append(fit_collective(curve))
        else:
            refused.append(Refusal(label=curve.label, system=curve.system, reason=reason, sources=curve.sources))
    return CollectiveFit(costs, refused)


def find_refusal(curve: CollectiveCurve) -> str | None:
    count = len(curve.points)
    if count == 0:
        return "none of its messages has a size, so there is no curve over sizes"
    if count < FEWEST_SIZES:
        return f"{count} size{'' if count == 1 else 's'} measured, and a curve needs at least {FEWEST_SIZES}"
    return None


def fit_collective(curve: CollectiveCurve) -> CollectiveCost:
    """Choose a form by held-out sizes, fit it on all of them. Raises ValueError for fewer than `FEWEST_SIZES`."""
    reason = find_refusal(curve)
    if reason is not None:
        raise ValueError(f"{curve.label}: {reason}")
    points = curve.points
    trials = hold_out_models(points)
    candidates = {
        model: Candidate(held_out=summarize_trials(trials[model]), extrapolation=hold_out_largest(points, fit))
        for model, fit in FITS.items()
    }
    # The errors that chose the form cannot also vouch for it: here each size is kept from that choice too.
    honest = hold_out(points, fit_best)
    log_spread, level = spread_of(honest)
    setting = {name: getattr(curve, name) for name in CollectiveSetting.__struct_fields__}
    return CollectiveCost(
        **setting,
        curve=FITS[choose_model(trials)](points),
        smallest_bytes=points[0].size_bytes,
        largest_bytes=points[-1].size_bytes,
        sizes=len(points),
        held_out=summarize_trials(honest),
        level=level,
        log_spread=log_spread,
        candidates=candidates,
        sources=curve.sources,
    )


def spread_of(trials: Sequence[Trial], level: float = LEVEL) -> tuple[float, float]:
    """The log error that a further size stays below with chance `level`, and the chance that it really is.

    A new size is as likely to fall between any two of n held-out errors, or beyond them all, so the k-th smallest
    covers k/(n+1). With fewer than nine there is none for 90 %: the worst is taken with the chance it has.
    """
    ordered = sorted(trial.log_error for trial in trials)
    count = len(ordered)
    rank = min(count, math.ceil((count + 1) * level))
    return ordered[rank - 1], rank / (count + 1)
