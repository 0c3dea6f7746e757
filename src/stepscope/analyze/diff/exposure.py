"""Every nanosecond of a step given to one name: to the work that kept the device busy, or to why it was idle.

The shares are those of a breakdown: compute first, then communication beside which nothing computed, then copies beside
which nothing else ran. Of two works of one share that run at once, the one that began first has the time.
"""

from __future__ import annotations
from stepscope.formats.classify import classify_lone_communication
from stepscope.formats.timeline import Integers
import numpy as np

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from stepscope.analyze.step.breakdown import SHARES
from stepscope.analyze.step.device_work import (
    COMMUNICATION,
    COMPUTE,
    TRANSFER,
    DeviceWork,
    Window,
    busy_ns,
    device_label,
)
from stepscope.analyze.step.host_activity import ACTIVITY_WORDS, divide_cpu_time
from stepscope.analyze.step.idle import HOST_REASONS, OTHER_REASONS, SYNC_REASONS, find_gaps
from stepscope.analyze.step.intervals import Intervals, complement, length, measure_within, subtract, union
from stepscope.analyze.step.view import TraceView, view
from stepscope.core.errors import UsageError
from stepscope.formats.timeline import ANNOTATION, MISSING, OPERATOR, PYTHON, RUNTIME, Timeline


IDLE_SHARES = SHARES[3:]
_REASONS_OF_SHARE = (HOST_REASONS, SYNC_REASONS, OTHER_REASONS)

OUTSIDE = "outside recorded calls"
NO_DEVICE = "cpu"


class Work(NamedTuple):
    """What kept the device busy, in order of start; without a device: what threads did, cut where it changes."""

    rows: Integers
    start: Integers
    end: Integers
    latest_end: Integers
    share: Integers
    own_start: Integers
    """From here to its end nothing that began before it, of its own share, still runs; may lie after the end."""
    covered_by: tuple[Intervals, Intervals, Intervals]
    """For each share the time that more important ones take from it."""

    def part(self, window: Window) -> slice:
        first = int(np.searchsorted(self.latest_end, window.start_ns, side="left"))
        return slice(first, max(first, int(np.searchsorted(self.start, window.end_ns, side="left"))))

    def exposed(self, window: Window) -> tuple[slice, Integers]:
        """For the rows that reach into the window the nanoseconds of it that are theirs alone."""
        part = self.part(window)
        begin = np.maximum(self.own_start[part], window.start_ns)
        end = np.maximum(np.minimum(self.end[part], window.end_ns), begin)
        exposed = end - begin
        for share in (COMMUNICATION, TRANSFER):
            mine = self.share[part] == share
            if mine.any():
                exposed[mine] -= measure_within(self.covered_by[share], begin[mine], end[mine])
        return part, exposed


class IdleTime(NamedTuple):
    """Of one window: idle nanoseconds by label of what the host was doing, one column a share."""

    labels: list[str]
    spent: Integers


class Side:
    """One of the two traces: its steps, and where their time went."""

    def __init__(self, timeline: Timeline, steps: Sequence[int] | None) -> None:
        self.timeline = timeline
        self.trace = view(timeline)
        self.numbers = complete_steps(self.trace) if steps is None else known_steps(self.trace, steps)
        self.windows = [self.trace.windows[number] for number in self.numbers]
        whole = self.trace.completion_windows
        self.overlapping = any(self.trace.windows[number] != whole[number] for number in self.numbers)
        self._device = max(self.trace.works, key=self._busy) if self.trace.works else None
        self.device = NO_DEVICE if self._device is None else device_label(self._device.device)
        self.work = _cpu_work(self.trace) if self._device is None else _device_work(self._device)

    @property
    def has_device(self) -> bool:
        return self._device is not None

    @cached_property
    def exposed(self) -> list[tuple[slice, Integers]]:
        """For each step the rows of `work` that reach into it, and what of its time is theirs alone."""
        return [self.work.exposed(window) for window in self.windows]

    def _busy(self, work: DeviceWork) -> tuple[int, int]:
        return sum(busy_ns(work, window) for window in self.windows), -work.device

    def idle(self, window: Window) -> IdleTime:
        if self._device is None:
            return self._cpu_idle(window)
        gaps = find_gaps(self.trace, self._device, window)
        if not len(gaps.spans.start):
            return IdleTime([], np.zeros((0, len(IDLE_SHARES)), np.int64))
        spent = np.stack([gaps.parts[:, list(reasons)].sum(axis=1) for reasons in _REASONS_OF_SHARE], axis=1)
        middle = gaps.spans.start + (gaps.spans.end - gaps.spans.start) // 2
        codes = self._doing(gaps.thread, middle)
        different, place = np.unique(codes, return_inverse=True)
        sums = np.zeros((len(different), len(IDLE_SHARES)), np.int64)
        np.add.at(sums, place.reshape(-1), spent)
        return IdleTime([OUTSIDE if c == MISSING else self.timeline.texts[c] for c in different.tolist()], sums)

    def _cpu_idle(self, window: Window) -> IdleTime:
        """Time outside operators by what the program did."""
        part = self.work.part(window)
        busy = union(self.work.start[part], self.work.end[part])
        beside = divide_cpu_time(self.trace, window).beside
        spent = {ACTIVITY_WORDS[name]: length(subtract(spans, busy)) for name, spans in beside.items()}
        spent[OUTSIDE] = length(complement(busy, *window)) - sum(spent.values())
        sums = np.zeros((len(spent), len(IDLE_SHARES)), np.int64)
        sums[:, 0] = list(spent.values())
        for label, share in ((ACTIVITY_WORDS["synchronisation"], 1), (OUTSIDE, 2)):
            place = list(spent).index(label)
            sums[place, [0, share]] = sums[place, [share, 0]]
        kept = np.flatnonzero(sums.any(axis=1))
        return IdleTime([list(spent)[place] for place in kept.tolist()], sums[kept])

    def _doing(self, thread: Integers, time: Integers) -> Integers:
        """Name of the innermost operator or Python function on the thread; else of its annotation or call."""
        trace = self.trace
        found = trace.innermost_of(thread, time)
        named = trace.enclosing(found, trace.is_kind(OPERATOR, PYTHON))
        plain = trace.enclosing(found, trace.is_kind(ANNOTATION, RUNTIME))
        row = np.where(named >= 0, named, plain)
        codes: Integers = np.where(row >= 0, trace.name[row], MISSING)
        return codes


