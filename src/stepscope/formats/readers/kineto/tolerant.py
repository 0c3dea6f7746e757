"""Kineto and other Chrome traces, event by event: reads everything, repairs what can be repaired and counts it.

For files of some tens of megabytes, for machines without heavy libraries, and for the odd record inside a large file
that the compiled scanner leaves to it.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stepscope.core.errors import BadInputError
from stepscope.formats.readers.kineto.text import UNREADABLE, ChromeText, Piece, decode_events
from stepscope.formats.source import Source, ends_early, first_damage, identity_of, rank_in_name
from stepscope.formats.timeline import (
    ANNOTATION,
    COLUMN,
    COLUMNS,
    COPY,
    COUNTER,
    DEVICE_ANNOTATION,
    DEVICE_KINDS,
    INSTANT,
    KERNEL,
    KINDS,
    MEMORY,
    MISSING,
    OTHER,
    SET,
    SYNC,
    TIME_LIMIT_NS,
    Timeline,
    TimelineBuilder,
)

CATEGORIES_OF_KIND = {
    "operator": "cpu_op operator",
    "runtime": "cuda_runtime cuda_driver runtime hip_runtime hip_driver gpu_runtime xpu_runtime xpu_driver "
    "mtia_runtime hpu_runtime glow_runtime privateuse1_runtime privateuse1_driver",
    "kernel": "kernel mtia_ccp_events hpu_op",
    "other": "Trace mtia_workloadd",
    "copy": "gpu_memcpy memcpy",
    "set": "gpu_memset memset",
    "sync": "cuda_sync cuda_event",
    "annotation": "user_annotation",
    "device_annotation": "gpu_user_annotation",
    "python": "python_function",
    "memory": "cpu_instant_event",
    "instant": "cpu_instant_event",
    "overhead": "overhead",
    "counter": "cuda_profiler_range",
}
"""Categories of Kineto and of its older and other-vendor writers, the one in use first. What records an allocation is
told from other instants by its name."""
KIND_OF_CATEGORY = {
    name.lower(): KINDS.index(kind) for kind, names in CATEGORIES_OF_KIND.items() for name in names.split()
}

MEMORY_EVENT = "[memory]"
"""Name of the instants that record an allocation or a release."""

COLUMN_OF_ARGUMENT = {argument: spec.name for spec in COLUMNS for argument in spec.arguments}
"""Arguments that have a column. Where two spellings stand in one event, the first one counts."""

WITHOUT_COLUMN = frozenset({
    "queued", "context", "cbid", "memory bandwidth (GB/s)", "Device Type", "wait_on_cuda_event_id", "Rank",
    "Python id", "Python parent id", "Python module id", "Python thread",
})  # fmt: skip
"""Arguments that are always the same, repeat another (bandwidth is bytes over time) or mean nothing elsewhere.
Any argument that is neither here nor above makes the whole object be kept in `arguments`."""

NO_STREAM = 4294967295
"""How older writers spell stream −1."""

NUMBER_LIMIT = 1 << 63
NAME_LIMIT = 1 << 16
"""Longer names are cut: no kernel's name has 65,536 characters, but damaged files do."""

_SKIPPED_FLOWS = ("s", "t", "f")


_ABSENT = msgspec.Raw()


class Event(msgspec.Struct, gc=False):
    """A record as it stands in the file; fields that are not there keep their defaults."""

    ph: str = "X"
    cat: str | None = None
    name: str | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: msgspec.Raw = _ABSENT
    dur: msgspec.Raw = _ABSENT
    args: msgspec.Raw = _ABSENT


_EVENTS = msgspec.json.Decoder(list[Event])
_ONE_EVENT = msgspec.json.Decoder(Event)
_RAW_ARGUMENTS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_kineto(path: Path) -> Timeline:
    """The whole file as an unfinished timeline (see `finish`)."""
    reader = EventReader(path)
    return reader.finish(reader.read())


class _Begun(NamedTuple):
    """A begin whose end was not seen yet."""

    event: Event
    start_ns: int
    values: dict[str, Any]


