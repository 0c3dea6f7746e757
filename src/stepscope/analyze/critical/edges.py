"""Edges of the host and of the device.

Host: the order on each thread, with the time between events kept as work, and hand-overs. Device: launches, order on
streams, the work itself, and waits between streams.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from stepscope.analyze.critical import kinds
from stepscope.analyze.critical.draft import UNLIMITED, Draft, launch_latencies
from stepscope.analyze.critical.rows import NEVER, Devices, LaunchOrder
from stepscope.analyze.step.device_work import share_work
from stepscope.analyze.step.host_activity import DATA_LOADING
from stepscope.analyze.step.host_waits import STREAM_WAIT as STREAM_WAIT_EVENT
from stepscope.analyze.step.host_waits import host_waits
from stepscope.analyze.step.intervals import clip, length
from stepscope.analyze.step.launches import BLOCKED_TIMES
from stepscope.analyze.step.numbers import Mask, Whole, distinct, unique
from stepscope.analyze.step.view import TraceView
from stepscope.formats.classify import EVENT_RECORD, STREAM_WAIT
from stepscope.formats.nesting import look_up
from stepscope.formats.timeline import DEVICE_KINDS, MISSING, OPERATOR, PYTHON, RUNTIME

Pairs: TypeAlias = tuple[Whole, Whole]
"""Places of device work that waits follow, and of the work that waited."""
IDLE_NS = 20_000
"""A thread that did nothing recorded for longer may have waited for another; between calls of one loop it is less."""
_ENGINE = "autograd::engine::evaluate_function"


def host_costs(draft: Draft) -> Whole:
    """What the own time of each host event is spent on."""
    trace, rows = draft.trace, draft.hosts.rows
    kind = trace.kind[rows]
    by_kind = np.full(256, kinds.C_GAP, np.int64)
    by_kind[[OPERATOR, RUNTIME, PYTHON]] = (kinds.C_OPERATOR, kinds.C_RUNTIME, kinds.C_PYTHON)
    cost: Whole = by_kind[kind]
    cost[draft.launches[rows]] = kinds.C_LAUNCH_CALL
    cost[trace.has_name(rows, DATA_LOADING.search) & (kind != RUNTIME)] = kinds.C_DATA_LOADING
    return cost


def add_chains(draft: Draft, cost_of: Whole) -> None:
    """Order on each thread. Call it last: what was found to be waiting no longer counts as the thread's own time."""
    hosts, chains = draft.hosts, draft.chains
    nodes, time = chains.nodes, chains.time
    if not len(nodes):
        return
    follows = np.flatnonzero(chains.thread[1:] == chains.thread[:-1]) + 1
    before = nodes[follows - 1]
    innermost = chains.open_after(before)
    row = np.where(innermost >= 0, hosts.rows[innermost], -1)
    cost = np.where(innermost >= 0, cost_of[innermost], kinds.C_GAP)
    weight = np.minimum(time[follows] - time[follows - 1], draft.limit[nodes[follows]])
    draft.edges.add(before, nodes[follows], weight, kind=kinds.HOST, cost=cost, row=row)
    _add_borders(draft)


def _add_borders(draft: Draft) -> None:
    """From the window's start to each thread, from each thread to the window's end."""
    chains, source = draft.chains, draft.rows.source
    places = [chains.of(thread) for thread in chains.numbers]
    first = np.array([place.start for place in places])
    last = np.array([place.stop - 1 for place in places])
    begins, ends = chains.time[first], chains.time[last]
    weight = np.minimum(begins, draft.limit[chains.nodes[first]])
    draft.edges.add(source, chains.nodes[first], weight, kind=kinds.WINDOW, cost=kinds.C_GAP)
    # A step can go on after its last recorded event: that time is the host's, on the thread that was last.
    latest = max(int(ends.max()), int(draft.devices.end.max()) if len(draft.devices) else 0)
    rest = np.where(ends == ends.max(), draft.rows.window.length_ns - latest, 0)
    draft.edges.add(chains.nodes[last], source + 1, rest, kind=kinds.WINDOW, cost=kinds.C_GAP)


