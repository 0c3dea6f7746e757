"""The graph of one rank while its edges are being found, and the least delays of its machine, measured in the trace."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Any, NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.critical.rows import (
    Chains,
    Devices,
    Hosts,
    LaunchOrder,
    StepRows,
    codes_in,
    core,
    device_queues,
    rows_of_kind,
    step_rows,
)
from stepscope.analyze.step.numbers import Mask, Whole, distinct
from stepscope.formats.classify import PLAIN, STREAM_WAIT, classify_call
from stepscope.formats.timeline import MISSING, RUNTIME, SYNC, Integers, Timeline

LOW = 0.01
"""Which quantile stands for the least: the clocks of host and device are fitted, so the very least is noise."""
USUAL = 0.95
"""Up to this quantile a delay counts as usual for its edge; what is above is unexplained."""
MOST_USUAL_NS = 50_000
"""No usual delay is longer, whatever a trace with holes seems to say."""
FALLBACK_STREAM_NS = 1_000
QUEUE_LIMIT = 1_021
"""Launches that wait on one stream behind the work that runs; as on an H200 with CUDA 13, each stream for itself."""
NO_END = -(1 << 62)
"""Before every time in a trace: nothing had to end."""
FAMILY_FACTOR = 2
"""A call takes at most so many times the least latency of any other call that does the same."""
_FAMILIES = (
    ("graph", re.compile(r"Graph", re.IGNORECASE)),
    ("kernel", re.compile(r"Launch.*Kernel|LaunchByPtr|KernelLaunch", re.IGNORECASE)),
    ("copy", re.compile(r"Mem(ory)?cpy|MemoryCopy", re.IGNORECASE)),
    ("fill", re.compile(r"Mem(ory)?set|MemoryFill", re.IGNORECASE)),
)
"""What launching calls do, whatever the vendor calls them; the first that fits decides."""


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """Delays in ns. The lower ones are what a dependency costs at least, the others what is usual on top of it."""

    launch_ns: dict[str, int] = {}
    """Name of the call → from its start to the start of its work on an idle stream."""
    launch_other_ns: int = 0
    """For calls that never met an idle stream."""
    launch_usual_ns: int = 0
    stream_ns: int = FALLBACK_STREAM_NS
    """From the end of one device activity to the start of the next that was already waiting."""
    stream_usual_ns: int = 0
    event_ns: int = 0
    """From the end of work to the start of work on another stream that waited for its event."""
    event_usual_ns: int = 0
    sync_ns: int | None = None
    """From the end of work to the return of the call that waited for it. None: measured in the window."""
    sync_usual_ns: int = 0
    call_ns: dict[str, int] = {}
    """Name of a blocking call → what it takes when there is nothing to wait for."""
    queue_limit: int = QUEUE_LIMIT
    """How many launches a stream holds before the next one has to wait; 0: no limit known."""


def least(delays: Whole) -> int:
    return _at(delays, floor(LOW * (len(delays) - 1))) if len(delays) else 0


def usual(delays: Whole) -> int:
    """What is usual above the least."""
    return _most_usual(delays, above=least(delays))


def _most_usual(delays: Whole, *, above: int = 0) -> int:
    return min(_at(delays, ceil(USUAL * (len(delays) - 1))) - above, MOST_USUAL_NS) if len(delays) else 0


def _at(delays: Whole, place: int) -> int:
    """What would stand at this place if they were sorted."""
    return int(np.partition(delays, place)[place])


def measure_constants(timeline: Timeline, queues: Devices, roles: Whole) -> Constants:
    """From all steps of a trace; `queues` is its device work on the clock of the trace, `roles` what its calls do.

    Work that another stream may have delayed says nothing about launches or streams, and does not count there.
    """
    free_from = free_times(queues)
    others_end = ends_awaited(timeline, queues, roles)
    delayed = others_end > np.maximum(np.where(queues.call >= 0, queues.called, queues.start), free_from)
    usable = (queues.call >= 0) & ~delayed
    launched = usable & queues.alone
    idle = launched & (free_from <= queues.called) & (queues.start >= queues.called)
    latency = (queues.start - queues.called)[idle]
    name = core(timeline, "name")[queues.call[idle]]
    by_call = _like_their_family({timeline.texts[code]: least(latency[name == code]) for code in distinct(name)})
    least_latency = least(latency)
    gap = (queues.start - free_from)[usable & queued(queues, free_from, least_latency)]
    # What began before those ends waited for something else, if at all; so did what was launched late.
    awaited = delayed & (queues.start >= others_end) & (queues.called + least_latency <= others_end)
    return Constants(
        launch_ns=by_call,
        launch_other_ns=min(by_call.values(), default=least((queues.start - queues.called)[launched])),
        launch_usual_ns=usual(latency),
        stream_ns=least(gap) if len(gap) else FALLBACK_STREAM_NS,
        stream_usual_ns=usual(gap),
        event_usual_ns=_most_usual((queues.start - others_end)[awaited]),
    )


def _like_their_family(by_call: dict[str, int]) -> dict[str, int]:
    """Calls that do the same take about the same: one that was only seen delayed does not get a latency of its own."""
    families = {name: next((one for one, pattern in _FAMILIES if pattern.search(name)), None) for name in by_call}
    capped = {}
    for name, latency in by_call.items():
        others = [by_call[other] for other in by_call if other != name and families[other] == families[name]]
        capped[name] = min([latency, *(FAMILY_FACTOR * other for other in others)])
    return capped


def ends_awaited(timeline: Timeline, queues: Devices, roles: Whole) -> Whole:
    """For work that may have waited for an event: when other streams had ended what they had been given before.

    That is the first work of each stream after any call that made a stream wait: the trace need not say which one. The
    least number for all other work.
    """
    ends = np.full(len(queues), NO_END, np.int64)
    waits = np.sort(core(timeline, "start_ns")[roles == STREAM_WAIT])
    if not len(waits):
        return ends
    issued = np.where(queues.call >= 0, queues.called, queues.start)
    orders = [mine.start + np.argsort(issued[mine], kind="stable") for mine in queues.queues]
    behind = np.zeros(len(queues), bool)
    for order in orders:
        behind[order] = np.diff(np.searchsorted(waits, issued[order], side="right"), prepend=0) > 0
    places = np.flatnonzero(behind)
    for number, order in enumerate(orders):
        before = np.searchsorted(issued[order], issued[places], side="left") - 1
        fits = (before >= 0) & (queues.queue[places] != number)
        fits &= queues.device[places] == queues.names[number][0]
        latest = np.maximum.accumulate(queues.end[order])
        ends[places[fits]] = np.maximum(ends[places[fits]], latest[before[fits]])
    return ends


def free_times(queues: Devices) -> Whole:
    """When everything before a device activity on its stream had ended; the least number for the first one."""
    free = np.full(len(queues), NO_END, np.int64)
    for mine in queues.queues:
        free[mine.start + 1 : mine.stop] = np.maximum.accumulate(queues.end[mine])[:-1]
    return free


def queued(queues: Devices, free_from: Whole, latency: int) -> Mask:
    """Work that was waiting on its stream when what was before it ended."""
    waiting: Mask = (queues.call >= 0) & (queues.called + latency <= free_from) & (queues.start >= free_from)
    return waiting


def launch_latencies(timeline: Timeline, constants: Constants, calls: Whole) -> Whole:
    """The least latency for each launching call (rows)."""
    names = core(timeline, "name")[calls]
    delays = np.full(len(calls), constants.launch_other_ns, np.int64)
    for code in distinct(names):
        if code >= 0:
            delays[names == code] = constants.launch_ns.get(timeline.texts[code], constants.launch_other_ns)
    return delays


UNLIMITED = 1 << 60


class SyncRows(NamedTuple):
    """The profiler's own record of waits, joined with the calls that waited (rows)."""

    call: Whole
    kind: list[str]
    device: Whole
    stream: Whole
    wait_stream: Whole
    recorded: Whole
    """When the event was recorded that was waited for, on the clock of the window; −1 where unknown."""
    complete: bool
    """Whether the profiler wrote waits down at all: then all of them."""