class EventReader:
    """Collects events into a builder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.builder = TimelineBuilder()
        self._open: dict[tuple[str, str], list[_Begun]] = {}
        self.first_damage: int | None = None

    def read(self) -> ChromeText:
        """The whole file."""
        text = ChromeText(Source(self.path))
        for piece in text.pieces():
            self.read_piece(piece)
        return text

    def read_piece(self, piece: Piece) -> None:
        for event in decode_events(piece, _EVENTS, self._read_record, self._damage):
            self.add(event)

    def _damage(self, what: str, offset: int) -> None:
        self.builder.count_repair(what)
        if self.first_damage is None:
            self.first_damage = offset

    def count_damage(self, text: ChromeText) -> None:
        """What is missing of the file, and where it is damaged first."""
        if text.cut_short:
            self.builder.count_repair(ends_early(text.cut_short))
        if self.first_damage is not None:
            self.builder.count_repair(first_damage(self.first_damage))

    def _read_record(self, text: bytes) -> Event | None:
        try:
            return _ONE_EVENT.decode(text)
        except UNREADABLE:
            pass
        try:
            loose = msgspec.json.decode(text.decode("utf-8", errors="replace"))
        except UNREADABLE:
            return None
        return self.loosen(loose) if isinstance(loose, dict) else None

    def loosen(self, loose: dict[str, Any]) -> Event | None:
        """An event with fields of wrong types or broken text: what is usable of it."""
        self.builder.count_repair("events with fields of a wrong type or invalid text were read as far as possible")

        fields = {key: value for key in Event.__struct_fields__ if (value := loose.get(key)) is not None}
        for key, value in fields.items():
            if key in ("ts", "dur", "args"):
                fields[key] = msgspec.Raw(msgspec.json.encode(value))
            elif not isinstance(value, int | float | str if key in ("pid", "tid") else str):
                fields[key] = str(value)
        return Event(**fields | {"ph": fields.get("ph") or "X"})

    def add(self, event: Event) -> None:
        phase = event.ph
        if phase == "X":
            self._add_complete(event)
        elif phase in _SKIPPED_FLOWS:
            return  # launches are joined by correlation, passes by sequence number: arrows repeat both
        elif phase == "M":
            self._read_naming(event)
        elif phase in ("i", "I"):
            self._add_instant(event)
        elif phase == "C":
            self._add_counters(event)
        elif phase in ("B", "E"):
            self._add_half(event)
        else:
            self.builder.count_repair(f"events of the unknown phase {phase[:8]!r} were left out")

    def _start(self, event: Event) -> int | None:
        start_ns = self._time(event.ts)
        if start_ns is None:
            self.builder.count_repair("events without a usable time were left out")
        return start_ns

    def _time(self, raw: msgspec.Raw) -> int | None:
        text = bytes(raw).strip(b'"')
        if not text:
            return None
        try:
            time_ns = parse_microseconds(text)
        except ValueError:
            return None
        return time_ns if abs(time_ns) < TIME_LIMIT_NS else None

    def _add_complete(self, event: Event) -> None:
        start_ns = self._start(event)
        if start_ns is None:
            return
        duration_ns = self._time(event.dur)
        if duration_ns is None:
            self.builder.count_repair("events without a usable duration were read as instants")
            duration_ns = 0
        elif duration_ns < 0:
            self.builder.count_repair("negative durations were read as zero")
            duration_ns = 0
        self._add(event, start_ns, start_ns + duration_ns, self._arguments(event))

    def _add(self, event: Event, start_ns: int, end_ns: int, values: dict[str, Any]) -> None:
        category = (event.cat or "").lower()
        kind = KIND_OF_CATEGORY.get(category)
        if kind is None:
            # Other writers have categories of their own: what nests on a thread is an annotation.
            kind = OTHER if category in ("", "trace") and not isinstance(event.tid, int) else ANNOTATION
        name = event.name if event.name is not None else ""
        if event.name is None:
            self.builder.count_repair("events without a name")
        if len(name) > NAME_LIMIT:
            name = name[:NAME_LIMIT]
            self.builder.count_repair("names longer than 65,536 characters were cut")
        on_device = kind in DEVICE_KINDS or kind in (DEVICE_ANNOTATION, SYNC)
        if on_device:
            self._place_on_device(event, kind, values)
        else:
            values.pop("stream", None)
            values.pop("device", None)
        if kind == SYNC and category == "cuda_event":
            values.setdefault("sync_kind", "Event Record")
        thread = None if on_device else (identity_of(event.pid), identity_of(event.tid))
        self.builder.add(kind, name, start_ns, end_ns, thread=thread, **values)

    def _place_on_device(self, event: Event, kind: int, values: dict[str, Any]) -> None:
        device, stream = values.get("device"), values.get("stream")
        if (device is None or device == MISSING) and isinstance(event.pid, int):
            values["device"] = event.pid if 0 <= event.pid < 1 << 16 else None
        if (
            (stream is None or stream == MISSING)
            and kind in (KERNEL, COPY, SET, DEVICE_ANNOTATION)
            and isinstance(event.tid, int)
        ):
            values["stream"] = event.tid
        if values.get("stream") == NO_STREAM:
            values["stream"] = None
        if values.get("wait_stream") == NO_STREAM:
            values["wait_stream"] = None

    def _arguments(self, event: Event) -> dict[str, Any]:
        text = bytes(event.args)
        if text in (b"", b"{}", b"null"):
            return {}
        try:
            raw = _RAW_ARGUMENTS.decode(text)
        except UNREADABLE:
            self.builder.count_repair("arguments that are no JSON object were left out")
            return {}
        values: dict[str, Any] = {}
        complete = True
        for key, value in raw.items():
            column = COLUMN_OF_ARGUMENT.get(key)
            if column is None:
                complete = complete and key in WITHOUT_COLUMN
            elif column not in values:
                cell = self._value(column, bytes(value))
                if cell is not None:
                    values[column] = cell
        if not complete:
            values["arguments"] = text.decode("utf-8", errors="replace")
        return values

    def _value(self, column: str, text: bytes) -> str | int | float | None:
        form = COLUMN[column].form
        if form == "text":
            return _text_value(text)
        number: float | int | None
        try:
            number = float(text.strip(b'"')) if form == "float" else int(text.strip(b'"'))
        except ValueError:
            number = self._odd_number(form, text)
        if number is None:
            return None
        if form == "int" and not -NUMBER_LIMIT <= number < NUMBER_LIMIT:
            if 0 <= number < 2 * NUMBER_LIMIT:
                return number - 2 * NUMBER_LIMIT  # an address in the upper half
            self.builder.count_repair("numbers beyond 64 bits were left out")
            return None
        return number

    def _odd_number(self, form: str, text: bytes) -> int | None:
        try:
            number = float(text.strip(b'"'))
            return int(number) if form == "int" else None
        except (ValueError, OverflowError):
            if text not in (b'"N/A"', b"null", b'""'):
                self.builder.count_repair("arguments that should be numbers were left out")
            return None

    def _add_instant(self, event: Event) -> None:
        start_ns = self._start(event)
        if start_ns is None:
            return
        values = self._arguments(event)
        memory = event.name == MEMORY_EVENT
        device = values.pop("device", None)
        if memory:
            values["device"] = device
        values.pop("stream", None)
        self.builder.add(
            MEMORY if memory else INSTANT,
            (event.name or "")[:NAME_LIMIT],
            start_ns,
            start_ns,
            thread=(identity_of(event.pid), identity_of(event.tid)),
            **values,
        )

    def _add_counters(self, event: Event) -> None:
        start_ns = self._start(event)
        if start_ns is None:
            return
        try:
            series = _RAW_ARGUMENTS.decode(bytes(event.args))
        except UNREADABLE:
            self.builder.count_repair("arguments that are no JSON object were left out")
            return
        for key, value in series.items():
            try:
                number = float(bytes(value))
            except ValueError:
                self.builder.count_repair("counters without a number were left out")
                continue
            name = event.name if len(series) == 1 and event.name else f"{event.name or ''} {key}".strip()
            thread = (identity_of(event.pid), identity_of(event.tid))
            self.builder.add(COUNTER, name[:NAME_LIMIT], start_ns, start_ns, thread=thread, value=number)

    def _add_half(self, event: Event) -> None:
        """Begin and end written apart: an end closes the latest open begin of its thread."""
        start_ns = self._start(event)
        if start_ns is None:
            return
        opened = self._open.setdefault((identity_of(event.pid), identity_of(event.tid)), [])
        if event.ph == "B":
            opened.append(_Begun(event, start_ns, self._arguments(event)))
        elif opened:
            held = opened.pop()
            began_ns = held.start_ns
            if start_ns < began_ns:
                self.builder.count_repair("ends before their begin were read as zero length")
                start_ns = began_ns
            self._add(held.event, began_ns, start_ns, held.values | self._arguments(event))
        else:
            self.builder.count_repair("ends without a begin were left out")

    def _read_naming(self, event: Event) -> None:
        if event.name == "thread_name":
            try:
                given = msgspec.json.decode(bytes(event.args)).get("name")
            except (*UNREADABLE, AttributeError):
                return
            if isinstance(given, str):
                self.builder.name_thread(identity_of(event.pid), identity_of(event.tid), given[:NAME_LIMIT])

    def finish(self, text: ChromeText) -> Timeline:
        """Everything read, on an absolute clock where the file gives its base."""
        return finish_kineto(self.path, self.finish_odd(text), text)

    def finish_odd(self, text: ChromeText) -> Timeline:
        """What this reader was given, on the file's own clock, with every repair counted."""
        for opened in self._open.values():
            if opened:
                self.builder.count_repair("begins without an end were left out", len(opened))
        self.count_damage(text)
        return self.builder.build(metadata={"thread_names": self.builder.thread_names()})