def add_host_pace(draft: Draft, step: int | None) -> None:
    """Where the host runs ahead, its work for the step lies before the window, beside device work of earlier steps.

    In steady state it takes that long in every period all the same: the step cannot become shorter.
    """
    trace = draft.trace
    if step is None or trace.span(step).start_ns >= draft.rows.window.start_ns:
        return
    own = _own_host_time(trace, step)
    source = draft.rows.source
    draft.edges.add(source, [source + 1], own, kind=kinds.WINDOW, cost=kinds.C_OPERATOR)


def _own_host_time(trace: TraceView, step: int) -> int:
    """What the program's thread takes for a step without waiting: in blocking calls, or for room in a full queue."""
    span, thread = trace.span(step), trace.main_thread
    waited = length(clip(host_waits(trace).synchronising(thread), span.start_ns, span.end_ns))
    launch = trace.parent[trace.rows_of(step, *DEVICE_KINDS)]
    calls = unique(launch[launch >= 0])
    calls = calls[(trace.thread[calls] == thread) & ~host_waits(trace).is_blocking(calls)]
    taken, names = trace.end[calls] - trace.start[calls], trace.name[calls]
    for code in distinct(names):
        mine = taken[names == code]
        usual = np.median(mine)
        waited += int((mine[mine >= BLOCKED_TIMES * usual] - usual).sum())
    return max(span.end_ns - span.start_ns - waited, 0)


def add_handovers(draft: Draft, cost_of: Whole) -> None:
    """Backward passes run on threads of their own, while the thread that called them waits or takes a share.

    A thread of the engine that was idle goes on because of what the caller did last; the caller goes on because the
    engine has ended something. Idle time before such a point is waiting.
    """
    is_backward = _backward_events(draft)
    engines: dict[int, list[int]] = {}
    for thread in distinct(draft.hosts.thread[is_backward]):
        caller = _caller(draft, thread, is_backward)
        if caller is not None:
            engines.setdefault(caller, []).append(thread)
    for caller, threads in engines.items():
        tops = [_top_events(draft, thread) for thread in threads]
        for top in tops:
            _add_wakes(draft, caller, top)
        _add_returns(draft, caller, np.concatenate(tops), cost_of)


def _top_events(draft: Draft, thread: int) -> Whole:
    """Places of the events of a thread that no other encloses."""
    first, last = (int(place) for place in np.searchsorted(draft.hosts.thread, (thread, thread + 1)))
    return first + np.flatnonzero(draft.hosts.parent[first:last] == MISSING)


def _add_wakes(draft: Draft, caller: int, top: Whole) -> None:
    """Events of the engine that came after idle time in which the caller did something."""
    hosts, points = draft.hosts, draft.chains.of(caller)
    times = draft.chains.time[points]
    idle_from = np.append(-1, np.maximum.accumulate(hosts.end[top])[:-1])
    place = np.searchsorted(times, hosts.start[top], side="right") - 1
    woken = (place >= 0) & (hosts.start[top] - idle_from > IDLE_NS)
    woken[woken] &= times[place[woken]] > idle_from[woken]
    first = top[woken]
    _hand_over(draft, draft.chains.nodes[points][place[woken]], 2 * first, first)


def _add_returns(draft: Draft, caller: int, top: Whole, cost_of: Whole) -> None:
    """Points of the caller after time in which it did nothing recorded and the engine ended something."""
    hosts, points = draft.hosts, draft.chains.of(caller)
    nodes, times = draft.chains.nodes[points], draft.chains.time[points]
    ended = top[np.argsort(hosts.end[top], kind="stable")]
    innermost = draft.chains.open_after(nodes[:-1])
    waits = (innermost < 0) | np.isin(cost_of[innermost], (kinds.C_GAP, kinds.C_PYTHON))
    place = np.searchsorted(hosts.end[ended], times[1:], side="right") - 1
    waits &= (place >= 0) & (times[1:] - times[:-1] > IDLE_NS)
    waits[waits] &= hosts.end[ended[place[waits]]] > times[:-1][waits]
    last = ended[place[waits]]
    _hand_over(draft, 2 * last + 1, nodes[1:][waits], last)


def _hand_over(draft: Draft, sources: Whole, targets: Whole, places: Whole) -> None:
    """Nodes of the host that went on because of others; the time between belongs to the events at these places."""
    hosts = draft.hosts
    delay, row = hosts.times_of(targets) - hosts.times_of(sources), hosts.rows[places]
    draft.edges.add(sources, targets, delay, kind=kinds.THREAD, cost=kinds.C_HANDOVER, row=row, inferred=1)
    draft.limit[targets] = 0


