"""Plots of a traced job: where steps went, as bars, and memory over time. All text in them is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from stepscope.analyze.job import RankSummary
from stepscope.analyze.step.breakdown import SHARES
from stepscope.analyze.step.memory import DeviceMemory
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
from stepscope.report.trace_words import by_step_time, median_rank, share_values

WIDTH, LEFT, RIGHT = 900, 120, 80
ROW, BAR = 20, 14
AXIS = 30
MOST_BARS = 32
"""Ranks or steps with a bar of their own; more of them are put together."""
GROUPS = 24
MEMORY_HEIGHT, MEMORY_POINTS = 220, 600


class Bar(NamedTuple):
    label: str
    step_s: float
    parts_s: Sequence[float]
    """In the order of SHARES; they sum to step_s."""


def rank_bars(ranks: list[RankSummary]) -> list[Bar]:
    """One a rank; of many ranks the slowest, the median and the fastest, and then means of neighbours."""
    if len(ranks) <= MOST_BARS:
        return [_rank_bar(f"rank {one.rank}", one) for one in ranks]
    ordered = by_step_time(ranks)
    single = (("slowest", ordered[0]), ("median", median_rank(ranks)), ("fastest", ordered[-1]))
    bars = [_rank_bar(f"{word}: {one.rank}", one) for word, one in single]
    size = -(-len(ranks) // GROUPS)
    for first in range(0, len(ranks), size):
        group = ranks[first : first + size]
        parts = [
            sum(column) / len(group) for column in zip(*(share_values(one.breakdown_s) for one in group), strict=True)
        ]
        label = f"{group[0].rank}–{group[-1].rank}" if len(group) > 1 else f"rank {group[0].rank}"
        bars.append(Bar(label, sum(one.step_s for one in group) / len(group), parts))
    return bars


def _rank_bar(label: str, summary: RankSummary) -> Bar:
    return Bar(label, summary.step_s, share_values(summary.breakdown_s))


def draw_bars(bars: Sequence[Bar], words: dict[str, str], name: str) -> str:
    """Lengths are times, so that slow ones stand out; shares are in the titles of the parts."""
    longest = max((bar.step_s for bar in bars), default=0.0) or 1e-9
    axis = Axis(0.0, longest, LEFT, WIDTH - RIGHT)
    height = len(bars) * ROW + AXIS
    parts = []
    for number, bar in enumerate(bars):
        parts.append(_draw_bar(bar, number * ROW + 2, axis, words))
    bottom = len(bars) * ROW + 4
    ticks, scale = time_ticks(axis)
    parts.append(draw_axis_below(axis, bottom, ticks, scale.unit))
    return wrap_svg("bars", name, parts, height=height, width=WIDTH)


def _draw_bar(bar: Bar, top: float, axis: Axis, words: dict[str, str]) -> str:
    drawn = [draw_text(LEFT - 8, top + 11, bar.label, "", "end")]
    reached = 0.0
    for share, spent in zip(SHARES, bar.parts_s, strict=True):
        if spent <= 0:
            continue
        left, right = axis.place(reached), axis.place(reached + spent)
        of_step = format_share(spent / bar.step_s) if bar.step_s > 0 else ""
        title = f"{bar.label}: {words[share]} {format_duration(spent)} ({of_step})"
        drawn.append(
            f'<rect class="f-{share.replace("_", "-")}" x="{left:.2f}" y="{top}" width="{max(right - left, 0.2):.2f}" '
            f'height="{BAR}"><title>{escape(title)}</title></rect>'
        )
        reached += spent
    drawn.append(draw_text(axis.place(reached) + 6, top + 11, format_duration(bar.step_s), "value", "start"))
    return "".join(drawn)


def draw_memory(memory: DeviceMemory, name: str) -> str:
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
