"""Records of what memory held: torch.profiler's memory timelines and snapshots of the CUDA allocator."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from stepscope.core.errors import BadInputError
from stepscope.formats import plain_pickle
from stepscope.formats.source import decode_json, list_of, read_bounded, text_of, whole_of
from stepscope.formats.timeline import Integers, Span

BEFORE = "allocated before the recording"
MOST_IN_SUM = 1 << 62
"""Bytes of all changes together; more does not fit a column, and no device moves as much."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Whose memory it is: a category of tensors, or the line that allocated it."""

    name: str
    stack: tuple[str, ...] = ()
    """The whole stack where it was first seen, innermost call first."""


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """An allocation that failed."""

    time_s: float | None
    """From the first event."""
    requested_bytes: int
    device_free_bytes: int | None
    """What the driver said was free."""
    allocated_bytes: int
    reserved_bytes: int
    owner: str


class Fragmentation(msgspec.Struct, frozen=True, kw_only=True):
    """How the allocator's segments were used when the snapshot was taken."""

    segments: int
    reserved_bytes: int
    allocated_bytes: int
    """In use by tensors, rounded up to the allocator's block sizes."""
    requested_bytes: int
    """What the program asked for of these."""
    awaiting_free_bytes: int
    """Freed by the program, still in use by another stream."""
    free_in_used_segments_bytes: int
    """Free, but beside blocks in use: empty_cache() cannot return it."""
    free_segments_bytes: int
    """Segments without a block in use: empty_cache() returns them."""
    largest_free_block_bytes: int


@dataclass(frozen=True)
class MemoryHistory:
    """Changes in the order in which they happened."""

    source: str
    format: str
    device: str
    owner_kind: str
    """category or allocation stack."""
    owners: Sequence[Owner]
    time_ns: Integers | None
    """None where the file has no times."""
    change_bytes: Integers
    owner: Integers
    """By change: index into owners."""
    start_bytes: Mapping[int, int]
    """By owner: held before the first change."""
    counts_blocks: bool
    """Whether each change is one block taken or given back; else several may be added up in one."""
    reserved_bytes: Integers | None = None
    """After each change; None where it is not recorded."""
    steps: Sequence[Span] = ()
    """As annotated."""
    failures: Sequence[OutOfMemory] = ()
    fragmentation: Fragmentation | None = None
    repairs: Mapping[str, int] = field(default_factory=dict)


CATEGORIES = (
    "parameter", "optimizer state", "input", "temporary", "activation", "gradient", "autograd detail", "unknown",
)  # fmt: skip
"""In the order of the columns and of the raw numbers."""
OWNERS = tuple(Owner(name=name) for name in CATEGORIES)
_PREEXISTING, _DESTROY = 1, 4
_NUMBERS = re.compile(rb"\s*\[\s*\[[-\d\s,]*(\]|$)")
_PICTURE = b"GPU Memory Timeline HTML"
_EXPORT_AGAIN = "export it again with prof.export_memory_timeline(path), path ending in .json.gz or .raw.json.gz"
_NAME_THE_DEVICE = f"name the device in export_memory_timeline(path, device), or {_EXPORT_AGAIN}"


def _is_timeline(head: bytes) -> bool:
    """Lists of numbers in a list, or the page that holds a picture of them."""
    return _NUMBERS.match(head) is not None or _PICTURE in head[:1024]


def _read_timeline(path: Path) -> list[MemoryHistory]:
    """The one device that was exported."""
    data, cut_short = read_bounded(path)
    if _PICTURE in data[:1024]:
        _refuse(path, "holds a picture of the memory timeline, not its numbers", _EXPORT_AGAIN)
    kind, what = list[list[int | list[int]]], "is no whole memory timeline"
    content = decode_json(data, what=what, hint=_EXPORT_AGAIN, path=path, cut_short=cut_short, kind=kind)
    is_raw = all(isinstance(value, int) for row in content for value in row)
    if not any(content) or (is_raw and any(len(row) != 4 for row in content)):
        _refuse(path, "holds no memory event of the device it was exported for", _NAME_THE_DEVICE)
    return [_read_raw(path, content) if is_raw else _read_sums(path, content)]


