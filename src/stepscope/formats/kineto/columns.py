"""Columns that grow while a large trace is read."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.formats.timeline import COLUMN, MISSING, Array, Block, Integers

FIRST_CELLS = 1 << 14
_STRETCH_CELLS = 1 << 20
"""Cells that are moved at once where others are put between them."""
_NARROW = {"kind": "u1", "thread": "i4", "name": "i4", "category": "i1"}


class Column:
    """A column that grows in place: the system moves its pages, so growing copies nothing and leaves no second one.

    A map that is looked at cannot be moved, so its cells are given out once, by `finish`, after which nothing is added.
    With a folder its pages belong to a file there, so that the system may drop them from memory.
    """

    def __init__(self, name: str, folder: Path | None) -> None:
        self._may_widen = name not in _NARROW and name not in ("start_ns", "end_ns") and COLUMN[name].form != "float"
        self._folder = folder
        self._used = 0
        first = "f8" if COLUMN[name].form == "float" else "i4" if self._may_widen else "i8"
        self._reserve(FIRST_CELLS, np.dtype(_NARROW.get(name, first)))

    def _reserve(self, cells: int, dtype: Any) -> None:
        size = cells * dtype.itemsize
        if self._folder is None:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                file.truncate(size)
                self._map = mmap.mmap(file.fileno(), size)
        self._cells = np.frombuffer(self._map, dtype)

    def extend(self, cells: Array) -> None:
        if self._may_widen and self._cells.dtype == np.int32 and not _fits(cells):
            narrow = self._cells
            self._reserve(len(narrow), np.dtype("i8"))
            self._cells[: self._used] = narrow[: self._used]
        needed = self._used + len(cells)
        if needed > len(self._cells):
            self._grow(max(needed, len(self._cells) * 2))
        self._cells[self._used : needed] = cells
        self._used = needed

    def _grow(self, cells: int) -> None:
        dtype = self._cells.dtype
        del self._cells
        self._map.resize(cells * dtype.itemsize)
        self._cells = np.frombuffer(self._map, dtype)

    def recode(self, mapping: Integers) -> None:
        """Every code replaced by what stands at its place in `mapping`."""
        self._cells[: self._used] = mapped(self._cells[: self._used], mapping)

    def insert(self, places: Integers, cells: Array) -> None:
        """`cells[i]` before what is now at `places[i]`, which ascend. Moves what follows, in place, from the end on: a
        stretch is written only where everything before it has still its old place."""
        if not len(places):
            return
        self.extend(cells)
        targets = places + np.arange(len(places))
        high = self._used
        while high > targets[0]:
            low = max(high - _STRETCH_CELLS, int(targets[0]))
            first, last = (int(place) for place in np.searchsorted(targets, [low, high]))
            is_new = np.zeros(high - low, bool)
            is_new[targets[first:last] - low] = True
            stretch = np.empty(high - low, self._cells.dtype)
            stretch[is_new] = cells[first:last]
            stretch[~is_new] = self._cells[low - first : high - last]
            self._cells[low:high] = stretch
            high = low

    def finish(self) -> Array:
        return self._cells[: self._used]


class GrowingBlock:
    """Columns of the few rows that have them. A column may show up late: the rows before have none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._rows = Column("parent", folder)
        self._columns: dict[str, Column] = {}
        self._used = 0

    def extend(self, rows: Array, columns: Mapping[str, Array]) -> None:
        self._rows.extend(rows)
        for name in columns:
            if name not in self._columns:
                self._columns[name] = Column(name, self._folder)
                self._columns[name].extend(absent(name, self._used))
        for name, column in self._columns.items():
            column.extend(columns[name] if name in columns else absent(name, len(rows)))
        self._used += len(rows)

    def finish(self, recode: Integers | None) -> Block:
        """With codes of texts replaced where that is asked for."""
        for name, column in self._columns.items():
            if recode is not None and COLUMN[name].form == "text":
                column.recode(recode)
        return Block(rows=self._rows.finish(), columns={name: c.finish() for name, c in self._columns.items()})


def _fits(cells: Array) -> bool:
    return not len(cells) or bool(cells.min() >= -(1 << 31) and cells.max() < 1 << 31)


def mapped(cells: Array, mapping: Integers) -> Array:
    if not len(mapping):
        return cells
    replaced: Array = np.where(cells >= 0, mapping[np.maximum(cells, 0)], MISSING)
    return replaced


def absent(name: str, rows: int) -> Array:
    """One missing value for all rows, without room for each."""
    if COLUMN[name].form == "float":
        return np.broadcast_to(np.array(np.nan), (rows,))
    return np.broadcast_to(np.array(MISSING, np.dtype(_NARROW.get(name, "i4"))), (rows,))
