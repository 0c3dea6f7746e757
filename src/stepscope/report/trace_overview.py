"""A step as few rectangles: host threads, device streams and the critical path, however many events the trace has.

Events that are too short to be seen are put together with their neighbours; what such a block holds (how many events,
how long they ran, which took most) goes along.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from stepscope.analyze.critical.kinds import COSTS, HOST_COSTS
from stepscope.analyze.critical.path import CriticalPath, short_on_path, spell_path_kind
from stepscope.analyze.step.device_work import Window
from stepscope.analyze.step.view import TraceView, view
from stepscope.core.units import cut_text
from stepscope.formats.classify import CATEGORIES, short_name
from stepscope.formats.timeline import (
    ANNOTATION,
    DEVICE_KINDS,
    MISSING,
    OPERATOR,
    PYTHON,
    RUNTIME,
    Integers,
    Thread,
    Timeline,
)
from stepscope.report.trace_blocks import Blocks, Events, clip, flatten, follow, join, list_contents, reduce_events

MOST_RECTANGLES = 8000
"""Marks drawn for one rank: five eighths are events, a quarter the lane of the critical path, the rest its
marks in other lanes."""
MOST_THREADS = 4
MOST_STREAMS = 12
LEVELS = {ANNOTATION: 2, OPERATOR: 5, RUNTIME: 1, PYTHON: 3}
"""Rows of a thread: so many levels of nesting of each kind."""
LONGEST_NAME = 120
NAMES_INSIDE = 4
"""A block of several events lists so many of their names, those that take most of it."""
MOST_UNPLACED = 300
PATH = "path"
"""Group of the lane with the critical path."""

COLOURS = (
    "matrix", "elementwise", "compute", "communication", "copy", "annotation", "operator", "runtime", "host", "delay",
)  # fmt: skip
"""Groups of rectangles that share a colour: the classes of kernels, what the host does, and two that only the critical
path has (its device parts have the colours of their kernels)."""
_OF_CATEGORY = {
    "communication": "communication", "copy": "copy", "set": "copy", "gemm": "matrix", "convolution": "matrix",
    "attention": "matrix", "moe": "matrix", "elementwise": "elementwise", "norm": "elementwise",
    "softmax": "elementwise", "reduction": "elementwise",
}  # fmt: skip
_OF_COST = {
    "compute": "compute", "communication": "communication", "copy": "copy",
    **dict.fromkeys((COSTS[cost] for cost in HOST_COSTS), "host"),
}  # fmt: skip
_OF_KIND = {ANNOTATION: "annotation", OPERATOR: "operator", RUNTIME: "runtime", PYTHON: "annotation"}
_NAMED_THREAD = re.compile(r"\((.+)\)\s*$")


class Lane(NamedTuple):
    label: str
    group: str
    """Thread, device or path: lanes of one group stand together."""


class Overview(NamedTuple):
    """One rank's step as rectangles."""

    window: Window
    lanes: list[Lane]
    blocks: Blocks
    contents: list[list[int]]
    """What blocks of several events hold."""
    marks: Blocks
    """Where the critical path runs in the lanes."""
    launches: list[int]
    """Pairs of a device block and the block that launched it, as differences to the pair before."""
    events: int
    """Drawn, before they were put together."""
    hidden: int
    """Host events of the window that have no rectangle: nested too deep, or on a thread that is not shown."""
    unplaced: list[tuple[int, int]]
    """Names and counts of events that a search knows of, but cannot find among the rectangles."""
    unsearched: int
    """Events beyond those, whose names are not on the page."""

    def count_rectangles(self) -> tuple[int, int]:
        """The number of events, and of those that hold several; the lane of the critical path does not count."""
        shown = [lane.group != PATH for lane in self.lanes]
        mine = [shown[lane] for lane in self.blocks.lane.tolist()]
        return sum(mine), sum(mine[place] for place, *_ in self.contents)

    def with_fewer_names(self) -> Overview:
        """Blocks of several events list only the name that takes most of each."""
        contents = [entry[:5] for entry in self.contents]
        dropped = sum(sum(entry[6::2]) for entry in self.contents) + sum(count for _, count in self.unplaced)
        return self._replace(contents=contents, unplaced=[], unsearched=self.unsearched + dropped)

    def to_data(self, used: list[int]) -> dict[str, Any]:
        """Plain lists; times in nanoseconds from the start of the window, names as places in `used`."""
        lanes, new = len(self.lanes), {name: place for place, name in enumerate(used)}
        blocks = self.blocks._replace(name=np.searchsorted(used, self.blocks.name))
        return {
            "length": self.window.length_ns,
            "lanes": [[lane.label, lane.group] for lane in self.lanes],
            "blocks": flatten(blocks, self.window, lanes),
            "contents": [
                [*entry[:3], *(number if place % 2 else new[number] for place, number in enumerate(entry[3:]))]
                for entry in self.contents
            ],
            "marks": flatten(self.marks, self.window, lanes, columns=2),
            "launches": self.launches,
            "unsearched": self.unsearched,
            "unplaced": [number for name, count in self.unplaced for number in (new[name], count)],
        }


