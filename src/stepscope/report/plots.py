"""Plots of reports as inline SVG: distributions, samples over time, sweeps, rooflines. All text in them is escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import chain
from typing import NamedTuple

from stepscope.core.units import format_bandwidth, format_bytes, format_duration, format_significant
from stepscope.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MAX_DRAWN_POINTS,
    MAX_SERIES,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Tick,
    decade_values,
    draw_axis_below,
    draw_axis_left,
    draw_text,
    linear_axis,
    log_axis,
    shorten,
    size_ticks,
    time_ticks,
    wrap_svg,
)
from stepscope.report.labels import format_decimal, format_flop_rate, format_percent
from stepscope.report.series import (
    Histogram,
    Roofline,
    RooflinePoint,
    SampleSeries,
    SweepPoint,
    SweepSeries,
    drawable,
    even_positions,
)
from stepscope.stats import Summary


def draw_sparkline(histogram: Histogram, summary: Summary) -> str:
    """The distribution in the height of a table row: bars, and a line at the median."""
    width, height = 96, 22
    axis = linear_axis(histogram.low_s, histogram.high_s, 1, width - 1, margin=0)
    tallest = max(histogram.counts)
    bar = (width - 2) / len(histogram.counts)
    bars = "".join(
        f"M{1 + i * bar:.1f} {height}v{-(height - 3) * count / tallest:.1f}h{bar * 0.86:.1f}V{height}z"
        for i, count in enumerate(histogram.counts)
        if count
    )
    median = min(max(axis.place(summary.median_s), 1), width - 1)
    name = f"distribution from {format_duration(summary.min_s)} to {format_duration(summary.max_s)}"
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(name)}"><path class="bar" d="{bars}"/>'
        f'<path class="median" d="M{median:.1f} 0V{height}"/></svg>'
    )


def draw_distribution(histogram: Histogram, summary: Summary, series: SampleSeries, name: str) -> str:
    """Histogram of all samples, every drawn sample as a dot below, median and its interval marked."""
    x = linear_axis(histogram.low_s, histogram.high_s, LEFT / 2, WIDTH - LEFT / 2)
    strip = 22
    floor = HEIGHT - BOTTOM - strip
    parts = [_interval_band(x, summary, floor + strip), _bars(histogram, x, floor)]
    parts.append(_strip(series, x, floor + 5, floor + strip - 5))
    median = x.place(summary.median_s)
    parts.append(f'<path class="median" d="M{median:.1f} {TOP}V{floor + strip}"/>')
    anchor, shift = ("start", 5) if median < WIDTH * 0.6 else ("end", -5)
    label = f"median {format_duration(summary.median_s)}"
    parts.append(draw_text(median + shift, TOP + 2, label, "strong", anchor))
    ticks, scale = time_ticks(x)
    parts += [_beyond(histogram, x, floor), draw_axis_below(x, floor + strip, ticks, scale.unit)]
    return wrap_svg("distribution", name, parts)


def _interval_band(x: Axis, summary: Summary, bottom: float) -> str:
    low, high = (min(max(x.place(value), x.start), x.end) for value in (summary.ci_low_s, summary.ci_high_s))
    return f'<rect class="band" x="{low:.1f}" y="{TOP}" width="{max(high - low, 1):.1f}" height="{bottom - TOP:.1f}"/>'


def _bars(histogram: Histogram, x: Axis, floor: float) -> str:
    tallest, room = max(histogram.counts), floor - TOP - 8
    if histogram.high_s <= histogram.low_s:
        middle = x.place(histogram.low_s)
        return f'<path class="bar" d="M{middle - 6:.1f} {floor}v{-room:.1f}h12V{floor}z"/>'
    left, right = x.place(histogram.low_s), x.place(histogram.high_s)
    step = (right - left) / len(histogram.counts)
    path = "".join(
        f"M{left + i * step + 0.5:.1f} {floor}v{-room * count / tallest:.1f}h{max(step - 1, 0.8):.1f}V{floor}z"
        for i, count in enumerate(histogram.counts)
        if count
    )
    return f'<path class="bar" d="{path}"/>'


def _strip(series: SampleSeries, x: Axis, top: float, bottom: float) -> str:
    """Dots spread over a few lines by their place, so that equal values stay countable."""
    measured = [value for value, warmup in zip(series.seconds, series.warmup, strict=True) if not warmup]
    rows = 5
    points = [
        (x.place(measured[i]), top + (bottom - top) * ((i * 3) % rows) / (rows - 1))
        for i in even_positions(len(measured), MAX_DRAWN_POINTS)
        if x.low <= measured[i] <= x.high
    ]
    return _dots(points, "dot")


def _beyond(histogram: Histogram, x: Axis, floor: float) -> str:
    parts = []
    if histogram.above:
        parts.append(draw_text(x.end, TOP + 16, f"{histogram.above} beyond →", "quiet", "end"))
    if histogram.below:
        parts.append(draw_text(x.start, TOP + 16, f"← {histogram.below} below", "quiet", "start"))
    return "".join(parts)


def draw_timeline(series: SampleSeries, summary: Summary | None, name: str) -> str:
    """Samples in the order taken, warm-ups in another colour; far values stand at the upper edge, hollow."""
    y = _timeline_axis(series)
    x = linear_axis(0, max(series.total - 1, 1), LEFT + 4, WIDTH - RIGHT - 4, margin=0)
    dots: dict[str, list[tuple[float, float]]] = {"dot": [], "dot warm": [], "dot far": [], "dot warm far": []}
    for i in even_positions(len(series.positions), MAX_DRAWN_POINTS):
        is_far = series.seconds[i] > y.high
        height = TOP - 4 if is_far else y.place(series.seconds[i])
        dots["dot" + " warm" * series.warmup[i] + " far" * is_far].append((x.place(series.positions[i]), height))
    ticks, scale = time_ticks(y, wanted=4)
    edges = Axis(0, 1, LEFT, WIDTH - RIGHT)
    parts = [draw_axis_left(edges, y, ticks, scale.unit), _process_borders(series, x)]
    if summary is not None:
        parts.append(f'<path class="median" d="M{LEFT} {y.place(summary.median_s):.1f}H{WIDTH - RIGHT}"/>')
    parts += [_dots(points, kind) for kind, points in dots.items()]
    parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    parts.append(draw_text(LEFT, HEIGHT - 8, "first sample", "", "start"))
    parts.append(draw_text(WIDTH - RIGHT, HEIGHT - 8, f"sample {series.total:,}", "", "end"))
    return wrap_svg("timeline", name, parts)


def _timeline_axis(series: SampleSeries) -> Axis:
    """Fits the measured samples but for the far ones: a slow warm-up must not flatten the rest."""
    measured = sorted(value for value, warmup in zip(series.seconds, series.warmup, strict=True) if not warmup)
    ordered = measured or sorted(series.seconds)
    low = ordered[0]
    usual = ordered[min(len(ordered) - 1, int(len(ordered) * 0.98))]
    reach = usual + 2 * (usual - low)
    high = max(value for value in ordered if value <= reach) if usual > low else ordered[-1]
    return linear_axis(low, high, HEIGHT - BOTTOM, TOP, margin=0.08)


def _process_borders(series: SampleSeries, x: Axis) -> str:
    borders = [
        position
        for position, before, here in zip(series.positions[1:], series.process, series.process[1:], strict=False)
        if before != here
    ]
    shown = [borders[i] for i in even_positions(len(borders), 50)]
    return "".join(
        f'<path class="border" d="M{x.place(position - 0.5):.1f} {TOP}V{HEIGHT - BOTTOM}"/>' for position in shown
    )


class SweepQuantity(NamedTuple):
    title: str
    read: Callable[[SweepPoint], float | None]
    format: Callable[[float], str]


LATENCY = SweepQuantity("Time", lambda point: point.median_s, format_duration)


def _format_rate(bytes_per_s: float) -> str:
    """In the unit that it fills: an axis label has no room for `0.0005 GB/s`."""
    return format_decimal(bytes_per_s, "B/s", ("G", "M", "k", ""), digits=3)


BUS_BANDWIDTH = SweepQuantity("Bus bandwidth", lambda point: point.busbw_bytes_per_s, _format_rate)


def draw_sweep(lines: Sequence[SweepSeries], quantity: SweepQuantity, name: str) -> str | None:
    """A quantity against message size on logarithmic axes; None where no line has it."""
    drawn = [
        [(point, value) for point in line.points if (value := quantity.read(point)) is not None and value > 0]
        for line in lines[:MAX_SERIES]
    ]
    if not any(drawn):
        return None
    left = 58
    x = log_axis([point.size_bytes for line in drawn for point, _ in line], left, WIDTH - RIGHT)
    y = log_axis([value for line in drawn for _, value in line], HEIGHT - BOTTOM, TOP)
    grid = [Tick(value, shorten(quantity.format(value))) for value in decade_values(y)]
    parts = [draw_axis_left(x, y, grid), draw_axis_below(x, y.start, size_ticks(x))]
    for number, line in enumerate(drawn):
        places = [(x.place(point.size_bytes), y.place(value)) for point, value in line]
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
        parts.append(f'<path class="line s{number}" d="M{path}"/>' if path else "")
        for (px, py), (point, value) in zip(places, line, strict=True):
            tip = f"{format_bytes(point.size_bytes)}: {quantity.format(value)}"
            parts.append(f'<circle class="s{number}" cx="{px:.1f}" cy="{py:.1f}" r="3"><title>{tip}</title></circle>')
    return wrap_svg("sweep", name, parts)


def _dots(points: Iterable[tuple[float, float]], kind: str) -> str:
    """Lines of no length with round ends: one element for all dots, each drawn once."""
    places = dict.fromkeys(f"M{px:.1f} {py:.1f}h0" for px, py in points)
    return f'<path class="{kind}" d="{"".join(places)}"/>' if places else ""


# The roofline: what a device was measured to do at best, and where its cases stand below that

SLANTED = ("copy", "read")
"""The bandwidths that have a roof; what is written alone computes nothing."""

_LEFT, _BOTTOM = 80, 40
_PLOT_HEIGHT, _LINE_HEIGHT = 250, 12
_RIDGE_ROOM = (1 / 16, 8)
"""How far the axis reaches beyond the ridges, so that slanted and level roofs are seen, and room is for their names."""


Place = tuple[float, float]
"""Intensity and flops per second."""


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
    """Matmul rates by dtype and bandwidths by name, as far as they have roofs."""
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
    """From the left edge up to the highest matmul rate; rate = bandwidth × intensity. The lowest comes first."""
    matrix, slopes = _roof_values(roofline)
    roofs = []
    for name, slope in sorted(slopes.items(), key=lambda item: item[1]):
        last = max(matrix.values()) / slope if matrix else x.high
        roofs.append(
            Roof((x.low, slope * x.low), (last, slope * last), f"{name} {format_bandwidth(slope)}", f"memory {name}")
        )
    return roofs


def level_roofs(roofline: Roofline, x: Axis, colours: dict[str, str]) -> list[Roof]:
    """From the steepest slanted roof to the right edge. The lowest comes first."""
    matrix, slopes = _roof_values(roofline)
    roofs = []
    for dtype, peak in sorted(matrix.items(), key=lambda item: item[1]):
        first = peak / max(slopes.values()) if slopes else x.low
        label = f"{dtype} {format_flop_rate(peak)}"
        roofs.append(Roof((first, peak), (x.high, peak), label, colours[dtype]))
    return roofs


def assign_colours(dtypes: Iterable[str]) -> dict[str, str]:
    """The page's series colours in order; those beyond the last share a grey."""
    names = dict.fromkeys(dtypes)
    return {dtype: f"s{number}" if number < MAX_SERIES else "rest" for number, dtype in enumerate(names)}


