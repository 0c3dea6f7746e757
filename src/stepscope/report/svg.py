"""Plots as inline SVG: small, without scripts, coloured by the page's style sheet so that they follow its theme.

Every function returns markup in which all text is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

from stepscope.core.units import format_bytes, format_duration, format_significant
from stepscope.report.axes import Axis, decade_values, linear_axis, log_axis, size_ticks, time_ticks
from stepscope.report.samples import Histogram, SampleSeries, even_positions
from stepscope.report.svg_parts import (
    BOTTOM,
    HEIGHT,
    LEFT,
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
from stepscope.report.sweeps import SweepPoint, SweepSeries
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
    parts += [_beyond(histogram, x, floor), _time_axis_below(x, floor + strip)]
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


def _time_axis_below(x: Axis, y: float) -> str:
    ticks, scale = time_ticks(x)
    parts = [f'<path class="axis" d="M{x.start:.1f} {y}H{x.end:.1f}"/>']
    for number, tick in enumerate(ticks):
        place = x.place(tick.value)
        unit = f" {scale.unit}" if number == len(ticks) - 1 else ""
        parts.append(f'<path class="axis" d="M{place:.1f} {y}v4"/>')
        parts.append(draw_text(place, y + 16, tick.text + unit, "", "middle"))
    return "".join(parts)


def draw_timeline(series: SampleSeries, summary: Summary | None, name: str) -> str:
    """Samples in the order taken, warm-ups in another colour; far values stand at the upper edge, hollow."""
    y = _timeline_axis(series)
    x = linear_axis(0, max(series.total - 1, 1), LEFT + 4, WIDTH - RIGHT - 4, margin=0)
    inside: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    above: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for i in even_positions(len(series.positions), MAX_DRAWN_POINTS):
        value, mark, place = series.seconds[i], series.warmup[i], x.place(series.positions[i])
        if value > y.high:
            above[mark].append((place, TOP - 4))
        else:
            inside[mark].append((place, y.place(value)))
    parts = [_time_axis_left(y), _process_borders(series, x)]
    if summary is not None:
        parts.append(f'<path class="median" d="M{LEFT} {y.place(summary.median_s):.1f}H{WIDTH - RIGHT}"/>')
    parts += [_dots(inside[False], "dot"), _dots(inside[True], "dot warm")]
    parts += [_dots(above[False], "dot far"), _dots(above[True], "dot warm far")]
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


def _time_axis_left(y: Axis) -> str:
    ticks, scale = time_ticks(y, wanted=4)
    parts = []
    for number, tick in enumerate(ticks):
        place = y.place(tick.value)
        parts.append(f'<path class="grid" d="M{LEFT} {place:.1f}H{WIDTH - RIGHT}"/>')
        unit = f" {scale.unit}" if number == len(ticks) - 1 else ""
        parts.append(draw_text(LEFT - 5, place + 4, tick.text + unit, "", "end"))
    return "".join(parts)


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
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= scale:
            return f"{format_significant(bytes_per_s / scale, 3)} {unit}"
    return f"{format_significant(bytes_per_s, 3)} B/s"


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
    parts = [_log_axes(x, y, quantity)]
    for number, line in enumerate(drawn):
        places = [(x.place(point.size_bytes), y.place(value)) for point, value in line]
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
        parts.append(f'<path class="line s{number}" d="M{path}"/>' if path else "")
        for (px, py), (point, value) in zip(places, line, strict=True):
            tip = f"{format_bytes(point.size_bytes)}: {quantity.format(value)}"
            parts.append(f'<circle class="s{number}" cx="{px:.1f}" cy="{py:.1f}" r="3"><title>{tip}</title></circle>')
    return wrap_svg("sweep", name, parts)


def _log_axes(x: Axis, y: Axis, quantity: SweepQuantity) -> str:
    parts = []
    for value in decade_values(y):
        parts.append(draw_grid_line(x, y.place(value), quantity.format(value)))
    parts.append(f'<path class="axis" d="M{x.start:.1f} {y.start:.1f}H{x.end:.1f}"/>')
    parts += [draw_tick_below(tick, x, y.start) for tick in size_ticks(x)]
    return "".join(parts)


def _dots(points: Iterable[tuple[float, float]], kind: str) -> str:
    """Lines of no length with round ends: one element for all dots, each drawn once."""
    places = dict.fromkeys(f"M{px:.1f} {py:.1f}h0" for px, py in points)
    return f'<path class="{kind}" d="{"".join(places)}"/>' if places else ""
