"""The roofline plot: what a device was measured to do at best, and where its cases stand below that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import chain
from typing import NamedTuple

from stepscope.core.units import format_duration, format_significant
from stepscope.report.axes import Axis, Tick, decade_values, log_axis
from stepscope.report.labels import format_byte_rate, format_flop_rate, format_percent
from stepscope.report.rooflines import Roofline, RooflinePoint, drawable
from stepscope.report.samples import even_positions
from stepscope.report.svg_parts import (
    MAX_DRAWN_POINTS,
    MAX_SERIES,
    RIGHT,
    TOP,
    WIDTH,
    draw_grid_line,
    draw_text,
    draw_tick_below,
    wrap_svg,
)

SLANTED = ("copy", "read")
"""The bandwidths that have a roof; what is written alone computes nothing."""

_LEFT, _BOTTOM = 80, 40
_PLOT_HEIGHT, _LINE_HEIGHT = 250, 12
_RIDGE_ROOM = (1 / 16, 8)
"""How far the axis reaches beyond the ridges, so that slanted and level roofs are seen, and room is for their names."""


class Place(NamedTuple):
    """In the plot's values."""

    intensity: float
    flops_per_s: float


class Roof(NamedTuple):
    start: Place
    end: Place
    label: str
    kind: str


class RooflinePlot(NamedTuple):
    markup: str
    colours: dict[str, str]
    """Dtype → class of its colour."""
    drawn: int


def draw_roofline(roofline: Roofline, name: str) -> RooflinePlot | None:
    """None where nothing that has a roof was measured."""
    matrix, slopes = _roof_values(roofline)
    if not matrix and not slopes:
        return None
    points = [roofline.points[i] for i in even_positions(len(roofline.points), MAX_DRAWN_POINTS)]
    colours = assign_colours(chain(matrix, (point.dtype for point in points)))
    x, y = choose_axes(roofline, top=TOP)
    slanted, level = slanted_roofs(roofline, x), level_roofs(roofline, x, colours)
    names = _stack_names(level, y)
    # Roofs that lie close have their names one above the other: the plot moves down to make room.
    lack = max(0.0, _LINE_HEIGHT - min(names, default=math.inf))
    y = y._replace(start=y.start + lack, end=y.end + lack)
    parts = [_axes(x, y)]
    parts += [_line(roof, x, y) for roof in (*slanted, *level)]
    parts.append(_name_slanted(slanted, x, y))
    parts += [draw_text(x.end, at + lack, roof.label, "name", "end") for roof, at in zip(level, names, strict=True)]
    parts += [_point(point, x, y, colours[point.dtype]) for point in points]
    return RooflinePlot(wrap_svg("roofline", name, parts, height=y.start + _BOTTOM), colours, len(points))


def _roof_values(roofline: Roofline) -> tuple[dict[str, float], dict[str, float]]:
    """Matrix rates by dtype and bandwidths by name, as far as they have roofs."""
    matrix = {dtype: value for dtype, value in roofline.matrix_flops_per_s.items() if drawable(value)}
    rates = roofline.bytes_per_s
    return matrix, {name: rates[name] for name in SLANTED if name in rates and drawable(rates[name])}


def choose_axes(roofline: Roofline, *, top: float) -> tuple[Axis, Axis]:
    """Both logarithmic; every point, ridge and roof is inside."""
    matrix, slopes = _roof_values(roofline)
    ridges = [peak / slope for peak in matrix.values() for slope in slopes.values()]
    across = [point.intensity for point in roofline.points]
    across += [ridge * room for ridge in ridges for room in _RIDGE_ROOM]
    x = log_axis(across or [0.1, 100.0], _LEFT, WIDTH - RIGHT)
    upward = [point.flops_per_s for point in roofline.points] + list(matrix.values())
    upward += [slope * x.low for slope in slopes.values()]
    if not matrix:
        upward += [slope * x.high for slope in slopes.values()]
    return x, log_axis(upward, top + _PLOT_HEIGHT, top)


def slanted_roofs(roofline: Roofline, x: Axis) -> list[Roof]:
    """From the left edge up to the highest matrix rate; rate = bandwidth × intensity. The lowest comes first."""
    matrix, slopes = _roof_values(roofline)
    roofs = []
    for name, slope in sorted(slopes.items(), key=lambda item: item[1]):
        last = max(matrix.values()) / slope if matrix else x.high
        start, end = Place(x.low, slope * x.low), Place(last, slope * last)
        roofs.append(Roof(start, end, f"{name} {format_byte_rate(slope)}", f"memory {name}"))
    return roofs


