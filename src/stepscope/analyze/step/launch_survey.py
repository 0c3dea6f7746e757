"""What the launches of all devices tell about the calls that made them: latencies, threads, what waits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from stepscope.analyze.step.device_work import DeviceWork
from stepscope.analyze.step.idle_loops import ByThread, Copies, Launches
from stepscope.analyze.step.numbers import distinct
from stepscope.analyze.step.row_loops import NEVER
from stepscope.analyze.step.view import TraceView
from stepscope.formats.timeline import COPY, MISSING

if TYPE_CHECKING:
    from stepscope.formats.timeline import Integers

    Waits = Mapping[int, Integers]
    """Thread → when its calls began that make a stream wait for an event; ascending."""


class LaunchSurvey:
    """In array operations, each question on its own."""

    def __init__(self, trace: TraceView, waits: Waits) -> None:
        self._trace = trace
        self._waits = waits

    @cached_property
    def least(self) -> Integers:
        """By code of the call's name the shortest time from a call to the start of its work on an empty stream.

        0 where none was seen.
        """
        import numpy as np

        trace = self._trace
        least = np.full(len(trace.timeline.texts), NEVER)
        for work in trace.works:
            free_from = trace.order_on_streams(work).free_from
            alone = np.flatnonzero((work.launch >= 0) & (free_from <= work.called))
            latency = np.maximum(work.start[alone] - work.called[alone], 0)
            np.minimum.at(least, trace.name[work.launch[alone]], latency)
        return _or_zero(least)

    @cached_property
    def threads(self) -> list[int]:
        """Threads that launched device work; −1 where the trace does not name the thread."""
        trace = self._trace
        found = (distinct(trace.thread[work.launch[work.launch >= 0]]) for work in trace.works)
        return sorted({thread for threads in found for thread in threads})

    @cached_property
    def blocking(self) -> Integers:
        """Calls of copies that did not leave the host to go on.

        Such a call returns only when its copy has ended, or, where memory is pageable, when the copy has begun. The
        launch of a graph starts many: that one copy in it has ended by then says nothing.
        """
        import numpy as np

        trace = self._trace
        found = [np.zeros(0, np.int64)]
        for work in trace.works:
            copies = work.rows[trace.kind[work.rows] == COPY]
            copies = copies[trace.parent[copies] >= 0]
            launch = trace.parent[copies]
            pageable = trace.has_name(copies, _is_pageable)
            waited = trace.end[launch] >= np.where(pageable, trace.start[copies], trace.end[copies])
            found.append(_launch_nothing_else(work, launch[waited]))
        return np.concatenate(found)

    @cached_property
    def held(self) -> dict[int, Integers]:
        """Thread → when its launches began that are the first after a wait for an event, ascending."""
        import numpy as np

        trace = self._trace
        held = {}
        for one, times in self._waits.items():
            called = [work.called[(work.launch >= 0) & (trace.thread[work.launch] == one)] for work in trace.works]
            launches = np.sort(np.concatenate([times[:0], *called]), kind="stable")
            following = launches.searchsorted(times, side="left")
            held[one] = launches[following[following < len(launches)]]
        return held


class CompiledSurvey(LaunchSurvey):
    """In one compiled pass for all questions."""

    @cached_property
    def least(self) -> Integers:
        return self._found.least

    @cached_property
    def threads(self) -> list[int]:
        return self._found.threads

    @cached_property
    def blocking(self) -> Integers:
        return self._found.blocking

    @cached_property
    def held(self) -> dict[int, Integers]:
        return self._found.held

    @cached_property
    def _found(self) -> _Found:
        import numpy as np

        from stepscope.analyze.native.step import survey_launches

        trace, waits = self._trace, self._waits
        texts, threads = len(trace.timeline.texts), range(MISSING, len(trace.timeline.threads))
        copies = Copies(COPY, np.zeros(texts + 1, bool))
        copies.is_pageable[trace.wanted_codes(COPY, _is_pageable)] = True
        times = np.concatenate([np.zeros(0, np.int64), *(waits[one] for one in sorted(waits))])
        first = np.cumsum([0, *(len(waits.get(one, ())) for one in threads)])
        found = Launches(
            least=np.full(texts, NEVER),
            has_launched=np.zeros(len(threads), bool),
            following=np.full(len(times), NEVER),
            blocking=np.empty(max((len(work.rows) for work in trace.works), default=0), np.int64),
        )
        blocking = [np.zeros(0, np.int64)]
        for work in trace.works:
            count = survey_launches(work.rows, trace.columns, copies, ByThread(times, times, first), found)
            blocking.append(_launch_nothing_else(work, found.blocking[:count]))
        held = {one: found.following[first[one + 1] : first[one + 2]] for one in waits}
        return _Found(
            _or_zero(found.least),
            (np.flatnonzero(found.has_launched) + MISSING).tolist(),
            np.concatenate(blocking),
            {one: called[called < NEVER] for one, called in held.items()},
        )


class _Found(NamedTuple):
    least: Integers
    threads: list[int]
    blocking: Integers
    held: dict[int, Integers]


def survey_launches_of(trace: TraceView, waits: Waits) -> LaunchSurvey:
    return CompiledSurvey(trace, waits) if trace.is_compiled else LaunchSurvey(trace, waits)


def _is_pageable(name: str) -> bool:
    return "Pageable" in name


def _launch_nothing_else(work: DeviceWork, calls: Integers) -> Integers:
    """Those of the calls that launched one row of the work."""
    import numpy as np

    if not len(calls):
        return calls
    launches = np.sort(work.launch, kind="stable")
    alone: Integers = calls[launches.searchsorted(calls, side="left") + 1 == launches.searchsorted(calls, side="right")]
    return alone


def _or_zero(least: Integers) -> Integers:
    least[least == NEVER] = 0
    return least