def call_roles(timeline: Timeline) -> Integers:
    """The role of every row; PLAIN for all that are no runtime calls."""
    calls = rows_of_kind(timeline, RUNTIME)
    by_code = np.zeros(len(timeline.texts) + 1, np.int8)
    for code in codes_in(timeline, calls):
        by_code[code] = classify_call(timeline.texts[code])
    roles = np.full(len(timeline), PLAIN, np.int8)
    roles[calls] = by_code[core(timeline, "name")[calls]]
    return roles


class EdgeBuffer:
    """Edges as they are found, in arrays; numbers stand for whole columns."""

    def __init__(self) -> None:
        self._parts: list[tuple[Any, ...]] = []

    def add(
        self,
        source: Any,
        target: Any,
        weight: Any,
        *,
        kind: int,
        cost: Any,
        row: Any = -1,
        inferred: Any = 0,
    ) -> None:
        """`weight` is the least delay in ns; `cost` what it is spent on; `row` the event it belongs to (−1: none)."""
        count = np.size(source) if np.ndim(source) else np.size(target)
        if count:
            columns = (source, target, weight, kind, cost, row, inferred)
            self._parts.append(tuple(np.broadcast_to(column, count) for column in columns))

    def columns(self) -> list[Whole]:
        """source, target, weight, kind, cost, row, inferred."""
        if not self._parts:
            return [np.zeros(0, np.int64) for _ in range(7)]
        return [np.concatenate(column).astype(np.int64, copy=False) for column in zip(*self._parts, strict=True)]