def _refuse(path: Path, why: str, hint: str) -> NoReturn:
    raise BadInputError(why, hint=hint, where=str(path))


def _columns(path: Path, content: object, shape: tuple[int, ...]) -> Integers:
    """As numbers of 64 bits; BadInputError where rows are not alike or numbers are too large."""
    try:
        found: Integers = np.array(content, np.int64)
    except (ValueError, OverflowError, TypeError):
        found = np.zeros(0, np.int64)
    if found.shape != shape:
        _refuse(path, "has rows of different lengths, or numbers beyond 64 bits", _NAME_THE_DEVICE)
    return found


def _read_raw(path: Path, content: list[list[int | list[int]]]) -> MemoryHistory:
    time, action, change, category = _columns(path, content, (len(content), 4)).T
    if (action < _PREEXISTING).any() or (action > _DESTROY).any() or (category < 0).any() or (category > 7).any():
        _refuse(path, "has an action beyond 1 to 4 or a category beyond 0 to 7", _NAME_THE_DEVICE)
    _check_sum(path, change)
    earlier = action == _PREEXISTING
    base = {int(one): int(change[earlier & (category == one)].sum()) for one in np.unique(category[earlier])}
    return _history(
        path,
        "raw memory timeline",
        time_ns=time[~earlier],
        change_bytes=change[~earlier],
        owner=category[~earlier],
        start_bytes=base,
        counts_blocks=True,
    )


def _read_sums(path: Path, content: list[list[int | list[int]]]) -> MemoryHistory:
    """Changes between the points of time, releases before allocations: no sum is higher than the file's."""
    if len(content) != 2:
        _refuse(path, "is no pair of times and sizes", _NAME_THE_DEVICE)
    time = _columns(path, content[0], (len(content[0]),))
    sizes = _columns(path, content[1], (len(time), len(CATEGORIES) + 1))[:, 1:]
    if (sizes < -MOST_IN_SUM // 16).any() or (sizes > MOST_IN_SUM // 16).any():
        _refuse(path, "holds sizes that no device has", _NAME_THE_DEVICE)
    change = np.diff(sizes, axis=0)
    point, category = np.nonzero(change)
    value = change[point, category]
    order = np.lexsort((value, point))
    _check_sum(path, value)
    return _history(
        path,
        "memory timeline",
        # Microseconds in this form, nanoseconds in the raw one.
        time_ns=time[point[order] + 1] * 1000,
        change_bytes=value[order],
        owner=category[order],
        start_bytes={place: int(size) for place, size in enumerate(sizes[0].tolist()) if size},
        counts_blocks=False,
    )


def _check_sum(path: Path, change: Integers) -> None:
    if sum(map(abs, change.tolist())) >= MOST_IN_SUM:
        _refuse(path, "holds sizes that no device has", _NAME_THE_DEVICE)


def _history(path: Path, form: str, **found: Any) -> MemoryHistory:
    """Of categories of tensors; the files do not name the device."""
    return MemoryHistory(
        source=str(path), format=form, device="as exported", owner_kind="category", owners=OWNERS, **found
    )


LIMITS = plain_pickle.Limits(bytes=1 << 30, objects=40_000_000, containers=8_000_000, remembered=16_000_000)
MOST_ENTRIES = 1 << 22
"""Events, segments and blocks of a file. A pickle can name one list any number of times: its size bounds nothing."""
_MOST_FRAMES = 200
_SHOWN_FRAMES = 24
_WORDS = (b"device_traces", b"segment_type", b"segment_pool_id")
_RESERVING = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_STEP = re.compile(r"ProfilerStep\s*#?(\d{1,9})$")
_NO_STACK = Owner(name="no stack recorded")
_RECORD_HISTORY = "call torch.cuda.memory._record_memory_history() before the steps and _dump_snapshot(path) after them"


def _is_snapshot(head: bytes) -> bool:
    return head[:1] == b"\x80" and any(word in head for word in _WORDS)


def _read_snapshot(path: Path) -> list[MemoryHistory]:
    """One history per device that holds memory or has events."""
    data, cut_short = read_bounded(path, LIMITS.bytes)
    packed = f" (the packed file ends early: {cut_short})" if cut_short else ""
    content = plain_pickle.load(data, where=f"{path}{packed}", most=LIMITS)
    snapshot = {"segments": content} if isinstance(content, list) else content
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("segments"), list):
        _refuse(path, "is no memory snapshot: it has no list of segments", _RECORD_HISTORY)
    traces = [list_of(trace) for trace in list_of(snapshot.get("device_traces"))]
    segments = [one for one in snapshot["segments"] if isinstance(one, dict)]
    blocks = sum(len(list_of(one.get("blocks"))) for one in segments)
    if len(segments) + blocks + sum(map(len, traces)) > MOST_ENTRIES:
        _refuse(path, f"holds more than {MOST_ENTRIES} events, segments and blocks", _RECORD_HISTORY)
    by_device: dict[int, list[dict[str, Any]]] = {}
    for segment in segments:
        by_device.setdefault(whole_of(segment.get("device")) or 0, []).append(segment)
    numbers = sorted({*by_device, *(number for number, trace in enumerate(traces) if trace)})
    if not numbers:
        _refuse(path, "holds no segment and no event", _RECORD_HISTORY)
    marks = list_of(snapshot.get("external_annotations"), MOST_ENTRIES)
    owners = _Owners()
    return [
        _Replay(path, number, by_device.get(number, []), owners).run(
            traces[number] if number < len(traces) else [], _steps(marks, number)
        )
        for number in numbers
    ]


