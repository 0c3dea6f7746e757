"""Axes of the plots: where values go and where the ticks stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from stepscope.core.units import format_bytes, format_significant
from stepscope.report.scale import TimeScale, choose_time_scale


class Tick(NamedTuple):
    value: float
    text: str


class Axis(NamedTuple):
    """Values from `low` to `high` onto places from `start` to `end` (which may run backwards)."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def linear_axis(low: float, high: float, start: float, end: float, *, margin: float = 0.04) -> Axis:
    """With a little air at both ends; a range of nothing becomes a small one around its value."""
    span = high - low
    if span <= abs(high) * 1e-9:
        span = abs(high) * 0.02 or 1e-9
        low, high = low - span / 2, high + span / 2
    return Axis(max(low - span * margin, min(low, 0.0)), high + span * margin, start, end)


def log_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """For positive values."""
    low, high = min(values), max(values)
    if high <= low * 1.05:
        low, high = low / 1.5, high * 1.5
    air = (high / low) ** 0.05
    return Axis(low / air, high * air, start, end, logarithmic=True)


def time_ticks(axis: Axis, wanted: int = 5) -> tuple[list[Tick], TimeScale]:
    """Round values of one unit, all with the same number of decimals."""
    scale = choose_time_scale(axis.high)
    span = (axis.high - axis.low) / scale.seconds
    power = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= wanted)
    first = math.ceil(axis.low / scale.seconds / step)
    last = math.floor(axis.high / scale.seconds / step)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = [
        Tick(number * step * scale.seconds, _format_fixed(number * step, decimals)) for number in range(first, last + 1)
    ]
    return ticks, scale


def _format_fixed(value: float, decimals: int) -> str:
    whole_digits = math.floor(math.log10(abs(value)) + 1e-9) + 1 if value else 1
    return format_significant(value, max(1, whole_digits + decimals))


def size_ticks(axis: Axis, wanted: int = 6) -> list[Tick]:
    """Powers of two, as sizes are asked for."""
    first, last = math.ceil(math.log2(axis.low)), math.floor(math.log2(axis.high))
    step = max(1, math.ceil((last - first + 1) / wanted))
    return [Tick(2.0**power, format_bytes(2.0**power)) for power in range(first, last + 1, step)]


def decade_values(axis: Axis) -> list[float]:
    """Powers of ten; where fewer than three fit, also their double and fivefold."""
    first, last = math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high))
    few = math.log10(axis.high / axis.low) < 3
    values = [10.0**power * factor for power in range(first, last + 1) for factor in ((1, 2, 5) if few else (1,))]
    inside = [value for value in values if axis.low <= value <= axis.high]
    step = max(1, math.ceil(len(inside) / 7))
    return inside[::step]
