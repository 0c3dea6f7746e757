"""Traces of XLA programs (JAX, PyTorch/XLA, TensorFlow) as the profiler's viewer gets them: one timeline per device.

On a device only what occupies it counts: operations on TPU, streams on GPU. Modules, steps and name scopes lie over
them and become annotations. The start and the done of an asynchronous operation are two short rows; what happened is
the time between them, which becomes a row of its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from decimal import Decimal
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stepscope.core.dtypes import dtype_bytes, dtype_name
from stepscope.core.errors import BadInputError
from stepscope.formats import classify as classes
from stepscope.formats.readers import TraceFormat
from stepscope.formats.readers.kineto.text import UNREADABLE
from stepscope.formats.readers.kineto.tolerant import Event, EventReader
from stepscope.formats.source import identity_of
from stepscope.formats.timeline import (
    ANNOTATION,
    COPY,
    DEVICE_ANNOTATION,
    INSTANT,
    KERNEL,
    OPERATOR,
    PYTHON,
    SET,
    Span,
    Timeline,
    TimelineBuilder,
)

_OPERATION = re.compile(
    r"%?(all-reduce-scatter|ragged-all-to-all|all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    r"|collective-broadcast|send|recv|copy)(?:-(start|done))?(?=[.\s]|$)"
)
_CONTAINERS = re.compile(r"%?(while|conditional|call)(?:\.\d+)*$")
_SHAPE = re.compile(r"\b(pred|[suf]\d+\w*|bf16|c64|c128|f8\w+)\[([\d,<= ]{0,200})\]")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d, ]*)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[(\d{1,9}),(\d{1,9})\]<=\[([\d,]{1,60})\](T\()?")
_STARTED = re.compile(r"%([\w-]{1,100}-start[\w.-]{0,100}|(?:send|recv)[.\d]{0,20})(?![\w-])")
_RESULT = re.compile(r"%?[\w.-]+ = (.*?) [\w-]+\(")
_LONGEST = 1 << 14
_MOST_ELEMENTS = 1 << 50
_LARGEST_GROUP = 1 << 12
"""Numbers beyond these are damage; their product stays within 64 bits."""


class DataMovement(NamedTuple):
    """An operation that moves data."""

    name: str
    """As XLA names it: all-reduce, send, copy, …"""
    phase: str
    """start or done of an asynchronous operation; empty for one that is whole."""


def parse_operation(name: str, category: str = "") -> DataMovement | None:
    """What an operation moves, by its name or its HLO category; None for computation."""
    for text in (name, category.removesuffix(" fusion")):
        found = _OPERATION.match(text)
        if found and not (found[1] == "copy" and not found[2]):
            # XLA's own name for an all-reduce of which each keeps a part.
            operation = "reduce-scatter" if found[1] == "all-reduce-scatter" else found[1]
            # A send and a receive are always in two parts, the first without a name of its own.
            return DataMovement(operation, found[2] or ("start" if operation in ("send", "recv") else ""))
    return None


def is_container(name: str, category: str = "") -> bool:
    """Loops and calls enclose the operations they run: their rows are no work of their own."""
    return category in ("while", "conditional", "call") or bool(_CONTAINERS.match(name))


def started_by(long_name: str) -> str | None:
    """Name of the start that a `-done` waits for."""
    found = _STARTED.search(long_name[:_LONGEST])
    return found[1] if found else None


def parse_shapes(text: str) -> list[tuple[str, int]]:
    """Element type and number of elements of every array in a shape or a tuple of shapes."""
    return [
        (dtype, min(prod(map(int, re.findall(r"\d+", sizes))), _MOST_ELEMENTS))
        for dtype, sizes in _SHAPE.findall(text[:_LONGEST])
    ]


def result_shapes(long_name: str) -> list[tuple[str, int]]:
    """Arrays that an operation gives."""
    found = _RESULT.match(long_name[:_LONGEST])
    return parse_shapes(found[1]) if found else []


def array_bytes(dtype: str, elements: int) -> int | None:
    """Bytes of an array; None for types smaller than a byte or not known."""
    width = dtype_bytes(dtype)
    return None if width is None or elements >= _MOST_ELEMENTS else width * elements


def parse_groups(long_name: str) -> tuple[int | None, list[int] | None]:
    """Size of the groups, and the members of the first one where they are written out."""
    text = long_name[:_LONGEST]
    if found := _LISTED_GROUPS.search(text):
        ranks = [int(rank) for rank in re.findall(r"\d{1,9}", found[1])]
        return (len(ranks), ranks) if ranks else (None, None)
    if found := _COUNTED_GROUPS.search(text):
        size = int(found[2])
        if size > _LARGEST_GROUP:
            return None, None
        # Without a permutation the groups are runs of neighbours.
        return size, list(range(size)) if found[4] is None else None
    return None, None


def collective_columns(operation: DataMovement, long_name: str) -> dict[str, object]:
    """Columns of the collective block, as far as the text tells."""
    size, ranks = parse_groups(long_name)
    columns: dict[str, object] = {"collective": operation.name, "group_size": size}
    if ranks is not None:
        columns["group_ranks"] = str(ranks)
    shapes = result_shapes(long_name)
    if operation.phase == "start" and len(shapes) > 1 and operation.name != "all-reduce":
        # A start gives its input and its output (and contexts without elements that matter).
        shapes = [shapes[1]]
    if not shapes or len({dtype for dtype, _ in shapes}) > 1:
        return columns
    out = sum(elements for _, elements in shapes)
    if out >= _MOST_ELEMENTS:
        return columns
    columns |= {"dtype": dtype_name(shapes[0][0]), "out_elements": out, "in_elements": out}
    if operation.name == "all-gather":
        columns["in_elements"] = out // size if size else None
    elif operation.name == "reduce-scatter":
        columns["in_elements"] = out * size if size else None
    return columns


_CATEGORIES_OF_CLASS = {
    classes.ELEMENTWISE: "loop fusion|non-fusion elementwise|data formatting|copy|copy fusion|broadcast|reshape"
    "|transpose|slice|dynamic-slice|dynamic-update-slice|concatenate|pad|iota|gather|scatter|rng-bit-generator",
    classes.REDUCTION: "reduce|reduce-window|reduction|select-and-scatter",
    classes.SORT: "sort",
}
_CLASS_OF_CATEGORY = {name: kind for kind, names in _CATEGORIES_OF_CLASS.items() for name in names.split("|")}


def category_of(category: str, origin: str) -> int | None:
    """Class of an operation by its HLO category and the framework's name for it; None where neither tells.

    Compilers for TPU write matrix products as convolutions, so that the origin decides between the two.
    """
    if category in _CLASS_OF_CATEGORY:
        return _CLASS_OF_CATEGORY[category]
    if category.startswith(("convolution", "dot", "gemm")):
        return classes.CONVOLUTION if re.search(r"conv_general|conv2d|/conv\b", origin) else classes.GEMM
    return None


_DEVICE = re.compile(r"(?:^|\s)/device:(TPU|GPU|CUSTOM|CPU|\w{1,16}):(\d{1,6})")
_STREAM = re.compile(r"Stream #(\d{1,9})")
_COPY_NAME = re.compile(r"Memcpy\s?(\w)2(\w)|Memcpy\s?(\w)to(\w)", re.IGNORECASE)
_DETAIL = re.compile(r"(\w+):([^ ]+)")
_WORK_LINES = ("XLA Ops", "Async XLA Ops", "Sparse Core Ops", "Host Offload Ops")
_ASYNC_STREAM = 1 << 20
"""Stream that joined starts and dones are put on: they run beside the operations."""
_KEPT = ("hlo_category", "long_name", "tf_op", "source", "hlo_module", "bytes_accessed", "model_flops")
_LONGEST_TEXT = 1 << 14
_LATEST_PS = 1 << 70


class _Row(NamedTuple):
    line: tuple[str, str]
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]
    instant: bool


class _Device(NamedTuple):
    kind: str
    number: int


def sniff(head: bytes, path: Path) -> bool:
    """Whether it is a Chrome trace with processes named as XLA's profiler names them."""
    if b"traceEvents" not in head and b'"ph"' not in head:
        return False
    if b"schemaVersion" in head or b"ProfilerStep#" in head:
        return False  # PyTorch's own, which may speak of XLA in its names
    return b"/device:TPU:" in head or b"/device:GPU:" in head or b"XLA Ops" in head or b"highres-ticks" in head


