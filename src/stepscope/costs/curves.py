"""Curves of time against message size: three forms, each monotone and never negative. Seconds and bytes.

Each is fitted on relative error and judged by sizes it has not seen. Only fitting needs numpy.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations, pairwise
from typing import Literal, NamedTuple

import msgspec

from stepscope.stats import quantile_sorted

ModelName = Literal["alpha_beta", "sqrt", "piecewise"]
END_SPAN = 4.0
"""An end slope is taken over sizes that differ by this factor: between close sizes it would be mostly noise."""


class AlphaBeta(msgspec.Struct, frozen=True, kw_only=True, tag_field="model", tag="alpha_beta"):
    """t = latency_s + S · s_per_byte."""

    latency_s: float
    s_per_byte: float

    def __post_init__(self) -> None:
        coefficients = msgspec.structs.astuple(self)
        if not all(0 <= value < math.inf for value in coefficients):
            raise ValueError("coefficients are numbers of 0 or more")
        if not any(coefficients):
            raise ValueError("a curve of nothing but zeros says that communication is free")

    def predict(self, size_bytes: float) -> float:
        return self.latency_s + self.s_per_byte * size_bytes


class SquareRoot(AlphaBeta, frozen=True, kw_only=True, tag_field="model", tag="sqrt"):
    """t = latency_s + s_per_sqrt_byte · √S + S · s_per_byte: what a pipeline with a well-chosen chunk size leaves."""

    s_per_sqrt_byte: float

    def predict(self, size_bytes: float) -> float:
        return self.latency_s + self.s_per_sqrt_byte * math.sqrt(size_bytes) + self.s_per_byte * size_bytes


class Piecewise(msgspec.Struct, frozen=True, kw_only=True, tag_field="model", tag="piecewise"):
    """Straight lines between knots where both axes are logarithmic; straight lines in S beyond the ends."""

    sizes_bytes: list[int]
    times_s: list[float]

    def __post_init__(self) -> None:
        if len(self.sizes_bytes) != len(self.times_s) or len(self.sizes_bytes) < 2:
            raise ValueError("a piecewise curve has as many times as sizes, and at least two")
        if self.sizes_bytes[0] < 1 or any(b <= a for a, b in pairwise(self.sizes_bytes)):
            raise ValueError("the sizes of a piecewise curve are above 0 and grow")
        if not 0 < self.times_s[0] < math.inf or any(not a <= b < math.inf for a, b in pairwise(self.times_s)):
            raise ValueError("the times of a piecewise curve are above 0 and never fall")

    @property
    def latency_s(self) -> float:
        """What is left at no bytes when the first piece is followed down."""
        return max(0.0, self.times_s[0] - self.sizes_bytes[0] * self._first_s_per_byte())

    @property
    def s_per_byte(self) -> float:
        """Slope of the last piece: how the curve goes on beyond its largest size."""
        largest = self.sizes_bytes[-1]
        far = max((i for i, size in enumerate(self.sizes_bytes) if size * END_SPAN <= largest), default=0)
        slope = self._slope(far, len(self.sizes_bytes) - 1)
        # A message twice as large never costs more than two messages.
        return min(slope, self.times_s[-1] / largest)

    def predict(self, size_bytes: float) -> float:
        sizes, times = self.sizes_bytes, self.times_s
        if size_bytes < sizes[0]:
            return max(0.0, times[0] - (sizes[0] - size_bytes) * self._first_s_per_byte())
        if size_bytes >= sizes[-1]:
            return times[-1] + (size_bytes - sizes[-1]) * self.s_per_byte
        above = bisect_right(sizes, size_bytes)
        way = math.log(size_bytes / sizes[above - 1]) / math.log(sizes[above] / sizes[above - 1])
        value = times[above - 1] * math.exp(way * math.log(times[above] / times[above - 1]))
        # Rounding must not leave the piece: neighbouring pieces would cross.
        return min(max(value, times[above - 1]), times[above])

    def _first_s_per_byte(self) -> float:
        last = len(self.sizes_bytes) - 1
        far = next((i for i, size in enumerate(self.sizes_bytes) if size >= END_SPAN * self.sizes_bytes[0]), last)
        return min(self._slope(0, far), self.times_s[0] / self.sizes_bytes[0])

    def _slope(self, a: int, b: int) -> float:
        return (self.times_s[b] - self.times_s[a]) / (self.sizes_bytes[b] - self.sizes_bytes[a])


Curve = AlphaBeta | SquareRoot | Piecewise


def model_of(curve: Curve) -> ModelName:
    model: ModelName = curve.__struct_config__.tag  # type: ignore[assignment]
    return model


def bandwidth_of(curve: Curve) -> float | None:
    """Bytes a second that a large message comes near to; None where the curve does not grow with its size."""
    return 1 / curve.s_per_byte if curve.s_per_byte > 0 else None


def steepness(curve: Curve, size_bytes: float) -> float:
    """d ln t / d ln S just above a size: 0 where only latency counts, 1 where time is proportional to size."""
    step = 1e-6
    rise = math.log(curve.predict(size_bytes * (1 + step)) / curve.predict(size_bytes))
    return min(1.0, max(0.0, rise / math.log1p(step)))


class CurvePoint(NamedTuple):
    size_bytes: int
    """Above 0."""
    time_s: float
    """Above 0."""


Points = Sequence[CurvePoint]
"""By size, each size once."""


def fit_alpha_beta(points: Points) -> AlphaBeta:
    latency, per_byte = fit_terms(points, [lambda size: 1.0, float])
    return AlphaBeta(latency_s=latency, s_per_byte=per_byte)


def fit_square_root(points: Points) -> SquareRoot:
    latency, per_root, per_byte = fit_terms(points, [lambda size: 1.0, math.sqrt, float])
    return SquareRoot(latency_s=latency, s_per_sqrt_byte=per_root, s_per_byte=per_byte)


def fit_piecewise(points: Points) -> Piecewise:
    """A knot at every size. Times that fall while sizes grow are levelled: curves are monotone."""
    times = rising([math.log(point.time_s) for point in points])
    return Piecewise(sizes_bytes=[point.size_bytes for point in points], times_s=[math.exp(value) for value in times])


FITS: dict[ModelName, Callable[[Points], Curve]] = {
    "alpha_beta": fit_alpha_beta,
    "sqrt": fit_square_root,
    "piecewise": fit_piecewise,
}
"""From the plainest form to the most flexible one."""


def fit_terms(points: Points, terms: Sequence[Callable[[int], float]]) -> list[float]:
    """Coefficients ≥ 0 of the terms of the size, with the least sum of squared relative errors.

    With so few terms the exact answer is the best of all subsets of them whose own solution is not negative.
    """
    import numpy as np

    table = np.array([[term(point.size_bytes) / point.time_s for term in terms] for point in points])
    scale = np.linalg.norm(table, axis=0)  # sizes span ten orders of magnitude
    best, least = [0.0] * len(terms), math.inf
    sizes = range(1, min(len(terms), len(points)) + 1)
    for chosen in map(list, chain.from_iterable(combinations(range(len(terms)), size) for size in sizes)):
        columns = table[:, chosen] / scale[chosen]
        solution, *_ = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)
        rest = float(np.sum((columns @ solution - 1) ** 2))
        # Equal fits go to the fewer terms; the margin is rounding.
        if (solution >= 0).all() and rest < least - 1e-15 * len(points):
            best, least = [0.0] * len(terms), rest
            for index, value in zip(chosen, solution / scale[chosen], strict=True):
                best[index] = float(value)
    return best


def rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls, in squares: neighbours that fall share their mean, until none does."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] >= mean:
            before, length = blocks.pop()
            mean, count = (before * length + mean * count) / (length + count), length + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


FEWEST_SIZES = 4
"""Two ends, and two sizes between them that can be held out."""
FOLDS = 10
NEAR = 0.1
"""A plainer form may be worse by this share of the least error."""
SAME = 0.001
"""Mean errors that differ by less are equal: timings do not repeat better."""
LARGEST_SHARE = 0.25
"""Fraction of the sizes, from the top, left out to see how a curve goes on beyond its range."""

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


class HeldOutSize(NamedTuple):
    """One held-out size."""

    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s - self.measured_s) / self.measured_s

    @property
    def log_error(self) -> float:
        return abs(math.log(self.measured_s / self.predicted_s))


def hold_out(points: Points, fit: Fit) -> list[HeldOutSize]:
    """Every size but the smallest and the largest, each predicted by a curve that was fitted without it.

    The ends stay in: without them a curve would be judged outside its range. Of many sizes several are left out at
    a time, `FOLDS` apart, so that their neighbours stay.
    """
    inner = range(1, len(points) - 1)
    folds = min(FOLDS, len(inner))
    found: dict[int, HeldOutSize] = {}
    for fold in range(folds):
        away = set(inner[fold::folds])
        curve = fit([point for i, point in enumerate(points) if i not in away])
        for i in away:
            found[i] = HeldOutSize(curve.predict(points[i].size_bytes), points[i].time_s)
    return [found[i] for i in inner]


def hold_out_largest(points: Points, fit: Fit) -> Extrapolation | None:
    """None where leaving out the largest quarter of the sizes would leave too few."""
    away = max(1, int(len(points) * LARGEST_SHARE))
    kept = points[:-away]
    if len(kept) < FEWEST_SIZES:
        return None
    curve = fit(kept)
    trials = [HeldOutSize(curve.predict(point.size_bytes), point.time_s) for point in points[-away:]]
    return Extrapolation(errors=summarize_trials(trials), reach=points[-1].size_bytes / kept[-1].size_bytes)


def summarize_trials(trials: Sequence[HeldOutSize]) -> HeldOut:
    ordered = sorted(trial.error for trial in trials)
    return HeldOut(
        n=len(ordered),
        median=quantile_sorted(ordered, 0.5),
        mean=math.fsum(ordered) / len(ordered),
        p90=quantile_sorted(ordered, 0.9),
        worst=ordered[-1],
    )


def choose_model(trials: Mapping[ModelName, Sequence[HeldOutSize]]) -> ModelName:
    """The plainest form whose mean error is near the least: more freedom must pay, or it only follows noise."""
    errors = {model: math.fsum(trial.error for trial in found) / max(1, len(found)) for model, found in trials.items()}
    limit = min(errors.values()) * (1 + NEAR) + SAME
    return next(model for model, error in errors.items() if error <= limit)


def hold_out_models(points: Points) -> dict[ModelName, list[HeldOutSize]]:
    return {model: hold_out(points, fit) for model, fit in FITS.items()}


def fit_best(points: Points) -> Curve:
    """Chosen by held-out sizes, then fitted on all of them."""
    return FITS[choose_model(hold_out_models(points))](points)