def _axes(x: Axis, y: Axis) -> str:
    rates = [Tick(value, shorten(format_flop_rate(value))) for value in decade_values(y)]
    intensities = [Tick(value, f"{value:g}") for value in decade_values(x)]
    title = draw_text((x.start + x.end) / 2, y.start + 33, "flop per byte", "", "middle")
    return draw_axis_left(x, y, rates) + draw_axis_below(x, y.start, intensities) + title


def _line(roof: Roof, x: Axis, y: Axis) -> str:
    (x1, y1), (x2, y2) = ((x.place(intensity), y.place(rate)) for intensity, rate in roof[:2])
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
        format_bandwidth(point.bytes_per_s),
        f"{format_significant(point.intensity, 3)} flop per byte",
        format_duration(point.median_s),
    ]
    if point.compute_share is not None:
        facts.append(f"{format_percent(point.compute_share)} of matmul peak")
    if point.memory_share is not None:
        facts.append(f"{format_percent(point.memory_share)} of copy bandwidth")
    return f"{point.label} ({point.dtype or 'no dtype'}, {point.cache} cache): {', '.join(facts)}"


def _name_slanted(roofs: Sequence[Roof], x: Axis, y: Axis) -> str:
    """Along the lines: above the upper one, below the lower."""
    parts = []
    for number, roof in enumerate(roofs):
        (x1, y1), (x2, y2) = ((x.place(intensity), y.place(rate)) for intensity, rate in roof[:2])
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
        heights.append(min(y.place(roof.end[1]) - 4, last - _LINE_HEIGHT))
    return heights
