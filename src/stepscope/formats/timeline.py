"""What one rank did, as columns: the form every trace reader produces and every analysis reads.

Rows are events. Text is interned: text columns hold indices into `texts`. Columns that only few rows have (collectives,
launch shapes, memory) are kept as blocks beside the rows, so that a trace of millions of events stays small; `column`
gives any of them in full length.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

if TYPE_CHECKING:
    from numpy.typing import NDArray


# As text: producers import this module on machines without numpy.
Array: TypeAlias = "NDArray[Any]"
Integers: TypeAlias = "NDArray[Any]"
"""Whole numbers of any width: readers choose the narrowest that fits."""

KINDS = (
    "operator", "runtime", "kernel", "copy", "set", "sync", "annotation", "device_annotation", "python", "counter",
    "memory", "overhead", "instant", "other",
)  # fmt: skip
"""What an event is. `sync` rows are the profiler's own record of a wait (of a stream, an event, a context); the call
that waited is a `runtime` row. `device_annotation` repeats a host annotation on the device and is never busy time."""

OPERATOR, RUNTIME, KERNEL, COPY, SET, SYNC, ANNOTATION, DEVICE_ANNOTATION = range(8)
PYTHON, COUNTER, MEMORY, OVERHEAD, INSTANT, OTHER = range(8, 14)

HOST_KINDS = (OPERATOR, RUNTIME, ANNOTATION, PYTHON)
"""Kinds that nest on a thread."""
DEVICE_KINDS = (KERNEL, COPY, SET)
"""Kinds that keep a device busy."""

MISSING = -1
"""In every whole-number and text column: this row has no such value. Counters' `value` uses NaN."""


class ColumnSpec(NamedTuple):
    """A column of the table."""

    name: str
    form: str
    """int, text (index into texts) or float."""
    block: str | None
    """The sparse block it is part of; None: every row has room for it."""
    arguments: Sequence[str]
    """How writers of Kineto traces spell the argument that it holds, the spelling in use first."""
    meaning: str


def _read_columns() -> Iterator[ColumnSpec]:
    with Path(__file__).with_name("columns.csv").open(encoding="utf-8", newline="") as file:
        for name, form, block, arguments, meaning in islice(csv.reader(file), 1, None):
            yield ColumnSpec(name, form, block or None, tuple(filter(None, arguments.split("|"))), meaning)


COLUMNS = tuple(_read_columns())
COLUMN = {spec.name: spec for spec in COLUMNS}
BLOCKS = tuple(dict.fromkeys(spec.block for spec in COLUMNS if spec.block))


class Thread(NamedTuple):
    """A host thread, as the trace calls it."""

    process: str
    thread: str
    name: str = ""


class Span(NamedTuple):
    """A step: its number and its interval on the host."""

    number: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Block:
    """Columns of the few rows that have them; those that no row has may be absent. `rows` ascends."""

    rows: Integers
    columns: Mapping[str, Array]


