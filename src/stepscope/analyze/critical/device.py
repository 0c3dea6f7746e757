"""Edges of the device: launches, order on streams, the work itself, and waits between streams."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from stepscope.analyze.critical import kinds
from stepscope.analyze.critical.draft import UNLIMITED, Draft, launch_latencies
from stepscope.analyze.critical.rows import NEVER, Devices, LaunchOrder, core
from stepscope.analyze.step.numbers import Whole
from stepscope.formats import classify
from stepscope.formats.classify import EVENT_RECORD, STREAM_WAIT
from stepscope.formats.timeline import COPY, MISSING, SET

CLOSE_NS = 5_000
"""Work that starts within this time after work on another stream ended may have waited for it."""
CHANCE = 0.1
"""How likely it may at most be that this is chance."""
LONG_CALL, LONG_CALL_NS = 4, 20_000
"""A launch call is long if it takes so many times its least latency, and this on top."""
DEFAULT_STREAMS = (0, 7, MISSING)
"""7 is what the profiler calls the default stream of CUDA."""


def work_costs(draft: Draft) -> Whole:
    """What each device activity counts as."""
    rows = draft.devices.rows
    kind, category = core(draft.timeline, "kind")[rows], core(draft.timeline, "category")[rows]
    copies = np.isin(kind, (COPY, SET)) | np.isin(category, (classify.COPY, classify.SET))
    cost = np.where(copies, kinds.C_COPY, kinds.C_COMPUTE)
    return np.where(category == classify.COMMUNICATION, kinds.C_COMMUNICATION, cost).astype(np.int64)


def add_work(draft: Draft, cost: Whole) -> None:
    """From start to end of each device activity; a meeting with other ranks decides the length of some."""
    devices = draft.devices
    nodes = draft.rows.start_of[devices.rows]
    weight = np.where(draft.meets[devices.rows], 0, devices.end - devices.start)
    draft.edges.add(nodes, nodes + 1, weight, kind=kinds.WORK, cost=cost, row=devices.rows)


def add_launches(draft: Draft) -> Whole:
    """From the start of the call to the start of its work. Returns when the launch would have let each begin."""
    devices, start_of = draft.devices, draft.rows.start_of
    ready = np.full(len(devices), NEVER, np.int64)
    place = np.flatnonzero(devices.call >= 0)
    call = start_of[devices.call[place]]
    inside = (call >= 0) & (devices.called[place] >= 0)
    place, call = place[inside], call[inside]
    delay = launch_latencies(draft.timeline, draft.constants, devices.call[place])
    ready[place] = devices.called[place] + delay
    targets = draft.begins(place)
    for mine, kind in ((devices.alone[place], kinds.LAUNCH), (~devices.alone[place], kinds.GRAPH)):
        row = devices.rows[place[mine]]
        draft.edges.add(call[mine], targets[mine], delay[mine], kind=kind, cost=kinds.C_LAUNCH, row=row)
    # A call that takes far longer than a launch, and does not wait for the device, does something else first (it loads
    # code): its work then follows its end too.
    returned = draft.hosts.end[call >> 1]
    late = (returned - devices.called[place] > LONG_CALL * delay + LONG_CALL_NS) & (devices.start[place] >= returned)
    late &= draft.limit[call + 1] == UNLIMITED
    ready[place[late]] = np.maximum(ready[place[late]], returned[late])
    row = devices.rows[place[late]]
    draft.edges.add(call[late] + 1, targets[late], 0, kind=kinds.LAUNCH, cost=kinds.C_LAUNCH, row=row)
    # Launched before the window began: it was waiting then.
    waiting = (devices.call >= 0) & ((start_of[devices.call] < 0) | (devices.called < 0))
    waiting |= (devices.call < 0) & (devices.start == 0)
    early = draft.begins(np.flatnonzero(waiting))
    draft.edges.add(draft.rows.source, early, 0, kind=kinds.WINDOW, cost=kinds.C_STREAM)
    ready[waiting] = 0
    return ready


def add_stream_order(draft: Draft, cost: Whole) -> Whole:
    """From each device activity to the next on its stream. Returns when each could have begun by that.

    Work that began before the one in front had ended (programmatic launches, graphs) follows its start instead, at the
    share of it that had passed; it cannot end before it.
    """
    devices, delay = draft.devices, draft.constants.stream_ns
    ready = np.full(len(devices), NEVER, np.int64)
    nodes = draft.rows.start_of[devices.rows]
    after = np.flatnonzero(devices.queue[1:] == devices.queue[:-1]) + 1
    overlaps = devices.end[after - 1] > devices.start[after]
    b = after[~overlaps]
    draft.edges.add(nodes[b - 1] + 1, nodes[b], delay, kind=kinds.STREAM, cost=kinds.C_STREAM, row=devices.rows[b])
    ready[b] = devices.end[b - 1] + delay
    b = after[overlaps]
    passed = devices.start[b] - devices.start[b - 1]
    draft.edges.add(nodes[b - 1], nodes[b], passed, kind=kinds.STREAM, cost=cost[b - 1], row=devices.rows[b - 1])
    ready[b] = devices.start[b]
    b = b[devices.end[b - 1] <= devices.end[b]]
    draft.edges.add(nodes[b - 1] + 1, nodes[b] + 1, 0, kind=kinds.STREAM, cost=kinds.C_STREAM, row=devices.rows[b])
    _add_outlasting(draft)
    return ready


def _add_outlasting(draft: Draft) -> None:
    """Work that ends after later work of its stream did delays what comes then."""
    devices = draft.devices
    for mine in devices.queues:
        end, start = devices.end[mine], devices.start[mine]
        latest = np.maximum.accumulate(end)
        holder = np.maximum.accumulate(np.where(end == latest, np.arange(len(end)), 0))
        place = np.arange(1, len(end))
        held = place[(holder[place - 1] != place - 1) & (latest[place - 1] <= start[place])]
        a, b = mine.start + holder[held - 1], mine.start + held
        row, delay = devices.rows[b], draft.constants.stream_ns
        nodes = draft.begins(b)
        draft.edges.add(draft.begins(a) + 1, nodes, delay, kind=kinds.STREAM, cost=kinds.C_STREAM, row=row)


def add_borders(draft: Draft, ready: Whole) -> None:
    """Work that nothing leads to begins with the window, and what each stream did last leads to its end."""
    devices, sink = draft.devices, draft.rows.source + 1
    loose = np.flatnonzero(ready == NEVER)
    draft.counts["loose"] = len(loose)
    draft.edges.add(sink - 1, draft.begins(loose), 0, kind=kinds.WINDOW, cost=kinds.C_STREAM)
    last = [mine.stop - 1 for mine in devices.queues if mine.stop > mine.start]
    # All other ends lead to what comes next on the stream, but those that were not waited for.
    overlapped = np.flatnonzero((devices.queue[1:] == devices.queue[:-1]) & (devices.end[:-1] > devices.start[1:]))
    ends = np.concatenate((np.array(last, np.int64), overlapped))
    draft.edges.add(draft.begins(ends) + 1, sink, 0, kind=kinds.WINDOW, cost=kinds.C_STREAM)


def add_events(draft: Draft, before: Whole, after: Whole, inferred: Whole) -> Whole:
    """Waits of one stream for another: from the end of work to the start of work (places).

    Returns when each device activity could have begun by that.
    """
    devices = draft.devices
    draft.edges.add(
        draft.begins(before) + 1,
        draft.begins(after),
        draft.constants.event_ns,
        kind=kinds.EVENT,
        cost=kinds.C_STREAM,
        row=devices.rows[after],
        inferred=inferred,
    )
    ready = np.full(len(devices), NEVER, np.int64)
    np.maximum.at(ready, after, np.where(devices.end[before] <= devices.start[after], devices.end[before], NEVER))
    return ready


def find_close_ends(draft: Draft, ready: Whole) -> tuple[Whole, Whole]:
    """Work that began just when work on another stream ended, though all that is known allowed it long before.

    That is evidence of a wait which the trace does not show. It counts only where chance is unlikely: with many ends in
    the time that was waited, one of them is always close.
    """
    devices, constants = draft.devices, draft.constants
    slow = constants.launch_usual_ns + constants.stream_usual_ns + CLOSE_NS
    late = np.flatnonzero((ready > NEVER) & (devices.start - ready > slow))
    befores, afters = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for number in np.unique(devices.device[late]).tolist():
        here = np.flatnonzero(devices.device == number)
        order = here[np.argsort(devices.end[here], kind="stable")]
        ends = devices.end[order]
        mine = late[devices.device[late] == number]
        place = np.searchsorted(ends, devices.start[mine], side="right") - 1
        earlier = np.searchsorted(ends, ready[mine], side="right")
        before = order[np.maximum(place, 0)]
        close = (place >= 0) & (devices.start[mine] - devices.end[before] <= CLOSE_NS)
        close &= devices.queue[before] != devices.queue[mine]
        close &= (place - earlier + 1) * CLOSE_NS <= CHANCE * (devices.start[mine] - ready[mine])
        befores.append(before[close])
        afters.append(mine[close])
    return np.concatenate(befores), np.concatenate(afters)


def find_default_stream_waits(draft: Draft) -> tuple[Whole, Whole]:
    """Order between the default stream and others, where they behave as a default stream and blocking streams do.

    The trace does not say which streams block. They do if work launched after work of the other stream never began
    before that had ended, in both directions, and at least once began just then. Where events are waited for, these
    explain as much.
    """
    devices = draft.devices
    none = np.zeros(0, np.int64)
    befores, afters = [none], [none]
    if (draft.roles[draft.hosts.rows] == STREAM_WAIT).any():
        return none, none
    on_device: dict[int, list[int]] = defaultdict(list)
    for queue, (device, _) in enumerate(devices.names):
        on_device[device].append(queue)
    for default, (device, stream) in enumerate(devices.names):
        for other in on_device[device] if stream in DEFAULT_STREAMS else ():
            if other != default:
                before, after = _mutual_waits(devices, draft.order, default, other)
                befores.append(before)
                afters.append(after)
    return np.concatenate(befores), np.concatenate(afters)


def _mutual_waits(devices: Devices, order: LaunchOrder, one: int, other: int) -> tuple[Whole, Whole]:
    """Nothing where the two streams do not behave so."""
    befores, afters = [], []
    queues = devices.queues
    for queue, source in ((one, other), (other, one)):
        places = np.arange(queues[queue].start, queues[queue].stop)
        before = order.on_queue(source, devices.called[places])
        known = (before >= 0) & (devices.called[places] > NEVER)
        befores.append(before[known])
        afters.append(places[known])
    before, after = np.concatenate(befores), np.concatenate(afters)
    delay = devices.start[after] - devices.end[before]
    waited = (delay <= CLOSE_NS) & (devices.called[after] < devices.end[before] - CLOSE_NS)
    if (delay < 0).any() or not waited.any():
        return before[:0], after[:0]
    # Only the first after each change of stream says something new.
    keep = np.append(True, (before[1:] != before[:-1]) | (devices.queue[after][1:] != devices.queue[after][:-1]))
    return before[keep], after[keep]


STREAM_WAIT_EVENT = "Stream Wait Event"


def find_event_waits(draft: Draft) -> tuple[Whole, Whole, Whole]:
    """(before, after, inferred): places of device work."""
    recorded, inferred = _recorded_waits(draft), _inferred_waits(draft)
    before, after = (np.concatenate(pair) for pair in zip(recorded, inferred, strict=True))
    return before, after, (np.arange(len(before)) >= len(recorded[0])).astype(np.int64)


def _recorded_waits(draft: Draft) -> tuple[Whole, Whole]:
    syncs, order = draft.syncs, draft.order
    number = {name: queue for queue, name in enumerate(draft.devices.names)}
    befores, afters = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    is_wait = np.array([kind == STREAM_WAIT_EVENT for kind in syncs.kind], bool)
    called = core(draft.timeline, "start_ns")[syncs.call] - draft.rows.window.start_ns
    streams = np.stack((syncs.device, syncs.stream, syncs.wait_stream), 1)
    for triple in np.unique(streams[is_wait], axis=0).tolist():
        device, stream, source = triple
        waiting, waited = number.get((device, stream)), number.get((device, source))
        if waiting is None or waited is None or waiting == waited:
            continue
        mine = is_wait & (streams == triple).all(1)
        # Where the record itself is not in the trace, it was at the latest just before the wait.
        until = np.where(syncs.recorded[mine] != MISSING, syncs.recorded[mine], called[mine])
        before = order.on_queue(waited, until)
        after = order.next_on_queue(waiting, called[mine])
        known = (before >= 0) & (after >= 0)
        befores.append(before[known])
        afters.append(after[known])
    return np.concatenate(befores), np.concatenate(afters)


def _inferred_waits(draft: Draft) -> tuple[Whole, Whole]:
    """From the order of calls on a thread.

    The stream that waits is that of the thread's next launch. The event is the last one that the thread recorded if it
    launched nothing since, and then its stream is that of the launch before; else what was waited for is what ended
    last, before the waiting work began, of all that other streams had been given.
    """
    hosts, devices, order = draft.hosts, draft.devices, draft.order
    waits = np.flatnonzero(draft.roles[hosts.rows] == STREAM_WAIT)
    # Where the profiler writes waits down, a call without such a record had nothing to wait for.
    if draft.syncs.complete or not len(waits) or not len(devices):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    after = order.by_thread(hosts.thread[waits], hosts.start[waits], after=True)
    waits, after = waits[after >= 0], after[after >= 0]
    thread, time = hosts.thread[waits], hosts.start[waits]
    last = order.by_thread(thread, time)
    recorded = last_recorded(draft, thread, time)
    adjacent = (recorded >= 0) & (last >= 0) & (devices.called[last] <= recorded)
    adjacent &= devices.queue[last] != devices.queue[after]
    adjacent &= devices.device[last] == devices.device[after]
    nearest = order.last_of(np.maximum(last, 0))
    adjacent &= devices.end[nearest] <= devices.start[after]
    before = np.where(adjacent, nearest, -1)
    best = np.where(adjacent, np.iinfo(np.int64).max, -1)
    for queue, (device, _) in enumerate(devices.names):
        candidate = order.on_queue(queue, time)
        end = np.where(candidate >= 0, devices.end[candidate], -1)
        fits = (devices.queue[after] != queue) & (devices.device[after] == device)
        fits &= (end <= devices.start[after]) & (end > best)
        before[fits], best[fits] = candidate[fits], end[fits]
    return before[before >= 0], after[before >= 0]


def last_recorded(draft: Draft, thread: Whole, time: Whole) -> Whole:
    """When each thread last recorded an event before the time; −1 if it did not."""
    hosts = draft.hosts
    records = np.flatnonzero(draft.roles[hosts.rows] == EVENT_RECORD)
    found = np.full(len(thread), -1, np.int64)
    for number in np.unique(thread).tolist():
        begins = np.sort(hosts.start[records[hosts.thread[records] == number]])
        mine = np.flatnonzero(thread == number)
        place = np.searchsorted(begins, time[mine], side="left") - 1
        found[mine[place >= 0]] = begins[place[place >= 0]]
    return found
