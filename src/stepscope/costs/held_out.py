"""Judging curves by sizes they have not seen, and choosing one of them by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from stepscope.costs.curves import Curve, ModelName
from stepscope.costs.fitting import FITS, Points
from stepscope.stats import quantile_sorted

FEWEST_SIZES = 4
"""Two ends, and two sizes between them that can be held out."""
FOLDS = 10
NEAR = 0.1
"""A plainer form may be worse by this share of the least error."""
SAME = 0.001
"""Mean errors that differ by less are equal: timings do not repeat better."""
LARGEST_SHARE = 0.25
"""Of the sizes, from the top: left out to see how a curve goes on beyond its range."""

Fit = Callable[[Points], Curve]


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors |predicted − measured| / measured at sizes that the curve was not fitted on."""

    n: int
    median: float
    mean: float
    p90: float
    worst: float


class Extrapolation(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the largest sizes when the curve was fitted without them."""

    errors: HeldOut
    reach: float
    """The largest size over the largest that was left in."""


class Trial(NamedTuple):
    """One held-out size."""

    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s - self.measured_s) / self.measured_s

    @property
    def log_error(self) -> float:
        return abs(math.log(self.measured_s / self.predicted_s))


def hold_out(points: Points, fit: Fit) -> list[Trial]:
    """Every size but the smallest and the largest, each predicted by a curve that was fitted without it.

    The ends stay in: without them a curve would be judged outside its range. Of many sizes several are left out at
    a time, `FOLDS` apart, so that their neighbours stay.
    """
    inner = range(1, len(points) - 1)
    folds = min(FOLDS, len(inner))
    found: dict[int, Trial] = {}
    for fold in range(folds):
        away = set(inner[fold::folds])
        curve = fit([point for i, point in enumerate(points) if i not in away])
        for i in away:
            found[i] = Trial(curve.predict(points[i].size_bytes), points[i].time_s)
    return [found[i] for i in inner]


def hold_out_largest(points: Points, fit: Fit) -> Extrapolation | None:
    """None where leaving out the largest quarter of the sizes would leave too few."""
    away = max(1, int(len(points) * LARGEST_SHARE))
    kept = points[:-away]
    if len(kept) < FEWEST_SIZES:
        return None
    curve = fit(kept)
    trials = [Trial(curve.predict(point.size_bytes), point.time_s) for point in points[-away:]]
    return Extrapolation(
        errors=summarize_trials(trials),
        reach=points[-1].size_bytes / kept[-1].size_bytes,
    )


def summarize_trials(trials: Sequence[Trial]) -> HeldOut:
    ordered = sorted(trial.error for trial in trials)
    return HeldOut(
        n=len(ordered),
        median=quantile_sorted(ordered, 0.5),
        mean=math.fsum(ordered) / len(ordered),
        p90=quantile_sorted(ordered, 0.9),
        worst=ordered[-1],
    )


def choose_model(trials: Mapping[ModelName, Sequence[Trial]]) -> ModelName:
    """The plainest form whose mean error is near the least: more freedom must pay, or it only follows noise."""
    errors = {model: math.fsum(trial.error for trial in found) / max(1, len(found)) for model, found in trials.items()}
    limit = min(errors.values()) * (1 + NEAR) + SAME
    return next(model for model, error in errors.items() if error <= limit)


def hold_out_models(points: Points) -> dict[ModelName, list[Trial]]:
    return {model: hold_out(points, fit) for model, fit in FITS.items()}


def fit_best(points: Points) -> Curve:
    """Chosen by held-out sizes, then fitted on all of them."""
    return FITS[choose_model(hold_out_models(points))](points)
