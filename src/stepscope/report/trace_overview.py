"""A step as few rectangles: host threads, device streams and the critical path, however many events the trace has.

Events that are too short to be seen are put together with their neighbours; what such a block holds (how many events,
how long they ran, which took most) goes along.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.analyze.critical.kinds import COSTS, HOST_COSTS
from stepscope.analyze.critical.path import CriticalPath
from stepscope.analyze.job import JobReport
from stepscope.analyze.step.device_work import Window
from stepscope.analyze.step.view import TraceView, view
from stepscope.report.trace_blocks import Blocks, Events, clip, flatten, join, reduce_events
from stepscope.report.trace_words import short_on_path, spell_path_kind
from stepscope.traces.classify import CATEGORIES
from stepscope.traces.kernel_names import short_name
from stepscope.traces.timeline import ANNOTATION, DEVICE_KINDS, MISSING, OPERATOR, PYTHON, RUNTIME, Thread, Timeline

if TYPE_CHECKING:
    from stepscope.traces.timeline import Integers

MOST_RECTANGLES = 4000
MOST_THREADS = 4
MOST_STREAMS = 12
LEVELS = {ANNOTATION: 2, OPERATOR: 3, RUNTIME: 1, PYTHON: 3}
"""Rows of a thread: so many levels of nesting of each kind."""
LONGEST_NAME = 120

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
    window: Window
    lanes: list[Lane]
    names: list[str]
    blocks: Blocks
    marks: Blocks
    """Where the critical path runs in the lanes."""
    events: int
    """In the window, before they were put together."""

    def to_data(self) -> dict[str, Any]:
        """Plain lists: lane, start, length, name, colour, count, busy time of one rectangle after the other; in ns."""
        return {
            "length": self.window.length_ns,
            "lanes": [[lane.label, lane.group] for lane in self.lanes],
            "names": self.names,
            "colours": list(COLOURS),
            "blocks": flatten(self.blocks, self.window),
            "marks": flatten(self.marks, self.window, columns=3),
        }


class Names:
    """Texts that rectangles show, numbered as they come."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._codes: dict[str, int] = {}

    def code(self, text: str) -> int:
        shown = text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "…"
        if shown not in self._codes:
            self._codes[shown] = len(self.texts)
            self.texts.append(shown)
        return self._codes[shown]

    def of_rows(self, trace: TraceView, rows: Integers, *, short: bool) -> Any:
        """For each row the number of its name."""
        import numpy as np

        table = np.zeros(len(trace.timeline.texts), np.int64)
        for code in trace.codes_in(rows):
            text = trace.text(code)
            table[code] = self.code(short_name(text) if short else text)
        return table[trace.name[rows]] if len(rows) else np.zeros(0, np.int64)