def _backward_events(draft: Draft) -> Mask:
    trace, rows = draft.trace, draft.hosts.rows
    named = trace.has_name(rows, lambda name: name.startswith(_ENGINE))
    backward: Mask = named | (trace.column("forward_thread")[rows] > 0)
    return backward


def _caller(draft: Draft, engine: int, is_backward: Mask) -> int | None:
    """The thread whose backward pass runs on this one; None if it is its own."""
    trace, hosts = draft.trace, draft.hosts
    sequence = trace.column("sequence")[hosts.rows]
    mine = hosts.thread == engine
    is_forward = (sequence >= 0) & ~is_backward & (trace.kind[hosts.rows] == OPERATOR)
    callers = look_up(sequence[is_backward & mine], sequence[is_forward], hosts.thread[is_forward])
    if (callers >= 0).any():
        caller = int(np.bincount(callers[callers >= 0]).argmax())
        return None if caller == engine else caller
    others = np.bincount(hosts.thread[~mine])
    return int(others.argmax()) if len(others) else None


def add_helpers(draft: Draft, works: Mask) -> None:
    """Threads that neither compute nor launch (they poll, log, watch) are woken by the program, not by themselves.

    Each of their events follows what the busiest thread did last; else their idle time would look like work of the
    host. `works`: which host events are work.
    """
    hosts, chains = draft.hosts, draft.chains
    busy = set(distinct(hosts.thread[works]))
    helpers = [thread for thread in chains.numbers if thread not in busy]
    draft.counts["helper_threads"] = len(helpers) if busy else 0
    if not busy or not helpers:
        return
    main = chains.of(int(np.bincount(hosts.thread[works]).argmax()))
    for thread in helpers:
        top = _top_events(draft, thread)
        place = np.searchsorted(chains.time[main], hosts.start[top], side="right") - 1
        top, place = top[place >= 0], place[place >= 0]
        _hand_over(draft, chains.nodes[main][place], 2 * top, top)


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
    return np.array(kinds.WORK_COSTS)[share_work(draft.trace.kind[rows], draft.trace.column("category")[rows])]


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
    delay = launch_latencies(draft.trace, draft.constants, devices.call[place])
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
        delayed = place[(holder[place - 1] != place - 1) & (latest[place - 1] <= start[place])]
        a, b = mine.start + holder[delayed - 1], mine.start + delayed
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
    delay, row = draft.constants.event_ns, devices.rows[after]
    nodes = draft.begins(before) + 1, draft.begins(after)
    draft.edges.add(*nodes, delay, kind=kinds.EVENT, cost=kinds.C_STREAM, row=row, inferred=inferred)
    ready = np.full(len(devices), NEVER, np.int64)
    np.maximum.at(ready, after, np.where(devices.end[before] <= devices.start[after], devices.end[before], NEVER))
    return ready


def _join(pairs: Iterable[Pairs]) -> Pairs:
    none = np.zeros(0, np.int64)
    before, after = (np.concatenate(column) for column in zip((none, none), *pairs, strict=True))
    return before, after


def find_close_ends(draft: Draft, ready: Whole) -> Pairs:
    """Work that began just when work on another stream ended, though all that is known allowed it long before.

    That is evidence of a wait which the trace does not show. It counts only where chance is unlikely: with many ends in
    the time that was waited, one of them is always close.
    """
    devices, constants = draft.devices, draft.constants
    slow = constants.launch_usual_ns + constants.stream_usual_ns + CLOSE_NS
    late = np.flatnonzero((ready > NEVER) & (devices.start - ready > slow))
    pairs = []
    for number in distinct(devices.device[late]):
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
        pairs.append((before[close], mine[close]))
    return _join(pairs)


def find_default_stream_waits(draft: Draft) -> Pairs:
    """Order between the default stream and others, where they behave as a default stream and blocking streams do.

    The trace does not say which streams block. They do if work launched after work of the other stream never began
    before that had ended, in both directions, and at least once began just then. Where events are waited for, these
    explain as much.
    """
    names = draft.devices.names
    has_waits = (draft.roles[draft.hosts.rows] == STREAM_WAIT).any()
    return _join(
        _mutual_waits(draft.devices, draft.order, default, other)
        for default, (device, stream) in enumerate(names)
        if stream in DEFAULT_STREAMS and not has_waits
        for other, (elsewhere, _) in enumerate(names)
        if other != default and elsewhere == device
    )


