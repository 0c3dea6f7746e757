"""When host threads were held up: inside calls that wait for a device, for an event or for other ranks."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from stepscope.analyze.step.device_work import LONG_AGO, DeviceWork
from stepscope.analyze.step.intervals import Intervals, join, no_intervals, subtract, touches
from stepscope.analyze.step.numbers import Mask, distinct, unique
from stepscope.analyze.step.view import NEVER, TraceView
from stepscope.formats import classify
from stepscope.formats.classify import HOST_WAITS, classify_call, classify_host_communication
from stepscope.formats.timeline import COPY, OPERATOR, RUNTIME, SYNC, Integers


def _launch_nothing_else(work: DeviceWork, calls: Integers) -> Integers:
    """Those of the calls that launched one row of the work."""
    if not len(calls):
        return calls
    launches = np.sort(work.launch, kind="stable")
    alone: Integers = calls[launches.searchsorted(calls, side="left") + 1 == launches.searchsorted(calls, side="right")]
    return alone


STREAM_WAIT = "Stream Wait Event"


def is_blocking_name(name: str) -> bool:
    """Whether a call returns only when device work has ended."""
    return classify_call(name) in HOST_WAITS


def is_wait_name(name: str) -> bool:
    """Whether a call makes a stream wait for an event; the host goes on."""
    return classify_call(name) == classify.STREAM_WAIT


def host_waits(trace: TraceView) -> HostWaits:
    """The waits of a trace, found once."""
    return trace.keep("host waits", lambda: HostWaits(trace))


class HostWaits:
    """Answers for each thread. Use `host_waits` to get one."""

    def __init__(self, trace: TraceView) -> None:
        self._trace = trace

    @cached_property
    def _waiting(self) -> Integers:
        """Calls whose name says that the host or a stream waits."""
        return self._trace.named_of(RUNTIME, lambda name: is_blocking_name(name) or is_wait_name(name))

    @cached_property
    def _calls(self) -> Integers:
        """Runtime rows that wait: by name, and copies that did not leave the host to go on."""
        trace = self._trace
        found = trace.named(self._waiting, is_blocking_name)
        return unique(np.append(found, self.blocking_copies)) if len(self.blocking_copies) else found

    @cached_property
    def _blocked(self) -> Intervals:
        """When any thread was inside a blocking call."""
        return self._trace.spans(self._calls)

    @cached_property
    def _top_meanwhile(self) -> Integers:
        """Host rows that nothing encloses, as far as they share time with a blocking call."""

        trace, blocked = self._trace, self._blocked
        rows = trace.top_rows
        return rows[touches(blocked, trace.start[rows], trace.end[rows])]

    @cached_property
    def _unplaced(self) -> Intervals:
        """Waits of the host that the profiler recorded itself, where the call that waited is not in the trace."""
        trace, (rows, said) = self._trace, self._syncs
        if not len(rows):
            return no_intervals()
        correlation = trace.column("correlation")
        calls = correlation[trace.rows(RUNTIME)]
        names = {code: trace.text(code) for code in distinct(said)}
        of_host = [code for code, name in names.items() if "Sync" in name and name != STREAM_WAIT]
        return trace.spans(rows[np.isin(said, of_host) & ~np.isin(correlation[rows], calls[calls >= 0])])

    @cached_property
    def _peers(self) -> Integers:
        """Operators that are collectives on the host; none where the device communicates: they only launch there."""
        trace = self._trace
        if any(work.communicates for work in trace.works):
            return np.zeros(0, np.int64)
        return trace.named(trace.rows(OPERATOR), classify_host_communication)

    @cached_property
    def _syncs(self) -> tuple[Integers, Integers]:
        """Waits that the profiler recorded itself, and the code of what each says it is."""
        trace, rows = self._trace, self._trace.rows(SYNC)
        if not len(rows):
            return rows, rows
        kinds = trace.column("sync_kind")[rows]
        return rows, np.where(kinds >= 0, kinds, trace.name[rows])

    @cached_property
    def _recorded(self) -> dict[tuple[int, int], Integers]:
        """(device, stream) → when a wait for an event was put on it; empty where the trace records none."""
        trace, (rows, said) = self._trace, self._syncs
        rows = rows[np.isin(said, [code for code in distinct(said) if trace.text(code) == STREAM_WAIT])]
        if not len(rows):
            return {}
        device, stream = trace.column("device")[rows], trace.column("stream")[rows]
        return {
            (one, other): np.sort(trace.start[rows[(device == one) & (stream == other)]])
            for one, other in set(zip(device.tolist(), stream.tolist(), strict=True))
        }

    @cached_property
    def least(self) -> Integers:
        """By code of the call's name the shortest time from a call to the start of its work on an empty stream.

        0 where none was seen.
        """
        trace = self._trace
        least = np.full(len(trace.timeline.texts), NEVER)
        for work in trace.works:
            free_from = trace.order_on_streams(work).free_from
            alone = np.flatnonzero((work.launch >= 0) & (free_from <= work.called))
            latency = np.maximum(work.start[alone] - work.called[alone], 0)
            np.minimum.at(least, trace.name[work.launch[alone]], latency)
        least[least == NEVER] = 0
        return least

    @cached_property
    def blocking_copies(self) -> Integers:
        """Calls of copies that did not leave the host to go on.

        Such a call returns only when its copy has ended, or, where memory is pageable, when the copy has begun. The
        launch of a graph starts many: that one copy in it has ended by then says nothing.
        """
        trace = self._trace
        found = [np.zeros(0, np.int64)]
        for work in trace.works:
            copies = work.rows[trace.kind[work.rows] == COPY]
            copies = copies[trace.parent[copies] >= 0]
            launch = trace.parent[copies]
            pageable = trace.has_name(copies, lambda name: "Pageable" in name)
            waited = trace.end[launch] >= np.where(pageable, trace.start[copies], trace.end[copies])
            found.append(_launch_nothing_else(work, launch[waited]))
        return np.concatenate(found)

    @cached_property
    def held(self) -> dict[int, Integers]:
        """Thread → when its launches began that are the first after a wait for an event, ascending."""
        trace = self._trace
        rows = trace.named(self._waiting, is_wait_name)
        held = {}
        for one in distinct(trace.thread[rows]):
            times = np.sort(trace.start[rows[trace.thread[rows] == one]])
            called = [work.called[(work.launch >= 0) & (trace.thread[work.launch] == one)] for work in trace.works]
            launches = np.sort(np.concatenate([times[:0], *called]), kind="stable")
            following = launches.searchsorted(times, side="left")
            held[one] = launches[following[following < len(launches)]]
        return held

    def is_blocking(self, rows: Integers) -> Mask:
        """Whether each of these calls returned only when device work had ended."""
        found: Mask = self._is_blocking[rows]
        return found

    @cached_property
    def _is_blocking(self) -> Mask:
        return self._trace.mask(self._calls)

    def synchronising(self, thread: int) -> Intervals:
        """When the thread was inside a blocking call, or did nothing recorded while another thread was.

        The second is how a backward pass looks: its thread has nothing to do until the main one comes back from a wait.
        Waits of which the trace does not say who waited count for every thread.
        """

        def find() -> Intervals:
            trace = self._trace
            is_own = trace.thread[self._calls] == thread
            own = trace.spans(self._calls[is_own])
            others = no_intervals()
            if not is_own.all():
                top = self._top_meanwhile
                others = subtract(self._blocked, trace.spans(top[trace.thread[top] == thread]))
            return join((own, others, self._unplaced))

        return self._trace.keep(("synchronising", thread), find)

    def with_peers(self, thread: int) -> Intervals:
        """When the thread was inside a collective that runs on the host, and not inside a blocking call."""
        return self._trace.keep(("with peers", thread), lambda: self._with_peers(thread))

    def _with_peers(self, thread: int) -> Intervals:
        mine = self._peers[self._trace.thread[self._peers] == thread]
        return subtract(self._trace.spans(mine), self.synchronising(thread))

    def waited(self, work: DeviceWork, place: Integers) -> Mask:
        """Whether a wait for an event stands before each of these, which have a launch, on its stream.

        Recorded waits name their stream. Calls do not: a wait belongs to the launch that follows it on its thread.
        """
        trace = self._trace
        waited = np.zeros(len(place), bool)
        if self._recorded:
            previous = trace.order_on_streams(work).previous[place]
            since = np.where(previous >= 0, work.called[previous], LONG_AGO)
            for (device, stream), times in self._recorded.items():
                if device == work.device:
                    mine = work.stream[place] == stream
                    low, high = since[mine], work.called[place[mine]]
                    waited[mine] = times.searchsorted(high, side="right") > times.searchsorted(low, side="right")
            return waited
        launch = trace.parent[work.rows[place]]
        thread = trace.thread[launch]
        for one, held in self.held.items():
            mine = np.flatnonzero(thread == one)
            called = trace.start[launch[mine]]
            waited[mine] = held.searchsorted(called, side="right") > held.searchsorted(called, side="left")
        return waited
