"""The graph of one rank while its edges are being found."""

from __future__ import annotations
from stepscope.analyze.step.numbers import Mask, Whole
import numpy as np

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stepscope.analyze.critical.calls import call_roles
from stepscope.analyze.critical.chains import Chains
from stepscope.analyze.critical.columns import core, rows_of_kind
from stepscope.analyze.critical.latencies import Constants, measure_constants
from stepscope.analyze.critical.rows import Devices, Hosts, LaunchOrder, StepRows, device_queues, step_rows
from stepscope.formats.timeline import MISSING, RUNTIME, SYNC, Timeline


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
