"""Summaries and intervals of repeated timings. Pure Python: the measuring loop uses them on frozen images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec

DEFAULT_LEVEL = 0.95
"""Coverage of the intervals shown beside a median."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Derived on reading from samples; seconds per iteration."""

    n: int
    median_s: float
    ci_low_s: float
    ci_high_s: float
    """Distribution-free interval of the median; the whole range where n is too small for the level."""
    level: float
    """Coverage the interval really has at this n."""
    mean_s: float
    stdev_s: float | None
    min_s: float
    max_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    outliers: int
    """Samples beyond the far fences (3 interquartile ranges); named, never dropped."""

    @property
    def relative_half_width(self) -> float:
        return (self.ci_high_s - self.ci_low_s) / 2 / self.median_s if self.median_s > 0 else math.inf


def summarize(values: Sequence[float], level: float = DEFAULT_LEVEL) -> Summary:
    """Raises ValueError on an empty list: there is no summary of nothing."""
    if not values:
        raise ValueError("no samples to summarise")
    ordered = sorted(values)
    n = len(ordered)
    low, high, covered = median_interval(ordered, level)
    mean = math.fsum(ordered) / n
    stdev = math.sqrt(math.fsum((v - mean) ** 2 for v in ordered) / (n - 1)) if n > 1 else None
    return Summary(
        n=n,
        median_s=quantile_sorted(ordered, 0.5),
        ci_low_s=low,
        ci_high_s=high,
        level=covered,
        mean_s=mean,
        stdev_s=stdev,
        min_s=ordered[0],
        max_s=ordered[-1],
        p50_s=quantile_sorted(ordered, 0.5),
        p95_s=quantile_sorted(ordered, 0.95),
        p99_s=quantile_sorted(ordered, 0.99),
        outliers=len(find_outliers(ordered)),
    )


def quantile_sorted(ordered: Sequence[float], q: float) -> float:
    """Linear between order statistics (Hyndman and Fan's type 7, numpy's default)."""
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float | None:
    """None where there are no values."""
    return quantile_sorted(sorted(values), 0.5) if values else None


def median_interval(ordered: Sequence[float], level: float = DEFAULT_LEVEL) -> tuple[float, float, float]:
    """Low, high and true coverage of an interval for the median from order statistics.

    Needs no assumption on the distribution but independence: the number of samples below the median is
    binomial. The narrowest symmetric pair of order statistics that covers at least `level` is taken; where n
    is too small for any pair, the whole range is returned with the coverage it has.
    """
    n = len(ordered)
    rank, tail = _interval_rank(n, level)
    return ordered[rank - 1], ordered[n - rank], 1 - 2 * tail


@lru_cache(maxsize=4096)
def _interval_rank(n: int, level: float) -> tuple[int, float]:
    """The largest r ≥ 1 such that [x_(r), x_(n+1-r)] covers the median with at least `level`, and P(X < r).

    X is the number of samples below the median, binomial with n and ½.
    """
    if n > 1000:  # the normal approximation is within one rank of the exact one here
        z = _normal_quantile(0.5 + level / 2)
        rank = max(1, math.floor((n - z * math.sqrt(n)) / 2))
        return rank, 0.5 * math.erfc((n / 2 - rank + 0.5) / math.sqrt(n / 2))
    probability = 0.5**n
    rank, tail = 1, probability
    for k in range(1, n // 2):
        probability *= (n - k + 1) / k
        if tail + probability > (1 - level) / 2:
            break
        rank, tail = k + 1, tail + probability
    return rank, tail


def _normal_quantile(p: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(p)


def find_outliers(values: Sequence[float]) -> list[int]:
    """Indices of samples more than three interquartile ranges outside the quartiles (Tukey's far fences)."""
    if len(values) < 4:
        return []
    ordered = sorted(values)
    first, third = quantile_sorted(ordered, 0.25), quantile_sorted(ordered, 0.75)
    reach = 3 * (third - first)
    return [i for i, value in enumerate(values) if value < first - reach or value > third + reach]


def drift(values: Sequence[float]) -> float:
    """Median of the later half over median of the earlier half, minus one: a slope that a mean would hide."""
    half = len(values) // 2
    if half == 0:
        return 0.0
    early, late = sorted(values[:half]), sorted(values[-half:])
    base = quantile_sorted(early, 0.5)
    return quantile_sorted(late, 0.5) / base - 1 if base > 0 else 0.0