def draw_overview(timeline: Timeline, job: JobReport, *, most: int = MOST_RECTANGLES) -> Overview:
    """The explained step of the telling rank; `timeline` must be that rank's."""
    trace = view(timeline)
    breakdown = job.detail.breakdown
    window = Window(breakdown.window_start_ns, breakdown.window_end_ns)
    names, lanes = Names(), _Lanes(len(trace.start))
    if job.critical is not None and job.critical.segments:
        of = f" of rank {job.telling_rank}" if len(job.ranks) > 1 else ""
        lanes.listed.append(Lane(f"critical path{of}", "path"))
        lanes.parts.append(_path_events(job.critical, names))
    for lane, found in chain(_host_lanes(trace, window, names), _device_lanes(trace, window, names)):
        lanes.add(lane, found)
    events = clip(join(lanes.parts), window)
    marks = clip(_path_marks(job.critical, lanes.of_row, trace), window)
    merged = reduce_events(marks, window, most // 4)
    blocks, used = _used_names(reduce_events(events, window, most - most // 4), names)
    return Overview(window, lanes.listed, used, blocks, merged, len(events.lane))


def _used_names(blocks: Blocks, names: Names) -> tuple[Blocks, list[str]]:
    """Only names that are still shown, numbered anew."""
    import numpy as np

    used, place = np.unique(blocks.name, return_inverse=True)
    return blocks._replace(name=place.reshape(-1)), [names.texts[code] for code in used.tolist()]


class _LaneEvents(NamedTuple):
    rows: Integers
    name: Any
    colour: Any
    start: Any
    end: Any


class _Lanes:
    """Lanes from top to bottom, their events, and which lane each row of the timeline went to."""

    def __init__(self, rows: int) -> None:
        import numpy as np

        self.listed: list[Lane] = []
        self.parts: list[Events] = []
        self.of_row: Any = np.full(rows, MISSING, np.int32)

    def add(self, lane: Lane, events: _LaneEvents) -> None:
        import numpy as np

        self.of_row[events.rows] = len(self.listed)
        place = np.full(len(events.rows), len(self.listed), np.int64)
        self.listed.append(lane)
        self.parts.append(Events(place, events.start, events.end, events.name, events.colour))


# Host


def _host_lanes(trace: TraceView, window: Window, names: Names) -> Iterator[tuple[Lane, _LaneEvents]]:
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
                    yield (
                        Lane(title, label),
                        _take(trace, here, names.of_rows(trace, here, short=False), _OF_KIND[kind]),
                    )


_LEVEL_NAMES = {ANNOTATION: "annotations", OPERATOR: "operators", RUNTIME: "runtime calls", PYTHON: "Python"}


def _inside(trace: TraceView, rows: Integers, window: Window) -> Integers:
    kept: Integers = rows[(trace.end[rows] > window.start_ns) & (trace.start[rows] < window.end_ns)]
    return kept


def _levels(trace: TraceView, rows: Integers, kind: int) -> Any:
    """How many events of the same kind enclose each."""
    import numpy as np

    is_kind = trace.is_kind(kind)
    level = np.zeros(len(rows), np.int64)
    above = trace.enclosing(trace.parent[rows], is_kind)
    # Deeper levels than are shown need no exact number.
    for _ in range(LEVELS[kind]):
        level += above >= 0
        above = trace.enclosing(np.where(above >= 0, trace.parent[above], MISSING), is_kind)
    return level


def _take(trace: TraceView, rows: Integers, names: Any, colour: str) -> _LaneEvents:
    import numpy as np

    colours = np.full(len(rows), COLOURS.index(colour), np.int64)
    return _LaneEvents(rows, names, colours, trace.start[rows], trace.end[rows])


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


def _device_lanes(trace: TraceView, window: Window, names: Names) -> Iterator[tuple[Lane, _LaneEvents]]:
    import numpy as np

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
        label = f"stream {queue}" if queue != MISSING else "stream unknown"
        yield (
            Lane(f"device {number} {label}" if several else label, "device"),
            _device(trace, rows[place == one], names),
        )
    if len(order) > MOST_STREAMS:
        rest = rows[np.isin(place, order[MOST_STREAMS:])]
        yield Lane(f"{len(order) - MOST_STREAMS} other streams", "device"), _device(trace, rest, names)


def _device(trace: TraceView, rows: Integers, names: Names) -> _LaneEvents:
    import numpy as np

    colour_of = np.array([COLOURS.index(_OF_CATEGORY.get(name, "compute")) for name in CATEGORIES], np.int64)
    category = trace.column("category")[rows].astype(np.int64)
    colours = np.where(category >= 0, colour_of[category], COLOURS.index("compute"))
    return _LaneEvents(rows, names.of_rows(trace, rows, short=True), colours, trace.start[rows], trace.end[rows])


# Critical path


def _path_events(path: CriticalPath, names: Names) -> Events:
    import numpy as np

    segments = [one for one in path.segments if one.end_ns > one.start_ns]
    return Events(
        np.zeros(len(segments), np.int64),
        np.array([one.start_ns for one in segments], np.int64),
        np.array([one.end_ns for one in segments], np.int64),
        np.array([names.code(_describe_segment(one.name, one.kind)) for one in segments], np.int64),
        np.array([COLOURS.index(_OF_COST.get(one.kind, "delay")) for one in segments], np.int64),
    )


def _describe_segment(name: str, kind: str) -> str:
    return f"{short_on_path(name, kind)} ({spell_path_kind(kind)})"


def _path_marks(path: CriticalPath | None, lane_of_row: Any, trace: TraceView) -> Events:
    """The stretches of the path that belong to an event, in the lane of that event or of what encloses it."""
    import numpy as np

    found = [one for one in (path.segments if path else []) if one.row is not None and one.end_ns > one.start_ns]
    rows = np.array([one.row for one in found], np.int64)
    shown = trace.enclosing(rows, lane_of_row >= 0) if len(rows) else rows
    kept = np.flatnonzero(shown >= 0)
    start = np.array([one.start_ns for one in found], np.int64)[kept]
    end = np.array([one.end_ns for one in found], np.int64)[kept]
    zeros = np.zeros(len(kept), np.int64)
    return Events(lane_of_row[shown[kept]].astype(np.int64), start, end, zeros, zeros)
