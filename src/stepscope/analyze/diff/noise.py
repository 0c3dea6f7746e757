"""Whether a difference between two traces is more than steps of one trace differ by among themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from stepscope.analyze.step.numbers import Floats, Mask
from stepscope.stats import holm, t_quantile, t_two_sided

Table: TypeAlias = Floats
"""Steps down, names across. NaN: the name has no value in that step."""

LEVEL = 0.01
"""Chance of even one false alarm in a table, as long as both traces vary as their steps do."""

MIN_EFFECT = 0.01
"""A difference smaller than this share of the larger value is not called one, however sure it is."""

ENOUGH_STEPS = 3
"""Steps of each trace from which on they tell themselves how much a step varies."""

STEP_VARIATION = 0.03
DEVICE_VARIATION = 0.02
HOST_VARIATION = 0.10
"""Relative standard deviation taken at least: of a step where there are few, of device work of one name, of anything
the host decides. Steps of one trace share its clocks and its caches and may differ less than two runs of the same
program do."""

ASSUMED_FREEDOM = 4
"""Degrees of freedom where no variation can be seen, because there is one step."""

MAD_TO_SD = 1.4826
"""From the median deviation to a standard deviation, for normal values."""
SMALL_SAMPLES = (1.0, 1.0, 1.196, 1.495, 1.363, 1.206, 1.200, 1.140, 1.129, 1.107)
"""The median deviation of few values is too small by this (Croux and Rousseeuw 1992), by number of values."""
MAD_EFFICIENCY = 0.4
"""Degrees of freedom of a median deviation over those of a standard deviation."""
MEDIAN_INEFFICIENCY = 1.2533
"""Standard error of a median over that of the mean, for normal values."""
MIDDLE_INEFFICIENCY = 1.1
"""Standard error of a mean over the middle half of all values over that of the mean of all, for normal values."""


def middle_steps(durations: Any) -> Mask:
    """The middle half by length: of three the median one, of one or two all."""
    count = len(durations)
    dropped = (count + 1) // 4 if count > 2 else 0
    order = np.argsort(durations, kind="stable")
    middle = np.zeros(count, bool)
    middle[order[dropped : count - dropped]] = True
    return middle


def spreads(values: Table) -> tuple[Table, Table]:
    """For each name a standard deviation that a few odd steps do not move, and how many steps have the name."""
    there = ~np.isnan(values)
    count = there.sum(axis=0)
    with np.errstate(invalid="ignore"):
        deviation = np.where(there, np.abs(values - _median(values, there)), np.nan)
    few = np.array(SMALL_SAMPLES)[np.minimum(count, len(SMALL_SAMPLES) - 1)]
    correction = np.where(count < len(SMALL_SAMPLES), few, count / np.maximum(count - 0.8, 1))
    return MAD_TO_SD * correction * _median(deviation, there), count.astype(np.float64)


def _median(values: Table, there: Mask) -> Table:
    """Of each column, over the steps that have a value; 0 where none has."""
    ordered = np.sort(np.where(there, values, np.inf), axis=0)
    count = there.sum(axis=0)
    columns = np.arange(values.shape[1])
    last = max(len(values) - 1, 0)
    low = ordered[np.clip((count - 1) // 2, 0, last), columns]
    high = ordered[np.clip(count // 2, 0, last), columns]
    return np.where(count > 0, (low + high) / 2, 0.0)


def p_values(a: Table, b: Table, *, level: Table, variation: float) -> list[float]:
    """For each name the chance that medians over steps differ so much from variation alone.

    `level` is how large the values are; `variation` of it is taken at least.
    """
    spread, freedom, counts = _pooled(a, b, variation * level)
    error = spread * np.sqrt(sum(_median_variance(count) for count in counts))
    there = [~np.isnan(values) for values in (a, b)]
    moved = np.abs(_median(b, there[1]) - _median(a, there[0])) * (level > 0)
    return [
        (t_two_sided(distance / by_chance, df) if by_chance > 0 else 0.0) if distance > 0 else 1.0
        for distance, by_chance, df in zip(moved.tolist(), error.tolist(), freedom.tolist(), strict=True)
    ]


def _median_variance(count: Table) -> Table:
    """Of a median of so many values, in variances of one value."""
    return np.where(count > 2, MEDIAN_INEFFICIENCY**2, 1.0) / np.maximum(count, 1)


def _pooled(a: Table, b: Table, least: Table) -> tuple[Table, Table, tuple[Table, Table]]:
    """Variation between steps of one side, its degrees of freedom, and in how many steps of each side it was seen."""
    (spread_a, count_a), (spread_b, count_b) = spreads(a), spreads(b)
    seen_a, seen_b = np.maximum(count_a - 1, 0), np.maximum(count_b - 1, 0)
    seen = np.maximum(seen_a + seen_b, 1)
    observed = np.sqrt((seen_a * spread_a**2 + seen_b * spread_b**2) / seen)
    freedom = ASSUMED_FREEDOM + MAD_EFFICIENCY * (seen_a + seen_b)
    return np.maximum(observed, least), freedom, (count_a, count_b)


def are_clear(p: Sequence[float], change: Table, level: Table) -> list[bool]:
    """Which changes of a table stand, each with regard to how many were looked at."""
    large = (abs(change) >= MIN_EFFECT * level).tolist()
    return [adjusted <= LEVEL and enough for adjusted, enough in zip(holm(p), large, strict=True)]


class StepNoise(NamedTuple):
    """What a step may change by from variation alone."""

    noise_s: float
    assumed: bool
    """Whether it comes from an assumed variation, because too few steps were seen."""


def noise_of_step(a: Table, b: Table, level: float) -> StepNoise:
    """The smallest change of the step that would be called one.

    The steps say how much they vary, where there are enough of them: by their standard deviation or by their median
    deviation, whichever asks for less. The first needs few steps, the second does not mind odd ones.
    """
    least = MIN_EFFECT * level
    error = MIDDLE_INEFFICIENCY * math.sqrt(1 / len(a) + 1 / len(b))
    columns = a[:, None], b[:, None]
    if min(len(a), len(b)) < ENOUGH_STEPS:
        floor = STEP_VARIATION * level
        spread, freedom, _ = _pooled(*columns, np.array([floor]))
        noise_s = t_quantile(LEVEL, float(freedom[0])) * error * float(spread[0])
        return StepNoise(max(noise_s, least), bool(spread[0] <= floor))
    seen = len(a) + len(b) - 2
    deviation = math.sqrt((float(((a - a.mean()) ** 2).sum()) + float(((b - b.mean()) ** 2).sum())) / seen)
    robust = float(_pooled(*columns, np.zeros(1))[0][0])
    noise_s = error * min(
        t_quantile(LEVEL, seen) * deviation, t_quantile(LEVEL, max(MAD_EFFICIENCY * seen, 1.0)) * robust
    )
    return StepNoise(max(noise_s, least), assumed=False)