def complete_steps(trace: TraceView) -> list[int]:
    """Without the first and last of many. Where optimizer steps are the marks, the first began before the trace did."""
    numbers = trace.judged_steps()
    steps = trace.timeline.steps
    if trace.timeline.step_marker == "optimizer" and len(steps) > 1:
        numbers = [number for number in numbers if number != steps[0].number]
    return numbers


def known_steps(trace: TraceView, steps: Sequence[int]) -> list[int]:
    """The steps asked for, each once; an error names one that the trace does not have."""
    if not steps:
        raise UsageError("no steps to compare were given", where=trace.source)
    return [trace.span(number).number for number in dict.fromkeys(steps)]


def _device_work(device: DeviceWork) -> Work:
    return _own_times(device.rows, device.start, device.end, device.share)


def _own_times(rows: Integers, start: Integers, end: Integers, share: Integers) -> Work:
    own_start = start.astype(np.int64)
    spans: list[Intervals] = []
    for one in (COMPUTE, COMMUNICATION, TRANSFER):
        mine = np.flatnonzero(share == one)
        spans.append(union(start[mine], end[mine]))
        if len(mine) > 1:
            reached = np.maximum.accumulate(end[mine])[:-1]
            own_start[mine[1:]] = np.maximum(start[mine[1:]], reached)
    compute, communication, _ = spans
    nothing = Intervals(compute.start[:0], compute.end[:0])
    both = union(np.concatenate((compute.start, communication.start)), np.concatenate((compute.end, communication.end)))
    return Work(
        rows=rows,
        start=start,
        end=end,
        latest_end=np.maximum.accumulate(end) if len(end) else end,
        share=share,
        own_start=own_start,
        covered_by=(nothing, compute, both),
    )


def _cpu_work(trace: TraceView) -> Work:
    """What each thread's innermost operator was, from one change to the next; a collective it is inside of makes it
    communication."""
    operators = trace.is_kind(OPERATOR)
    every = trace.rows(OPERATOR)
    is_talking = np.zeros(len(trace.timeline), bool)
    is_talking[trace.named(every, classify_lone_communication)] = True
    parts: list[tuple[Any, Any, Any]] = []
    for thread in np.unique(trace.thread[every]).tolist():
        rows = every[trace.thread[every] == thread]
        cuts = np.unique(np.concatenate((trace.start[rows], trace.end[rows])))
        inside = trace.enclosing(trace.innermost(int(thread), cuts[:-1]), operators)
        busy = inside >= 0
        parts.append((inside[busy], cuts[:-1][busy], cuts[1:][busy]))
    if not parts:
        none = np.zeros(0, np.int64)
        return _own_times(none, none, none, none)
    rows, start, end = (np.concatenate([part[place] for part in parts]) for place in range(3))
    order = np.argsort(start, kind="stable")
    rows, start, end = rows[order], start[order], end[order]
    share = np.where(trace.enclosing(rows, is_talking) >= 0, COMMUNICATION, COMPUTE)
    return _own_times(rows, start, end, share)
