"""What one rank did, as columns: the form every trace reader produces and every analysis reads.

Rows are events. Text is interned: text columns hold indices into `texts`. Columns that only few rows have (collectives,
launch shapes, memory) are kept as blocks beside the rows, so that a trace of millions of events stays small; `column`
gives any of them in full length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    meaning: str


COLUMNS = (
    ColumnSpec("start_ns", "int", None, "when it began, in nanoseconds on the clock of the trace"),
    ColumnSpec("end_ns", "int", None, "when it ended; equal to start_ns for instants"),
    ColumnSpec("kind", "int", None, "index into KINDS"),
    ColumnSpec("name", "text", None, "as written in the trace"),
    ColumnSpec("category", "int", None, "index into CATEGORIES of the classifier; device rows only"),
    ColumnSpec("thread", "int", None, "index into threads; host rows only"),
    ColumnSpec("device", "int", None, "number of the device; device and sync rows"),
    ColumnSpec("stream", "int", None, "number of the stream; device and sync rows"),
    ColumnSpec("correlation", "int", None, "joins a runtime call and the device work it launched"),
    ColumnSpec("external_id", "int", None, "profiler's id of the host event, repeated on what it caused"),
    ColumnSpec("record_function_id", "int", None, "id of the operator call in the execution trace (rf_id)"),
    ColumnSpec("event_index", "int", None, "order of creation; decides between equal times"),
    ColumnSpec("sequence", "int", None, "autograd sequence number: pairs forward and backward"),
    ColumnSpec("forward_thread", "int", None, "above 0 on operators of the backward pass"),
    ColumnSpec(
        "parent", "int", None, "row of the enclosing host event; of device rows: of the call that launched them"
    ),
    ColumnSpec("step", "int", None, "number of the step the row belongs to; device rows: the step that launched them"),
    ColumnSpec("shapes", "text", None, "sizes of the inputs, JSON"),
    ColumnSpec("types", "text", None, "dtypes of the inputs, JSON"),
    ColumnSpec("strides", "text", "inputs", "strides of the inputs, JSON"),
    ColumnSpec("values", "text", "inputs", "scalar inputs, JSON"),
    ColumnSpec("bytes", "int", "transfer", "bytes copied, set or allocated"),
    ColumnSpec("collective", "text", "collective", "name of the collective as recorded"),
    ColumnSpec("group", "text", "collective", "name of the process group"),
    ColumnSpec("group_description", "text", "collective", "what the process group is for"),
    ColumnSpec("group_ranks", "text", "collective", "members, JSON list or as written"),
    ColumnSpec("group_size", "int", "collective", "number of members"),
    ColumnSpec("in_elements", "int", "collective", "elements this rank put in"),
    ColumnSpec("out_elements", "int", "collective", "elements this rank got"),
    ColumnSpec("dtype", "text", "collective", "element type as recorded"),
    ColumnSpec("in_splits", "text", "collective", "uneven shares of the input, JSON"),
    ColumnSpec("out_splits", "text", "collective", "uneven shares of the output, JSON"),
    ColumnSpec("collective_sequence", "int", "collective", "number of the call in its group"),
    ColumnSpec("peer", "int", "collective", "other rank of a send or receive"),
    ColumnSpec("rank_start", "int", "collective", "first global rank of the group"),
    ColumnSpec("rank_stride", "int", "collective", "distance between global ranks of the group"),
    ColumnSpec("sync_kind", "text", "sync", "Stream Sync, Event Sync, Context Sync or Stream Wait Event"),
    ColumnSpec("wait_stream", "int", "sync", "stream that was waited for"),
    ColumnSpec("wait_correlation", "int", "sync", "correlation of the event record that was waited for"),
    ColumnSpec("grid", "text", "launch", "blocks of the launch, JSON"),
    ColumnSpec("block", "text", "launch", "threads a block, JSON"),
    ColumnSpec("registers", "int", "launch", "registers a thread"),
    ColumnSpec("shared_memory", "int", "launch", "bytes of shared memory a block"),
    ColumnSpec("blocks_per_sm", "float", "launch", "blocks divided by multiprocessors"),
    ColumnSpec("warps_per_sm", "float", "launch", "warps divided by multiprocessors"),
    ColumnSpec("occupancy", "float", "launch", "estimated achieved occupancy, percent"),
    ColumnSpec("graph", "int", "graph", "id of the captured graph a kernel belongs to"),
    ColumnSpec("graph_node", "int", "graph", "id of its node"),
    ColumnSpec("value", "float", "counter", "value of a counter"),
    ColumnSpec("address", "int", "memory", "address that was allocated or freed"),
    ColumnSpec("total_allocated", "int", "memory", "bytes allocated after this event"),
    ColumnSpec("total_reserved", "int", "memory", "bytes the allocator held after this event"),
    ColumnSpec("arguments", "text", "rest", "arguments without a column of their own, JSON"),
)
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
        order: Integers = rows[np.lexsort((index, -end, start))]
        return order


TIME_LIMIT_NS = 1 << 62
"""Times beyond it (146 years) are no times; sums of two stay within 64 bits."""


class TimelineBuilder:
    """Makes a Timeline row by row: for formats whose files are small, for repairs and for tests."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}
        self._threads: dict[tuple[str, str], int] = {}
        self._thread_names: dict[tuple[str, str], str] = {}
        self._core: dict[str, list[int]] = {name: [] for name in ("start_ns", "end_ns", "kind", "name", "thread")}
        self._filled: dict[str, tuple[list[int], list[int]]] = {
            spec.name: ([], []) for spec in COLUMNS if spec.block is None and spec.name not in self._core
        }
        """Rows and values of the other columns that every row has room for: most rows have few of them."""
        self._sparse: dict[str, dict[int, dict[str, float | int]]] = {block: {} for block in BLOCKS}
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
            _, form, block, _ = COLUMN[column]
            cell = self.code(str(value)) if form == "text" else float(value) if form == "float" else int(value)
            if block is None:
                rows, cells = self._filled[column]
                rows.append(row)
                cells.append(int(cell))
            else:
                self._sparse[block].setdefault(row, {})[column] = cell
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

        core: dict[str, Array] = {name: np.array(cells, np.int64) for name, cells in self._core.items()}
        for name, (rows, cells) in self._filled.items():
            core[name] = np.full(len(self), MISSING, np.int64)
            core[name][rows] = cells
        core["kind"] = core["kind"].astype(np.uint8)
        return Timeline(
            rank=rank,
            world_size=world_size,
            core=core,
            blocks={name: self._block(name) for name in BLOCKS if self._sparse[name]},
            texts=list(self._codes),
            threads=[Thread(p, t, self._thread_names.get((p, t), "")) for p, t in self._threads],
            metadata=dict(metadata or {}),
            repairs=dict(self.repairs),
        )

    def _block(self, name: str) -> Block:
        import numpy as np

        cells = self._sparse[name]
        columns: dict[str, Array] = {}
        for spec in COLUMNS:
            if spec.block == name:
                missing = float("nan") if spec.form == "float" else MISSING
                values: Iterable[float | int] = [row.get(spec.name, missing) for row in cells.values()]
                columns[spec.name] = np.array(list(values), np.float64 if spec.form == "float" else np.int64)
        return Block(rows=np.array(list(cells), np.int64), columns=columns)


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
