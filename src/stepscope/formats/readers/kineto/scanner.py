"""Large Chrome traces: the compiled scanner reads the usual records, the tolerant parser the others."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Mapping
from enum import IntEnum
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stepscope.formats.machine_code import load
from stepscope.formats.readers.kineto.text import ChromeText, Patience, Piece, Reached
from stepscope.formats.readers.kineto.tolerant import (
    COLUMN_OF_ARGUMENT,
    KIND_OF_CATEGORY,
    WITHOUT_COLUMN,
    EventReader,
    finish_kineto,
)
from stepscope.formats.source import PIECE_BYTES, Source
from stepscope.formats.timeline import COLUMN, COLUMNS, MISSING, Array, Block, Integers, Thread, Timeline, make_blocks

Field = IntEnum(
    "Field",
    # what was read so far, and how far
    "ROWS TEXTS POOL_USED THREADS ODD LOOKED "
    # known keys and categories; slots hold numbers + 1
    "KEY_SLOTS KEY_MASK KEY_BYTES KEY_BEGIN KEY_COLUMN KEY_FORM "
    "CATEGORY_SLOTS CATEGORY_MASK CATEGORY_BYTES CATEGORY_BEGIN CATEGORY_KIND "
    # what followed each key lately
    "LITERALS LITERAL_SIZE LITERAL_KEY "
    # growing text pool
    "SLOTS SLOT_MASK POOL BOUNDS ESCAPED "
    # threads
    "THREAD_SLOTS THREAD_CODES "
    # output
    "TABLE FLOATS ODD_LIST WRITTEN",
    start=0,
)
"""What stands where in the workspace."""

_FOUND_LATER = ("category", "parent", "step")
WHOLE = tuple(spec.name for spec in COLUMNS if spec.form != "float" and spec.name not in _FOUND_LATER)
REAL = tuple(spec.name for spec in COLUMNS if spec.form == "float")
"""Columns of the two tables that the scanner fills."""

# Forms of columns.
FORM_INT, FORM_TEXT, FORM_FLOAT, FORM_IGNORED = range(4)

# Keys of a record itself; those of its arguments follow.
RECORD_KEYS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id", "bp", "s")
PH, CAT, NAME, PID, TID, TS, DUR, ARGS = range(8)
FIRST_ARGUMENT = len(RECORD_KEYS)
WORDS = (*RECORD_KEYS, *COLUMN_OF_ARGUMENT, *sorted(WITHOUT_COLUMN))

# What a text is: a string as it stands or with escapes, a JSON list or object, or arguments whose keys were all read.
PLAIN_TEXT, ESCAPED_TEXT, JSON_TEXT, ARGUMENTS_TEXT = range(4)

LITERAL_BYTES = 96
"""Longer texts between two values are not remembered."""


FIRST_CELLS = 1 << 14
_MOVED_CELLS = 1 << 20
"""Cells that are moved at once where others are put between them."""
_NARROW = {"kind": "u1", "thread": "i4", "name": "i4", "category": "i1"}


class GrowingColumn:
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
        section is written only where everything before it has still its old place."""
        if not len(places):
            return
        self.extend(cells)
        targets = places + np.arange(len(places))
        high = self._used
        while high > targets[0]:
            low = max(high - _MOVED_CELLS, int(targets[0]))
            first, last = (int(place) for place in np.searchsorted(targets, [low, high]))
            is_new = np.zeros(high - low, bool)
            is_new[targets[first:last] - low] = True
            section = np.empty(high - low, self._cells.dtype)
            section[is_new] = cells[first:last]
            section[~is_new] = self._cells[low - first : high - last]
            self._cells[low:high] = section
            high = low

    def finish(self) -> Array:
        return self._cells[: self._used]


class GrowingBlock:
    """Columns of the few rows that have them. A column may show up late: the rows before have none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._rows = GrowingColumn("parent", folder)
        self._columns: dict[str, GrowingColumn] = {}
        self._used = 0

    def extend(self, rows: Array, columns: Mapping[str, Array]) -> None:
        self._rows.extend(rows)
        for name in columns:
            if name not in self._columns:
                self._columns[name] = GrowingColumn(name, self._folder)
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
    return np.where(cells >= 0, mapping[np.maximum(cells, 0)], MISSING)


def absent(name: str, rows: int) -> Array:
    """One missing value for all rows, without room for each."""
    if COLUMN[name].form == "float":
        return np.broadcast_to(np.array(np.nan), (rows,))
    return np.broadcast_to(np.array(MISSING, np.dtype(_NARROW.get(name, "i4"))), (rows,))


_SMALLEST_RECORD = 2
"""`{}`: what the tolerant parser may be given."""
_SMALLEST_EVENT = 60
"""No record the scanner accepts is shorter: it has seven fields. The compiled loop trusts the table's length."""
THREAD_LIMIT = 1 << 14
THREAD_SLOT_COUNT = 4 * THREAD_LIMIT


