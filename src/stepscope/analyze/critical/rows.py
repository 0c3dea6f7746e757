"""The events of a step as the graph needs them: host events thread by thread, device work stream by stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from stepscope.analyze.step.device_work import Window
from stepscope.analyze.step.numbers import Mask, Whole, distinct, number_codes
from stepscope.analyze.step.view import TraceView
from stepscope.formats.timeline import DEVICE_KINDS, HOST_KINDS

COMPILED_FROM = 80_000
"""Edges, or points of threads, from which loading the compiled loops pays."""
NEVER = -(1 << 61)
"""The time of a call that the trace does not have: before everything."""


class Hosts(NamedTuple):
    """Host events of the window, by thread, then start, then longest first. Times count from the window's start."""

    rows: Whole
    thread: Whole
    start: Whole
    end: Whole
    parent: Whole
    """Place of the enclosing event; −1 at the top."""

    def times_of(self, nodes: Whole) -> Whole:
        """Nodes are 2·place for the start of an event, and one more for its end."""
        times: Whole = np.where(nodes & 1, self.end[nodes >> 1], self.start[nodes >> 1])
        return times


@dataclass(frozen=True)
class Devices:
    """Device work, by stream, then start. Times count from the window's start."""

    rows: Whole
    queue: Whole
    """Number of the stream among all streams of all devices."""
    device: Whole
    start: Whole
    end: Whole
    call: Whole
    """Row of the call that launched it; −1 where the trace has none."""
    called: Whole
    """When that call began; NEVER without one."""
    alone: Mask
    """The only or first work of its call: a captured graph has many."""
    names: list[tuple[int, int]]
    """(device, stream) of each queue."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def queues(self) -> list[slice]:
        """Where each queue stands."""
        ends = np.cumsum(np.bincount(self.queue, minlength=len(self.names))).tolist()
        return [slice(*pair) for pair in pairwise([0, *ends])]

    def inside(self, wanted: Mask, window: Window) -> Devices:
        """Those for which `wanted` holds, with times from the window's start, cut to it; queues keep their numbers."""
        columns = ("rows", "queue", "device", "start", "end", "call", "called", "alone")
        taken = {name: getattr(self, name)[wanted] for name in columns}
        for name in ("start", "end"):
            taken[name] = np.clip(taken[name] - window.start_ns, 0, window.length_ns)
        taken["called"] = np.where(taken["called"] == NEVER, NEVER, taken["called"] - window.start_ns)
        return replace(self, **taken)


class StepRows(NamedTuple):
    window: Window
    hosts: Hosts
    devices: Devices
    start_of: Whole
    """Node of the start of each row of the timeline; its end is the next node. −1: not in the window."""

    @property
    def source(self) -> int:
        """The node of the window's start; the next one is its end."""
        return 2 * (len(self.hosts.rows) + len(self.devices))


def device_queues(trace: TraceView) -> Devices:
    """All device work of a trace. Times are those of the trace."""
    rows = trace.rows(*DEVICE_KINDS)
    device, stream = (trace.column(name)[rows].astype(np.int64) for name in ("device", "stream"))
    names, queue = _number_queues(device, stream)
    order = np.lexsort((trace.end[rows], trace.start[rows], queue))
    rows, queue, device = rows[order], queue[order], device[order]
    call = trace.parent[rows].astype(np.int64)
    called = np.where(call >= 0, trace.start[call], NEVER)
    return Devices(
        rows=rows,
        queue=queue,
        device=device,
        start=trace.start[rows].astype(np.int64),
        end=trace.end[rows].astype(np.int64),
        call=call,
        called=called,
        alone=_first_of_call(call, trace.start[rows]),
        names=names,
    )


