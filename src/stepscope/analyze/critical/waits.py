"""Calls that block the host until device work has ended, and launches that a full queue delays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from stepscope.analyze.critical import kinds
from stepscope.analyze.critical.draft import Draft, least, usual
from stepscope.analyze.critical.edges import last_recorded
from stepscope.analyze.step.numbers import Mask, Whole, distinct, unique
from stepscope.formats.classify import ALLOCATION, BLOCKING_COPY, DEVICE_SYNC, EVENT_SYNC, STREAM_SYNC
from stepscope.formats.timeline import COPY, MISSING, OPERATOR

CLOCK_NS = 2_000
"""By how much the clocks of host and device may disagree: whole microseconds are cut off at both ends."""
OWN_NS = 2_000
"""What a blocking call costs itself where the trace has none that did not wait."""
LONG_NS = 20_000
"""A blocking call that takes longer has waited."""
_SCALARS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero")


class HostWaitEdges(NamedTuple):
    """Edges from the end of device work (places) to the return of host calls (places)."""

    work: Whole
    call: Whole
    inferred: Whole


def add_host_waits(draft: Draft) -> None:
    """Edges to the returns of blocking calls, and what those that waited take themselves. Measures what is missing."""
    hosts, devices = draft.hosts, draft.devices
    waits = _joined([finder(draft) for finder in _FINDERS])
    delay = hosts.end[waits.call] - devices.end[waits.work]
    # A wait is over when the last work is: only its delay says how long returning takes.
    last = np.full(len(hosts.rows), -1, np.int64)
    np.maximum.at(last, waits.call, np.where(delay >= -CLOCK_NS, devices.end[waits.work], -1))
    waited = last > hosts.start
    binding = (devices.end[waits.work] == last[waits.call]) & waited[waits.call] & (delay >= 0)
    if draft.constants.sync_ns is None:
        _measure(draft, delay[binding], unique(waits.call[~waited[waits.call]]))
    calls = np.flatnonzero((last >= 0) & (last + (draft.constants.sync_ns or 0) > hosts.start))
    names = draft.trace.name[hosts.rows[calls]].tolist()
    own = draft.constants.call_ns
    draft.limit[2 * calls + 1] = [own.get(draft.trace.text(name), OWN_NS) for name in names]
    nodes, row = (draft.begins(waits.work) + 1, 2 * waits.call + 1), hosts.rows[waits.call]
    least_delay = draft.constants.sync_ns or 0
    draft.edges.add(*nodes, least_delay, kind=kinds.SYNC, cost=kinds.C_SYNC, row=row, inferred=waits.inferred)


def _measure(draft: Draft, delay: Whole, free: Whole) -> None:
    """How long returning takes, and each kind of blocking call (places) that had nothing to wait for."""
    hosts = draft.hosts
    names = draft.trace.name[hosts.rows[free]]
    taken = hosts.end[free] - hosts.start[free]
    own = {draft.trace.text(code): least(taken[names == code]) for code in distinct(names)}
    draft.constants = replace(
        draft.constants,
        sync_ns=least(delay),
        sync_usual_ns=usual(delay),
        call_ns={**own, **draft.constants.call_ns},
    )


def _joined(parts: list[HostWaitEdges]) -> HostWaitEdges:
    return HostWaitEdges(*(np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True)))


def _waits(work: Whole, call: Whole, keep: Mask, *, inferred: int | Whole) -> HostWaitEdges:
    return HostWaitEdges(work[keep], call[keep], np.broadcast_to(inferred, len(work))[keep])


_NONE = HostWaitEdges(*[np.zeros(0, np.int64)] * 3)


def _all_queues(draft: Draft, calls: Whole, device: Whole, *, inferred: int) -> HostWaitEdges:
    """Each call waits for what every stream of its device (−1: all) had been given when it began."""
    parts = [_NONE]
    for queue, (number, _) in enumerate(draft.devices.names):
        place = draft.order.on_queue(queue, draft.hosts.start[calls])
        parts.append(_waits(place, calls, (place >= 0) & ((device == number) | (device == MISSING)), inferred=inferred))
    return _joined(parts)


def _recorded(draft: Draft) -> HostWaitEdges:
    """Waits that the profiler wrote down."""
    syncs, role = draft.syncs, draft.roles[draft.syncs.call]
    if not len(syncs.call) or not len(draft.devices):
        return _NONE
    place = draft.rows.start_of[syncs.call] >> 1
    began = draft.hosts.start[place]
    kind = np.array(syncs.kind)
    context = (kind == "Context Sync") & (role == DEVICE_SYNC)
    parts = [_all_queues(draft, place[context], syncs.device[context], inferred=0)]
    recorded = np.where(syncs.recorded != MISSING, syncs.recorded, began)
    for mine, stream, until in (
        ((kind == "Stream Sync") & (role != EVENT_SYNC), syncs.stream, began),
        ((kind == "Event Sync") & (role == EVENT_SYNC), syncs.wait_stream, recorded),
    ):
        for queue, (device, number) in enumerate(draft.devices.names):
            here = mine & (syncs.device == device) & (stream == number)
            work = draft.order.on_queue(queue, until[here])
            parts.append(_waits(work, place[here], work >= 0, inferred=0))
    return _joined(parts)


def _untold(draft: Draft, role: int) -> Whole:
    """Calls (places) of a role of which the profiler did not write down what they waited for."""
    if not len(draft.devices) or (draft.syncs.complete and role == EVENT_SYNC):
        return np.zeros(0, np.int64)
    rows = draft.hosts.rows
    return np.flatnonzero((draft.roles[rows] == role) & ~np.isin(rows, draft.syncs.call))


def _device_syncs(draft: Draft) -> HostWaitEdges:
    """In a process with several devices the current one is that of the thread's last launch."""
    calls = _untold(draft, DEVICE_SYNC)
    device = np.full(len(calls), MISSING)
    several = len({number for number, _ in draft.devices.names}) > 1
    if several:
        last = draft.order.by_thread(draft.hosts.thread[calls], draft.hosts.start[calls])
        device = np.where(last >= 0, draft.devices.device[last], MISSING)
    return _all_queues(draft, calls, device, inferred=int(several))