def scan_kineto(path: Path, *, folder: Path | None = None, piece_bytes: int = PIECE_BYTES) -> Timeline:
    """As `read_kineto`, many times faster.

    With `folder` the columns lie in (nameless) files there instead of in memory: for traces that are larger than it.
    """
    text = ChromeText(Source(path), piece_bytes)
    scanner = _Scanner(path, text.patience, folder)
    text.feed(scanner.read, scanner.read_damaged)
    return finish_kineto(path, scanner.finish(text), text)


class _Keys:
    """Words the scanner knows, in a small table it can look into."""

    def __init__(self, words: Iterable[str]) -> None:
        encoded = [word.encode() for word in words]
        self.bytes = _padded(b"".join(encoded))
        self.begin = np.cumsum([0, *map(len, encoded)])
        count = 1 << (4 * len(encoded)).bit_length()
        self.slots = _make_slots(count, self.bytes, self.begin, np.zeros(len(encoded), np.int64))

    def addresses(self) -> list[int]:
        return [self.slots.ctypes.data, len(self.slots) - 1, self.bytes.ctypes.data, self.begin.ctypes.data]


def _make_slots(count: int, content: Array, bounds: Integers, flags: Integers) -> Integers:
    """Numbers + 1 of texts at the places of their hashes, or behind those that were there before; a power of two of
    places."""
    hash_text = load("json_text", "hash_text", "ii")
    slots = np.zeros(count, np.int64)
    start = content.ctypes.data
    for number, (begin, end, flag) in enumerate(
        zip(bounds.tolist(), bounds[1:].tolist(), flags.tolist(), strict=False)
    ):
        place = (hash_text(start + begin, start + end) ^ (flag * 7919)) & (count - 1)
        while slots[place]:
            place = (place + 1) & (count - 1)
        slots[place] = number + 1
    return slots


class _Pool:
    """All texts so far: one run of bytes, cut at `bounds`; `slots` finds a text by its hash."""

    def __init__(self) -> None:
        self.slots = np.zeros(1 << 16, np.int64)
        self.bytes = np.zeros(1 << 20, np.uint8)
        self.bounds = np.zeros(1 << 14, np.int64)
        self.flags = np.zeros(1 << 14, np.uint8)

    def make_room(self, texts: int, used: int, size: int) -> None:
        """Enough for every text that `size` more bytes can hold."""
        # Arguments kept whole hold texts that are kept by themselves too.
        self.bytes = _grown(self.bytes, used + 2 * size + 8)
        most = texts + size // 8 + 2
        self.bounds = _grown(self.bounds, most)
        self.flags = _grown(self.flags, most)
        if len(self.slots) < 2 * most:
            count = 1 << (2 * most).bit_length()
            self.slots = _make_slots(count, self.bytes, self.bounds[: texts + 1], self.flags[:texts])

    def texts(self, count: int) -> list[str]:
        """All of them; the scanner has checked each when it was new."""
        whole = self.bytes[: self.bounds[count]].tobytes()
        bounds, flags = self.bounds[: count + 1].tolist(), self.flags[:count].tolist()
        return [
            msgspec.json.decode(b'"' + whole[begin:end] + b'"', type=str)
            if form == ESCAPED_TEXT
            else whole[begin:end].decode()
            for begin, end, form in zip(bounds, bounds[1:], flags, strict=False)
        ]


