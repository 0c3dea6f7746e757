"""Who waited for whom, rank by rank and collective by collective: a heat map, and the same as a table."""

from __future__ import annotations

from collections.abc import Collection

from stepscope.analyze.answers.facts import spell_collective
from stepscope.analyze.ranks.waiting import MapColumn, MapRow, WaitingMap
from stepscope.core.units import format_bytes, format_duration
from stepscope.report.charts import draw_text, wrap_svg
from stepscope.report.heatmap import Box, draw_cell, label_step
from stepscope.report.trace_charts import LEFT, RIGHT, WIDTH
from stepscope.report.trace_tables import Cell, PageColumn, PageTable

ROW = 20
WIDEST = 74
"""A column of few is not wider than this."""
WRITTEN_FROM = 52
"""Cells of this width have room for their number."""
_LEAN = -40.0
"""Degrees by which the titles of columns lean."""
_LETTER, _LEANING = 5.8, 18.0
"""Width of a letter, and of a column that has room for its leaning title."""


def draw_waiting(found: WaitingMap, linked: Collection[int], name: str) -> str:
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


def name_row(row: MapRow) -> str:
    return f"rank {row.ranks[0]}" if len(row.ranks) == 1 else f"ranks {row.ranks[0]}–{row.ranks[-1]}"


def short_title(column: MapColumn) -> str:
    names = list(column.collectives)
    count = sum(column.collectives.values())
    size = f" {format_bytes(column.size_bytes)}" if column.size_bytes is not None else ""
    name = spell_collective(names[0]) if len(names) == 1 else "several kinds"
    return f"{count} × {name}" if count > 1 else f"{name}{size}"


def describe_column(column: MapColumn) -> str:
    count = sum(column.collectives.values())
    if count == 1:
        return short_title(column) + (f" among {column.group_size}" if column.group_size else "")
    return ", ".join(f"{number} × {spell_collective(name)}" for name, number in column.collectives.items())


def caption_waiting(found: WaitingMap) -> str:
    where = f"step {found.step}" if found.step is not None else "all steps"
    together = ""
    if len(found.columns) < found.collectives:
        together = (
            f"; {found.collectives} collectives put together to {len(found.columns)} columns, the colour is their mean"
        )
    grouped = "; groups of ranks show their mean" if any(len(row.ranks) > 1 for row in found.rows) else ""
    return (
        f"Waiting for later ranks in the collectives of {where}, in order of time: the stronger the colour, the longer "
        f"the wait; an outline marks the rank that came last{together}{grouped}"
    )


def table_of_waiting(found: WaitingMap) -> PageTable:
    """One row per column of the map."""
    columns = [
        PageColumn("Place"),
        PageColumn("Collective", numeric=False),
        PageColumn("Came last", numeric=False, hint="The rank to whom most of the arrival skew is due"),
        PageColumn("Arrival skew", hint="Latest minus median arrival"),
        *(PageColumn(name_row(row).capitalize(), hint="How long it waited for later ranks") for row in found.rows),
    ]
    rows = [
        [
            Cell(str(place + 1), place + 1),
            Cell(describe_column(column)),
            Cell("-" if column.last_rank is None else f"rank {column.last_rank}"),
            Cell(format_duration(column.skew_s), column.skew_s),
            *(_time_cell(row.wait_s[place]) for row in found.rows),
        ]
        for place, column in enumerate(found.columns)
    ]
    return PageTable("Waiting by collective and rank", "Waiting of each rank for later ones", columns, rows, 0)


def _time_cell(time_s: float | None) -> Cell:
    return Cell("-") if time_s is None else Cell(format_duration(time_s), time_s)
