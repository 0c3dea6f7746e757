"""The one table for people and programs: a polars frame of events with words, not codes."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.core.errors import MissingDependencyError, UsageError, unknown_name
from stepscope.core.files import output_file
from stepscope.formats.chrome import packed
from stepscope.formats.chrome_rows import PIECE_ROWS
from stepscope.formats.classify import CATEGORIES
from stepscope.formats.timeline import COLUMN, COLUMNS, KINDS, MISSING, Timeline, has_value

if TYPE_CHECKING:
    import polars as pl


def require_polars() -> None:
    try:
        import polars  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            "tables of traces need the package polars", hint="pip install 'stepscope[read]'"
        ) from None


ALWAYS = ("rank", "row", "start_ns", "end_ns", "duration_ns", "kind", "name")
"""`parent` speaks of `row`, which counts in each rank from 0."""
_OF_THREADS = {"process": "process", "thread": "thread", "thread_name": "name"}
CSV_COLUMNS = (*ALWAYS, "category", "process", "thread", "thread_name", *(s.name for s in COLUMNS[6:]))
"""In this order."""


class WrittenTable(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    size_bytes: int
    rows: int
    columns: list[str]


def write_csv(
    timelines: Timeline | Sequence[Timeline], path: Path, *, columns: Sequence[str] | None = None
) -> WrittenTable:
    """Write all events; packed where the name ends in .gz. The file appears whole or not at all.

    Without `columns` every column that some event has a value in. A missing value is an empty field.
    """
    ranks = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not ranks:
        raise UsageError("there is no trace to write", where=str(path))
    chosen = _known(columns) if columns is not None else _used(ranks)
    with output_file(path) as part:
        with part.open("wb") as file, packed(file, path) as stream:
            for piece in _pieces(ranks, chosen):
                stream.write(piece)
        size_bytes = part.stat().st_size
    return WrittenTable(path=str(path), size_bytes=size_bytes, rows=sum(map(len, ranks)), columns=chosen)


def _known(columns: Sequence[str]) -> list[str]:
    for name in columns:
        if name not in CSV_COLUMNS:
            raise unknown_name("column", name, CSV_COLUMNS)
    return list(columns)


def _used(ranks: Sequence[Timeline]) -> list[str]:
    return [name for name in CSV_COLUMNS if name in ALWAYS or any(_has(timeline, name) for timeline in ranks)]


def _has(timeline: Timeline, name: str) -> bool:
    if name in ("process", "thread_name"):
        return any(thread.process if name == "process" else thread.name for thread in timeline.threads)
    spec = COLUMN[name]
    if spec.block is None:
        return bool((timeline.core[name] != MISSING).any())
    block = timeline.blocks.get(spec.block)
    if block is None or name not in block.columns:
        return False
    return bool(has_value(name, block.columns[name]).any())


def _pieces(ranks: Sequence[Timeline], columns: Sequence[str]) -> Iterator[bytes]:
    yield _text([columns])
    for timeline in ranks:
        for first in range(0, len(timeline), PIECE_ROWS):
            rows = slice(first, min(first + PIECE_ROWS, len(timeline)))
            yield _text(zip(*(_cells(timeline, name, rows) for name in columns), strict=True))


def _text(rows: Any) -> bytes:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue().encode("utf-8", "backslashreplace")


def _cells(timeline: Timeline, name: str, rows: slice) -> list[Any]:
    """Values as they are written; the empty text where there is none."""
    core: Any = timeline.core
    if name == "rank":
        return ["" if timeline.rank is None else timeline.rank] * (rows.stop - rows.start)
    if name == "row":
        return list(range(rows.start, rows.stop))
    if name == "duration_ns":
        return list((core["end_ns"][rows] - core["start_ns"][rows]).tolist())
    column, words = _words_of(timeline, name)
    values = timeline.column(column, rows.start, rows.stop).tolist()
    if words is not None:
        return ["" if code == MISSING else words[code] for code in values]
    # NaN is the one number that differs from itself; every number is a time.
    is_time, is_real = name in ("start_ns", "end_ns"), COLUMN[name].form == "float"
    return [value if is_time or (value == value if is_real else value != MISSING) else "" for value in values]  # noqa: PLR0124


def _words_of(timeline: Timeline, name: str) -> tuple[str, Sequence[str] | None]:
    """The column that holds the codes of one of words, and the words; None where there are numbers."""
    if name in _OF_THREADS:
        return "thread", [getattr(thread, _OF_THREADS[name]) for thread in timeline.threads]
    if name in ("kind", "category"):
        return name, KINDS if name == "kind" else CATEGORIES
    return name, timeline.texts if COLUMN[name].form == "text" else None


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
        column, words = _words_of(timeline, name)
        cells = timeline.column(column)
        if words is not None and words is not timeline.texts:
            return _worded(name, cells, words)
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