class _Scanner:
    def __init__(self, path: Path, patience: Patience, folder: Path | None) -> None:
        self._patience = patience
        self._tolerant = EventReader(path)
        self._pool = _Pool()
        self._thread_slots = np.zeros(THREAD_SLOT_COUNT, np.int64)
        self._thread_codes = np.zeros((THREAD_LIMIT, 2), np.int64)
        self._text: bytes | None = None
        self._table = np.empty((0, len(WHOLE)), np.int64)
        self._floats = np.empty((0, len(REAL)), np.float64)
        self._odd = np.empty((0, 3), np.int64)
        self._written = np.zeros(len(WHOLE) + len(REAL), np.int64)
        self._columns = {s.name: GrowingColumn(s.name, folder) for s in COLUMNS if s.block is None and s.name in WHOLE}
        self._blocks: dict[str, GrowingBlock] = {}
        self._folder = folder
        self._row = 0
        self._places: list[int] = []
        """For each row of the tolerant parser: the scanner's row it stands before."""
        self._work = np.zeros(len(Field), np.int64)
        self._prepare()

    def _prepare(self) -> None:
        """Everything in the workspace that stays."""
        self._keys = _Keys(WORDS)
        cells = [_cell_of(word if number >= FIRST_ARGUMENT else "") for number, word in enumerate(WORDS)]
        kinds = {spelling: kind for cat, kind in KIND_OF_CATEGORY.items() for spelling in (cat, cat.capitalize())}
        # Event records need a word added that only the tolerant parser adds.
        kinds = {cat: kind for cat, kind in kinds.items() if cat.lower() not in ("cuda_event", "trace")}
        self._categories = _Keys(kinds)
        # After each key, at the start of a record and of its arguments, and after an unknown key of either sort.
        states = len(WORDS) + 4
        self._kept = [
            np.array([column for column, _ in cells]),
            np.array([form for _, form in cells]),
            np.array(list(kinds.values())),
            np.zeros(states * 2 * LITERAL_BYTES + 8, np.uint8),
            np.zeros(states * 2, np.int64),
            np.zeros(states * 2, np.int64),
        ]
        addresses = [array.ctypes.data for array in self._kept]
        at = Field
        work = self._work
        work[at.KEY_SLOTS : at.KEY_SLOTS + 6] = [*self._keys.addresses(), *addresses[:2]]
        work[at.CATEGORY_SLOTS : at.CATEGORY_SLOTS + 5] = [*self._categories.addresses(), addresses[2]]
        work[at.LITERALS : at.LITERALS + 3] = addresses[3:]
        work[at.THREAD_SLOTS : at.THREAD_SLOTS + 2] = [self._thread_slots.ctypes.data, self._thread_codes.ctypes.data]

    def read_damaged(self, piece: Piece) -> None:
        self._parse_tolerantly(piece, int(self._work[Field.ROWS]))

    def _parse_tolerantly(self, piece: Piece, row: int) -> None:
        """What comes of it belongs before `row` of those that the scanner has read since the last were collected."""
        before = len(self._tolerant.builder)
        self._tolerant.read_piece(piece)
        self._places += [self._row + row] * (len(self._tolerant.builder) - before)

    def read(self, text: bytes, begin: int, offset: int) -> Reached:
        """Whole records of `text` from `begin` on; `offset` is where it stands in the file."""
        at, work = Field, self._work
        if text is not self._text:
            self._take(text)
        work[at.ODD] = 0
        start = self._bytes.ctypes.data
        reached = load("compiled", "scan", "iii")(work.ctypes.data, start + begin, start + len(text)) - start
        # Neighbours are decoded together.
        for row, records in groupby(self._odd[: work[at.ODD]].tolist(), itemgetter(2)):
            bounds = list(records)
            first, last = bounds[0][0] + begin, bounds[-1][1] + begin
            self._parse_tolerantly(Piece(text[first:last], offset + first, self._patience), row)
        return Reached(int(reached), int(work[at.LOOKED]) - start)

    def _take(self, text: bytes) -> None:
        """Room for everything that this text may hold. It is often asked for again, from behind a damaged place on."""
        self._collect()
        at = Field
        size = len(text)
        self._text, self._bytes = text, _padded(text)
        events = size // _SMALLEST_EVENT + 2
        if len(self._table) < events:
            self._table = np.empty((events, len(WHOLE)), np.int64)
            self._floats = np.empty((events, len(REAL)), np.float64)
            self._odd = np.empty((size // _SMALLEST_RECORD + 2, 3), np.int64)
        work, pool = self._work, self._pool
        pool.make_room(int(work[at.TEXTS]), int(work[at.POOL_USED]), size)
        self._written[:] = 0
        work[at.SLOTS : at.SLOTS + 5] = [
            pool.slots.ctypes.data, len(pool.slots) - 1, *(a.ctypes.data for a in (pool.bytes, pool.bounds, pool.flags))
        ]  # fmt: skip
        arrays = (self._table, self._floats, self._odd, self._written)
        work[at.TABLE : at.TABLE + 4] = [array.ctypes.data for array in arrays]

    def _collect(self) -> None:
        """Copy rows out of the scanner's table, each column as narrow as its values allow."""
        rows = int(self._work[Field.ROWS])
        self._work[Field.ROWS] = 0
        table, floats = self._table[:rows], self._floats[:rows]
        columns: dict[str, Array] = {name: table[:, number] for number, name in enumerate(WHOLE)}
        columns |= {name: floats[:, number] for number, name in enumerate(REAL)}
        for name, column in self._columns.items():
            column.extend(columns[name])
        for name, block in make_blocks(columns).items():
            self._blocks.setdefault(name, GrowingBlock(self._folder)).extend(block.rows + self._row, block.columns)
        self._row += rows

    def finish(self, text: ChromeText) -> Timeline:
        """One timeline from what both readers read, in the order of the file."""
        self._collect()
        tolerant = self._tolerant.finish_odd(text)
        texts = self._pool.texts(int(self._work[Field.TEXTS]))
        threads = [Thread(texts[p], texts[t]) for p, t in self._thread_codes[: self._work[Field.THREADS]].tolist()]
        joined = _Joined(texts, threads, tolerant)
        places = np.array(self._places, np.int64)
        core: dict[str, Array] = {}
        for name, column in self._columns.items():
            if joined.recode is not None and COLUMN[name].form == "text":
                column.recode(joined.recode)
            column.insert(places, joined.tolerant_cells(name, tolerant.core[name]))
            core[name] = column.finish()
        rows = self._row + len(tolerant)
        for spec in COLUMNS:
            if spec.block is None and spec.name not in core:
                core[spec.name] = absent(spec.name, rows)
        return Timeline(
            rank=None,
            world_size=None,
            core=core,
            blocks=self._join_blocks(joined, tolerant, places),
            texts=joined.texts,
            threads=joined.threads,
            repairs=tolerant.repairs,
        )

    def _join_blocks(self, joined: _Joined, tolerant: Timeline, places: Integers) -> dict[str, Block]:
        blocks = {name: block.finish(joined.recode) for name, block in self._blocks.items()}
        if len(places):
            # Rows move down by as many as were put in before them.
            blocks = {
                name: Block(block.rows + places.searchsorted(block.rows, side="right"), block.columns)
                for name, block in blocks.items()
            }
        for name, block in tolerant.blocks.items():
            columns = {n: joined.tolerant_cells(n, cells) for n, cells in block.columns.items()}
            blocks[name] = _merged(blocks.get(name), Block(places[block.rows] + block.rows, columns))
        return blocks


def _cell_of(word: str) -> tuple[int, int]:
    """Column and form of an argument."""
    name = COLUMN_OF_ARGUMENT.get(word)
    if name in WHOLE:
        return WHOLE.index(name), FORM_TEXT if COLUMN[name].form == "text" else FORM_INT
    return (REAL.index(name), FORM_FLOAT) if name in REAL else (0, FORM_IGNORED)


class _Joined:
    """Texts and threads of both readers as one numbering."""

    def __init__(self, texts: list[str], threads: list[Thread], tolerant: Timeline) -> None:
        codes: dict[str, int] = {}
        scanned = [codes.setdefault(text, len(codes)) for text in texts]
        # Two spellings of one text (an escaped letter, say) are one text.
        self.recode = None if scanned == list(range(len(scanned))) else np.array(scanned, np.int32)
        self._codes = np.array([codes.setdefault(text, len(codes)) for text in tolerant.texts], np.int64)
        self.texts = list(codes)
        numbers = {(thread.process, thread.thread): number for number, thread in enumerate(threads)}
        places = [numbers.setdefault((thread.process, thread.thread), len(numbers)) for thread in tolerant.threads]
        self._threads = np.array(places, np.int64)
        names = tolerant.metadata["thread_names"]
        self.threads = [Thread(*place, names.get(place, "")) for place in numbers]

    def tolerant_cells(self, name: str, cells: Array) -> Array:
        if COLUMN[name].form == "text":
            return mapped(cells, self._codes)
        return mapped(cells, self._threads) if name == "thread" else cells


def _merged(one: Block | None, other: Block) -> Block:
    """Rows of both blocks in their order."""
    if one is None:
        return other
    rows = np.concatenate([one.rows, other.rows])
    order = np.argsort(rows, kind="stable")
    columns: dict[str, Array] = {}
    for name in dict.fromkeys([*one.columns, *other.columns]):
        parts = [
            block.columns[name] if name in block.columns else absent(name, len(block.rows)) for block in (one, other)
        ]
        columns[name] = np.concatenate(parts)[order]
    return Block(rows=rows[order], columns=columns)


def _padded(text: bytes) -> Array:
    """With eight bytes behind the end, which the scanner may read but not use."""
    return np.frombuffer(text + bytes(8), np.uint8)


def _grown(array: Array, size: int) -> Array:
    if len(array) >= size:
        return array
    larger = np.zeros(max(size, len(array) * 3 // 2), array.dtype)
    larger[: len(array)] = array
    return larger