class TextTable:
    """Texts that rectangles show, numbered as they come."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._codes: dict[str, int] = {}

    def code(self, text: str) -> int:
        shown = cut_text(text, LONGEST_NAME)
        if shown not in self._codes:
            self._codes[shown] = len(self.texts)
            self.texts.append(shown)
        return self._codes[shown]

    def of_rows(self, trace: TraceView, rows: Integers, *, short: bool) -> Any:
        """For each row the number of its name."""
        table = np.zeros(len(trace.timeline.texts), np.int64)
        for code in trace.codes_in(rows):
            text = trace.text(code)
            table[code] = self.code(short_name(text) if short else text)
        return table[trace.name[rows]] if len(rows) else np.zeros(0, np.int64)


def draw_overview(
    timeline: Timeline, window: Window, path: CriticalPath | None, names: TextTable, *, most: int = MOST_RECTANGLES
) -> Overview:
    """A step of one rank; `path` must be the critical path of that rank alone."""
    trace = view(timeline)
    lanes, on_path = _Lanes(len(trace.start)), join([])
    if path is not None and path.segments:
        lanes.listed.append(Lane("critical path of this rank", PATH))
        on_path = clip(_path_events(path, names), window)
    for lane, found in chain(_host_lanes(trace, window, names), _device_lanes(trace, window, names)):
        lanes.add(lane, found)
    drawn = clip(join(lanes.parts), window)
    marks = reduce_events(clip(_path_marks(path, lanes.of_row, trace), window), window, most // 8)
    # The path has a segment for every piece of host time: put together apart, it takes no room from the events.
    events = join([on_path, drawn])
    blocks = follow(reduce_events(on_path, window, most // 4), reduce_events(drawn, window, most * 5 // 8))
    contents = list_contents(blocks, events, most=NAMES_INSIDE)
    hidden = _hidden_rows(trace, window, lanes.of_row)
    unplaced = _find_unplaced(events, blocks, contents, names.of_rows(trace, hidden, short=False))
    return Overview(
        window=window,
        lanes=lanes.listed,
        blocks=blocks,
        contents=contents,
        marks=marks,
        launches=_find_launches(trace, events, blocks),
        events=len(drawn.lane),
        hidden=len(hidden),
        unplaced=unplaced[:MOST_UNPLACED],
        unsearched=sum(count for _, count in unplaced[MOST_UNPLACED:]),
    )


def _find_launches(trace: TraceView, events: Events, blocks: Blocks) -> list[int]:
    """From the first event of each device block to the block of the call that launched it, or of what encloses it."""
    is_first = blocks.first
    row = events.row[is_first]
    device = np.flatnonzero((row >= 0) & trace.is_kind(*DEVICE_KINDS)[row])
    block_of_row = np.full(len(trace.start), MISSING, np.int64)
    owner = np.repeat(np.arange(len(is_first)), blocks.count)
    block_of_row[events.row[events.row >= 0]] = owner[events.row >= 0]
    caller = trace.enclosing(trace.parent[row[device]], block_of_row >= 0)
    known = np.flatnonzero(caller >= 0)
    pairs = np.stack((device[known], block_of_row[caller[known]]), axis=1)
    flat: list[int] = np.diff(pairs, axis=0, prepend=np.zeros((1, 2), np.int64)).reshape(-1).tolist()
    return flat


def _hidden_rows(trace: TraceView, window: Window, lane_of_row: Any) -> Integers:
    """Host events inside the window without a lane. Python frames hide nothing where operators were recorded."""
    rows = _inside(trace, trace.rows(ANNOTATION, OPERATOR, RUNTIME), window)
    hidden: Integers = rows[lane_of_row[rows] == MISSING]
    return hidden


def _find_unplaced(events: Events, blocks: Blocks, contents: list[list[int]], hidden: Any) -> list[tuple[int, int]]:
    """Names in blocks that list other names, and those of events without a rectangle; the most frequent first."""
    inside = np.repeat(blocks.count > 1, blocks.count) & (events.row >= 0)
    missing = np.bincount(np.concatenate((events.name[inside], hidden)).astype(np.int64))
    for one, _, _, *named in contents:
        if events.row[blocks.first[one]] >= 0:
            np.subtract.at(missing, named[::2], named[1::2])
    order = np.argsort(-missing, kind="stable")
    return [(int(name), int(missing[name])) for name in order if missing[name] > 0]


def used_names(overviews: Sequence[Overview]) -> list[int]:
    """Numbers of the names that any of them still shows."""
    listed = [name for one in overviews for entry in one.contents for name in entry[3::2]]
    listed += [name for one in overviews for name, _ in one.unplaced]
    found: list[int] = np.unique(np.concatenate([*(one.blocks.name for one in overviews), listed])).astype(int).tolist()
    return found


class _Lanes:
    """Lanes from top to bottom, their events, and which lane each row of the timeline went to."""

    def __init__(self, rows: int) -> None:
        self.listed: list[Lane] = []
        self.parts: list[Events] = []
        self.of_row: Any = np.full(rows, MISSING, np.int32)

    def add(self, lane: Lane, events: Events) -> None:
        self.of_row[events.row] = len(self.listed)
        self.parts.append(events._replace(lane=np.full(len(events.row), len(self.listed), np.int64)))
        self.listed.append(lane)


# Host


def _host_lanes(trace: TraceView, window: Window, names: TextTable) -> Iterator[tuple[Lane, Events]]:
    inside = {thread: _inside(trace, stack.rows, window) for thread, stack in trace.stacks.items()}
    chosen = sorted(inside, key=lambda thread: (thread != trace.main_thread, -len(inside[thread])))[:MOST_THREADS]
    for thread in chosen:
        rows = inside[thread]
        label = _name_thread(trace, thread)
        has_operators = bool(trace.is_kind(OPERATOR)[rows].any())
        for kind, levels in LEVELS.items():
            # Python frames say what the host did where no operators were recorded; else they hide them.
            if kind == PYTHON and has_operators:
                continue
            mine = rows[trace.is_kind(kind)[rows]]
            level = _levels(trace, mine, kind)
            for number in range(levels):
                here = mine[level == number]
                if len(here):
                    title = f"{label}: {_LEVEL_NAMES[kind]}" if number == 0 else ""
                    colour = np.full(len(here), COLOURS.index(_OF_KIND[kind]), np.int64)
                    yield Lane(title, label), _take(trace, here, names.of_rows(trace, here, short=False), colour)


_LEVEL_NAMES = {ANNOTATION: "annotations", OPERATOR: "operators", RUNTIME: "runtime calls", PYTHON: "Python"}


def _inside(trace: TraceView, rows: Integers, window: Window) -> Integers:
    kept: Integers = rows[(trace.end[rows] > window.start_ns) & (trace.start[rows] < window.end_ns)]
    return kept


def _levels(trace: TraceView, rows: Integers, kind: int) -> Any:
    """How many events of the same kind enclose each."""
    is_kind = trace.is_kind(kind)
    level = np.zeros(len(rows), np.int64)
    above = trace.enclosing(trace.parent[rows], is_kind)
    # Deeper levels than are shown need no exact number.
    for _ in range(LEVELS[kind]):
        level += above >= 0
        above = trace.enclosing(np.where(above >= 0, trace.parent[above], MISSING), is_kind)
    return level


def _take(trace: TraceView, rows: Integers, names: Any, colours: Any) -> Events:
    """Rows of the timeline; the lane is set where it is added."""
    return Events(None, trace.start[rows], trace.end[rows], names, colours, rows)


def _name_thread(trace: TraceView, thread: int) -> str:
    known: Thread = trace.timeline.threads[thread]
    if thread == trace.main_thread:
        return "main thread"
    # Kineto writes `thread 500 (pt_autograd_0)`: the name alone says more in little room.
    named = _NAMED_THREAD.search(known.name)
    if named and not named[1].startswith("python"):
        return named[1]
    return known.name.partition(" (")[0] or f"thread {known.thread}"


# Device


def _device_lanes(trace: TraceView, window: Window, names: TextTable) -> Iterator[tuple[Lane, Events]]:
    rows = _inside(trace, trace.rows(*DEVICE_KINDS), window)
    if not len(rows):
        return
    device, stream = trace.column("device")[rows], trace.column("stream")[rows]
    several = len(np.unique(device)) > 1
    pairs, place = np.unique(np.stack([device, stream], axis=1), axis=0, return_inverse=True)
    place = place.reshape(-1)
    busy = np.zeros(len(pairs), np.int64)
    np.add.at(busy, place, trace.end[rows] - trace.start[rows])
    order = np.argsort(-busy, kind="stable").tolist()
    for one in order[:MOST_STREAMS]:
        number, queue = pairs[one].tolist()
        label = f"device {number} " * several + (f"stream {queue}" if queue != MISSING else "stream unknown")
        yield Lane(label, "device"), _device(trace, rows[place == one], names)
    if len(order) > MOST_STREAMS:
        rest = rows[np.isin(place, order[MOST_STREAMS:])]
        yield Lane(f"{len(order) - MOST_STREAMS} other streams", "device"), _device(trace, rest, names)


def _device(trace: TraceView, rows: Integers, names: TextTable) -> Events:
    colour_of = np.array([COLOURS.index(_OF_CATEGORY.get(name, "compute")) for name in CATEGORIES], np.int64)
    category = trace.column("category")[rows].astype(np.int64)
    colours = np.where(category >= 0, colour_of[category], COLOURS.index("compute"))
    return _take(trace, rows, names.of_rows(trace, rows, short=True), colours)


# Critical path


def _path_events(path: CriticalPath, names: TextTable) -> Events:
    rows = [
        (0, one.start_ns, one.end_ns, names.code(f"{short_on_path(one.name, one.kind)} ({spell_path_kind(one.kind)})"),
         COLOURS.index(_OF_COST.get(one.kind, "delay")), MISSING)
        for one in path.segments if one.end_ns > one.start_ns
    ]  # fmt: skip
    return Events(*np.array(rows, np.int64).reshape(-1, len(Events._fields)).T)


def _path_marks(path: CriticalPath | None, lane_of_row: Any, trace: TraceView) -> Events:
    """The segments of the path that belong to an event, in the lane of that event or of what encloses it."""
    segments = [one for one in (path.segments if path else []) if one.row is not None and one.end_ns > one.start_ns]
    rows, start, end = np.array([(one.row, one.start_ns, one.end_ns) for one in segments], np.int64).reshape(-1, 3).T
    shown = trace.enclosing(rows, lane_of_row >= 0) if len(rows) else rows
    kept = np.flatnonzero(shown >= 0)
    zeros = np.zeros(len(kept), np.int64)
    return Events(lane_of_row[shown[kept]].astype(np.int64), start[kept], end[kept], zeros, zeros, zeros)