@dataclass(frozen=True)
class Timeline:
    """Events of one rank. Row order is file order; nothing is dropped, clipped or shifted."""

    rank: int | None
    world_size: int | None
    core: Mapping[str, Array]
    """The columns every row has, see COLUMNS."""
    blocks: Mapping[str, Block]
    texts: Sequence[str]
    threads: Sequence[Thread]
    steps: Sequence[Span] = ()
    """In order of time."""
    step_marker: str = "none"
    """How steps were found: profiler (ProfilerStep), optimizer, annotation `name`, or none (all is one step)."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """source, format, devices, groups, versions: what the file says of itself."""
    repairs: Mapping[str, int] = field(default_factory=dict)
    """What was repaired while reading, with counts; shown as warnings."""

    def __len__(self) -> int:
        return len(self.core["start_ns"])

    def column(self, name: str, first: int = 0, last: int | None = None) -> Array:
        """Any column, of all rows or of those from `first` to before `last`; those of blocks are filled with MISSING
        (NaN for numbers with fractions)."""
        import numpy as np

        spec = COLUMN[name]
        last = len(self) if last is None else last
        if spec.block is None:
            return self.core[name][first:last]
        block = self.blocks.get(spec.block)
        if spec.form == "float":
            full: Array = np.full(last - first, np.nan)
        else:
            full = np.full(last - first, MISSING, np.int32 if spec.form == "text" else np.int64)
        if block is not None and name in block.columns:
            begin, end = np.searchsorted(block.rows, (first, last))
            full[block.rows[begin:end] - first] = block.columns[name][begin:end]
        return full

    def text(self, name: str, row: int) -> str | None:
        """A text column's value in one row."""
        code = self.at(name, row)
        return None if code is None else self.texts[int(code)]

    def at(self, name: str, row: int) -> float | int | None:
        """One value; None where the row has none. Text columns give their code."""
        import numpy as np

        spec = COLUMN[name]
        if spec.block is None:
            value: Any = self.core[name][row]
        else:
            block = self.blocks.get(spec.block)
            if block is None or name not in block.columns:
                return None
            place = int(np.searchsorted(block.rows, row))
            if place >= len(block.rows) or block.rows[place] != row:
                return None
            value = block.columns[name][place]
        if spec.form == "float":
            return None if np.isnan(value) else float(value)
        return None if value == MISSING and name not in ("start_ns", "end_ns") else int(value)

    def rows(self, *kinds: int, step: int | None = None) -> Integers:
        """Rows of these kinds (of one step), in order of start, then longest first, then creation."""
        import numpy as np

        wanted = np.isin(self.core["kind"], kinds)
        if step is not None:
            wanted &= self.core["step"] == step
        rows = np.flatnonzero(wanted)
        start, end, index = (self.core[name][rows] for name in ("start_ns", "end_ns", "event_index"))
        return rows[np.lexsort((index, -end, start))]


def has_value(name: str, cells: Array) -> Array:
    """By cell of a column: whether there is a value in it."""
    import numpy as np

    return ~np.isnan(cells) if COLUMN[name].form == "float" else cells != MISSING


def make_blocks(columns: Mapping[str, Array]) -> dict[str, Block]:
    """Blocks from columns in full length: of the rows that have a value in one of them; columns without any are left
    out, and so are those that are in no block."""
    import numpy as np

    members: dict[str, dict[str, Array]] = {}
    used: dict[str, Array] = {}
    for name, cells in columns.items():
        block = COLUMN[name].block
        if block is not None and (filled := has_value(name, cells)).any():
            members.setdefault(block, {})[name] = cells
            used[block] = used[block] | filled if block in used else filled
    rows = {block: np.flatnonzero(filled) for block, filled in used.items()}
    return {
        block: Block(rows[block], {name: cells[rows[block]] for name, cells in named.items()})
        for block, named in members.items()
    }


def make_timeline(columns: Mapping[str, Array], **facts: Any) -> Timeline:
    """An unfinished timeline from its columns in full length, those without any value left out."""
    import numpy as np

    core = {
        spec.name: np.full(len(columns["start_ns"]), MISSING, np.int64)
        if spec.name not in columns
        else columns[spec.name].astype(np.uint8 if spec.name == "kind" else np.int64)
        for spec in COLUMNS
        if spec.block is None
    }
    return Timeline(core=core, blocks=make_blocks(columns), **facts)


TIME_LIMIT_NS = 1 << 62
"""Times beyond it (146 years) are no times; sums of two stay within 64 bits."""


