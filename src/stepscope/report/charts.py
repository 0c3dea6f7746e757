"""The one chart helper: units, axes with their ticks, and the parts of inline SVG. All text in markup is escaped.

Plots are small, without scripts, and coloured by the page's style sheet so that they follow its theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from stepscope.core.units import format_bytes, format_significant

# One time unit for numbers that are read together: a column, an axis, the two ends of an interval


class TimeScale(NamedTuple):
    unit: str
    seconds: float

    def format(self, value_s: float, digits: int = 4) -> str:
        """Without the unit."""
        return format_significant(value_s / self.seconds, digits)


TIME_SCALES = (TimeScale("s", 1.0), TimeScale("ms", 1e-3), TimeScale("µs", 1e-6), TimeScale("ns", 1e-9))


def choose_time_scale(typical_s: float) -> TimeScale:
    """The largest unit that the typical value fills."""
    return next((scale for scale in TIME_SCALES if typical_s >= scale.seconds), TIME_SCALES[-1])


def format_interval(low_s: float, high_s: float, scale: TimeScale) -> str:
    return f"{scale.format(low_s)}–{scale.format(high_s)}"


# Axes: where values go and where the ticks stand


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


# What all plots are made of

WIDTH, HEIGHT = 440, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 16, 24
MAX_DRAWN_POINTS = 600
"""Dots in one plot; more would only cover each other."""
MAX_SERIES = 6
"""Colours of the page: lines in one plot, one colour each."""


def draw_text(x: float, y: float, text: str, kind: str, anchor: str, *, turn: float = 0.0) -> str:
    """`turn` in degrees, clockwise, around the text's anchor."""
    classes = f' class="{kind}"' if kind else ""
    turned = f' transform="rotate({turn:.1f} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{classes}{turned}>{escape(text)}</text>'


def draw_axis_below(x: Axis, y: float, ticks: Sequence[Tick], unit: str = "") -> str:
    """A line with its ticks; the unit stands behind the last one."""
    parts = [f'<path class="axis" d="M{x.start:.1f} {y:.1f}H{x.end:.1f}"/>']
    for tick, text in zip(ticks, _with_unit(ticks, unit), strict=True):
        place = x.place(tick.value)
        anchor = "end" if place > x.end - 16 and not unit else "middle"
        parts.append(f'<path class="axis" d="M{place:.1f} {y:.1f}v4"/>' + draw_text(place, y + 16, text, "", anchor))
    return "".join(parts)


def draw_axis_left(x: Axis, y: Axis, ticks: Sequence[Tick], unit: str = "") -> str:
    """Lines across the plot, named at their left; the unit stands behind the last one."""
    return "".join(
        f'<path class="grid" d="M{x.start:.1f} {y.place(tick.value):.1f}H{x.end:.1f}"/>'
        + draw_text(x.start - 5, y.place(tick.value) + 4, text, "", "end")
        for tick, text in zip(ticks, _with_unit(ticks, unit), strict=True)
    )


def _with_unit(ticks: Sequence[Tick], unit: str) -> list[str]:
    texts = [tick.text for tick in ticks]
    return [*texts[:-1], f"{texts[-1]} {unit}"] if unit and texts else texts


def shorten(text: str) -> str:
    """`1.000 ms` → `1 ms`: an axis label needs no more digits than it has."""
    number, _, unit = text.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def wrap_svg(
    kind: str, name: str, parts: Sequence[str], *, height: float = HEIGHT, width: float = WIDTH, role: str = "img"
) -> str:
    """`role` is `group` where there are links inside: readers of the screen would not find them in an image."""
    return (
        f'<svg class="plot {kind}" viewBox="0 0 {width} {height:g}" role="{role}" aria-label="{escape(name)}">'
        f"<title>{escape(name)}</title>{''.join(parts)}</svg>"
    )