class _Owners:
    """Stacks by the line of the program that they end in."""

    def __init__(self) -> None:
        self.found: list[Owner] = [Owner(name=BEFORE), _NO_STACK]
        self._place_of_name = {owner.name: place for place, owner in enumerate(self.found)}
        self._place_of_stack: dict[tuple[int, ...], int] = {}
        """By the identities of its frames: each is written once, and the snapshot keeps them alive."""

    def of(self, frames: object) -> int:
        lines = list_of(frames, _MOST_FRAMES)
        key = tuple(map(id, lines))
        place = self._place_of_stack.get(key)
        if place is None:
            place = self._place_of_stack[key] = self._find(lines)
        return place

    def _find(self, frames: list[Any]) -> int:
        stack = [line for frame in frames if (line := _describe(frame))]
        if not stack:
            return self._place_of_name[_NO_STACK.name]
        python = [line for line, is_python, _ in stack if is_python]
        own = next((line for line, is_python, in_torch in stack if is_python and not in_torch), None)
        name = own or (python[0] if python else stack[0][0])
        if name not in self._place_of_name:
            self._place_of_name[name] = len(self.found)
            self.found.append(Owner(name=name, stack=tuple(line for line, _, _ in stack[:_SHOWN_FRAMES])))
        return self._place_of_name[name]


def _describe(frame: object) -> tuple[str, bool, bool] | None:
    """The line as text, whether it is Python, and whether it is torch's."""
    if not isinstance(frame, dict):
        return None
    file, name = text_of(frame.get("filename")) or "", text_of(frame.get("name")) or ""
    line = whole_of(frame.get("line"))
    is_python = file.endswith(".py") or file.startswith("<")
    where = f"{file}:{line}" if is_python else ""
    return f"{where} {name}".strip(), is_python, "/torch/" in file