def _stream_syncs(draft: Draft) -> HostWaitEdges:
    """The stream is that of the thread's last launch: the wait is for what the thread launched last."""
    calls = _untold(draft, STREAM_SYNC)
    return _inferred(draft, calls, draft.hosts.start[calls])


def _event_syncs(draft: Draft) -> HostWaitEdges:
    """The event is the last one that the thread recorded, on the stream of its last launch before."""
    hosts = draft.hosts
    calls = _untold(draft, EVENT_SYNC)
    recorded = last_recorded(draft, hosts.thread[calls], hosts.start[calls])
    return _inferred(draft, calls, np.where(recorded >= 0, recorded, hosts.start[calls]))


def _inferred(draft: Draft, calls: Whole, until: Whole) -> HostWaitEdges:
    """Waits for the stream of the last launch until then, unless the times contradict or do not explain the wait.

    Then for what ended last before the call returned.
    """
    hosts, devices = draft.hosts, draft.devices
    if not len(calls):
        return _NONE
    launch = draft.order.by_thread(hosts.thread[calls], until)
    work = np.full(len(calls), -1, np.int64)
    for queue in distinct(devices.queue[launch[launch >= 0]]):
        mine = np.flatnonzero((launch >= 0) & (devices.queue[launch] == queue))
        work[mine] = draft.order.on_queue(queue, until[mine])
    end = np.where(work >= 0, devices.end[work], -1)
    began, returned = hosts.start[calls], hosts.end[calls]
    contradicted = end > returned + CLOCK_NS
    # A call that returned long after that work had ended waited for something else, or not for the device at all.
    unclear = contradicted | (returned - np.maximum(end, began) > LONG_NS)
    by_end = np.argsort(devices.end, kind="stable")
    place = np.searchsorted(devices.end[by_end], returned, side="right") - 1
    nearest = by_end[np.maximum(place, 0)]
    helps = (place >= 0) & (devices.end[nearest] > np.maximum(began, np.where(contradicted, 0, end)))
    work = np.where(unclear & helps, nearest, np.where(contradicted, -1, work))
    return _waits(work, calls, work >= 0, inferred=1)


def _copies(draft: Draft) -> HostWaitEdges:
    """Copies from and to pageable memory, and blocking copies: the call returns when the copy has ended."""
    places, calls, blocking = _maybe_blocking(draft)
    ended = draft.devices.end[places] <= draft.hosts.end[calls] + CLOCK_NS
    return _waits(places, calls, ended, inferred=np.where(blocking, 0, 1))


def add_staged_copies(draft: Draft) -> None:
    """Large copies from pageable memory go through a buffer, piece by piece: the call returns with the last one in it.

    That is shortly before the copy ends, so the call follows the copy's start and takes a share of its time.
    """
    hosts, devices = draft.hosts, draft.devices
    places, calls, _ = _maybe_blocking(draft)
    start, end, returned = devices.start[places], devices.end[places], hosts.end[calls]
    staged = (end > returned + CLOCK_NS) & (2 * (returned - start) > end - start)
    places, calls, passed = places[staged], calls[staged], (returned - start)[staged]
    source, row = draft.begins(places), devices.rows[places]
    draft.edges.add(source, 2 * calls + 1, passed, kind=kinds.SYNC, cost=kinds.C_COPY, row=row, inferred=1)
    draft.limit[2 * calls + 1] = OWN_NS