def level_roofs(roofline: Roofline, x: Axis, colours: dict[str, str]) -> list[Roof]:
    """From the steepest slanted roof to the right edge. The lowest comes first."""
    matrix, slopes = _roof_values(roofline)
    roofs = []
    for dtype, peak in sorted(matrix.items(), key=lambda item: item[1]):
        first = peak / max(slopes.values()) if slopes else x.low
        label = f"{dtype} {format_flop_rate(peak)}"
        roofs.append(Roof(Place(first, peak), Place(x.high, peak), label, colours[dtype]))
    return roofs


def assign_colours(dtypes: Iterable[str]) -> dict[str, str]:
    """The page's series colours in order; those beyond the last share a grey."""
    names = dict.fromkeys(dtypes)
    return {dtype: f"s{number}" if number < MAX_SERIES else "rest" for number, dtype in enumerate(names)}


def _axes(x: Axis, y: Axis) -> str:
    parts = [draw_grid_line(x, y.place(value), format_flop_rate(value)) for value in decade_values(y)]
    parts.append(f'<path class="axis" d="M{x.start:.1f} {y.start:.1f}H{x.end:.1f}"/>')
    parts += [draw_tick_below(Tick(value, f"{value:g}"), x, y.start) for value in decade_values(x)]
    parts.append(draw_text((x.start + x.end) / 2, y.start + 33, "flop per byte", "", "middle"))
    return "".join(parts)


def _line(roof: Roof, x: Axis, y: Axis) -> str:
    (x1, y1), (x2, y2) = ((x.place(at.intensity), y.place(at.flops_per_s)) for at in (roof.start, roof.end))
    return f'<path class="roof {roof.kind}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def _point(point: RooflinePoint, x: Axis, y: Axis, colour: str) -> str:
    """Leads to its case. Keyboards reach that through the table, without a stop at each point."""
    kind = colour if point.cache == "cold" else f"{colour} hollow"
    place = f'cx="{x.place(point.intensity):.1f}" cy="{y.place(point.flops_per_s):.1f}"'
    return (
        f'<a href="#{escape(point.anchor)}" tabindex="-1"><circle class="{kind}" {place} r="3">'
        f"<title>{escape(describe_point(point))}</title></circle></a>"
    )


def describe_point(point: RooflinePoint) -> str:
    facts = [
        format_flop_rate(point.flops_per_s),
        format_byte_rate(point.bytes_per_s),
        f"{format_significant(point.intensity, 3)} flop per byte",
        format_duration(point.median_s),
    ]
    if point.compute_share is not None:
        facts.append(f"{format_percent(point.compute_share)} of matrix peak")
    if point.memory_share is not None:
        facts.append(f"{format_percent(point.memory_share)} of copy")
    return f"{point.label} ({point.dtype or 'no dtype'}, {point.cache} cache): {', '.join(facts)}"


def _name_slanted(roofs: Sequence[Roof], x: Axis, y: Axis) -> str:
    """Along the lines: above the upper one, below the lower."""
    parts = []
    for number, roof in enumerate(roofs):
        (x1, y1), (x2, y2) = ((x.place(at.intensity), y.place(at.flops_per_s)) for at in (roof.start, roof.end))
        turn = math.degrees(math.atan2(y2 - y1, x2 - x1))
        away = -5.0 if number == len(roofs) - 1 else 13.0
        across, down = math.sin(math.radians(turn)), math.cos(math.radians(turn))
        start = 0.3  # Past the few flop per byte at which most operators that move data crowd.
        at_x, at_y = x1 + (x2 - x1) * start - away * across, y1 + (y2 - y1) * start + away * down
        parts.append(draw_text(at_x, at_y, roof.label, "name", "start", turn=turn))
    return "".join(parts)


def _stack_names(roofs: Sequence[Roof], y: Axis) -> list[float]:
    """Heights of the level roofs' names: above the line, and higher where one would cover the last."""
    heights: list[float] = []
    for roof in roofs:
        last = heights[-1] if heights else math.inf
        heights.append(min(y.place(roof.end.flops_per_s) - 4, last - _LINE_HEIGHT))
    return heights
