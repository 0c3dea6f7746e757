"""Rows of a timeline as plain values, in an order of their own: what two readers of one file must agree on."""

from __future__ import annotations

from stepscope.formats.timeline import COLUMNS, Timeline


def rows_of(timeline: Timeline) -> list[str]:
    columns = []
    for spec in COLUMNS:
        cells = timeline.column(spec.name).tolist()
        if spec.name in ("parent", "step", "category"):
            continue
        if spec.form == "text":
            columns.append([timeline.texts[code] if code >= 0 else None for code in cells])
        elif spec.name == "thread":
            columns.append([tuple(timeline.threads[number]) if number >= 0 else None for number in cells])
        else:
            columns.append(cells)
    return sorted(repr(row) for row in zip(*columns, strict=True))