class _Replay:
    """One device's events, one after the other."""

    def __init__(self, path: Path, device: int, segments: Sequence[dict[str, Any]], owners: _Owners) -> None:
        self.path = path
        self.device = device
        self.segments = segments
        self.owners = owners
        self.changes: list[tuple[int | None, int, int, int]] = []
        """Time in microseconds, bytes, owner, and bytes reserved since the first event."""
        self.start: dict[int, int] = {}
        self.live: dict[int, tuple[int, int]] = {}
        """By address: size and owner."""
        self.freed: dict[int, int] = {}
        """By address: blocks whose release was requested and is not completed yet, by size."""
        self.held = self.taken = 0
        self.failures: list[tuple[int | None, Mapping[str, Any], int, int]] = []
        self.repairs: dict[str, int] = {}

    def run(self, events: Sequence[Any], steps: Sequence[Span]) -> MemoryHistory:
        for event in events:
            self._take(event)
        self._add_older_blocks()
        time_us, change, owner, reserved = zip(*self.changes, strict=True) if self.changes else ((), (), (), ())
        if sum(map(abs, change)) + sum(self.start.values()) + self.taken >= MOST_IN_SUM:
            _refuse(self.path, "holds sizes that no device has", _RECORD_HISTORY)
        end = sum(whole_of(one.get("total_size")) or 0 for one in self.segments)
        before = end - self.taken
        if before < 0:
            self.repairs["segments that were taken and are not in the snapshot, as when its events are incomplete"] = 1
            before = 0
        times = [time for time in time_us if time is not None]
        is_timed = len(times) == len(time_us)
        return MemoryHistory(
            source=str(self.path),
            format="CUDA memory snapshot",
            device=str(self.device),
            owner_kind="allocation stack",
            owners=self.owners.found,
            time_ns=np.array(times, np.int64) * 1000 if is_timed else None,
            change_bytes=np.array(change, np.int64),
            owner=np.array(owner, np.int64),
            start_bytes=self.start,
            counts_blocks=True,
            reserved_bytes=np.array(reserved, np.int64) + before,
            steps=steps if is_timed else (),
            failures=[self._failure(*one, before=before, first=min(times, default=0)) for one in self.failures],
            fragmentation=_fragmentation(self.segments) if self.segments else None,
            repairs=self.repairs,
        )

    def _take(self, event: Any) -> None:
        action = event.get("action") if isinstance(event, dict) else None
        size = whole_of(event.get("size")) if isinstance(event, dict) else None
        if not isinstance(action, str) or size is None:
            self._count("events without an action or a size were left out")
            return
        time, address = whole_of(event.get("time_us")), whole_of(event.get("addr"))
        if time is not None and time >= 1 << 52:
            time = None
        if action in _RESERVING:
            self.taken += _RESERVING[action] * size
            self._note(time, 0, 0)
        elif action == "oom":
            self.failures.append((time, event, self.held, self.taken))
        elif address is not None and action == "alloc":
            self._allocate(address, size, self.owners.of(event.get("frames")), time)
        elif address is not None and action in ("free_requested", "free_completed"):
            self._free(action, address, size, time)

    def _allocate(self, address: int, size: int, owner: int, time: int | None) -> None:
        if address in self.live:
            self._count("allocations at an address that was in use: the earlier one is taken as freed")
            old_size, old_owner = self.live.pop(address)
            self._note(time, -old_size, old_owner)
        self.freed.pop(address, None)
        self.live[address] = (size, owner)
        self._note(time, size, owner)

    def _free(self, action: str, address: int, size: int, time: int | None) -> None:
        if address in self.live:
            held, owner = self.live.pop(address)
            self._note(time, -held, owner)
        elif self.freed.pop(address, None) is None:
            # It was there before the history begins.
            self.start[0] = self.start.get(0, 0) + size
            self._note(time, -size, 0)
        if action == "free_requested":
            self.freed[address] = size

    def _note(self, time: int | None, change: int, owner: int) -> None:
        self.held += change
        self.changes.append((time, change, owner, self.taken))

    def _add_older_blocks(self) -> None:
        """Blocks in use at the end whose allocation is not among the events."""
        for segment in self.segments:
            for block in list_of(segment.get("blocks")):
                if isinstance(block, dict) and block.get("state") == "active_allocated":
                    address, size = whole_of(block.get("address")), _requested(block)
                    if address is None or address not in self.live:
                        owner = self.owners.of(_frames(block)) if _frames(block) else 0
                        self.start[owner] = self.start.get(owner, 0) + size

    def _failure(
        self, time: int | None, event: Mapping[str, Any], held: int, taken: int, *, before: int, first: int
    ) -> OutOfMemory:
        return OutOfMemory(
            time_s=None if time is None else (time - first) / 1e6,
            requested_bytes=whole_of(event.get("size")) or 0,
            device_free_bytes=whole_of(event.get("device_free")),
            allocated_bytes=held + sum(self.start.values()),
            reserved_bytes=taken + before,
            owner=self.owners.found[self.owners.of(event.get("frames"))].name,
        )

    def _count(self, what: str) -> None:
        self.repairs[what] = self.repairs.get(what, 0) + 1