def finish_kineto(path: Path, timeline: Timeline, text: ChromeText) -> Timeline:
    """Rank, world, clock base and metadata from the header."""
    from dataclasses import replace

    if not len(timeline):
        raise BadInputError(
            "holds no event that could be read" + (f" ({text.cut_short})" if text.cut_short else ""),
            hint="record it again; `stepscope trace record` writes and checks traces",
            where=str(path),
        )
    header = text.header
    distributed = header.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    base = header.get("baseTimeNanoseconds")
    base_ns = base if isinstance(base, int) else 0
    core = dict(timeline.core)
    repairs = dict(timeline.repairs)
    if abs(base_ns) + int(abs(core["end_ns"]).max()) >= NUMBER_LIMIT:
        repairs["the base of the clock is beyond 64 bits: times count from it"] = 1
        base_ns = 0
    if base_ns:
        core["start_ns"] = core["start_ns"] + base_ns
        core["end_ns"] = core["end_ns"] + base_ns
    rank = distributed.get("rank")
    world = distributed.get("world_size")
    return replace(
        timeline,
        core=core,
        repairs=repairs,
        rank=rank if isinstance(rank, int) else rank_in_name(path),
        world_size=world if isinstance(world, int) else None,
        metadata=_describe(path, header, distributed, rank),
    )


