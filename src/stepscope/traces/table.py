"""The one table for people and programs: a polars frame of events with words, not codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.core.errors import unknown_name
from stepscope.formats.classify import CATEGORIES
from stepscope.formats.timeline import COLUMN, COLUMNS, KINDS, MISSING, Timeline
from stepscope.traces.cache import require_polars

if TYPE_CHECKING:
    import polars as pl

TABLE_COLUMNS = ("rank", "process", *(spec.name for spec in COLUMNS))
_NEVER_MISSING = ("start_ns", "end_ns", "kind", "name")


def make_table(timeline: Timeline, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Events of one rank; all columns, or those named. Missing values are null; `thread` and `process` are words."""
    require_polars()
    import polars as pl

    names = list(TABLE_COLUMNS if columns is None else columns)
    for name in names:
        if name not in TABLE_COLUMNS:
            raise unknown_name("column", name, TABLE_COLUMNS)
    words = _Words(timeline)
    return pl.DataFrame([words.series(name) for name in names])


class _Words:
    """Codes to words; one list of categories for all text columns."""

    def __init__(self, timeline: Timeline) -> None:
        import polars as pl

        self._timeline = timeline
        self._texts: Any = pl.Enum(list(timeline.texts))

    def series(self, name: str) -> pl.Series:
        import polars as pl

        timeline = self._timeline
        if name == "rank":
            return pl.repeat(timeline.rank, len(timeline), dtype=pl.Int64, eager=True).alias("rank")
        if name in ("process", "thread"):
            return _worded(name, timeline.core["thread"], [getattr(thread, name) for thread in timeline.threads])
        cells = timeline.column(name)
        if name in ("kind", "category"):
            return _worded(name, cells, KINDS if name == "kind" else CATEGORIES)
        form = COLUMN[name].form
        if form == "float":
            return pl.Series(name, cells).fill_nan(None)
        if form == "text":
            codes = pl.Series(name, np.where(cells < 0, 0, cells).astype(np.uint32))
            return _with_nulls(codes.cat.to(self._texts), cells)
        series = pl.Series(name, cells)
        return series if name in _NEVER_MISSING else _with_nulls(series, cells)


def _with_nulls(series: pl.Series, cells: Any) -> pl.Series:
    import polars as pl

    missing = cells == MISSING
    if not missing.any():
        return series
    frame = pl.DataFrame([series, pl.Series("missing", missing)])
    return frame.select(pl.when(~pl.col("missing")).then(pl.col(series.name)).alias(series.name)).to_series()


def _worded(name: str, cells: Any, labels: Sequence[str]) -> pl.Series:
    """Few labels, which may repeat: strings as categories of their own."""
    import polars as pl

    known = list(dict.fromkeys(labels))
    numbers = np.array([known.index(label) for label in labels] or [0])
    places = numbers[np.where(cells < 0, 0, cells)].astype(np.uint32)
    return _with_nulls(pl.Series(name, places).cat.to(pl.Enum(known or [""])), cells)
