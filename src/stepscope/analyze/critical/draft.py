"""The graph of one rank while its edges are being found, and the least delays of its machine, measured in the trace."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.critical.rows import (
    Chains,
    Devices,
    LaunchOrder,
    StepRows,
    device_queues,
    step_rows,
)
from stepscope.analyze.step.device_work import LONG_AGO
from stepscope.analyze.step.numbers import Mask, Whole, distinct
from stepscope.analyze.step.view import TraceView, order_on_streams
from stepscope.formats.classify import PLAIN, STREAM_WAIT, classify_call
from stepscope.formats.nesting import look_up
from stepscope.formats.timeline import MISSING, RUNTIME, SYNC, Integers

LOW = 0.01
"""Which quantile stands for the least: the clocks of host and device are fitted, so the very least is noise."""
USUAL = 0.95
"""Up to this quantile a delay counts as usual for its edge; what is above is unexplained."""
MOST_USUAL_NS = 50_000
"""No usual delay is longer, whatever a trace with holes seems to say."""
FALLBACK_STREAM_NS = 1_000
QUEUE_LIMIT = 1_021
"""Launches that wait on one stream behind the work that runs; as on an H200 with CUDA 13, each stream for itself."""
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
    return int(np.quantile(delays, LOW, method="lower")) if len(delays) else 0


def usual(delays: Whole) -> int:
    """What is usual above the least."""
    return _most_usual(delays, above=least(delays))


def _most_usual(delays: Whole, *, above: int = 0) -> int:
    return min(int(np.quantile(delays, USUAL, method="higher")) - above, MOST_USUAL_NS) if len(delays) else 0


def measure_constants(trace: TraceView, queues: Devices, roles: Whole) -> Constants:
    """From all steps of a trace; `queues` is its device work on the clock of the trace, `roles` what its calls do.

    Work that another stream may have delayed says nothing about launches or streams, and does not count there.
    """
    free_from = order_on_streams(queues.queue, queues.end).free_from
    others_end = ends_awaited(trace, queues, roles)
    delayed = others_end > np.maximum(np.where(queues.call >= 0, queues.called, queues.start), free_from)
    usable = (queues.call >= 0) & ~delayed
    launched = usable & queues.alone
    idle = launched & (free_from <= queues.called) & (queues.start >= queues.called)
    latency = (queues.start - queues.called)[idle]
    name = trace.name[queues.call[idle]]
    by_call = _like_their_family({trace.text(code): least(latency[name == code]) for code in distinct(name)})
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


def ends_awaited(trace: TraceView, queues: Devices, roles: Whole) -> Whole:
    """For work that may have waited for an event: when other streams had ended what they had been given before.

    That is the first work of each stream after any call that made a stream wait: the trace need not say which one. The
    least number for all other work.
    """
    ends = np.full(len(queues), LONG_AGO, np.int64)
    waits = np.sort(trace.start[roles == STREAM_WAIT])
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


def queued(queues: Devices, free_from: Whole, latency: int) -> Mask:
    """Work that was waiting on its stream when what was before it ended."""
    waiting: Mask = (queues.call >= 0) & (queues.called + latency <= free_from) & (queues.start >= free_from)
    return waiting


def launch_latencies(trace: TraceView, constants: Constants, calls: Whole) -> Whole:
    """The least latency for each launching call (rows)."""
    names = trace.name[calls]
    delays = np.full(len(calls), constants.launch_other_ns, np.int64)
    for code in distinct(names):
        if code >= 0:
            delays[names == code] = constants.launch_ns.get(trace.text(code), constants.launch_other_ns)
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


def call_roles(trace: TraceView) -> Integers:
    """The role of every row; PLAIN for all that are no runtime calls."""
    calls = trace.rows(RUNTIME)
    by_code = np.zeros(len(trace.timeline.texts) + 1, np.int8)
    for code in trace.codes_in(calls):
        by_code[code] = classify_call(trace.text(code))
    roles = np.full(len(trace.start), PLAIN, np.int8)
    roles[calls] = by_code[trace.name[calls]]
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


class Draft:
    """What the finders of edges need to know, and where they write."""

    def __init__(self, trace: TraceView, step: int | None, meets: Mask, constants: Constants | None) -> None:
        queues = device_queues(trace)
        self.trace = trace
        self.roles: Whole = call_roles(trace)
        """What each row does as a call."""
        self.constants = measure_constants(trace, queues, self.roles) if constants is None else constants
        self.rows = step_rows(trace, step, queues)
        self.hosts, self.devices = self.rows.hosts, self.rows.devices
        self.order = LaunchOrder(trace, self.rows)
        self.syncs = _sync_rows(trace, self.rows)
        self.chains = Chains(self.hosts)
        self.launches = trace.mask(queues.call[queues.call >= 0])
        """Rows that launched device work, in whatever step."""
        self.meets = meets
        """Rows whose length the meeting with other ranks decides."""
        self.limit: Whole = np.full(self.rows.source + 2, UNLIMITED, np.int64)
        """Per node: what a thread takes at most to come to it from the point before when it need not wait."""
        self.edges = EdgeBuffer()
        self.counts: dict[str, int] = {}

    def begins(self, places: Whole) -> Whole:
        """Nodes of the start of device work; the next node is its end."""
        return self.rows.start_of[self.devices.rows[places]]


def _sync_rows(trace: TraceView, rows: StepRows) -> SyncRows:
    """Those whose call lies in the window."""
    found = trace.rows(SYNC)
    if "sync" not in trace.timeline.blocks or not len(found):
        empty = np.zeros(0, np.int64)
        return SyncRows(empty, [], empty, empty, empty, empty, complete=False)
    call = _calls_with(trace, trace.column("correlation")[found])
    inside = (call >= 0) & (rows.start_of[call] >= 0)
    found, call = found[inside], call[inside]
    names = ("sync_kind", "device", "stream", "wait_stream", "wait_correlation")
    kind, device, stream, wait_stream, correlation = (trace.column(name)[found].astype(np.int64) for name in names)
    record = _calls_with(trace, correlation)
    return SyncRows(
        call=call,
        kind=[trace.text(code) for code in np.where(kind >= 0, kind, trace.name[found]).tolist()],
        device=device,
        stream=stream,
        wait_stream=wait_stream,
        recorded=np.where(record >= 0, trace.start[record] - rows.window.start_ns, MISSING),
        complete=True,
    )


def _calls_with(trace: TraceView, correlation: Whole) -> Whole:
    """Row of the runtime call with each number; −1 where there is none."""
    calls = trace.rows(RUNTIME)
    return look_up(correlation, trace.column("correlation")[calls], calls)
