"""Nsight Systems exports (`nsys export --type sqlite`): one timeline per process.

Tables and columns come and go between versions of the exporter, so both are asked for by presence.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from stepscope.core.errors import BadInputError, first_line
from stepscope.formats.nesting import look_up
from stepscope.formats.readers import TraceFormat
from stepscope.formats.readers.kineto.tolerant import NO_STREAM
from stepscope.formats.source import open_trace, rank_in_name
from stepscope.formats.timeline import (
    ANNOTATION,
    COLUMN,
    COPY,
    DEVICE_KINDS,
    INSTANT,
    KERNEL,
    MEMORY,
    MISSING,
    OPERATOR,
    OTHER,
    RUNTIME,
    SET,
    SYNC,
    Integers,
    Thread,
    Timeline,
    make_timeline,
)

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


class ExportTables:
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
        """One column as text by a whole-number key."""
        return {int(row[0]): str(row[1]) for row in self.rows(table, key, column) if isinstance(row[0], int)}

    def rows(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """Cells as they are; none where the table or a column is not there."""
        if not self.has(table, *columns):
            return []
        return [row for piece in self._pieces(table, map(quoted, columns)) for row in piece]

    def _pieces(self, table: str, listed: Iterable[str]) -> Iterator[list[tuple[Any, ...]]]:
        try:
            cursor = self._connection.execute(f"SELECT {', '.join(listed)} FROM {quoted(table)}")
            while piece := cursor.fetchmany(_ROWS_AT_ONCE):
                yield piece
        except DAMAGE as error:
            self.count_repair(f"{table} is damaged ({first_line(error)}): the rows before were read")

    def count(self, table: str) -> int:
        try:
            found = self._connection.execute(f"SELECT count(*) FROM {quoted(table)}").fetchone()
        except DAMAGE:
            return 0
        return int(found[0])

    def columns(self, table: str, wanted: Sequence[str]) -> dict[str, Integers]:
        """Whole-number columns; −1 where a row or the whole table lacks one. No rows: no such table, or no times in
        it."""
        asked = [column for column in wanted if self.has(table, column)] if self.has(table, "start") else []
        listed = [f"coalesce({quoted(column)}, -1)" for column in asked]
        pieces = [self._numbers(piece, table) for piece in self._pieces(table, listed)] if asked else []
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


def join_parts(parts: Sequence[RowPart], process: int) -> tuple[dict[str, Any], list[int]]:
    """Columns of the rows of one process, in the order of the parts; and the numbers of its threads, in the order of
    the column `thread`."""
    mine: list[tuple[RowPart, Integers]] = [(part, np.flatnonzero(part.process == process)) for part in parts]
    chosen = [(part, rows) for part, rows in mine if len(rows)]
    columns = {name: _joined(name, chosen) for name in {name for part, _ in chosen for name in part.cells}}
    columns["thread"], numbers = _thread_indices(chosen)
    return columns, numbers


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


MAGIC = b"SQLite format 3\0"
_RANGE_PUSHED, _RANGE_FREE, _MARK = (59, 70), (60, 71), 34
"""Kinds of NVTX events. Pushed ranges nest on their thread; free ones may end on another and overlap anything."""
_FREE_RANGES = -2
"""Number of the thread that free ranges are put on."""

_WAYS = ("", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
_UNIFIED_WAYS = {11: "HtoD", 12: "DtoH", 13: "DtoD"}
_MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static", 6: "Managed Static"}
_WAITS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}
_STREAM_SYNC = 3
_FREED = 1

_API_VERSION = re.compile(r"(?:_ptsz|_ptds)?(?:_v\d{4,})?$")
_OPERATOR = re.compile(r"(\w+::[\w.]+), (?=op_id|seq|sizes)")
_OPERATOR_SEQUENCE = re.compile(r"\bseq = (\d{1,18})\b")
_OPERATOR_SIZES = re.compile(r"\bsizes = (\[\[.*?\]\]|\[\])(?:,|$)")


def sniff(head: bytes, path: Path) -> bool:
    """Whether it is an SQLite file with a table that only Nsight Systems writes."""
    if not head.startswith(MAGIC):
        return False
    try:
        with closing(connect(path)) as connection:
            listed = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    except DAMAGE:
        return True  # damaged, or packed: `read` says so
    names = {str(name) for (name,) in listed}
    return any(name.startswith("CUPTI_ACTIVITY_KIND_") for name in names) or {"StringIds", "NVTX_EVENTS"} <= names


def read(path: Path, *, system_calls: bool = False) -> list[Timeline]:
    """One unfinished timeline per process that used a device (of all, where none did).

    `system_calls` reads calls of the operating system's libraries too (kind `other`): they are many and rarely matter.
    """
    with open_trace(path) as file:
        magic = file.read(len(MAGIC))
    if magic != MAGIC:
        hint = "unpack it first, or export the report: nsys export --type sqlite REPORT"
        raise BadInputError("is not an SQLite file", hint=hint, where=f"{path}: byte 0")
    try:
        with closing(connect(path)) as connection:
            return _Reader(ExportTables(connection), path, system_calls).timelines()
    except DAMAGE as error:
        raise BadInputError(
            f"the database cannot be read: {first_line(error)}",
            hint="export the report again: nsys export --type sqlite --force-overwrite true REPORT",
            where=str(path),
        ) from error


class _Reader:
    def __init__(self, tables: ExportTables, path: Path, system_calls: bool) -> None:
        self.tables = tables
        self.path = path
        self.system_calls = system_calls
        self.codes: dict[str, int] = {}

    def timelines(self) -> list[Timeline]:
        parts = [part for part in self._parts() if len(part.process)]
        if not parts:
            raise BadInputError(
                "holds no CUDA or NVTX event",
                hint="profile with --trace=cuda,nvtx; with --capture-range the program must call cudaProfilerStart",
                where=str(self.path),
            )
        parts, processes = self._settle_processes(parts)
        base_ns = self._start_of_session()
        return self._number_ranks([self._timeline(parts, process, base_ns) for process in processes], processes)

    def _parts(self) -> Iterator[RowPart]:
        yield self._calls("CUPTI_ACTIVITY_KIND_RUNTIME", RUNTIME)
        yield self._calls("CUPTI_ACTIVITY_KIND_DRIVER", RUNTIME)
        if self.system_calls:
            yield self._calls("OSRT_API", OTHER)
        yield self._kernels()
        yield self._graphs()
        yield self._copies()
        yield self._sets()
        yield from self._waits()
        yield self._memory()
        yield self._ranges()

    # --- texts -----------------------------------------------------------------------------------------------------

    def _code(self, text: str) -> int:
        return self.codes.setdefault(text, len(self.codes))

    def _name_codes(self, ids: Integers, *, api: bool = False) -> Integers:
        """Codes of texts that stand in StringIds."""

        def name_of(identity: int) -> str:
            text = self.tables.strings.get(identity)
            if text is None:
                self.tables.count_repair("names that the table of texts does not hold")
                return "unnamed" if identity == MISSING else f"unnamed {identity}"
            # Calls carry the version of the interface (cudaLaunchKernel_v7000): other profilers write the name alone.
            return _API_VERSION.sub("", text, count=1) if api else text

        return self._coded(ids, name_of)

    def _coded(self, keys: Integers, name_of: Any) -> Integers:
        """Codes of texts made from whole numbers; keys of three numbers are rows."""
        packed = keys
        if keys.ndim == 2:
            # One number sorts ten times faster than three. Real ones fit; clipped, strange ones still have some name.
            limits = np.array([(1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1])
            first, second, third = np.clip(keys, 0, limits).T
            packed = (first << 32) | (second << 16) | third
        _, places, inverse = np.unique(packed, return_index=True, return_inverse=True)
        codes = np.array([self._code(name_of(key)) for key in keys[places].tolist()], np.int64)
        return codes[inverse]

    # --- rows of the host ------------------------------------------------------------------------------------------

    def _calls(self, table: str, kind: int) -> RowPart:
        cells = self.tables.columns(table, ("start", "end", "globalTid", "correlationId", "nameId"))
        thread = cells["globalTid"]
        rows = self.tables.spans(cells, table) | {
            "kind": np.full(len(thread), kind),
            "name": self._name_codes(cells["nameId"], api=kind == RUNTIME),
            "correlation": cells["correlationId"] if kind == RUNTIME else np.full(len(thread), MISSING),
        }
        return RowPart(rows, _process(thread), thread)

    def _ranges(self) -> RowPart:
        table = "NVTX_EVENTS"
        cells = self.tables.columns(table, ("start", "end", "eventType", "globalTid", "textId"))
        event = cells["eventType"] if self.tables.has(table, "eventType") else np.full(len(cells["start"]), 59)
        chosen = np.flatnonzero(np.isin(event, (*_RANGE_PUSHED, *_RANGE_FREE, _MARK)))
        texts = self.tables.rows(table, "text")
        cells = {name: column[chosen] for name, column in cells.items()}
        mark, free = event[chosen] == _MARK, np.isin(event[chosen], _RANGE_FREE)
        without_end = cells["end"] == MISSING
        self.tables.count_repair("NVTX ranges without an end were read as instants", int((without_end & ~mark).sum()))
        cells["end"] = np.where(without_end, cells["start"], cells["end"])
        rows = self.tables.spans(cells, table) | {"kind": np.where(mark, INSTANT, ANNOTATION)}
        own = [texts[row][0] if row < len(texts) else None for row in chosen.tolist()]
        rows |= self._read_texts(own, cells["textId"].tolist(), rows["kind"])
        # Ranges that need not nest get a thread of their own, so that nothing seems to lie inside them by chance.
        return RowPart(rows, _process(cells["globalTid"]), np.where(free, _FREE_RANGES, cells["globalTid"]))

    def _read_texts(self, own: list[Any], ids: list[int], kinds: Integers) -> dict[str, Any]:
        """Names of ranges; those that PyTorch wrote for its operators become operators with their shapes."""
        seen: dict[str, tuple[int, int, int, bool]] = {}
        found = []
        for text, identity in zip(own, ids, strict=True):
            told = text if isinstance(text, str) else self.tables.strings.get(identity, "unnamed")
            if told not in seen:
                seen[told] = self._read_text(told)
            found.append(seen[told])
        name, shapes, sequence, operator = np.array(found or np.empty((0, 4)), np.int64).T
        kinds[operator > 0] = OPERATOR
        return {"name": name, "shapes": shapes, "sequence": sequence}

    def _read_text(self, told: str) -> tuple[int, int, int, bool]:
        operator = _OPERATOR.match(told)
        if operator is None:
            return self._code(told), MISSING, MISSING, False
        sizes, number = _OPERATOR_SIZES.search(told), _OPERATOR_SEQUENCE.search(told)
        shapes = self._code(sizes[1]) if sizes else MISSING
        return self._code(operator[1]), shapes, int(number[1]) if number else MISSING, True

    # --- rows of devices -------------------------------------------------------------------------------------------

    def _on_device(self, table: str, kind: int, more: Sequence[str] = ()) -> tuple[dict[str, Integers], dict[str, Any]]:
        """The table's own columns, and those of the timeline that all such tables share."""
        usual = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId", "graphId")
        cells = self.tables.columns(table, (*usual, *more))
        rows = self.tables.spans(cells, table) | {
            "kind": np.full(len(cells["start"]), kind),
            "device": cells["deviceId"],
            "stream": np.where(cells["streamId"] == NO_STREAM, MISSING, cells["streamId"]),
            "correlation": cells["correlationId"],
        }
        graph, node = cells["graphId"], cells["graphNodeId"]
        if (node > 0).any() or (graph > 0).any():
            # The upper half of a node's number is its graph, unless the exporter writes the graph itself.
            rows["graph"] = np.where(graph > 0, graph, np.where(node > 0, node >> 32, MISSING))
            rows["graph_node"] = np.where(node > 0, node, MISSING)
        return cells, rows

    def _kernels(self) -> RowPart:
        table = "CUPTI_ACTIVITY_KIND_KERNEL"
        shape = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
        memory = ("staticSharedMemory", "dynamicSharedMemory")
        names = ("demangledName", "shortName", "mangledName")
        cells, rows = self._on_device(table, KERNEL, (*shape, *memory, *names, "registersPerThread"))
        name = cells["demangledName"]
        for other in names[1:]:
            name = np.where(name < 0, cells[other], name)
        rows["name"] = self._name_codes(name)
        if self.tables.has(table, *shape):
            sizes = np.stack([cells[column] for column in shape], axis=1)
            rows["grid"], rows["block"] = self._coded(sizes[:, :3], str), self._coded(sizes[:, 3:], str)
            rows["registers"] = cells["registersPerThread"]
            rows["shared_memory"] = sum(np.maximum(cells[column], 0) for column in memory)
            rows |= self._coverage(cells["deviceId"], sizes)
        return RowPart(rows, _process(cells["globalPid"]))

    def _coverage(self, device: Integers, sizes: Integers) -> dict[str, Any]:
        labels = self.tables.labels("TARGET_INFO_GPU", "smCount")
        units_of = {number: int(count) for number, count in labels.items() if count.isdigit() and int(count)}
        if not units_of:
            return {}
        # CUDA numbers the devices a process may see, the report those of the machine: where a number is not there, the
        # largest device stands in, since those of one machine are nearly always alike.
        used, inverse = np.unique(device, return_inverse=True)
        units = np.array([units_of.get(number, max(units_of.values())) for number in used.tolist()], np.float64)[
            inverse
        ]
        counts = np.maximum(sizes, 1).astype(np.float64)
        blocks = counts[:, :3].prod(axis=1) / units
        return {"blocks_per_sm": blocks, "warps_per_sm": blocks * np.ceil(counts[:, 3:].prod(axis=1) / 32)}

    def _graphs(self) -> RowPart:
        """Whole graphs, where the profiler was told not to look inside: one row keeps the device busy."""
        cells, rows = self._on_device("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", KERNEL)
        rows["name"] = self._coded(cells["graphId"], lambda graph: f"CUDA graph {graph}")
        self.tables.count_repair("CUDA graphs recorded as a whole: the kernels inside are unknown", len(cells["start"]))
        return RowPart(rows, _process(cells["globalPid"]))

    def _copies(self) -> RowPart:
        cells, rows = self._on_device("CUPTI_ACTIVITY_KIND_MEMCPY", COPY, ("bytes", "copyKind", "srcKind", "dstKind"))
        memories = _MEMORIES | self.tables.labels("ENUM_CUDA_MEM_KIND", "label")

        def name_of(key: list[int]) -> str:
            kind, source, target = key
            way = _WAYS[kind] if 0 < kind < len(_WAYS) else _UNIFIED_WAYS.get(kind, "unknown")
            unified = "Unified, " if kind in _UNIFIED_WAYS else ""
            return f"Memcpy {way} ({unified}{memories.get(source, 'Unknown')} -> {memories.get(target, 'Unknown')})"

        rows["name"] = self._coded(np.stack([cells[c] for c in ("copyKind", "srcKind", "dstKind")], axis=1), name_of)
        rows["bytes"] = cells["bytes"]
        return RowPart(rows, _process(cells["globalPid"]))

    def _sets(self) -> RowPart:
        cells, rows = self._on_device("CUPTI_ACTIVITY_KIND_MEMSET", SET, ("bytes", "memKind"))
        memories = _MEMORIES | self.tables.labels("ENUM_CUDA_MEM_KIND", "label")
        rows["name"] = self._coded(cells["memKind"], lambda kind: f"Memset ({memories.get(kind, 'Unknown')})")
        rows["bytes"] = cells["bytes"]
        return RowPart(rows, _process(cells["globalPid"]))

    def _waits(self) -> Iterator[RowPart]:
        recorded, rows = self._on_device("CUPTI_ACTIVITY_KIND_CUDA_EVENT", SYNC, ("eventSyncId",))
        rows["name"] = rows["sync_kind"] = self._coded(recorded["start"] * 0, lambda _: "Event Record")
        yield RowPart(rows, _process(recorded["globalPid"]))
        cells, rows = self._on_device("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", SYNC, ("syncType", "eventSyncId"))
        rows["name"] = rows["sync_kind"] = self._coded(cells["syncType"], lambda kind: _WAITS.get(kind, "Unknown"))
        rows["wait_stream"] = np.where(cells["syncType"] == _STREAM_SYNC, rows["stream"], MISSING)
        rows["wait_correlation"] = look_up(cells["eventSyncId"], recorded["eventSyncId"], recorded["correlationId"])
        yield RowPart(rows, _process(cells["globalPid"]))

    def _memory(self) -> RowPart:
        table = "CUDA_GPU_MEMORY_USAGE_EVENTS"
        wanted = ("start", "deviceId", "globalPid", "address", "bytes", "memoryOperationType", "correlationId")
        cells = self.tables.columns(table, wanted)
        freed = cells["memoryOperationType"] == _FREED
        rows = self.tables.spans(cells | {"end": cells["start"]}, table) | {
            "kind": np.full(len(freed), MEMORY),
            "name": np.full(len(freed), self._code("[memory]")),
            "device": cells["deviceId"],
            "correlation": cells["correlationId"],
            "address": cells["address"],
            "bytes": np.where(freed, -cells["bytes"], cells["bytes"]),
        }
        return RowPart(rows, _process(cells["globalPid"]))

    # --- timelines -------------------------------------------------------------------------------------------------

    def _settle_processes(self, parts: list[RowPart]) -> tuple[list[RowPart], list[int]]:
        """Every row gets a process; those that used a device are returned, or all where none did."""
        known = sorted({process for part in parts for process in np.unique(part.process).tolist()} - {MISSING})
        first = known[0] if known else 0
        nameless = sum(int((part.process == MISSING).sum()) for part in parts)
        if len(known) > 1:
            self.tables.count_repair("rows that name no process were given to the first one", nameless)
        settled = [part._replace(process=np.where(part.process == MISSING, first, part.process)) for part in parts]
        busy: set[int] = set()
        for part in settled:
            busy |= set(np.unique(part.process[np.isin(part.cells["kind"], DEVICE_KINDS)]).tolist())
        return settled, sorted(busy) or known or [first]

    def _timeline(self, parts: list[RowPart], process: int, base_ns: int) -> Timeline:
        columns, numbers = join_parts(parts, process)
        for name in ("start_ns", "end_ns"):
            columns[name] = columns[name] + base_ns
        return make_timeline(
            columns,
            rank=None,
            world_size=None,
            texts=list(self.codes),
            threads=self._threads(process, numbers),
            metadata=self._describe(process, base_ns),
            repairs=dict(self.tables.repairs),
        )

    def _threads(self, process: int, numbers: list[int]) -> list[Thread]:
        pid = str(process & 0xFFFFFF) if process else ""
        ids = self.tables.labels("ThreadNames", "nameId", "globalTid")
        threads = []
        for number in numbers:
            told = ids.get(number, "")
            name = self.tables.strings.get(int(told), "") if told.isdigit() else ""
            if number == _FREE_RANGES:
                threads.append(Thread(pid, "ranges", "NVTX ranges"))
            else:
                threads.append(Thread(pid, "" if number == MISSING else str(number & 0xFFFFFF), name))
        return threads

    def _describe(self, process: int, base_ns: int) -> dict[str, Any]:
        tables = self.tables
        versions = tables.rows("META_DATA_EXPORT", "name", "value")
        names = tables.labels("PROCESSES", "name", "globalPid")
        unread = [] if self.system_calls else [table for table in ("OSRT_API",) if tables.has(table)]
        return {
            "format": "nsys-sqlite",
            "source": str(self.path),
            "process": str(process & 0xFFFFFF),
            "process_name": next((name for key, name in names.items() if key >> 24 == process), ""),
            "devices": self._devices(),
            "versions": {str(name): str(value) for name, value in versions if "VERSION" in str(name).upper()},
            "base_ns": base_ns,
            "left_out": {table: tables.count(table) for table in unread},
        }

    def _devices(self) -> list[dict[str, Any]]:
        """As the header of a Kineto trace spells them."""
        spelled = {
            "id": "id",
            "name": "name",
            "totalMemory": "totalGlobalMem",
            "computeMajor": "computeMajor",
            "computeMinor": "computeMinor",
            "smCount": "numSms",
        }
        table = "TARGET_INFO_GPU"
        present = [column for column in spelled if self.tables.has(table, column)]
        rows = self.tables.rows(table, *present) if present else []
        return [{spelled[column]: cell for column, cell in zip(present, row, strict=True)} for row in rows]

    def _start_of_session(self) -> int:
        rows = self.tables.rows("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
        value = rows[0][0] if rows else 0
        return value if isinstance(value, int) and 0 <= value < 1 << 61 else 0

    def _number_ranks(self, timelines: list[Timeline], processes: list[int]) -> list[Timeline]:
        told = self.tables.labels("MPI_RANKS", "rank", "globalPid")
        ranks = {key >> 24: int(rank) for key, rank in told.items() if rank.isdigit()}
        world: int | None = len(processes)
        found: list[int | None]
        if len({ranks.get(process) for process in processes} - {None}) == len(processes):
            found, source = [ranks[process] for process in processes], "content"
            world = len(ranks)
        elif len(processes) == 1:
            found, source, world = [rank_in_name(self.path)], "name", None
        else:
            # Nothing says who is who; launchers start ranks in order, so process numbers mostly ascend with them.
            found, source = list(range(len(processes))), "order of processes"
        numbered = [
            replace(timeline, rank=rank, world_size=world, metadata={**timeline.metadata, "rank_from": source})
            for rank, timeline in zip(found, timelines, strict=True)
        ]
        return sorted(numbered, key=lambda timeline: timeline.rank or 0)


def _process(serial: Integers) -> Integers:
    """Machine and pid out of a serialised id; −1 where there is none."""
    return np.where(serial < 0, MISSING, serial >> 24)


FORMAT = TraceFormat("nsys_sqlite", sniff, read)
