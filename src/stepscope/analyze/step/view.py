"""A timeline as analyses ask for it: a step's window, a device's work, who enclosed or launched what.

What several analyses need is worked out once and kept with the timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from stepscope.analyze.step.device_work import LONG_AGO, DeviceWork, Window, busy_ns, exclusive_windows
from stepscope.analyze.step.intervals import Intervals, union
from stepscope.analyze.step.numbers import Mask, distinct, is_any
from stepscope.core.errors import UsageError
from stepscope.core.units import count_of
from stepscope.formats.classify import is_launch_name
from stepscope.formats.nesting import farthest, nearest, nearest_after
from stepscope.formats.timeline import (
    ANNOTATION,
    COUNTER,
    DEVICE_KINDS,
    HOST_KINDS,
    MISSING,
    OPERATOR,
    RUNTIME,
    Integers,
    Span,
    Timeline,
)

NEVER = 1 << 62
"""After every time in a trace."""
_COUNTED = (*HOST_KINDS, *DEVICE_KINDS)
"""Kinds that a window begins and ends with: what a profiler writes about itself does not stretch it."""
_PIECE = 1 << 16
"""So many bytes stay in the nearest caches."""
_FEW_NAMES = 8
"""So many names are compared one by one sooner than looked up."""
_FEW_TEXTS = 2000
"""So many texts are asked sooner than it is found out which of them are names of the rows in question."""
EMPTY = 0.1
"""A step with less than this fraction of the events of the fullest step is empty."""
_Kept = TypeVar("_Kept")


class StreamOrder(NamedTuple):
    """For each row of a device's work: what was before it on its stream."""

    previous: Integers
    """Place of the row that began last before it on the stream; −1 for the first."""
    free_from: Integers
    """When everything before it on the stream had ended; long ago for the first."""


def order_on_streams(stream: Integers, end: Integers) -> StreamOrder:
    """Rows come in order of start."""
    found = StreamOrder(np.full(len(end), MISSING, np.int64), np.full(len(end), LONG_AGO, np.int64))
    for one in distinct(stream):
        mine = np.flatnonzero(stream == one)
        found.previous[mine[1:]] = mine[:-1]
        found.free_from[mine[1:]] = np.maximum.accumulate(end[mine])[:-1]
    return found


class HostStack(NamedTuple):
    """The host events of a thread: by start, those that enclose before those inside."""

    rows: Integers
    start: Integers


