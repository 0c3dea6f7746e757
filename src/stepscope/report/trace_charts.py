"""Charts of a traced job: where steps went, memory over time, who waited for whom, a roofline. All text is escaped."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from typing import NamedTuple

from stepscope.analyze.ranks.section import describe_column, name_row, short_title
from stepscope.analyze.ranks.waiting import MapRow, WaitingMap
from stepscope.analyze.section import Bar, Bars, Chart
from stepscope.analyze.step.memory import DeviceMemory
from stepscope.analyze.step.operator_rates import DrawnRates, OperatorRate
from stepscope.core.units import format_bytes, format_duration, format_share
from stepscope.report.charts import (
    Axis,
    Tick,
    draw_axis_below,
    draw_axis_left,
    draw_text,
    linear_axis,
    shorten,
    time_ticks,
    wrap_svg,
)
from stepscope.report.heatmap import Box, draw_cell, label_step
from stepscope.report.plots import draw_roofline
from stepscope.report.series import Roofline, RooflinePoint, drawable
from stepscope.system.catalogue import DevicePeak

WIDTH, LEFT, RIGHT = 900, 120, 80
ROW, BAR = 20, 14
AXIS = 30
MEMORY_HEIGHT, MEMORY_POINTS = 220, 600
WIDEST = 74
"""A column of a heat map with few is not wider than this."""
WRITTEN_FROM = 52
"""Cells of this width have room for their number."""
_LEAN = -40.0
"""Degrees by which the titles of columns lean."""
_LETTER, _LEANING = 5.8, 18.0
"""Width of a letter, and of a column that has room for its leaning title."""


class Figure(NamedTuple):
    caption: str
    plot: str
    """SVG."""
    legend: list[tuple[str, str]]
    """Classes of the mark, and its word."""
    is_wide: bool = True


def draw_chart(chart: Bars | Chart, linked: Collection[int]) -> Figure | None:
    """Ranks in `linked` have a timeline to go to. None: there is nothing to draw."""
    if isinstance(chart, Bars):
        used = [name for place, name in enumerate(chart.words) if any(bar.parts_s[place] > 0 for bar in chart.bars)]
        legend = [(f"square f-{name.replace('_', '-')}", chart.words[name]) for name in used]
        return Figure(chart.caption, _draw_bars(chart), legend)
    if chart.kind == "memory":
        legend = [("s0", "allocated"), ("dashed", "held by the allocator")]
        return Figure(chart.caption, _draw_memory(chart.data, chart.name), legend)
    if chart.kind == "waiting":
        return Figure(chart.caption, _draw_waiting(chart.data, linked, chart.name), [])
    return _draw_rates(chart)


# Bars and memory


def _draw_bars(chart: Bars) -> str:
    """Lengths are times, so that slow ones stand out; shares are in the titles of the parts."""
    longest = max((bar.whole_s for bar in chart.bars), default=0.0) or 1e-9
    axis = Axis(0.0, longest, LEFT, WIDTH - RIGHT)
    height = len(chart.bars) * ROW + AXIS
    parts = []
    for number, bar in enumerate(chart.bars):
        parts.append(_draw_bar(bar, number * ROW + 2, axis, chart.words))
    bottom = len(chart.bars) * ROW + 4
    ticks, scale = time_ticks(axis)
    parts.append(draw_axis_below(axis, bottom, ticks, scale.unit))
    return wrap_svg("bars", chart.name, parts, height=height, width=WIDTH)


def _draw_bar(bar: Bar, top: float, axis: Axis, words: dict[str, str]) -> str:
    drawn = [draw_text(LEFT - 8, top + 11, bar.label, "", "end")]
    reached = 0.0
    for share, spent in zip(words, bar.parts_s, strict=True):
        if spent <= 0:
            continue
        left, right = axis.place(reached), axis.place(reached + spent)
        of_step = format_share(spent / bar.whole_s) if bar.whole_s > 0 else ""
        title = f"{bar.label}: {words[share]} {format_duration(spent)} ({of_step})"
        drawn.append(
            f'<rect class="f-{share.replace("_", "-")}" x="{left:.2f}" y="{top}" width="{max(right - left, 0.2):.2f}" '
            f'height="{BAR}"><title>{escape(title)}</title></rect>'
        )
        reached += spent
    drawn.append(draw_text(axis.place(reached) + 6, top + 11, format_duration(bar.whole_s), "value", "start"))
    return "".join(drawn)


def _draw_memory(memory: DeviceMemory, name: str) -> str:
    """Bytes allocated, and above them bytes held by the allocator where that is recorded."""
    points = memory.timeline
    step = max(1, -(-len(points) // MEMORY_POINTS))
    chosen = [max(points[i : i + step], key=lambda one: one.allocated_bytes) for i in range(0, len(points), step)]
    most = max([memory.peak_bytes, *(one.reserved_bytes or 0 for one in chosen)])
    x = linear_axis(0.0, max((one.time_s for one in points), default=0.0), LEFT, WIDTH - RIGHT, margin=0.0)
    y = Axis(0.0, most * 1.05 or 1.0, MEMORY_HEIGHT, 8)
    levels = [Tick(value, shorten(format_bytes(value))) for value in (0.0, most / 2, most)]
    parts = [draw_axis_left(x, y, levels)]
    parts.append(_step_line("line s0", [(one.time_s, one.allocated_bytes) for one in chosen], x, y))
    reserved = [(one.time_s, one.reserved_bytes) for one in chosen if one.reserved_bytes is not None]
    if reserved:
        parts.append(_step_line("line rest dashes", reserved, x, y))
    peak_x, peak_y = x.place(memory.peak_time_s), y.place(memory.peak_bytes)
    parts.append(f'<circle class="s1" cx="{peak_x:.1f}" cy="{peak_y:.1f}" r="3.5"/>')
    parts.append(draw_text(peak_x + 7, peak_y + 4, f"peak {format_bytes(memory.peak_bytes)}", "name", "start"))
    ticks, scale = time_ticks(x)
    parts.append(draw_axis_below(x, MEMORY_HEIGHT, ticks, scale.unit))
    return wrap_svg("memory", name, parts, height=MEMORY_HEIGHT + AXIS, width=WIDTH)


def _step_line(kind: str, points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    """Memory stays as it is until the next event."""
    if not points:
        return ""
    places = [(x.place(at), y.place(value)) for at, value in points]
    path = f"M{places[0][0]:.1f} {places[0][1]:.1f}" + "".join(f"H{at:.1f}V{up:.1f}" for at, up in places[1:])
    return f'<path class="{kind}" d="{path}"/>'


# Waiting


def _draw_waiting(found: WaitingMap, linked: Collection[int], name: str) -> str:
    """Rows are ranks, columns collectives in order of time; ranks in `linked` have a timeline to go to."""
    wide = min(WIDEST, (WIDTH - LEFT - RIGHT) / len(found.columns))
    titles = [short_title(column) for column in found.columns]
    top = 14 + 0.66 * _LETTER * max(map(len, titles))
    most = max((_wait_each(found, row, place) for row in found.rows for place in range(len(titles))), default=0.0)
    parts = [
        draw_text(LEFT + (place + 0.4) * wide, top - 6, titles[place], "", "start", turn=_LEAN)
        for place in range(0, len(titles), label_step(_LEANING, wide))
    ]
    for number, row in enumerate(found.rows):
        y = top + number * ROW
        label = draw_text(LEFT - 8, y + 14, name_row(row), "", "end")
        rank = row.ranks[0]
        is_linked = len(row.ranks) == 1 and rank in linked
        parts.append(f'<a href="#rank-{rank}">{label}</a>' if is_linked else label)
        parts += [
            _draw_cell(found, row, place, Box(LEFT + place * wide, y, wide, ROW), most)
            for place in range(len(found.columns))
        ]
    height = top + len(found.rows) * ROW + 4
    return wrap_svg("heatmap waiting", name, parts, height=height, width=WIDTH, role="group")


def _wait_each(found: WaitingMap, row: MapRow, place: int) -> float:
    """Mean over the collectives of a column, so that columns of two and of three compare."""
    return (row.wait_s[place] or 0.0) / sum(found.columns[place].collectives.values())


def _draw_cell(found: WaitingMap, row: MapRow, place: int, box: Box, most: float) -> str:
    wait, late, column = row.wait_s[place], row.late_s[place], found.columns[place]
    who = f"{name_row(row)}, {describe_column(column)}"
    if wait is None:
        return draw_cell(box, None, f"{who}: took no part", kind="gap")
    is_last = row.ranks == [column.last_rank]
    arrived = "" if late is None else f", arrived {_compare(late)}"
    said = f"{who}: waited {format_duration(wait)}{arrived}{', the last to come' if is_last else ''}"
    text = ("last" if is_last else format_duration(wait)) if box.wide >= WRITTEN_FROM else ""
    heat = _wait_each(found, row, place) / most if most > 0 else 0.0
    return draw_cell(box, heat, said, kind="marked" if is_last else "", text=text)


def _compare(late_s: float) -> str:
    if late_s == 0:
        return "with the median rank"
    return f"{format_duration(abs(late_s))} {'after' if late_s > 0 else 'before'} the median rank"


# Roofline


def _draw_rates(chart: Chart) -> Figure | None:
    found: DrawnRates = chart.data
    used = {rate.dtype for rate in found.rates}
    roofline = Roofline(
        run_id="",
        device=found.peak.name,
        matrix_flops_per_s={dtype: rate for dtype, rate in found.peak.flops.items() if dtype in used},
        bytes_per_s={"copy": found.peak.memory_bytes_per_s},
        points=[_point(place, rate, found.peak) for place, rate in enumerate(found.rates) if drawable(rate.intensity)],
    )
    plot = draw_roofline(roofline, chart.name)
    if plot is None:
        return None
    legend = [(f"round hollow {colour}", dtype) for dtype, colour in plot.colours.items()]
    return Figure(f"{len(roofline.points)} {chart.caption}", plot.markup, legend, is_wide=False)


def _point(place: int, rate: OperatorRate, peak: DevicePeak) -> RooflinePoint:
    """Caches are as the step left them: neither cold nor warm."""
    roof = peak.flops.get(rate.dtype)
    return RooflinePoint(
        anchor=f"rate-{place}",
        label=f"{rate.calls} × {rate.name} {rate.shapes.replace(', []', '')}",
        operator=rate.name,
        dtype=rate.dtype,
        cache="in-step",
        intensity=rate.intensity,
        median_s=rate.median_s,
        flops_per_s=rate.flops_per_s,
        bytes_per_s=rate.bytes_per_s,
        compute_share=rate.flops_per_s / roof if roof else None,
        memory_share=rate.bytes_per_s / peak.memory_bytes_per_s,
    )