class TimelineBuilder:
    """Makes a Timeline row by row: for formats whose files are small, for repairs and for tests."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}
        self._threads: dict[tuple[str, str], int] = {}
        self._thread_names: dict[tuple[str, str], str] = {}
        self._core: dict[str, list[int]] = {name: [] for name in ("start_ns", "end_ns", "kind", "name", "thread")}
        self._filled: dict[str, tuple[list[int], list[float]]] = {}
        """Rows and values of the other columns: most rows have few of them."""
        self.repairs: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._core["start_ns"])

    def code(self, text: str) -> int:
        return self._codes.setdefault(text, len(self._codes))

    def thread(self, process: object, thread: object) -> int:
        return self._threads.setdefault((str(process), str(thread)), len(self._threads))

    def name_thread(self, process: object, thread: object, name: str) -> None:
        self._thread_names[str(process), str(thread)] = name

    def thread_names(self) -> dict[tuple[str, str], str]:
        """Names given to threads, those without an event of their own included."""
        return dict(self._thread_names)

    def count_repair(self, what: str, count: int = 1) -> None:
        self.repairs[what] = self.repairs.get(what, 0) + count

    def _repair_times(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        if not (abs(start_ns) < TIME_LIMIT_NS and abs(end_ns) < TIME_LIMIT_NS):
            self.count_repair("events with an impossible time were put at zero")
            return 0, 0
        self.count_repair("events that end before they start were read as instants")
        return start_ns, start_ns

    def add(
        self,
        kind: int,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        thread: tuple[object, object] | None = None,
        **values: Any,
    ) -> int:
        """One event; `values` are other columns by name (text as text, None for missing). Returns its row."""
        if not -TIME_LIMIT_NS < start_ns <= end_ns < TIME_LIMIT_NS:
            start_ns, end_ns = self._repair_times(start_ns, end_ns)
        core = self._core
        row = len(core["start_ns"])
        core["start_ns"].append(start_ns)
        core["end_ns"].append(end_ns)
        core["kind"].append(kind)
        core["name"].append(self.code(name))
        core["thread"].append(MISSING if thread is None else self.thread(*thread))
        for column, value in values.items():
            if value is None:
                continue
            form = COLUMN[column].form
            rows, cells = self._filled.setdefault(column, ([], []))
            rows.append(row)
            cells.append(self.code(str(value)) if form == "text" else float(value) if form == "float" else int(value))
        return row

    def build(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Timeline:
        """The Timeline as read; `finish` (module finish) then adds categories, parents and steps."""
        import numpy as np

        columns: dict[str, Array] = {name: np.array(cells, np.int64) for name, cells in self._core.items()}
        for name, (rows, cells) in self._filled.items():
            columns[name] = np.full(len(self), np.nan if COLUMN[name].form == "float" else MISSING)
            columns[name][rows] = cells
        return make_timeline(
            columns,
            rank=rank,
            world_size=world_size,
            texts=list(self._codes),
            threads=[Thread(p, t, self._thread_names.get((p, t), "")) for p, t in self._threads],
            metadata=dict(metadata or {}),
            repairs=dict(self.repairs),
        )


EDGE_KINDS = ("host", "thread", "launch", "stream", "event", "sync", "queue", "collective", "graph", "data")
"""host: order on one thread; thread: hand-over between threads; launch: call to device work; stream: order on one
stream; event: record and wait between streams; sync: device work that a host call waited for; queue: a full launch
queue held the host; collective: a peer's arrival; graph: order inside a captured graph; data: a tensor was written and
then read."""


@dataclass(frozen=True)
class RowEdges:
    """Edges between rows of one timeline: `after[i]` could not go on before `before[i]` had got far enough."""

    before: Integers
    after: Integers
    kind: Integers
    """Index into EDGE_KINDS."""
    inferred: Integers
    """1 where the trace does not say so and order in time was the evidence."""


class LinkSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a graph and a timeline was joined; recordings keep it."""

    generation: str
    linked_share: float
    """The smaller of the two shares that follow."""
    device_share: float | None
    """Share of device events whose call was found; None where there are no device events."""
    operator_share: float | None
    """Share of the graph's operators whose host event was found; None where there are no operators."""
    device_events: int
    device_events_linked: int
    operators: int
    operators_linked: int
    nodes: int
    """Without the roots, which have no event."""
    nodes_linked: int
    reasons: dict[str, int]
    """Why the rest was not joined, with counts."""
    warnings: list[str]