def _describe(path: Path, header: dict[str, Any], distributed: dict[str, Any], rank: object) -> dict[str, Any]:
    devices = header.get("deviceProperties")
    versions = ("schemaVersion", "cuda_driver_version", "cuda_runtime_version", "cupti_version", "hip_runtime_version")
    return {
        "format": "kineto",
        "source": str(path),
        "rank_from": "content" if isinstance(rank, int) else "name",
        "devices": [device for device in devices if isinstance(device, dict)] if isinstance(devices, list) else [],
        "distributed": distributed,
        "shapes_recorded": bool(header.get("record_shapes")),
        "stacks_recorded": bool(header.get("with_stack")),
        "versions": {key: header[key] for key in versions if key in header},
        "base_ns": header.get("baseTimeNanoseconds") if isinstance(header.get("baseTimeNanoseconds"), int) else 0,
    }


def parse_microseconds(text: bytes) -> int:
    """Decimal microseconds as whole nanoseconds, from the digits: floats of this size have no nanoseconds."""
    whole, point, fraction = text.partition(b".")
    if len(fraction) <= 3 and (fraction.isdigit() or not point):
        number = int(whole) * 1000
        below = int(fraction.ljust(3, b"0")) if fraction else 0
        return number - below if whole.startswith(b"-") else number + below
    try:
        # Beyond nanoseconds, or with an exponent.
        return int((Decimal(text.decode("ascii", errors="replace")) * 1000).to_integral_value())
    except (InvalidOperation, OverflowError) as error:
        raise ValueError(f"no number: {text[:40]!r}") from error


def _text_value(text: bytes) -> str | None:
    """Texts as they are, lists and objects as JSON."""
    if text[:1] == b'"':
        try:
            return msgspec.json.decode(text, type=str)
        except UNREADABLE:
            return text.decode("utf-8", errors="replace")
    return None if text == b"null" else text.decode("utf-8", errors="replace")
