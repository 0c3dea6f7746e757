"""An Nsight Systems database as numpy columns: what is there is read, damage is counted, nothing is trusted."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from stepscope.core.errors import first_line
from stepscope.formats.timeline import COLUMN, COLUMNS, MISSING, Array, Block, Integers, Thread, Timeline

DAMAGE = (sqlite3.Error, UnicodeDecodeError)
"""What a damaged database raises: its error messages can hold the damaged bytes, which Python then fails to decode."""

_ROWS_AT_ONCE = 1 << 16
_LONGEST_CELL = 64 << 20
_LATEST_NS = 1 << 61
"""Times beyond it are no times; the sum with the start of the session stays within 64 bits."""


def connect(path: Path) -> sqlite3.Connection:
    """Read-only, without locks, and without trust in what the schema would run."""
    connection = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_CELL)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
    return connection


class Tables:
    """The real tables of an export. Those that cannot be read to their end give the rows before."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.repairs: dict[str, int] = {}
        self.columns_of = self._find()
        self.strings = self.labels("StringIds", "value")

    def count_repair(self, what: str, count: int = 1) -> None:
        if count:
            self.repairs[what] = self.repairs.get(what, 0) + count

    def has(self, table: str, *columns: str) -> bool:
        return set(columns) <= self.columns_of.get(table, set()) if table in self.columns_of else False

    def _find(self) -> dict[str, set[str]]:
        """Columns of every table; views and virtual tables, which run what their writer chose, are left out."""
        tables: dict[str, set[str]] = {}
        rows = self._connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        for name, sql in rows:
            if isinstance(name, str) and "VIRTUAL" not in str(sql).upper().split("(")[0]:
                described = self._connection.execute(f"PRAGMA table_xinfo({quoted(name)})").fetchall()
                tables[name] = {str(row[1]) for row in described if not row[6]}
        return tables

    def labels(self, table: str, column: str, key: str = "id") -> dict[int, str]:
        """One column as text by a whole-number key; empty where the table or a column is not there."""
        if not self.has(table, key, column):
            return {}
        return {int(row[0]): str(row[1]) for row in self.rows(table, key, column) if isinstance(row[0], int)}

    def rows(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """Cells as they are."""
        rows: list[tuple[Any, ...]] = []
        try:
            cursor = self._connection.execute(f"SELECT {', '.join(map(quoted, columns))} FROM {quoted(table)}")
            while piece := cursor.fetchmany(_ROWS_AT_ONCE):
                rows += piece
        except DAMAGE as error:
            self.count_repair(f"{table} is damaged ({first_line(error)}): the rows before were read")
        return rows

    def count(self, table: str) -> int:
        try:
            found = self._connection.execute(f"SELECT count(*) FROM {quoted(table)}").fetchone()
        except DAMAGE:
            return 0
        return int(found[0])

    def columns(self, table: str, wanted: Sequence[str]) -> dict[str, Integers] | None:
        """Whole-number columns; −1 where a row or the whole table lacks one. None: no such table, or no times in it."""
        if not self.has(table, "start"):
            return None
        asked = [column for column in wanted if self.has(table, column)]
        listed = ", ".join(f"coalesce({quoted(column)}, -1)" for column in asked)
        pieces: list[Integers] = []
        try:
            cursor = self._connection.execute(f"SELECT {listed} FROM {quoted(table)}")
            while piece := cursor.fetchmany(_ROWS_AT_ONCE):
                pieces.append(self._numbers(piece, table))
        except DAMAGE as error:
            self.count_repair(f"{table} is damaged ({first_line(error)}): the rows before were read")
        whole = np.concatenate(pieces) if pieces else np.empty((0, len(asked)), np.int64)
        found: dict[str, Integers] = {column: whole[:, place] for place, column in enumerate(asked)}
        for column in wanted:
            found.setdefault(column, np.full(len(whole), MISSING, np.int64))
        return found

    def _numbers(self, rows: list[tuple[Any, ...]], table: str) -> Integers:
        try:
            numbers = np.array(rows, np.int64)
        except (ValueError, TypeError, OverflowError):
            bad = sum(not isinstance(cell, int) for row in rows for cell in row)
            self.count_repair(f"cells of {table} that are no whole numbers were left out", bad)
            clean = [[cell if isinstance(cell, int) else MISSING for cell in row] for row in rows]
            numbers = np.array(clean, np.int64)
        return numbers

    def spans(self, cells: dict[str, Integers], table: str) -> dict[str, Any]:
        """Start and end, made usable: a row that ends before it starts is an instant, an impossible time is zero."""
        start, end = cells["start"], cells["end"]
        wild = (start < -_LATEST_NS) | (start > _LATEST_NS) | (end < -_LATEST_NS) | (end > _LATEST_NS)
        self.count_repair(f"rows of {table} with an impossible time were put at zero", int(wild.sum()))
        start, end = np.where(wild, 0, start), np.where(wild, 0, end)
        backwards = end < start
        self.count_repair(f"rows of {table} that end before they start were read as instants", int(backwards.sum()))
        return {"start_ns": start, "end_ns": np.where(backwards, start, end)}


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


class RowPart(NamedTuple):
    """Rows of one table: cells by column of a Timeline (texts as codes), and whose they are."""

    cells: dict[str, Any]
    process: Integers
    thread: Integers | None = None
    """Any number that tells threads apart; None: rows of a device."""


def join_parts(parts: Sequence[RowPart], process: int, texts: Sequence[str]) -> tuple[Timeline, list[int]]:
    """The rows of one process, in the order of the parts; and the numbers of its threads, in the order of `threads`."""
    mine: list[tuple[RowPart, Integers]] = [(part, np.flatnonzero(part.process == process)) for part in parts]
    chosen = [(part, rows) for part, rows in mine if len(rows)]
    names = {name for part, _ in chosen for name in part.cells}
    columns = {name: _joined(name, chosen) for name in names}
    columns["thread"], numbers = _thread_indices(chosen)
    count = len(columns["thread"])
    timeline = Timeline(
        rank=None,
        world_size=None,
        core={spec.name: _core(spec.name, columns, count) for spec in COLUMNS if spec.block is None},
        blocks=_blocks(columns, count),
        texts=texts,
        threads=[Thread("", str(number)) for number in numbers],
    )
    return timeline, numbers


def _joined(name: str, chosen: list[tuple[RowPart, Integers]]) -> Any:
    missing = np.nan if COLUMN[name].form == "float" else MISSING
    cells = [part.cells[name][rows] if name in part.cells else np.full(len(rows), missing) for part, rows in chosen]
    return np.concatenate(cells)


def _thread_indices(chosen: list[tuple[RowPart, Integers]]) -> tuple[Integers, list[int]]:
    host = np.concatenate([np.full(len(rows), part.thread is not None) for part, rows in chosen])
    numbers = [part.thread[rows] for part, rows in chosen if part.thread is not None]
    used, inverse = np.unique(np.concatenate(numbers) if numbers else np.empty(0, np.int64), return_inverse=True)
    index = np.full(len(host), MISSING, np.int64)
    index[host] = inverse
    return index, used.tolist()


def _core(name: str, columns: dict[str, Any], count: int) -> Array:
    if name not in columns:
        return np.full(count, MISSING, np.int64)
    cells: Array = columns[name].astype(np.uint8 if name == "kind" else np.int64)
    return cells


def _blocks(columns: dict[str, Any], count: int) -> dict[str, Block]:
    found: dict[str, dict[str, Any]] = {}
    for name, cells in columns.items():
        block = COLUMN[name].block
        if block is not None:
            found.setdefault(block, {})[name] = cells
    blocks: dict[str, Block] = {}
    for block, named in found.items():
        has = np.zeros(count, bool)
        for name, cells in named.items():
            has |= ~np.isnan(cells) if COLUMN[name].form == "float" else cells != MISSING
        rows = np.flatnonzero(has)
        if len(rows):
            blocks[block] = Block(rows=rows, columns={name: cells[rows] for name, cells in named.items()})
    return blocks