class TraceView:
    """Use `view` to get the one of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._kept: dict[object, Any] = {}
        core: Any = timeline.core
        self.start = core["start_ns"]
        self.end = core["end_ns"]
        self.kind = core["kind"]
        self.name = core["name"]
        self.thread = core["thread"]
        self.parent = core["parent"]
        self.step = core["step"]

    def column(self, name: str) -> Any:
        """Any column in full length. Typed loosely: its element type is the reader's choice."""
        return self.keep(("column", name), lambda: self.timeline.column(name))

    def keep(self, key: object, make: Callable[[], _Kept]) -> _Kept:
        """What `make` gives, made at the first question only."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: _Kept = self._kept[key]
        return kept

    def is_kind(self, *kinds: int) -> Mask:
        """For each row whether it is of one of these kinds."""
        return self.keep(("is kind", kinds), lambda: is_any(self.kind, kinds))

    def rows(self, *kinds: int) -> Integers:
        """Rows of these kinds, in file order."""
        return self.keep(("rows", kinds), lambda: self.find(lambda part: is_any(self.kind[part], kinds)))

    def find(self, holds: Callable[[slice], Mask]) -> Integers:
        """Rows for which something holds; asked piece by piece: fresh memory for all rows would cost more than that."""
        pieces = (slice(first, first + _PIECE) for first in range(0, len(self.start), _PIECE))
        found = [np.flatnonzero(holds(piece)) + piece.start for piece in pieces]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def mask(self, *rows: Integers) -> Mask:
        """For each row of the trace whether it is one of these."""
        mask = np.zeros(len(self.start), bool)
        for some in rows:
            mask[some] = True
        return mask

    def rows_of(self, step: int | None, *kinds: int) -> Integers:
        """Rows of these kinds that belong to a step, which the trace must have; None: all of them."""
        self.check(step)
        rows = self.rows(*kinds)
        return rows if step is None else rows[self.step[rows] == step]

    def text(self, code: int) -> str:
        return self.timeline.texts[code]

    def label(self, row: int) -> str | None:
        """The name of a row; None for row −1."""
        return self.text(int(self.name[row])) if row >= 0 else None

    def codes_in(self, rows: Integers | Mask) -> list[int]:
        """The different names among these rows, as codes."""
        seen = np.zeros(len(self.timeline.texts) + 1, bool)
        seen[self.name[rows]] = True  # a row without a name marks the last place
        return np.flatnonzero(seen[:-1]).tolist()

    def named(self, rows: Integers, is_wanted: Callable[[str], object]) -> Integers:
        """Those of the rows whose name is wanted; asked once a name."""
        found: Integers = rows[self.has_name(rows, is_wanted)]
        return found

    def named_of(self, kind: int, is_wanted: Callable[[str], object]) -> Integers:
        """Rows of one kind whose name is wanted."""
        codes = self.wanted_codes(kind, is_wanted)
        if len(codes) > _FEW_NAMES:
            return self.named(self.rows(kind), is_wanted)

        def holds(part: slice) -> Mask:
            named: Mask = is_any(self.name[part], codes) & (self.kind[part] == kind)
            return named

        return self.find(holds) if codes else np.zeros(0, np.int64)

    def wanted_codes(self, kind: int, is_wanted: Callable[[str], object]) -> list[int]:
        """Codes of the wanted names, among those of the rows of one kind at least."""
        texts = self.timeline.texts
        among = range(len(texts)) if len(texts) <= _FEW_TEXTS else self.codes_in(self.rows(kind))
        return [code for code in among if is_wanted(texts[code])]

    @cached_property
    def top_rows(self) -> Integers:
        """Host rows that nothing encloses."""

        def holds(part: slice) -> Mask:
            on_top: Mask = (self.parent[part] == MISSING) & is_any(self.kind[part], HOST_KINDS)
            return on_top

        return self.find(holds)

    def has_name(self, rows: Integers, is_wanted: Callable[[str], object]) -> Mask:
        """For each of the rows whether its name is wanted; asked once a name."""
        wanted = np.zeros(len(self.timeline.texts) + 1, bool)
        wanted[[code for code in self.codes_in(rows) if is_wanted(self.text(code))]] = True
        found: Mask = wanted[self.name[rows]]
        return found

    def spans(self, rows: Integers) -> Intervals:
        """The time any of these rows covers."""
        return union(self.start[rows], self.end[rows])

    # Steps

    @property
    def source(self) -> str | None:
        source = self.timeline.metadata.get("source")
        return None if source is None else str(source)

    @cached_property
    def _spans(self) -> dict[int, Span]:
        return {span.number: span for span in self.timeline.steps}

    def span(self, step: int) -> Span:
        if step in self._spans:
            return self._spans[step]
        known = ", ".join(str(span.number) for span in self.timeline.steps[:20]) or "none"
        raise UsageError(f"the trace has no step {step}", hint=f"steps it has: {known}", where=self.source)

    def check(self, step: int | None) -> None:
        """Refuse a step that the trace does not have."""
        if step is not None:
            self.span(step)

    def window(self, step: int | None) -> Window:
        """The exclusive window of the step, see `windows`. None: the whole trace."""
        self.check(step)
        return self._whole_window if step is None else self.windows[step]

    @cached_property
    def _whole_window(self) -> Window:
        """Begins and ends with host and device events: what a profiler writes about itself does not stretch it."""
        if not len(self.start):
            return Window(0, 0)
        earliest, latest = int(self.start.argmin()), int(self.end.argmax())
        if self.kind[earliest] in _COUNTED and self.kind[latest] in _COUNTED:  # so it is nearly always
            return Window(int(self.start[earliest]), int(self.end[latest]))
        counted = self.is_kind(*_COUNTED)
        if not counted.any():
            return Window(0, 0)
        # Rows are mostly in order, so few begin as early as the first of them in the file, or end as late as the last.
        early = np.flatnonzero(self.start <= self.start[counted.argmax()])
        late = np.flatnonzero(self.end >= self.end[len(counted) - 1 - counted[::-1].argmax()])
        return Window(int(self.start[early[counted[early]]].min()), int(self.end[late[counted[late]]].max()))

    @cached_property
    def windows(self) -> dict[int, Window]:
        """Step → its exclusive window, in order of time: from its start on the host, or from the end of the device
        work of the steps before where that is later, to the end of the last device work that it launched."""
        return exclusive_windows(self.completion_windows)

    @cached_property
    def completion_windows(self) -> dict[int, Window]:
        """Step → from its start on the host to the end of the device work it launched: launch to completion.

        Longer than a step takes where the host runs ahead: it includes the time in the queue. Work that outlasts all of
        the next step (a kernel that never ends, a copy of a checkpoint) holds no step up and counts for none.
        """
        last = {span.number: span.end_ns for span in self.timeline.steps}
        for work in self.works:
            numbers, places = np.unique(work.step, return_inverse=True)
            ends = np.full(len(numbers), LONG_AGO)
            np.maximum.at(ends, places, work.end)
            for number, end in zip(numbers.tolist(), ends.tolist(), strict=True):
                if number in last:
                    last[number] = max(last[number], end)
        limit: int | None = None
        for span in reversed(self.timeline.steps):
            if limit is not None and last[span.number] > limit:
                done = [work.end[(work.step == span.number) & (work.end <= limit)] for work in self.works]
                last[span.number] = max([span.end_ns, *(int(end.max()) for end in done if len(end))])
            limit = last[span.number]
        return {span.number: Window(span.start_ns, last[span.number]) for span in self.timeline.steps}

    def judged_steps(self) -> list[int]:
        """Steps that stand for the rest: without the first and the last where more than two remain, and without empty
        ones (a profiler that is stopped late leaves one behind)."""
        numbers = [span.number for span in self.timeline.steps]
        judged = numbers[1:-1] if len(numbers) > 4 else numbers
        return [one for one in judged if one not in self.empty_steps] or judged

    @cached_property
    def empty_steps(self) -> frozenset[int]:
        """Steps to which far fewer operators and calls, or far fewer device activities, belong than to the fullest."""
        numbers = np.array([span.number for span in self.timeline.steps], np.int64)
        is_empty = np.zeros(len(numbers), bool)
        for kinds in ((OPERATOR, RUNTIME), DEVICE_KINDS):
            own = self.step[self.rows(*kinds)]
            events = np.bincount(np.searchsorted(numbers, own[own >= 0]), minlength=len(numbers))[: len(numbers)]
            is_empty |= events < EMPTY * events.max(initial=0)
        return frozenset(numbers[is_empty].tolist())

    def median_step(self) -> int | None:
        """The judged step nearest to the median step time (the shorter of two middle ones); None without steps."""
        return self.middle_of(judged) if (judged := self.judged_steps()) else None

    def middle_of(self, steps: Sequence[int]) -> int:
        """The one of median step time."""
        return sorted(steps, key=lambda number: self.windows[number].length_ns)[(len(steps) - 1) // 2]

    # Devices

    @cached_property
    def works(self) -> list[DeviceWork]:
        """The work of each device, by number. Sync rows and device annotations are no work."""
        rows = self.rows(*DEVICE_KINDS)
        start = self.start.take(rows)
        if (start[1:] < start[:-1]).any():
            rows = rows[np.argsort(start, kind="stable")]
        device = self.column("device")[rows]
        numbers = distinct(device)
        core = self.timeline.core
        return [DeviceWork(one, rows if len(numbers) == 1 else rows[device == one], core) for one in numbers]

    def order_on_streams(self, work: DeviceWork) -> StreamOrder:
        return self.keep(("order", work.device), lambda: order_on_streams(work.stream, work.end))

    def busiest(self, window: Window) -> DeviceWork:
        """The device that stands for the rank: the one with most busy time in the window, the first of equals."""
        if len(self.works) == 1:
            return self.works[0]
        return max(self.works, key=lambda work: (busy_ns(work, window), -work.device))

    @cached_property
    def launch_evidence(self) -> str | None:
        """How a trace without device work shows that a device was used all the same; None: it does not."""
        launches = len(self.named_of(RUNTIME, is_launch_name))
        if launches:
            return f"{launches} call{'s launch' if launches > 1 else ' launches'} device work"
        ranges = len(self.rows(COUNTER)) if self.timeline.metadata.get("devices") else 0
        return f"{count_of(ranges, 'counter')} of a device were recorded" if ranges else None

    # The host

    @cached_property
    def main_thread(self) -> int:
        """The thread that runs the program: most annotations, and among equals most operators. −1 without threads."""
        best = np.arange(len(self.timeline.threads))
        for kind in (ANNOTATION, OPERATOR, RUNTIME):
            if len(best) > 1:
                thread = self.thread[self.rows(kind)]
                counts = np.bincount(thread[thread >= 0], minlength=len(self.timeline.threads))[best]
                best = best[counts == counts.max()]
        return int(best[-1]) if len(best) else MISSING

    @cached_property
    def stacks(self) -> dict[int, HostStack]:
        """Thread → its host events; rows without a thread are in none."""
        rows = self.rows(*HOST_KINDS)
        rows = self.nested_order(rows[self.thread[rows] >= 0])
        parts = np.split(rows, np.flatnonzero(np.diff(self.thread[rows])) + 1) if len(rows) else []
        return {int(self.thread[part[0]]): HostStack(part, self.start[part]) for part in parts}

    def nested_order(self, rows: Integers) -> Integers:
        """By thread, then start, then longest first, then creation: what encloses comes before what is inside.

        Files are nearly in order of time, which a stable sort turns into speed; only rows that share their start need
        more.
        """
        start = self.start[rows]
        order = np.argsort(start, kind="stable")
        rows, start = rows[order], start[order]
        same = start[1:] == start[:-1]
        if same.any():
            tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
            some = rows[tied]
            rows[tied] = some[np.lexsort((self.column("event_index")[some], -self.end[some], start[tied]))]
        thread = self.thread[rows]
        if len(thread) and thread.max() < 1 << 16:
            thread = thread.astype(np.uint16)  # numpy sorts short integers by radix
        by_thread: Integers = rows[np.argsort(thread, kind="stable")]
        return by_thread

    def innermost(self, thread: int, times: Integers) -> Integers:
        """Row of the innermost event open on the thread at each time; −1 where none is."""
        stack = self.stacks.get(thread)
        if stack is None:
            return np.full(len(times), MISSING, np.int64)
        before = stack.start.searchsorted(times, side="right") - 1
        found = np.where(before >= 0, stack.rows[before], MISSING)
        # The last that began may have ended: what is open then encloses it.
        return nearest_after(found, self.parent, self.end, times)

    def innermost_of(self, threads: Integers, times: Integers) -> Integers:
        """The same for pairs of thread and time; −1 also for the thread −1."""
        found = np.full(len(times), MISSING, np.int64)
        for thread in self.stacks:
            mine = np.flatnonzero(threads == thread)
            if len(mine):
                found[mine] = self.innermost(thread, times[mine])
        return found

    def top_operators(self, thread: int) -> Integers:
        """Operators of the thread that no other operator encloses, in order of start."""
        return self.keep(("top operators", thread), lambda: self._top_operators(thread))

    def _top_operators(self, thread: int) -> Integers:
        stack = self.stacks.get(thread)
        if stack is None:
            return self.rows(OPERATOR)[:0]
        rows = stack.rows[self.is_kind(OPERATOR)[stack.rows]]
        top: Integers = rows[self.enclosing(self.parent[rows], self.is_kind(OPERATOR)) == MISSING]
        return top

    def enclosing(self, rows: Integers, wanted: Mask) -> Integers:
        """For each row the nearest of itself and what encloses or launched it for which `wanted` holds; −1 if none."""
        return nearest(rows, self.parent, wanted)

    def outermost(self, rows: Integers, wanted: Mask) -> Integers:
        """Like `enclosing`, but the farthest one."""
        return farthest(rows, self.parent, wanted)


def view(timeline: Timeline) -> TraceView:
    """The view of a timeline, made once: it lives as long as the timeline, as a cached property would."""
    kept = vars(timeline).get("_analysis_view")
    if kept is None:
        kept = vars(timeline)["_analysis_view"] = TraceView(timeline)
    assert isinstance(kept, TraceView)
    return kept