def _mutual_waits(devices: Devices, order: LaunchOrder, one: int, other: int) -> Pairs:
    """Nothing where the two streams do not behave so."""
    pairs = []
    for queue, source in ((one, other), (other, one)):
        places = np.arange(devices.queues[queue].start, devices.queues[queue].stop)
        before = order.on_queue(source, devices.called[places])
        known = (before >= 0) & (devices.called[places] > NEVER)
        pairs.append((before[known], places[known]))
    before, after = _join(pairs)
    delay = devices.start[after] - devices.end[before]
    waited = (delay <= CLOSE_NS) & (devices.called[after] < devices.end[before] - CLOSE_NS)
    if (delay < 0).any() or not waited.any():
        return before[:0], after[:0]
    # Only the first after each change of stream says something new.
    keep = np.append(True, (before[1:] != before[:-1]) | (devices.queue[after][1:] != devices.queue[after][:-1]))
    return before[keep], after[keep]


def find_event_waits(draft: Draft) -> tuple[Whole, Whole, Whole]:
    """(before, after, inferred): places of device work."""
    recorded, inferred = _recorded_waits(draft), _inferred_waits(draft)
    return *_join((recorded, inferred)), np.repeat((0, 1), (len(recorded[0]), len(inferred[0])))


def _recorded_waits(draft: Draft) -> Pairs:
    syncs, order = draft.syncs, draft.order
    number = {name: queue for queue, name in enumerate(draft.devices.names)}
    is_wait = np.array([kind == STREAM_WAIT_EVENT for kind in syncs.kind], bool)
    called = draft.trace.start[syncs.call] - draft.rows.window.start_ns
    # Where the record itself is not in the trace, it was at the latest just before the wait.
    until = np.where(syncs.recorded != MISSING, syncs.recorded, called)
    streams = np.stack((syncs.device, syncs.stream, syncs.wait_stream), 1)
    pairs = []
    for triple in np.unique(streams[is_wait], axis=0).tolist():
        device, stream, source = triple
        waiting, waited = number.get((device, stream)), number.get((device, source))
        if waiting is None or waited is None or waiting == waited:
            continue
        mine = is_wait & (streams == triple).all(1)
        before, after = order.on_queue(waited, until[mine]), order.next_on_queue(waiting, called[mine])
        known = (before >= 0) & (after >= 0)
        pairs.append((before[known], after[known]))
    return _join(pairs)


def _inferred_waits(draft: Draft) -> Pairs:
    """From the order of calls on a thread.

    The stream that waits is that of the thread's next launch. The event is the last one that the thread recorded if it
    launched nothing since, and then its stream is that of the launch before; else what was waited for is what ended
    last, before the waiting work began, of all that other streams had been given.
    """
    hosts, devices, order = draft.hosts, draft.devices, draft.order
    waits = np.flatnonzero(draft.roles[hosts.rows] == STREAM_WAIT)
    # Where the profiler writes waits down, a call without such a record had nothing to wait for.
    if draft.syncs.complete or not len(waits) or not len(devices):
        return _join([])
    after = order.by_thread(hosts.thread[waits], hosts.start[waits], after=True)
    waits, after = waits[after >= 0], after[after >= 0]
    thread, time = hosts.thread[waits], hosts.start[waits]
    last = order.by_thread(thread, time)
    recorded = last_recorded(draft, thread, time)
    adjacent = (recorded >= 0) & (last >= 0) & (devices.called[last] <= recorded)
    adjacent &= devices.queue[last] != devices.queue[after]
    adjacent &= devices.device[last] == devices.device[after]
    nearest = order.last_to_end[last]
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
    for number in distinct(thread):
        begins = np.sort(hosts.start[records[hosts.thread[records] == number]])
        mine = np.flatnonzero(thread == number)
        place = np.searchsorted(begins, time[mine], side="left") - 1
        found[mine[place >= 0]] = begins[place[place >= 0]]
    return found