def read(path: Path) -> list[Timeline]:
    """One unfinished timeline per device; rows of the host go with the first. A file without devices gives one."""
    collected = _Collector(path)
    collected.collect()
    return collected.timelines()


class _Collector(EventReader):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.processes: dict[str, str] = {}
        self.lines: dict[tuple[str, str], str] = {}
        self.rows: list[_Row] = []

    def collect(self) -> None:
        self.count_damage(self.read())
        if not self.rows:
            damage = "" if self.first_damage is None else f": the first damage is at byte {self.first_damage}"
            raise BadInputError(
                "holds no event that could be read",
                hint="record it again; the profiler's viewer reads files named *.trace.json.gz",
                where=f"{self.path}{damage}",
            )

    def loosen(self, loose: dict[str, Any]) -> Event | None:
        """Fields of wrong types make an event unreadable here."""
        return None

    def add(self, event: Event) -> None:
        line = (identity_of(event.pid), identity_of(event.tid))
        if event.ph == "M":
            self._take_name(event, line)
            return
        is_last = event.name is None and not bytes(event.ts)  # the list of the viewer ends with an empty event
        if event.ph not in ("X", "i", "I") or is_last:
            return  # flows and counters
        start_ps, duration_ps = parse_picoseconds(bytes(event.ts)), parse_picoseconds(bytes(event.dur))
        if start_ps is None:
            self.builder.count_repair("events without a usable time were left out")
            return
        if duration_ps is None or duration_ps < 0:
            if event.ph == "X" and bytes(event.dur):
                self.builder.count_repair("events without a usable duration were read as instants")
            duration_ps = 0
        name = (event.name or "")[:_LONGEST_TEXT]
        # Both ends are cut down to nanoseconds, so that neighbours do not overlap by rounding.
        start_ns, end_ns = start_ps // 1000, (start_ps + duration_ps) // 1000
        self.rows.append(_Row(line, name, start_ns, end_ns, self._decoded(event), event.ph != "X"))

    def _decoded(self, event: Event) -> dict[str, Any]:
        text = bytes(event.args)
        if len(text) <= 2:
            return {}
        try:
            decoded = msgspec.json.decode(text)
        except UNREADABLE:
            decoded = None
        if isinstance(decoded, dict):
            return decoded
        self.builder.count_repair("arguments that are no JSON object were left out")
        return {}

    def _take_name(self, event: Event, line: tuple[str, str]) -> None:
        given = self._decoded(event).get("name")
        if isinstance(given, str) and event.name == "process_name":
            self.processes[line[0]] = given[:_LONGEST_TEXT]
        elif isinstance(given, str) and event.name == "thread_name":
            self.lines[line] = given[:_LONGEST_TEXT]

    def timelines(self) -> list[Timeline]:
        devices: dict[str, _Device] = {}
        for process, name in self.processes.items():
            if found := _DEVICE.search(name):
                devices[process] = _Device(found[1], int(found[2]))
        by_device: dict[_Device, list[_Row]] = {device: [] for device in sorted(set(devices.values()))}
        host: list[_Row] = []
        for row in self.rows:
            device = devices.get(row.line[0])
            (host if device is None else by_device[device]).append(row)
        by_device = {device: rows for device, rows in by_device.items() if rows}
        if not by_device:
            builder = _DeviceBuilder(self, _Device("host", 0))
            builder.add_host(host)
            return [replace(builder.finish(0, True, True), rank=None)]
        made = []
        for place, (device, rows) in enumerate(by_device.items()):
            builder = _DeviceBuilder(self, device)
            builder.add_device(rows)
            if place == 0:
                builder.add_host(host)
            made.append(builder.finish(len(by_device), bool(host), place == 0))
        return made


