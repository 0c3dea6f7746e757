"""When host threads were held up: inside calls that wait for a device, for an event or for other ranks."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

from stepscope.analyze.step.intervals import Intervals, no_intervals, subtract, union
from stepscope.analyze.step.view import COMMUNICATION, LONG_AGO, DeviceWork, TraceView, distinct
from stepscope.traces.timeline import COPY, HOST_KINDS, MISSING, OPERATOR, RUNTIME, SYNC

if TYPE_CHECKING:
    from stepscope.analyze.step.view import Mask
    from stepscope.traces.timeline import Integers

BLOCKING_CALLS = frozenset(
    {
        "cudaDeviceSynchronize",
        "cudaThreadSynchronize",
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
        "cudaMemcpy2D",
        "cudaMemcpyToSymbol",
        "cudaMemcpyFromSymbol",
        "cuCtxSynchronize",
        "cuStreamSynchronize",
        "cuEventSynchronize",
        "cuMemcpyDtoH",
        "cuMemcpyHtoD",
        "hipDeviceSynchronize",
        "hipCtxSynchronize",
        "hipStreamSynchronize",
        "hipEventSynchronize",
        "hipMemcpy",
        "hipMemcpyWithStream",
        "zeEventHostSynchronize",
        "zeFenceHostSynchronize",
        "zeCommandQueueSynchronize",
        "zeCommandListHostSynchronize",
        "urEventWait",
        "urQueueFinish",
        "piEventsWait",
        "piQueueFinish",
    }
)
"""Runtime calls that return only when device work has ended. Other names that say Synchronize count too."""

WAIT_CALLS = frozenset({"cudaStreamWaitEvent", "cuStreamWaitEvent", "hipStreamWaitEvent"})
"""Calls that make a stream wait for an event; the host goes on."""

STREAM_WAIT = "Stream Wait Event"
_VERSION = re.compile(r"(?:_v\d+)?(?:_ptsz|_ptds)?$")


def is_blocking_name(name: str) -> bool:
    bare = _VERSION.sub("", name)
    return bare in BLOCKING_CALLS or "Synchronize" in bare


def is_wait_name(name: str) -> bool:
    return _VERSION.sub("", name) in WAIT_CALLS


def host_waits(trace: TraceView) -> HostWaits:
    """The waits of a trace, found once."""
    return trace.keep("host waits", lambda: HostWaits(trace))


class HostWaits:
    """Answers for each thread. Use `host_waits` to get one."""

    def __init__(self, trace: TraceView) -> None:
        self._trace = trace

    @cached_property
    def _calls(self) -> Integers:
        return _blocking_calls(self._trace)

    @cached_property
    def _unplaced(self) -> Intervals:
        return self._trace.spans(_unplaced_syncs(self._trace))

    @cached_property
    def _peers(self) -> Integers:
        return _host_collectives(self._trace)

    @cached_property
    def _recorded(self) -> dict[tuple[int, int], Integers]:
        return _recorded_waits(self._trace)

    @cached_property
    def _least(self) -> Integers:
        return _least_latencies(self._trace)

    def is_blocking(self, rows: Integers) -> Mask:
        """Whether each of these calls returned only when device work had ended."""
        is_blocking = self._trace.keep("is blocking", self._mark_blocking)
        found: Mask = is_blocking[rows]
        return found

    def _mark_blocking(self) -> Mask:
        import numpy as np

        mask = np.zeros(len(self._trace.start), bool)
        mask[self._calls] = True
        return mask

    def synchronising(self, thread: int) -> Intervals:
        """When the thread was inside a blocking call, or did nothing recorded while another thread was.

        The second is how a backward pass looks: its thread has nothing to do until the main one comes back from a wait.
        Waits of which the trace does not say who waited count for every thread.
        """
        return self._trace.keep(("synchronising", thread), lambda: self._synchronising(thread))

    def _synchronising(self, thread: int) -> Intervals:
        import numpy as np

        trace = self._trace
        is_own = trace.thread[self._calls] == thread
        own = trace.spans(self._calls[is_own])
        others = no_intervals()
        if not is_own.all():
            top = trace.keep("top rows", lambda: _top_rows(trace))
            others = subtract(trace.spans(self._calls), trace.spans(top[trace.thread[top] == thread]))
        parts = (own, others, self._unplaced)
        return union(np.concatenate([one.start for one in parts]), np.concatenate([one.end for one in parts]))

    def with_peers(self, thread: int) -> Intervals:
        """When the thread was inside a collective that runs on the host, and not inside a blocking call."""
        return self._trace.keep(("with peers", thread), lambda: self._with_peers(thread))

    def _with_peers(self, thread: int) -> Intervals:
        mine = self._peers[self._trace.thread[self._peers] == thread]
        return subtract(self._trace.spans(mine), self.synchronising(thread))

    def least_latency(self, names: Integers) -> Integers:
        """For names of launch calls the shortest time from the call to the start of its work on an empty stream."""
        return self._least[names]

    def waited(self, work: DeviceWork, place: Integers) -> Mask:
        """Whether a wait for an event stands before each of these on its stream.

        Recorded waits name their stream. Calls do not: a wait belongs to the launch that follows it on its thread.
        """
        import numpy as np

        trace = self._trace
        waited = np.zeros(len(place), bool)
        if self._recorded:
            previous = trace.order_on_streams(work).previous[place]
            since = np.where(previous >= 0, work.called[previous], LONG_AGO)
            for (device, stream), times in self._recorded.items():
                if device == work.device:
                    mine = work.stream[place] == stream
                    waited[mine] = _any_between(times, since[mine], work.called[place[mine]])
            return waited
        thread = trace.thread[work.launch[place]]
        for one, held in trace.keep("held launches", lambda: _held_launches(trace)).items():
            mine = np.flatnonzero(thread == one)
            called = work.called[place[mine]]
            waited[mine] = held.searchsorted(called, side="right") > held.searchsorted(called, side="left")
        return waited


def _top_rows(trace: TraceView) -> Integers:
    """Host rows that nothing encloses."""
    import numpy as np

    return np.flatnonzero((trace.parent == MISSING) & trace.is_kind(*HOST_KINDS))


def _any_between(times: Integers, low: Integers, high: Integers) -> Mask:
    found: Mask = times.searchsorted(high, side="right") > times.searchsorted(low, side="right")
    return found


def _blocking_calls(trace: TraceView) -> Integers:
    """Runtime rows that wait: by name, and copies that did not leave the host to go on.

    Such a call returns only when its copy has ended, or, where memory is pageable, when the copy has begun.
    """
    import numpy as np

    found = trace.named_of(RUNTIME, is_blocking_name)
    for work in trace.works:
        place = np.flatnonzero((trace.kind[work.rows] == COPY) & (work.launch >= 0))
        launch = work.launch[place]
        pageable = trace.has_name(work.rows[place], lambda name: "Pageable" in name)
        waited = trace.end[launch] >= np.where(pageable, work.start[place], work.end[place])
        if waited.any():
            # The launch of a graph starts many: that one copy in it has ended by then says nothing.
            launches, blocking = np.sort(work.launch), launch[waited]
            last = launches.searchsorted(blocking, side="right")
            is_alone = launches.searchsorted(blocking, side="left") + 1 == last
            found = np.union1d(found, blocking[is_alone])
    return found


def _unplaced_syncs(trace: TraceView) -> Integers:
    """Waits of the host that the profiler recorded itself, where the call that waited is not in the trace."""
    import numpy as np

    rows = trace.rows(SYNC)
    if not len(rows):
        return rows
    correlation = trace.column("correlation")
    calls = correlation[trace.rows(RUNTIME)]
    kinds = trace.column("sync_kind")[rows]
    said = np.where(kinds >= 0, kinds, trace.name[rows])
    of_host = [code for code in np.unique(said).tolist() if _is_host_sync(trace.text(code))]
    return rows[np.isin(said, of_host) & ~np.isin(correlation[rows], calls[calls >= 0])]


def _is_host_sync(text: str) -> bool:
    return "Sync" in text and text != STREAM_WAIT


def _host_collectives(trace: TraceView) -> Integers:
    """Operators that are collectives on the host; none where the device communicates: they only launch there."""
    from stepscope.traces.classify import classify_host_communication

    if any((work.share == COMMUNICATION).any() for work in trace.works):
        return trace.rows(RUNTIME)[:0]
    return trace.named(trace.rows(OPERATOR), classify_host_communication)


def _recorded_waits(trace: TraceView) -> dict[tuple[int, int], Integers]:
    """(device, stream) → when a wait for an event was put on it; empty where the trace records none."""
    import numpy as np

    rows = trace.rows(SYNC)
    if not len(rows):
        return {}
    kinds = trace.column("sync_kind")[rows]
    said = np.where(kinds >= 0, kinds, trace.name[rows])
    is_wait = [code for code in np.unique(said).tolist() if trace.text(code) == STREAM_WAIT]
    rows = rows[np.isin(said, is_wait)]
    device, stream = trace.column("device")[rows], trace.column("stream")[rows]
    waits: dict[tuple[int, int], Integers] = {}
    for one, other in set(zip(device.tolist(), stream.tolist(), strict=True)):
        waits[one, other] = np.sort(trace.start[rows[(device == one) & (stream == other)]])
    return waits


def _held_launches(trace: TraceView) -> dict[int, Integers]:
    """Thread → when its launches began that are the first after a wait for an event."""
    import numpy as np

    rows = trace.named_of(RUNTIME, is_wait_name)
    thread = trace.thread[rows]
    held = {}
    for one in distinct(thread):
        called = [work.called[(work.launch >= 0) & (trace.thread[work.launch] == one)] for work in trace.works]
        launches = np.sort(np.concatenate(called), kind="stable")
        following = launches.searchsorted(np.sort(trace.start[rows[thread == one]]), side="left")
        held[one] = launches[following[following < len(launches)]]
    return held


def _least_latencies(trace: TraceView) -> Integers:
    """By code of the call's name; 0 where it was never seen on an empty stream."""
    import numpy as np

    least = np.full(len(trace.timeline.texts), -LONG_AGO)
    for work in trace.works:
        free_from = trace.order_on_streams(work).free_from
        alone = np.flatnonzero((work.launch >= 0) & (free_from <= work.called))
        latency = np.maximum(work.start[alone] - work.called[alone], 0)
        np.minimum.at(least, trace.name[work.launch[alone]], latency)
    least[least == -LONG_AGO] = 0
    return least
