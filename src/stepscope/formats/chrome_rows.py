"""Rows of a timeline as text of Chrome trace events, some thousand rows at a time.

Rows that have the same columns share a template, so that no object is built for an event: a few hundred templates fill
millions of lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from stepscope.formats.readers.kineto.tolerant import CATEGORIES_OF_KIND, COLUMN_OF_ARGUMENT
from stepscope.formats.timeline import (
    BLOCKS,
    COLUMN,
    COLUMNS,
    COPY,
    COUNTER,
    DEVICE_ANNOTATION,
    DEVICE_KINDS,
    INSTANT,
    KINDS,
    MEMORY,
    MISSING,
    RUNTIME,
    SET,
    SYNC,
    Integers,
    Thread,
    Timeline,
)

ON_DEVICE = (*DEVICE_KINDS, DEVICE_ANNOTATION, SYNC)
"""Kinds shown under a device; all others stand under a host thread."""

RANK_PROCESSES = 100_000
"""Process numbers a rank has for itself in a file of many."""
FIRST_DEVICE = 50_000
"""Where its devices begin among them."""
EXACT = 1 << 53
"""Whole numbers up to here survive viewers that read every number as a double."""


@dataclass(frozen=True)
class Places:
    """Places of one rank's rows: `fields[of_row[row]]` is the text of pid and tid of a row."""

    rank: int | None
    fields: Sequence[str]
    of_row: Integers
    labels: Sequence[dict[str, Any]]
    """Events that name processes and threads."""
    host_processes: dict[str, int | str]
    """As the trace called them, and as they are called in the file."""
    devices: dict[int, int | str]
    say_devices: bool
    """Whether process and thread of an event lead back to its device and stream. Not where a process of a single rank
    has the number of one of its devices."""


def plan_places(timelines: Sequence[Timeline]) -> list[Places]:
    """One rank keeps its own numbers; several get numbers that cannot meet."""
    alone = len(timelines) == 1
    return [_plan_rank(timeline, None if alone else index) for index, timeline in enumerate(timelines)]


def _plan_rank(timeline: Timeline, index: int | None) -> Places:
    core: Any = timeline.core
    on_device = np.isin(core["kind"], ON_DEVICE)
    rows = np.flatnonzero(on_device)
    queues, which = np.unique(
        np.stack([core["device"][rows], core["stream"][rows]], axis=1), axis=0, return_inverse=True
    )
    pairs: list[tuple[int, int]] = [(int(device), int(stream)) for device, stream in queues]
    hosts = _host_numbers(timeline.threads, index)
    devices = _device_numbers([device for device, _ in pairs], set(hosts.values()), index)
    threads = [(hosts[thread.process], _number(thread.thread)) for thread in timeline.threads]
    streams = [(devices[device], stream if stream >= 0 else "no stream") for device, stream in pairs]
    of_row = np.where(on_device, 0, core["thread"]).astype(np.int64)
    of_row[rows] = len(threads) + which.reshape(-1)
    return Places(
        rank=timeline.rank,
        # The last is for rows without a thread: MISSING points to it.
        fields=[
            *(
                f'"pid":{json.dumps(pid, ensure_ascii=False)},"tid":{json.dumps(tid, ensure_ascii=False)},'
                for pid, tid in [*threads, *streams]
            ),
            "",
        ],
        of_row=of_row,
        labels=[
            *_name_processes(timeline, index, hosts, devices),
            *_name_tracks(timeline.threads, threads, [stream for _, stream in pairs], streams),
        ],
        host_processes=hosts,
        devices=devices,
        say_devices=index is not None or all(number == device for device, number in devices.items() if device >= 0),
    )


def _number(text: str) -> int | str:
    """A number where the text is one, so that viewers sort it as one."""
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and str(int(text)) == text and abs(int(text)) < EXACT:
        return int(text)
    return text


def _host_numbers(threads: Sequence[Thread], index: int | None) -> dict[str, int | str]:
    processes = list(dict.fromkeys(thread.process for thread in threads))
    if index is None:
        return {process: _number(process) for process in processes}
    return {process: (index + 1) * RANK_PROCESSES + place for place, process in enumerate(processes)}