class _DeviceBuilder:
    def __init__(self, collected: _Collector, device: _Device) -> None:
        self.collected = collected
        self.device = device
        self.builder = TimelineBuilder()
        self.builder.repairs.update(collected.builder.repairs)
        self.joined = 0
        self.steps: list[Span] = []
        self.step_marker = "none"
        self._open: dict[str, list[tuple[_Row, DataMovement]]] = defaultdict(list)

    # --- rows of the device ----------------------------------------------------------------------------------------

    def add_device(self, rows: list[_Row]) -> None:
        rows = sorted(rows, key=lambda row: row.start_ns)
        names = self.collected.lines
        on_streams = any(_STREAM.match(names.get(row.line, "")) for row in rows)
        for row in rows:
            line = names.get(row.line, "")
            stream = _STREAM.match(line)
            if row.instant:
                self._annotate(row)
            elif stream:
                self._add_stream_work(row, int(stream[1]))
            elif line in _WORK_LINES and not on_streams:
                self._add_operation(row)
            else:
                self._annotate(row)
        for waiting in self._open.values():
            for row, operation in waiting:
                # Its done lies outside the recording: what was seen of it stays.
                self.builder.count_repair("asynchronous operations without an end were read as they stand")
                self._add_moving(row, operation, row.start_ns, row.end_ns, row.name)
        self._find_steps(rows)

    def _annotate(self, row: _Row) -> None:
        kind = INSTANT if row.instant else DEVICE_ANNOTATION
        place: dict[str, Any] = {"device": self.device.number, "stream": _number(row.line[1])}
        self.builder.add(kind, row.name, row.start_ns, row.end_ns, **place)

    def _add_operation(self, row: _Row) -> None:
        category = _text(row.args, "hlo_category")
        if is_container(row.name, category):
            self._annotate(row)
            return
        operation = parse_operation(row.name, category)
        if operation is None:
            self._add_kernel(row, category)
        elif operation.phase == "start":
            self._annotate(row)
            self._open[row.name.lstrip("%")].append((row, operation))
        elif operation.phase == "done":
            self._annotate(row)
            self._join(row, operation)
        else:
            self._add_moving(row, operation, row.start_ns, row.end_ns, row.name)

    def _join(self, done: _Row, operation: DataMovement) -> None:
        """The start a done belongs to: the one it names, else the one with its number, else the oldest of its kind."""
        named = started_by(_text(done.args, "long_name"))
        told = done.name.lstrip("%")
        for candidate in (named, told.replace("-done", "-start"), told.replace("-done", "")):
            if candidate and self._open.get(candidate):
                self._finish_pair(self._open[candidate].pop(0), done)
                return
        same = [
            (waiting[0][0].start_ns, key)
            for key, waiting in self._open.items()
            if waiting and waiting[0][1].name == operation.name
        ]
        if same:
            self._finish_pair(self._open[min(same)[1]].pop(0), done)
        else:
            self.builder.count_repair("asynchronous operations without a start were read as they stand")
            self._add_moving(done, operation, done.start_ns, done.end_ns, done.name)

    def _finish_pair(self, started: tuple[_Row, DataMovement], done: _Row) -> None:
        row, operation = started
        self.joined += 1
        self._add_moving(row, operation, row.start_ns, done.end_ns, row.name.replace("-start", "", 1))

    def _add_moving(self, row: _Row, operation: DataMovement, start_ns: int, end_ns: int, name: str) -> None:
        long_name = (
            _text(row.args, "long_name") or f"{row.name} = {_text(row.args, 'shape_with_layout')} {operation.name}("
        )
        stream = _ASYNC_STREAM if operation.phase else _number(row.line[1])
        place: dict[str, Any] = {"device": self.device.number, "stream": stream, "arguments": self._kept(row)}
        if operation.name == "copy":
            shapes = result_shapes(long_name)
            size = array_bytes(*shapes[0]) if shapes else None
            self.builder.add(COPY, name, start_ns, end_ns, bytes=size, **place)
        else:
            place |= collective_columns(operation, long_name)
            self.builder.add(KERNEL, name, start_ns, end_ns, **place)

    def _add_kernel(self, row: _Row, category: str) -> None:
        self.builder.add(
            KERNEL,
            row.name,
            row.start_ns,
            row.end_ns,
            device=self.device.number,
            stream=_number(row.line[1]),
            category=category_of(category, _text(row.args, "tf_op") or _text(row.args, "long_name")),
            arguments=self._kept(row),
        )

    def _add_stream_work(self, row: _Row, stream: int) -> None:
        details = dict(_DETAIL.findall(_text(row.args, "kernel_details")[:1024]))
        copied = dict(_DETAIL.findall(_text(row.args, "memcpy_details")[:1024]))
        values: dict[str, Any] = {"device": self.device.number, "stream": stream, "arguments": self._kept(row)}
        values["correlation"] = _number(row.args.get("correlation_id"))
        copy = _COPY_NAME.match(row.name)
        if copied or copy:
            way = "to".join(letter.upper() for letter in (copy.groups() if copy else ()) if letter) or "unknown"
            source, target = copied.get("kind_src", "unknown"), copied.get("kind_dst", "unknown")
            name = f"Memcpy {way} ({source.capitalize()} -> {target.capitalize()})"
            self.builder.add(COPY, name, row.start_ns, row.end_ns, bytes=_number(copied.get("size")), **values)
        elif row.name.lower().startswith("memset"):
            self.builder.add(SET, row.name, row.start_ns, row.end_ns, **values)
        else:
            values |= {
                "grid": _sizes(details.get("grid")),
                "block": _sizes(details.get("block")),
                "registers": _number(details.get("regs")),
                "occupancy": _real(details.get("occ_pct")),
            }
            self.builder.add(KERNEL, row.name, row.start_ns, row.end_ns, **values)

    def _kept(self, row: _Row) -> str | None:
        """Arguments that are the same for every run of an operation, so that texts stay few."""
        kept = {key: value for key in _KEPT if isinstance(value := row.args.get(key), str | int | float)}
        return msgspec.json.encode(kept).decode()[:_LONGEST_TEXT] if kept else None

    def _find_steps(self, rows: list[_Row]) -> None:
        names = self.collected.lines
        steps = [row for row in rows if names.get(row.line) == "Steps" and row.end_ns > row.start_ns]
        self.step_marker = "annotation Steps"
        if not steps:
            steps, name = _longest_module([row for row in rows if names.get(row.line) == "XLA Modules"])
            self.step_marker = f"annotation {name}" if steps else "none"
        for row in steps:
            if self.steps and row.start_ns < self.steps[-1].end_ns:
                continue  # a step inside another would count its time twice
            number = int(row.name) if row.name.isdigit() and len(row.name) < 10 else len(self.steps)
            if self.steps and number <= self.steps[-1].number:
                number = self.steps[-1].number + 1
            self.steps.append(Span(number, row.start_ns, row.end_ns))

    # --- rows of the host ------------------------------------------------------------------------------------------

    def add_host(self, rows: list[_Row]) -> None:
        for row in rows:
            kind = PYTHON if row.name.startswith("$") else OPERATOR if "hlo_op" in row.args else ANNOTATION
            kept = self._kept(row) if kind == OPERATOR else None
            self.builder.add(
                INSTANT if row.instant else kind, row.name, row.start_ns, row.end_ns, thread=row.line, arguments=kept
            )
            if row.line in self.collected.lines:
                self.builder.name_thread(*row.line, self.collected.lines[row.line])

    def finish(self, devices: int, has_host: bool, holds_host: bool) -> Timeline:
        host = "none recorded" if not has_host else "here" if holds_host else "with the first device"
        metadata = {
            "format": "xla",
            "source": str(self.collected.path),
            "device_type": self.device.kind,
            "devices": [{"id": self.device.number, "name": f"{self.device.kind} {self.device.number}"}]
            if devices
            else [],
            "devices_in_file": devices,
            "host_rows": host,
            "joined_pairs": self.joined,
            "rank_from": "device",
        }
        built = self.builder.build(rank=self.device.number, metadata=metadata)
        return replace(built, steps=tuple(self.steps), step_marker=self.step_marker if self.steps else "none")


