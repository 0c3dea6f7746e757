"""Timelines as one Chrome trace: for Perfetto and every tool that reads Kineto's JSON, many ranks side by side.

Written some thousand rows at a time, so that memory does not grow with the trace. Times are decimal microseconds with
all their nanoseconds, counted from `baseTimeNanoseconds`; reading the file of one rank back gives the same columns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from stepscope._version import __version__
from stepscope.core.errors import UsageError
from stepscope.core.files import output_file
from stepscope.core.units import format_bytes
from stepscope.formats.chrome_rows import PIECE_ROWS, Places, RowText, label, plan_places
from stepscope.formats.timeline import (
    COUNTER,
    DEVICE_ANNOTATION,
    DEVICE_KINDS,
    EDGE_KINDS,
    KINDS,
    MEMORY,
    OPERATOR,
    SYNC,
    Integers,
    RowEdges,
    Timeline,
)

FLOWS = ("ac2g", "fwdbwd")
"""Arrows found from the columns, by the categories they have in the file: from a launch call to its device work, and
from an operator to its backward pass."""


class Arrow(NamedTuple):
    """From the start of one row to the start of another; timelines by their place in the list."""

    from_timeline: int
    from_row: int
    to_timeline: int
    to_row: int
    category: str = "dependency"


def arrows_of_edges(timeline: int, edges: RowEdges) -> Iterator[Arrow]:
    """Arrows for dependencies that an analysis has found in one timeline of the list."""
    for before, after, kind in zip(edges.before.tolist(), edges.after.tolist(), edges.kind.tolist(), strict=True):
        yield Arrow(timeline, before, timeline, after, EDGE_KINDS[kind])


def flow_lines(
    timeline: Timeline, writer: RowText, category: str, kept: Integers | None, next_id: int
) -> Iterator[tuple[list[str], int]]:
    begins, ends = launch_pairs(timeline) if category == "ac2g" else _passes(timeline)
    if kept is not None:
        both = (kept[begins] & kept[ends]).astype(bool)
        begins, ends = begins[both], ends[both]
    for first in range(0, len(begins), PIECE_ROWS):
        part = slice(first, first + PIECE_ROWS)
        ids = np.arange(next_id + first, next_id + first + len(begins[part])).tolist()
        lines = writer.arrow("s", category, begins[part], ids) + writer.arrow("f", category, ends[part], ids)
        yield lines, len(ids)


def launch_pairs(timeline: Timeline) -> tuple[Integers, Integers]:
    """Rows of the calls, rows of the device work each launched."""
    parent: Any = timeline.core["parent"]
    devices = np.flatnonzero(np.isin(timeline.core["kind"], DEVICE_KINDS) & (parent >= 0))
    return parent[devices], devices


def _passes(timeline: Timeline) -> tuple[Integers, Integers]:
    """For each autograd sequence number the last operator that carries it forward and the first that does backward."""
    core: Any = timeline.core
    rows = np.flatnonzero((core["kind"] == OPERATOR) & (core["sequence"] >= 0))
    rows = rows[np.argsort(core["start_ns"][rows], kind="stable")]
    backward = core["forward_thread"][rows] > 0
    later, earlier = rows[backward], rows[~backward][::-1]
    numbers, first = np.unique(core["sequence"][later], return_index=True)
    forward_numbers, last = np.unique(core["sequence"][earlier], return_index=True)
    _, left, right = np.intersect1d(forward_numbers, numbers, assume_unique=True, return_indices=True)
    return earlier[last[left]], later[first[right]]


def arrow_lines(
    writers: Sequence[RowText], arrows: Sequence[Arrow], kept: Sequence[Integers] | None, next_id: int
) -> Iterator[list[str]]:
    """Arrows given by the caller; those to rows that were left out go with them."""
    for number, arrow in enumerate(arrows, next_id):
        begin, end = (arrow.from_timeline, arrow.from_row), (arrow.to_timeline, arrow.to_row)
        if kept is not None and not all(kept[timeline][row] for timeline, row in (begin, end)):
            continue
        yield [
            line
            for phase, (timeline, row) in (("s", begin), ("f", end))
            for line in writers[timeline].arrow(phase, arrow.category, np.array([row]), [number])
        ]


TRIES = 10
"""How often a file that came out too large, or much smaller than it may be, is written again."""
CLOSE_ENOUGH = 0.9
"""A file with this share of the allowed size is not tried to be filled further."""
AIM = 0.97
"""Fraction of the allowed size that the next attempt aims at, so that it fits."""


class DropOrder:
    """Rows of all timelines in the order in which they may go: host events from the shortest, calls that launched,
    device work from the shortest."""

    def __init__(self, ranks: Sequence[Timeline], *, arrow_events: int) -> None:
        self._sizes = [len(timeline) for timeline in ranks]
        standing = np.concatenate([_standing(timeline) for timeline in ranks])
        duration = np.concatenate([np.subtract(one.core["end_ns"], one.core["start_ns"]) for one in ranks])
        # Of equals the later goes first, so that what is left is the beginning.
        self._order: Integers = np.lexsort((-np.arange(len(standing)), duration, standing))
        begins = np.cumsum([0, *self._sizes])
        launched = np.zeros(len(standing), np.int64)
        for timeline, begin in zip(ranks, begins.tolist(), strict=False):
            launched[begin + launch_pairs(timeline)[1]] = 1
        self._events = 1 + arrow_events * launched[self._order]
        """In the file for each, its arrow included."""

    def rows(self) -> int:
        return sum(self._sizes)

    def rows_within(self, max_events: int) -> int:
        """How many rows from the end of the order have so few events in the file."""
        return int(np.searchsorted(np.cumsum(self._events[::-1]), max_events, side="right"))

    def keep(self, rows: int) -> list[Integers]:
        """For each timeline which rows stay, if so many may."""
        kept = np.zeros(len(self._order), bool)
        kept[self._order[len(self._order) - rows :]] = True
        return np.split(kept, np.cumsum(self._sizes)[:-1])


def _standing(timeline: Timeline) -> Integers:
    """0 may go first, 2 last."""
    core: Any = timeline.core
    standing = np.zeros(len(timeline), np.int8)
    standing[np.isin(core["kind"], (COUNTER, MEMORY))] = 1
    standing[launch_pairs(timeline)[0]] = 1
    standing[np.isin(core["kind"], (*DEVICE_KINDS, DEVICE_ANNOTATION, SYNC))] = 2
    for span in timeline.steps:
        standing[(core["start_ns"] == span.start_ns) & (core["end_ns"] == span.end_ns)] = 2
    return standing


def count_left_out(ranks: Sequence[Timeline], kept: Sequence[Integers] | None) -> dict[str, int]:
    if kept is None:
        return {}
    counts = sum(
        np.bincount(timeline.core["kind"][chosen == 0].astype(np.int64), minlength=len(KINDS))
        for timeline, chosen in zip(ranks, kept, strict=True)
    )
    return {KINDS[kind]: count for kind, count in enumerate(np.asarray(counts).tolist()) if count}


def write_within(
    max_bytes: int, path: Path, order: DropOrder, rows: int, write: Callable[[Sequence[Integers] | None], int]
) -> None:
    """Call `write` (rows to keep → size of the file) with fewer rows until the file fits.

    How far a row packs is only known afterwards, so the bound is approached from both sides. The last call
    is the one that fits.
    """
    too_many, fitting = rows + 1, 0

    def attempt(count: int) -> int:
        return write(None if count == order.rows() else order.keep(count))

    size = attempt(rows)
    for _ in range(TRIES):
        if size <= max_bytes:
            fitting = rows
            if rows + 1 == too_many or size >= CLOSE_ENOUGH * max_bytes:
                return
        else:
            too_many = rows
        if too_many - fitting <= 1:
            break
        rows = min(max(int(rows * AIM * max_bytes / size), fitting + 1), too_many - 1)
        size = attempt(rows)
    if size > max_bytes:
        size = attempt(fitting)
    if size > max_bytes:
        raise UsageError(
            f"not even an empty trace fits into {format_bytes(max_bytes)}: names and headings alone take "
            f"{format_bytes(size)}",
            hint="allow a larger file",
            where=str(path),
        )


__all__ = ["FLOWS", "Arrow", "WrittenTrace", "arrows_of_edges", "write_chrome"]

GZIP_LEVEL = 2
"""Level of isal's gzip; higher ones gain nothing there."""
SECOND_NS = 1_000_000_000
EXTRA_PROCESS = "stepscope"


class WrittenTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds, and what was left out to keep it small."""

    path: str
    size_bytes: int
    ranks: list[int | None]
    events: int
    """Rows of the timelines."""
    arrows: int
    extra: int
    left_out: dict[str, int]
    """By kind of event."""
    base_ns: int


def write_chrome(
    timelines: Timeline | Sequence[Timeline],
    path: Path,
    *,
    flows: Collection[str] = ("ac2g",),
    arrows: Iterable[Arrow] = (),
    extra: Iterable[Mapping[str, Any]] = (),
    max_bytes: int | None = None,
    max_events: int | None = None,
) -> WrittenTrace:
    """Write these ranks into one file, packed where its name ends in .gz. The file appears whole or not at all.

    `extra` events are written as they are, but may give `ts_ns` and `dur_ns` on the clock of the timelines instead of
    `ts` and `dur`; without a `pid` they stand under a heading of their own. `max_bytes` bounds the file as it lies on
    the disk, `max_events` its rows together with the two ends of each launch arrow. The shortest host events are left
    out first, then launch calls, then the shortest device work; the file and the answer say how many of each kind.
    """
    ranks = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    _check(ranks, path, flows)
    plan = _Plan(ranks, path, flows=tuple(flows), arrows=list(arrows))
    # What is written last takes the name of the file at the end; an error leaves what was there.
    with output_file(path) as part:
        if max_bytes is None and max_events is None:
            return plan.write(part, extra, None)
        order = DropOrder(ranks, arrow_events=2 if "ac2g" in flows else 0)
        rows = order.rows() if max_events is None else order.rows_within(max_events)
        if max_bytes is None:
            return plan.write(part, extra, order.keep(rows))
        events = [dict(event) for event in extra]
        written: list[WrittenTrace] = []

        def write(kept: Sequence[Integers] | None) -> int:
            written.append(plan.write(part, events, kept))
            return written[-1].size_bytes

        write_within(max_bytes, path, order, rows, write)
        return written[-1]


def _check(ranks: Sequence[Timeline], path: Path, flows: Collection[str]) -> None:
    if not ranks:
        raise UsageError("there is no trace to write", where=str(path))
    for flow in flows:
        if flow not in FLOWS:
            raise UsageError(f"there are no arrows called {flow!r}", hint=f"one of: {', '.join(FLOWS)}")
    numbers = [timeline.rank for timeline in ranks if timeline.rank is not None]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise UsageError(
            f"rank {twice[0]} is there twice", hint="write traces of one run into one file", where=str(path)
        )


class _Plan:
    """Everything that does not depend on which rows are left out."""

    def __init__(self, ranks: Sequence[Timeline], path: Path, *, flows: tuple[str, ...], arrows: list[Arrow]) -> None:
        self.ranks = ranks
        self.path = path
        self.flows = flows
        self.arrows = arrows
        self.base_ns = _base(ranks)
        self.places = plan_places(ranks)

    def write(self, part: Path, extra: Iterable[Mapping[str, Any]], kept: Sequence[Integers] | None) -> WrittenTrace:
        """One try, into the file beside the one that is wanted."""
        counts = Counter[str]()
        left_out = count_left_out(self.ranks, kept)
        with part.open("wb") as file, packed(file, self.path) as stream:
            stream.write(_header(self.ranks, self.places, self.base_ns, left_out))
            separator = b"\n  "
            for piece in self._pieces(extra, kept, counts):
                stream.write(separator + piece)
                separator = b",\n  "
            stream.write(b"\n]}\n")
        return WrittenTrace(
            path=str(self.path),
            size_bytes=part.stat().st_size,
            ranks=[timeline.rank for timeline in self.ranks],
            events=counts["events"],
            arrows=counts["arrows"],
            extra=counts["extra"],
            left_out=left_out,
            base_ns=self.base_ns,
        )

    def _pieces(
        self, extra: Iterable[Mapping[str, Any]], kept: Sequence[Integers] | None, counts: Counter[str]
    ) -> Iterator[bytes]:
        """Events, already separated by commas inside a piece."""
        for places in self.places:
            yield from map(_encode, places.labels)
        writers = [
            RowText(timeline, places, self.base_ns) for timeline, places in zip(self.ranks, self.places, strict=True)
        ]
        next_id = 1
        for index, (timeline, writer) in enumerate(zip(self.ranks, writers, strict=True)):
            chosen = None if kept is None else kept[index]
            for first in range(0, len(timeline), PIECE_ROWS):
                last = min(first + PIECE_ROWS, len(timeline))
                lines = writer.lines(first, last, chosen)
                counts["events"] += len(lines)
                if lines:
                    yield _joined(lines)
            for category in self.flows:
                for lines, count in flow_lines(timeline, writer, category, chosen, next_id):
                    next_id += count
                    counts["arrows"] += count
                    yield _joined(lines)
        for lines in arrow_lines(writers, self.arrows, kept, next_id):
            counts["arrows"] += len(lines) // 2
            yield _joined(lines)
        yield from self._extra_lines(extra, counts)

    def _extra_lines(self, extra: Iterable[Mapping[str, Any]], counts: Counter[str]) -> Iterator[bytes]:
        named = False
        for event in extra:
            if "pid" not in event and not named:
                named = True
                yield _encode(label("process_name", EXTRA_PROCESS, 0, "name", "added by stepscope"))
                yield _encode(label("process_sort_index", EXTRA_PROCESS, 0, "sort_index", -1))
            counts["extra"] += 1
            yield _encode(_placed(event, self.base_ns))


def _base(ranks: Sequence[Timeline]) -> int:
    """The whole second before the first event, so that times are short and exact in every viewer."""
    firsts = [int(timeline.core["start_ns"].min()) for timeline in ranks if len(timeline)]
    return max(0, min(firsts, default=0) // SECOND_NS * SECOND_NS)


@contextmanager
def packed(file: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    """Nothing of when and under which name it was written goes into the packed file: equal content, equal bytes."""
    if path.suffix != ".gz":
        yield file
        return
    packer: Any
    try:
        from isal.igzip import IGzipFile
    except ImportError:
        import gzip

        packer = gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6)
    else:
        packer = IGzipFile(  # type: ignore[no-untyped-call]
            filename="", mode="wb", fileobj=file, mtime=0, compresslevel=GZIP_LEVEL
        )
    with packer as stream:
        yield stream


def _joined(lines: Sequence[str]) -> bytes:
    return _as_bytes(",\n  ".join(lines))


def _encode(event: Mapping[str, Any]) -> bytes:
    return _as_bytes(json.dumps(event, separators=(",", ":"), default=str, ensure_ascii=False)[:-1]) + b"\n  }"


def _as_bytes(text: str) -> bytes:
    # Half a surrogate pair may stand in a text of a damaged trace. Escaped, it would cost strict readers the event.
    return text.encode("utf-8", "replace")


def _header(ranks: Sequence[Timeline], places: Sequence[Places], base_ns: int, left_out: dict[str, int]) -> bytes:
    first = ranks[0].metadata
    versions = first.get("versions")
    content: dict[str, Any] = {"schemaVersion": 1, **(versions if isinstance(versions, dict) else {})}
    if first.get("devices"):
        content["deviceProperties"] = first["devices"]
    if len(ranks) == 1:
        content |= _distributed(ranks[0])
    for name, key in (("record_shapes", "shapes_recorded"), ("with_stack", "stacks_recorded")):
        if any(timeline.metadata.get(key) for timeline in ranks):
            content[name] = 1
    content["stepscope"] = {
        "version": __version__,
        "ranks": [_describe_rank(timeline, place) for timeline, place in zip(ranks, places, strict=True)],
        "left_out": left_out,
    }
    content |= {"displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}
    return _as_bytes(json.dumps(content, default=str, ensure_ascii=False)[:-1]) + b',\n"traceEvents": ['


def _distributed(timeline: Timeline) -> dict[str, Any]:
    known = timeline.metadata.get("distributed")
    content = dict(known) if isinstance(known, dict) else {}
    if timeline.rank is not None:
        content["rank"] = timeline.rank
    if timeline.world_size is not None:
        content["world_size"] = timeline.world_size
    return {"distributedInfo": content} if content else {}


def _describe_rank(timeline: Timeline, places: Places) -> dict[str, Any]:
    """Which headings of the file are this rank's, and what they were called in its own trace."""
    return {
        "rank": timeline.rank,
        "processes": [[number, process] for process, number in places.host_processes.items()],
        "devices": [[number, device] for device, number in places.devices.items()],
        **_distributed(timeline),
    }


def _placed(event: Mapping[str, Any], base_ns: int) -> dict[str, Any]:
    placed = {"ph": "X", "pid": EXTRA_PROCESS, "tid": 0, **event}
    for given, name, since in (("ts_ns", "ts", base_ns), ("dur_ns", "dur", 0)):
        if given in placed:
            placed[name] = (int(placed.pop(given)) - since) / 1000
    return placed
