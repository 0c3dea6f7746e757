"""Fitting the three forms to measured points, each on relative error: a small message counts as much as a large one."""

from __future__ import annotations
import numpy as np

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from stepscope.costs.curves import AlphaBeta, Curve, ModelName, Piecewise, SquareRoot


class Point(NamedTuple):
    size_bytes: int
    """Above 0."""
    time_s: float
    """Above 0."""


Points = Sequence[Point]
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
    return Piecewise(
        sizes_bytes=[point.size_bytes for point in points],
        times_s=[math.exp(value) for value in times],
    )


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
    table = np.array([[term(point.size_bytes) / point.time_s for term in terms] for point in points])
    scale = np.linalg.norm(table, axis=0)  # sizes span ten orders of magnitude
    best, least = [0.0] * len(terms), math.inf
    for chosen in _subsets(len(terms), most=len(points)):
        columns = table[:, chosen] / scale[chosen]
        solution, *_ = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)
        rest = float(np.sum((columns @ solution - 1) ** 2))
        # Equal fits go to the fewer terms; the margin is rounding.
        if (solution >= 0).all() and rest < least - 1e-15 * len(points):
            best, least = [0.0] * len(terms), rest
            for index, value in zip(chosen, solution / scale[chosen], strict=True):
                best[index] = float(value)
    return best


def _subsets(count: int, *, most: int) -> Iterator[list[int]]:
    for size in range(1, min(count, most) + 1):
        for chosen in combinations(range(count), size):
            yield list(chosen)


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