def _device_numbers(devices: Sequence[int], taken: set[int | str], index: int | None) -> dict[int, int | str]:
    numbers: dict[int, int | str] = {}
    for device in sorted(set(devices)):
        if device == MISSING:
            numbers[device] = "unknown device" if index is None else f"unknown device of trace {index}"
        elif index is not None:
            numbers[device] = (index + 1) * RANK_PROCESSES + FIRST_DEVICE + device
        else:
            # A process with the number of a device would be shown as that device.
            numbers[device] = device if device not in taken else RANK_PROCESSES + FIRST_DEVICE + device
    return numbers


def label(what: str, pid: int | str, tid: int | str, key: str, value: int | str) -> dict[str, Any]:
    """An event that says how a process or thread is called, or where it stands."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {key: value}}


def _name_processes(
    timeline: Timeline, index: int | None, hosts: dict[str, int | str], devices: dict[int, int | str]
) -> Iterator[dict[str, Any]]:
    """Ranks in order of their numbers, in each its host processes, then its devices."""
    position = index or 0
    rank = position if timeline.rank is None else timeline.rank
    prefix = "" if index is None and timeline.rank is None else f"rank {rank}: "
    headings = [(number, f"process {process}", "CPU", place) for place, (process, number) in enumerate(hosts.items())]
    for device, number in devices.items():
        name = "unknown device" if device == MISSING else f"device {device}"
        headings.append((number, name, f"GPU {device}", FIRST_DEVICE + max(device, 0)))
    for number, name, kind, place in headings:
        order = rank * RANK_PROCESSES + place
        for key, value in (("name", f"{prefix}{name}"), ("labels", kind), ("sort_index", order)):
            yield label(f"process_{key}", number, 0, key, value)


def _name_tracks(
    threads: Sequence[Thread],
    of_threads: Sequence[tuple[int | str, int | str]],
    streams: Sequence[int],
    of_streams: Sequence[tuple[int | str, int | str]],
) -> Iterator[dict[str, Any]]:
    """The main thread (which has its process's number) first, the others as they appear."""
    named = [(one.name, 0 if one.thread == one.process else place) for place, one in enumerate(threads, 1)]
    named += [(f"stream {stream}" if stream >= 0 else "no stream", max(stream, 0)) for stream in streams]
    for (name, order), (pid, tid) in zip(named, [*of_threads, *of_streams], strict=True):
        if name:
            yield label("thread_name", pid, tid, "name", name)
        yield label("thread_sort_index", pid, tid, "sort_index", order)


PIECE_ROWS = 1 << 16

CATEGORY_OF_KIND = {KINDS.index(kind): names.split()[0] for kind, names in CATEGORIES_OF_KIND.items()}
"""Runtime calls have two: by their name."""

_DRIVER_CALL = re.compile(r"cu[A-Z]")

_NOT_ARGUMENTS = ("start_ns", "end_ns", "kind", "name", "category", "thread", "parent", "step", "arguments")
"""Fields of the event itself, and what is found anew on reading."""

_IN_MEMORY_EVENTS = {"device": "Device Id", "bytes": "Bytes"}

_AS_JSON = ("shapes", "types", "strides", "values", "grid", "block")
"""Text columns that hold lists; the others are written as the texts they are."""

ARGUMENT_COLUMNS = tuple(spec.name for spec in COLUMNS if spec.name not in _NOT_ARGUMENTS and spec.name != "value")
_BIT = {name: place for place, name in enumerate(ARGUMENT_COLUMNS)}
_REST_BIT = len(ARGUMENT_COLUMNS)
_VALUE_BIT = _REST_BIT + 1
_KIND_BITS = 4
_PLACE_BITS = (1 << (_BIT["device"] + _KIND_BITS)) | (1 << (_BIT["stream"] + _KIND_BITS))
_TIME = "%s.%03d"


class LineField(NamedTuple):
    """A part of a line that varies: where its values come from, and how they are written."""

    column: str
    form: str


class Template(NamedTuple):
    text: str
    fields: Sequence[LineField]


class RowText:
    """Writes rows of one timeline; `base_ns` is what its times are counted from."""

    def __init__(self, timeline: Timeline, places: Places, base_ns: int) -> None:
        self._timeline = timeline
        self._places = places
        self._base_ns = base_ns
        self._texts = {form: _Texts(timeline.texts, write) for form, write in _WRITE_TEXT.items()}
        self._covers = cache(self._find_covered)

    def lines(self, first: int, last: int, kept: Integers | None = None) -> list[str]:
        """One text for each row from `first` to before `last` (of these: those where `kept`), in order."""
        columns = self._columns(first, last)
        if kept is not None:
            chosen = np.flatnonzero(kept[first:last])
            columns = {name: values[chosen] for name, values in columns.items()}
        keys = self._keys(columns)
        order = np.argsort(keys, kind="stable")
        starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
        lines = np.empty(len(keys), object)
        for group in np.split(order, starts[1:]) if len(keys) else ():
            lines[group] = self._fill(int(keys[group[0]]), columns, group)
        return lines.tolist()

    def arrow(self, phase: str, category: str, rows: Integers, ids: Sequence[int]) -> list[str]:
        """Beginnings (s) or ends (f) of arrows at the starts of these rows."""
        close = ',"bp":"e"' if phase == "f" else ""
        text = f'{{"ph":"{phase}","id":%d,%s"ts":{_TIME},"cat":"{category}","name":"{category}"{close}\n  }}'
        fields = self._places.fields
        where = [fields[code] for code in self._places.of_row[rows].tolist()]
        whole, below = _split_time(np.asarray(self._timeline.core["start_ns"])[rows] - self._base_ns)
        return list(map(text.__mod__, zip(ids, where, whole, below, strict=True)))

    def _columns(self, first: int, last: int) -> dict[str, Any]:
        """Each column that one of these rows has, in full length."""
        core = self._timeline.core
        columns: dict[str, Any] = {name: column[first:last] for name, column in core.items()}
        columns["place"] = self._places.of_row[first:last]
        for name in BLOCKS:
            block = self._timeline.blocks.get(name)
            if block is None:
                continue
            begin, end = np.searchsorted(block.rows, (first, last))
            if begin < end:
                columns |= {column: self._timeline.column(column, first, last) for column in block.columns}
        return columns

    def _keys(self, columns: dict[str, Any]) -> Integers:
        """Kind and which arguments a row has, as one number."""
        keys: Any = columns["kind"].astype(np.int64)
        for name, values in columns.items():
            bit = _BIT.get(name, _VALUE_BIT if name == "value" else None)
            if bit is not None:
                there = np.isfinite(values) if values.dtype.kind == "f" else values != MISSING
                keys |= there.astype(np.int64) << (bit + _KIND_BITS)
        if self._places.say_devices:
            # Tools that know kernels by their stream would take annotations of the device for work.
            keys[columns["kind"] == DEVICE_ANNOTATION] &= ~_PLACE_BITS
        rest = columns.get("arguments")
        if rest is not None:
            codes = np.unique(rest)
            covered = np.array([self._covers(int(code)) for code in codes], np.int64)[np.searchsorted(codes, rest)]
            keys &= ~(covered << _KIND_BITS)
            keys |= (rest != MISSING).astype(np.int64) << (_REST_BIT + _KIND_BITS)
        found: Integers = keys
        return found

    def _find_covered(self, code: int) -> int:
        """Columns that the kept arguments of a row repeat."""
        arguments = [] if code == MISSING else _keys_of(self._timeline.texts[code])
        columns = {COLUMN_OF_ARGUMENT[argument] for argument in arguments if argument in COLUMN_OF_ARGUMENT}
        return sum(1 << _BIT[column] for column in columns)

    def _fill(self, key: int, columns: dict[str, Any], group: Integers) -> list[str]:
        template = _make_template(key)
        parts: list[Any] = []
        for column, form in template.fields:
            parts += self._values(column, form, columns, group)
        return list(map(template.text.__mod__, zip(*parts, strict=True)))

    def _values(self, column: str, form: str, columns: dict[str, Any], group: Integers) -> list[list[Any]]:
        if form == "time":
            since = columns["start_ns"][group]
            return _split_time(since - self._base_ns if column == "start_ns" else columns["end_ns"][group] - since)
        if form == "bandwidth":
            duration = columns["end_ns"][group] - columns["start_ns"][group]
            with np.errstate(divide="ignore", invalid="ignore"):
                rates = (columns["bytes"][group] / duration).tolist()
            return [[repr(rate) if took else '"N/A"' for rate, took in zip(rates, duration.tolist(), strict=True)]]
        values = columns[column][group].tolist()
        if form == "number":
            return [values]
        if form == "place":
            return [[self._places.fields[code] for code in values]]
        return [self._texts[form].of(values)]


class _Texts:
    """Texts as they are written, made when first used."""

    def __init__(self, texts: Sequence[str], write: Callable[[str], str]) -> None:
        self._texts = texts
        self._write = write
        self._written: dict[int, str] = {}

    def of(self, codes: list[int]) -> list[str]:
        written = self._written
        for code in set(codes):
            if code not in written:
                written[code] = self._write(self._texts[code])
        return [written[code] for code in codes]


@cache
def _make_template(key: int) -> Template:
    kind = key & ((1 << _KIND_BITS) - 1)
    bits = key >> _KIND_BITS
    head, fields = _head(kind, counted=bool(bits >> _VALUE_BIT & 1))
    if kind == COUNTER and bits >> _VALUE_BIT & 1:
        return Template(head + ',"args":{"value":%r}\n  }', [*fields, LineField("value", "number")])
    arguments: list[str] = []
    for place, column in enumerate(ARGUMENT_COLUMNS):
        if bits >> place & 1:
            argument = COLUMN[column].arguments[0]
            if kind == MEMORY:
                argument = _IN_MEMORY_EVENTS.get(column, argument)
            form = COLUMN[column].form
            marker = "%d" if form == "int" else "%r" if form == "float" else "%s"
            arguments.append(f"{quoted(argument).replace('%', '%%')}:{marker}")
            fields.append(LineField(column, "number" if form != "text" else "list" if column in _AS_JSON else "text"))
            if column == "bytes" and kind in (COPY, SET):
                arguments.append('"memory bandwidth (GB/s)":%s')
                fields.append(LineField("bytes", "bandwidth"))
    if bits >> _REST_BIT & 1:
        arguments.append("%s")
        fields.append(LineField("arguments", "rest"))
    body = f',"args":{{{",".join(arguments)}}}' if arguments else ""
    return Template(f"{head}{body}\n  }}", fields)


def _head(kind: int, *, counted: bool) -> tuple[str, list[LineField]]:
    """The line up to its arguments."""
    place, start = LineField("place", "place"), LineField("start_ns", "time")
    if kind == COUNTER and counted:
        return f'{{"ph":"C","name":%s,%s"ts":{_TIME}', [LineField("name", "text"), place, start]
    if kind in (INSTANT, MEMORY):
        text = f'{{"ph":"i","s":"t","cat":"{CATEGORY_OF_KIND[kind]}","name":%s,%s"ts":{_TIME}'
        return text, [LineField("name", "text"), place, start]
    fields = [LineField("name", "text"), place, start, LineField("end_ns", "time")]
    if kind == RUNTIME:
        text = f'{{"ph":"X","cat":"%s","name":%s,%s"ts":{_TIME},"dur":{_TIME}'
        return text, [LineField("name", "call"), *fields]
    return f'{{"ph":"X","cat":"{CATEGORY_OF_KIND[kind]}","name":%s,%s"ts":{_TIME},"dur":{_TIME}', fields


def _split_time(nanoseconds: Any) -> list[list[Any]]:
    """Whole microseconds and what is left; times before the base keep their sign on the whole."""
    if len(nanoseconds) and nanoseconds.min() < 0:
        # As text, because half a microsecond before the base is −0.500 and no number keeps the sign of zero.
        whole = [("-" if value < 0 else "") + str(abs(value) // 1000) for value in nanoseconds.tolist()]
        return [whole, (np.abs(nanoseconds) % 1000).tolist()]
    return [(nanoseconds // 1000).tolist(), (nanoseconds % 1000).tolist()]


def _call_category(name: str) -> str:
    return "cuda_driver" if _DRIVER_CALL.match(name) else "cuda_runtime"


def quoted(value: object) -> str:
    """As JSON that may hold any character: what cannot be encoded is found when the file is written."""
    return json.dumps(value, ensure_ascii=False)


def _as_list(text: str) -> str:
    """JSON where it is some; a text else."""
    if text[:1] in ("[", "{"):
        try:
            msgspec.json.decode(text, type=msgspec.Raw)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            pass
        else:
            return text
    return quoted(text)


def _keys_of(text: str) -> list[str]:
    try:
        decoded = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return []
    return list(decoded)


def _without_braces(text: str) -> str:
    """The members of a JSON object, to stand beside others; anything else becomes one member."""
    stripped = text.strip()
    if stripped.startswith("{") and _keys_of(stripped):
        return stripped[1:-1]
    return f'"arguments":{quoted(text)}'


_WRITE_TEXT = {"text": quoted, "list": _as_list, "rest": _without_braces, "call": _call_category}
"""By the form of a field."""