@dataclass
class Draft:
    """What the finders of edges need to know, and where they write."""

    timeline: Timeline
    rows: StepRows
    constants: Constants
    order: LaunchOrder
    roles: Whole
    """What each row does as a call (module calls)."""
    syncs: SyncRows
    chains: Chains
    launches: Mask
    """Rows that launched device work, in whatever step."""
    meets: Mask
    """Rows whose length the meeting with other ranks decides."""
    limit: Whole
    """Per node: what a thread takes at most to come to it from the point before when it need not wait."""
    edges: EdgeBuffer = field(default_factory=EdgeBuffer)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def hosts(self) -> Hosts:
        return self.rows.hosts

    @property
    def devices(self) -> Devices:
        return self.rows.devices

    def begins(self, places: Whole) -> Whole:
        """Nodes of the start of device work; the next node is its end."""
        return self.rows.start_of[self.devices.rows[places]]


def begin_draft(timeline: Timeline, step: int | None, meets: Mask, constants: Constants | None) -> Draft:
    queues, roles = device_queues(timeline), call_roles(timeline)
    rows = step_rows(timeline, step, queues)
    launches = np.zeros(len(timeline), bool)
    launches[queues.call[queues.call >= 0]] = True
    return Draft(
        timeline=timeline,
        rows=rows,
        constants=measure_constants(timeline, queues, roles) if constants is None else constants,
        order=LaunchOrder(timeline, rows),
        roles=roles,
        syncs=_sync_rows(timeline, rows),
        chains=Chains(rows.hosts),
        launches=launches,
        meets=meets,
        limit=np.full(rows.source + 2, UNLIMITED, np.int64),
    )


def _sync_rows(timeline: Timeline, rows: StepRows) -> SyncRows:
    """Those whose call lies in the window."""
    found = rows_of_kind(timeline, SYNC)
    if "sync" not in timeline.blocks or not len(found):
        empty = np.zeros(0, np.int64)
        return SyncRows(empty, [], empty, empty, empty, empty, complete=False)
    call = _calls_with(timeline, core(timeline, "correlation")[found])
    inside = (call >= 0) & (rows.start_of[call] >= 0)
    found, call = found[inside], call[inside]
    names = ("sync_kind", "wait_stream", "wait_correlation")
    kind, wait_stream, correlation = (timeline.column(name)[found].astype(np.int64) for name in names)
    record = _calls_with(timeline, correlation)
    began = core(timeline, "start_ns")[record] - rows.window.start_ns
    name = core(timeline, "name")[found]
    return SyncRows(
        call=call,
        kind=[timeline.texts[code] for code in np.where(kind >= 0, kind, name).tolist()],
        device=core(timeline, "device")[found].astype(np.int64),
        stream=core(timeline, "stream")[found].astype(np.int64),
        wait_stream=wait_stream,
        recorded=np.where(record >= 0, began, MISSING),
        complete=True,
    )


def _calls_with(timeline: Timeline, correlation: Whole) -> Whole:
    """Row of the runtime call with each number; −1 where there is none."""
    calls = rows_of_kind(timeline, RUNTIME)
    calls = calls[core(timeline, "correlation")[calls] >= 0]
    if not len(calls):
        return np.full(len(correlation), MISSING, np.int64)
    numbers, first = np.unique(core(timeline, "correlation")[calls], return_index=True)
    place = np.minimum(np.searchsorted(numbers, correlation), len(numbers) - 1)
    return np.where((numbers[place] == correlation) & (correlation >= 0), calls[first[place]], MISSING)