def _frames(block: Mapping[str, Any]) -> object:
    """Frames of a block; older snapshots keep them in its history."""
    if "frames" in block:
        return block["frames"]
    history = list_of(block.get("history"), 1)
    return history[0].get("frames") if history and isinstance(history[0], dict) else None


def _requested(block: Mapping[str, Any]) -> int:
    size = whole_of(block.get("requested_size"))
    return (whole_of(block.get("size")) or 0) if size is None else size


def _fragmentation(segments: Sequence[dict[str, Any]]) -> Fragmentation:
    sums = Counter[str]()
    largest = 0
    for segment in segments:
        blocks = [one for one in list_of(segment.get("blocks")) if isinstance(one, dict)]
        by_state = Counter[object]()
        for block in blocks:
            state, size = text_of(block.get("state")), whole_of(block.get("size")) or 0
            by_state[state] += size
            if state == "inactive":
                largest = max(largest, size)
            elif state == "active_allocated":
                sums["requested_bytes"] += _requested(block)
        free, used = by_state["inactive"], by_state["active_allocated"]
        waiting = by_state.total() - free - used
        sums["reserved_bytes"] += whole_of(segment.get("total_size")) or 0
        sums["allocated_bytes"] += used
        sums["awaiting_free_bytes"] += waiting
        sums["free_in_used_segments_bytes" if used or waiting else "free_segments_bytes"] += free
    names = (name for name in Fragmentation.__struct_fields__ if name not in ("segments", "largest_free_block_bytes"))
    return Fragmentation(
        segments=len(segments), largest_free_block_bytes=largest, **{name: sums[name] for name in names}
    )


def _steps(marks: Sequence[Any], device: int) -> list[Span]:
    """Profiler steps among the annotations, where these were recorded."""
    found: list[Span] = []
    open_since: dict[int, int] = {}
    for mark in marks:
        named = _STEP.match(text_of(mark.get("name")) or "") if isinstance(mark, dict) else None
        time = whole_of(mark.get("time_us")) if named else None
        if named is None or time is None or time >= 1 << 52 or whole_of(mark.get("device")) not in (None, device):
            continue
        number = int(named[1])
        if mark.get("stage") == "START":
            open_since[number] = time
        elif number in open_since:
            found.append(Span(number, open_since.pop(number) * 1000, time * 1000))
    return sorted(found, key=lambda span: span.start_ns)


def looks_like_memory(head: bytes, path: Path) -> bool:
    """Whether it says what memory held, and no timeline of events."""
    return _is_timeline(head) or _is_snapshot(head)


def read_memory(path: Path, head: bytes) -> list[MemoryHistory]:
    """One history per device."""
    return _read_timeline(path) if _is_timeline(head) else _read_snapshot(path)