def _number_queues(device: Whole, stream: Whole) -> tuple[list[tuple[int, int]], Whole]:
    """The (device, stream) of each queue, ascending, and the queue of each device activity."""
    devices, streams = distinct(device), distinct(stream)
    # A handful of each: looking their numbers up is much faster than sorting all pairs.
    pair = np.searchsorted(devices, device) * len(streams) + np.searchsorted(streams, stream)
    found, queue = number_codes(pair, len(devices) * len(streams))
    return [(devices[code // len(streams)], streams[code % len(streams)]) for code in found], queue


def _first_of_call(call: Whole, start: Whole) -> Mask:
    order = np.lexsort((start, call))
    sorted_calls = call[order]
    first = np.ones(len(call), bool)
    first[order[1:]] = (sorted_calls[1:] != sorted_calls[:-1]) | (sorted_calls[1:] < 0)
    return first


def step_rows(trace: TraceView, step: int | None, queues: Devices) -> StepRows:
    """What belongs to the exclusive window of a step: its host events and what they launched, as far as they reach into
    it, and work launched before that was still running.

    Work of later steps is left out: on a stream it comes after all of this step, so it cannot have delayed it.
    """
    window = trace.window(step)
    hosts = _hosts(trace, step, window)
    own = np.ones(len(queues), bool) if step is None else trace.step[queues.rows] == step
    own &= queues.end > window.start_ns
    before = queues.called if step is not None else queues.start
    carried = (before < window.start_ns) & (queues.end > window.start_ns) & (queues.start < window.end_ns)
    devices = queues.inside(own | carried, window)
    start_of = np.full(len(trace.start), -1, np.int64)
    start_of[hosts.rows] = 2 * np.arange(len(hosts.rows))
    start_of[devices.rows] = 2 * (len(hosts.rows) + np.arange(len(devices)))
    return StepRows(window, hosts, devices, start_of)


def _hosts(trace: TraceView, step: int | None, window: Window) -> Hosts:
    wanted = trace.is_kind(*HOST_KINDS) & (trace.thread >= 0)
    if step is not None:
        wanted &= (trace.step == step) & (trace.end > window.start_ns)
    rows = trace.nested_order(np.flatnonzero(wanted))
    place = np.full(len(trace.start) + 1, -1, np.int64)
    place[rows] = np.arange(len(rows))
    length = window.length_ns
    return Hosts(
        rows=rows,
        thread=trace.thread[rows].astype(np.int64),
        start=np.clip(trace.start[rows] - window.start_ns, 0, length),
        end=np.clip(trace.end[rows] - window.start_ns, 0, length),
        parent=place[trace.parent[rows]],  # the last entry answers for −1
    )


class LaunchOrder:
    """What was launched last before, or first after, a time: by a thread, or on a stream."""

    def __init__(self, trace: TraceView, rows: StepRows) -> None:
        devices = rows.devices
        self._devices = devices
        has_call = np.flatnonzero(devices.call >= 0)
        thread = trace.thread[devices.call[has_call]].astype(np.int64)
        order = np.lexsort((devices.called[has_call], thread))
        self._places = has_call[order]
        self._thread = thread[order]
        self._called = devices.called[self._places]
        self._issued = np.zeros(len(devices), np.int64)
        self.last_to_end = np.zeros(len(devices) + 1, np.int64)
        """Among each work and all before it on its stream: the place of what ended last; one more for work −1."""
        for mine in devices.queues:
            self._issued[mine] = np.maximum.accumulate(devices.called[mine])
            latest = np.maximum.accumulate(devices.end[mine])
            is_new = devices.end[mine] == latest
            self.last_to_end[mine] = np.maximum.accumulate(np.where(is_new, np.arange(mine.start, mine.stop), 0))

    def by_thread(self, thread: Whole, time: Whole, *, after: bool = False) -> Whole:
        """Place of the last work that this thread launched before the time (first after it); −1 if there is none."""
        found = np.full(len(thread), -1, np.int64)
        for number in distinct(thread):
            first, last = (int(np.searchsorted(self._thread, number, side=side)) for side in ("left", "right"))
            mine = np.flatnonzero(thread == number)
            place = first + np.searchsorted(self._called[first:last], time[mine], side="left") - (0 if after else 1)
            inside = (place >= first) & (place < last)
            found[mine[inside]] = self._places[place[inside]]
        return found

    def on_queue(self, queue: int, time: Whole) -> Whole:
        """Place of the work launched on a stream before the time that ended last; −1 if there is none."""
        mine = self._devices.queues[queue]
        place = mine.start + np.searchsorted(self._issued[mine], time, side="left") - 1
        found: Whole = np.where(place >= mine.start, self.last_to_end[place], -1)
        return found

    def next_on_queue(self, queue: int, time: Whole) -> Whole:
        """Place of the first work launched on a stream at or after the time; −1 if there is none."""
        mine = self._devices.queues[queue]
        place = mine.start + np.searchsorted(self._issued[mine], time, side="left")
        found: Whole = np.where(place < mine.stop, place, -1)
        return found


class Chains:
    """Points of all threads, one thread after the other: nodes (2·place for a start, one more for an end) and times."""

    def __init__(self, hosts: Hosts) -> None:
        count = len(hosts.rows)
        nodes = np.zeros(2 * count, np.int64)
        run_loop(emit_points, 2 * count, (hosts.thread, hosts.parent), (nodes, np.zeros(count + 1, np.int64)))
        thread = hosts.thread[nodes >> 1]
        time = hosts.times_of(nodes)
        back = (time[1:] < time[:-1]) & (thread[1:] == thread[:-1])
        if back.any():  # events that cross instead of nesting
            order = np.lexsort((np.arange(len(nodes)), time, thread))
            nodes, thread, time = nodes[order], thread[order], time[order]
        self.nodes: Whole = nodes
        self.thread: Whole = thread
        self.time: Whole = time
        self.numbers: list[int] = distinct(hosts.thread)
        """The threads there are."""
        self._parent = hosts.parent

    def of(self, thread: int) -> slice:
        """Where the points of a thread stand."""
        first, last = np.searchsorted(self.thread, (thread, thread + 1))
        return slice(int(first), int(last))

    def open_after(self, nodes: Whole) -> Whole:
        """Place of the innermost event that is open just after each point; −1 where none is."""
        # After a start that is the event itself, after an end what encloses it.
        return np.where(nodes & 1, self._parent[nodes >> 1], nodes >> 1)


def is_large(rows: int) -> bool:
    """Whether loading the compiler pays for a loop over so many edges or points."""
    return rows >= COMPILED_FROM


def run_loop(loop: Callable[..., int], rows: int, inputs: Sequence[Any], outputs: Sequence[Whole]) -> int:
    """Calls a loop that cannot be written as array operations: `loop(*inputs, *outputs)`, which fills the outputs.

    Compiled where it is large; else on lists, which is faster than loading the compiler. Inputs may be lists then.
    """
    if is_large(rows):
        return _compile(loop)(*inputs, *outputs)
    lists = [column.tolist() for column in outputs]
    result = loop(*(one.tolist() if isinstance(one, np.ndarray) else one for one in inputs), *lists)
    for column, values in zip(outputs, lists, strict=True):
        column[:] = values
    return result


@cache
def _compile(loop: Callable[..., int]) -> Callable[..., int]:
    from stepscope.formats.machine_code import compiled

    return compiled(loop)


def emit_points(thread: Any, parent: Any, points: Any, stack: Any) -> int:
    """Starts (2·place) and ends (2·place + 1) in the order in which nested events begin and end.

    Rows come by thread, start, longest first; `parent` is a place or −1. Returns how many points were written: all.
    """
    depth = 0
    count = 0
    for place in range(len(thread)):
        new_thread = place > 0 and thread[place] != thread[place - 1]
        while depth > 0 and (new_thread or stack[depth - 1] != parent[place]):
            depth -= 1
            points[count] = 2 * stack[depth] + 1
            count += 1
        stack[depth] = place
        depth += 1
        points[count] = 2 * place
        count += 1
    while depth > 0:
        depth -= 1
        points[count] = 2 * stack[depth] + 1
        count += 1
    return count