def _longest_module(rows: list[_Row]) -> tuple[list[_Row], str]:
    """Runs of the program that took most of the time, where there are several: each is a step."""
    times: dict[str, int] = defaultdict(int)
    for row in rows:
        times[row.name] += row.end_ns - row.start_ns
    if not times:
        return [], ""
    name = max(times, key=lambda module: times[module])
    chosen = [row for row in rows if row.name == name]
    return (chosen, name) if len(chosen) > 1 and times[name] * 2 >= sum(times.values()) else ([], "")


def parse_picoseconds(text: bytes) -> int | None:
    """Decimal microseconds, from their digits; None where it is no number."""
    try:
        value = Decimal(text.strip(b'"').decode("ascii")) * 1_000_000
        return int(value) if abs(value) < _LATEST_PS else None
    except (ArithmeticError, ValueError):
        return None


def _text(args: dict[str, Any], key: str) -> str:
    value = args.get(key)
    return value[:_LONGEST_TEXT] if isinstance(value, str) else ""


def _number(value: object) -> int | None:
    try:
        number = int(str(value)[:20])
    except ValueError:
        return None
    return number if 0 <= number < 1 << 62 else None


def _real(value: str | None) -> float | None:
    try:
        return float(value) if value else None
    except ValueError:
        return None


def _sizes(value: str | None) -> str | None:
    parts = (value or "").split(",")
    return f"[{', '.join(parts)}]" if len(parts) == 3 and all(part.isdigit() for part in parts) else None


FORMAT = TraceFormat("xla", sniff, read)
