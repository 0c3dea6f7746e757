"""What is usual among many values of which some are slow: found on the fast side, since faults only add time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from stepscope.stats import quantile_sorted

LEAST_SPREAD = 0.03
"""Of logarithms: no two links repeat better than this, so no class is taken to be narrower."""

_REACH = 4.0
"""Spreads around the centre that still count as usual."""

_SHARE = 4
"""At least one in so many values is usual."""


class Usual(NamedTuple):
    centre: float
    spread: float
    """Robust standard deviation."""


def find_usual(values: Sequence[float]) -> Usual:
    """Centre and spread of the usual values among these logarithms, though more than half of them may be too high.

    Starts from the fastest dense quarter and takes in its surroundings until nothing more belongs to it: noise
    without a gap ends with nearly all values, a second cluster behind a gap stays outside.
    """
    ordered = sorted(values)
    core = _densest(ordered)
    for _ in range(len(ordered)):
        centre, spread = _middle(core)
        grown = [value for value in ordered if abs(value - centre) <= _REACH * spread]
        if grown == core:
            break
        core = grown
    return Usual(*_middle(core))


def _densest(ordered: Sequence[float]) -> list[float]:
    """The fastest of those windows that are narrow in themselves, or about as narrow as the narrowest."""
    count = min(len(ordered), max(2, math.ceil(len(ordered) / _SHARE)))
    widths = [ordered[i + count - 1] - ordered[i] for i in range(len(ordered) - count + 1)]
    wide = max(2 * min(widths), _REACH * LEAST_SPREAD)
    first = next(i for i, width in enumerate(widths) if width <= wide)
    return list(ordered[first : first + count])


def _middle(ordered: Sequence[float]) -> tuple[float, float]:
    centre = quantile_sorted(ordered, 0.5)
    deviation = quantile_sorted(sorted(abs(value - centre) for value in ordered), 0.5)
    return centre, max(LEAST_SPREAD, 1.4826 * deviation)