def _maybe_blocking(draft: Draft) -> tuple[Whole, Whole, Mask]:
    """Copies (places) whose calls (places) may wait for them, and which of these do by their name."""
    trace, devices = draft.trace, draft.devices
    places = _launched_copies(draft)
    blocking = draft.roles[devices.call[places]] == BLOCKING_COPY
    # A captured graph launches many things at once and waits for none.
    of_call = np.bincount(devices.call[devices.call >= 0], minlength=len(trace.start))[devices.call[places]]
    wanted = (of_call == 1) & (blocking | trace.has_name(devices.rows[places], _may_block))
    return places[wanted], draft.rows.start_of[devices.call[places[wanted]]] >> 1, blocking[wanted]


def _launched_copies(draft: Draft) -> Whole:
    """Copies (places) whose calls are in the window."""
    devices = draft.devices
    places = np.flatnonzero((draft.trace.kind[devices.rows] == COPY) & (devices.call >= 0))
    return places[draft.rows.start_of[devices.call[places]] >= 0]


def _may_block(name: str) -> bool:
    """Names tell the kind of memory in newer traces; where they do not, the times decide."""
    return "Pageable" in name or not any(word in name for word in ("Pinned", "DtoD", "Device -> Device", "PtoP"))


def _scalars(draft: Draft) -> HostWaitEdges:
    """Operators that return a number to the host, where the trace lacks the call that waited."""
    trace, hosts, devices = draft.trace, draft.hosts, draft.devices
    is_scalar = trace.has_name(hosts.rows, _SCALARS.__contains__) & (trace.kind[hosts.rows] == OPERATOR)
    if not is_scalar.any() or not len(devices):
        return _NONE
    waits = np.isin(draft.roles[hosts.rows], (DEVICE_SYNC, STREAM_SYNC, EVENT_SYNC))
    has_wait = np.zeros(len(hosts.rows) + 1, bool)
    has_wait[hosts.parent[waits]] = True
    launched = _launched_copies(draft)
    operator = hosts.parent[draft.rows.start_of[devices.call[launched]] >> 1]
    wanted = (operator >= 0) & is_scalar[operator] & ~has_wait[operator]
    wanted &= devices.end[launched] <= hosts.end[operator] + CLOCK_NS
    return _waits(launched, operator, wanted, inferred=1)


def _allocations(draft: Draft) -> HostWaitEdges:
    """Taking or giving back memory waits for the device only sometimes: where most of the call was such a wait."""
    hosts = draft.hosts
    calls = np.flatnonzero(draft.roles[hosts.rows] == ALLOCATION)
    waits = _all_queues(draft, calls, np.full(len(calls), MISSING), inferred=1)
    last = np.full(len(hosts.rows), -1, np.int64)
    np.maximum.at(last, waits.call, draft.devices.end[waits.work])
    length = hosts.end - hosts.start
    waited = (last <= hosts.end + CLOCK_NS) & (last - hosts.start > length // 2) & (length > LONG_NS)
    return _waits(waits.work, waits.call, waited[waits.call], inferred=1)


_FINDERS = (_recorded, _device_syncs, _stream_syncs, _event_syncs, _copies, _scalars, _allocations)


def add_queue_limits(draft: Draft) -> None:
    """A stream holds only so many launches: the call that is one too many returns when the oldest has begun.

    A trace in which more were waiting than the limit allows has another limit: none is assumed then.
    """
    devices, hosts, most = draft.devices, draft.hosts, draft.constants.queue_limit
    parts: list[tuple[Whole, Whole]] = []
    for mine in devices.queues if most > 0 else []:
        places = np.arange(mine.start, mine.stop)
        places = places[devices.alone[places]]
        later, earlier = places[most:], places[: max(0, len(places) - most)]
        called = devices.call[later]
        known = (called >= 0) & (draft.rows.start_of[called] >= 0)
        earlier, call = earlier[known], draft.rows.start_of[called[known]] >> 1
        if (devices.start[earlier] > hosts.end[call] + CLOCK_NS).any():
            draft.constants = replace(draft.constants, queue_limit=0)
            return
        parts.append((earlier, call))
    for earlier, call in parts:
        delayed = call[devices.start[earlier] > hosts.start[call]]
        draft.limit[2 * delayed + 1] = np.minimum(draft.limit[2 * delayed + 1], _least_times(draft, delayed))
        row = hosts.rows[call]
        source = draft.begins(earlier)
        draft.edges.add(source, 2 * call + 1, 0, kind=kinds.QUEUE, cost=kinds.C_SYNC, row=row, inferred=1)


def _least_times(draft: Draft, calls: Whole) -> Whole:
    """For each call the least time that calls of its name take."""
    hosts = draft.hosts
    names = draft.trace.name[hosts.rows]
    taken = hosts.end - hosts.start
    by_name = {code: least(taken[names == code]) for code in distinct(names[calls])}
    return np.array([by_name[code] for code in names[calls].tolist()], np.int64)
