"""Edges of the host: the order on each thread, with the time between events kept as work, and hand-overs."""

from __future__ import annotations

import numpy as np

from stepscope.analyze.critical import kinds
from stepscope.analyze.critical.draft import Draft
from stepscope.analyze.critical.rows import codes_in, core
from stepscope.analyze.step.host_activity import DATA_LOADING
from stepscope.analyze.step.host_waits import host_waits
from stepscope.analyze.step.intervals import clip, length
from stepscope.analyze.step.launches import BLOCKED_TIMES
from stepscope.analyze.step.numbers import Mask, Whole
from stepscope.analyze.step.view import TraceView, view
from stepscope.formats.timeline import ANNOTATION, DEVICE_KINDS, MISSING, OPERATOR, PYTHON, RUNTIME

IDLE_NS = 20_000
"""A thread that did nothing recorded for longer may have waited for another; between calls of one loop it is less."""
_ENGINE = "autograd::engine::evaluate_function"


def host_costs(draft: Draft) -> Whole:
    """What the own time of each host event is spent on."""
    timeline, rows = draft.timeline, draft.hosts.rows
    kind = core(timeline, "kind")[rows]
    by_kind = np.full(256, kinds.C_GAP, np.int64)
    by_kind[[OPERATOR, RUNTIME, PYTHON, ANNOTATION]] = (kinds.C_OPERATOR, kinds.C_RUNTIME, kinds.C_PYTHON, kinds.C_GAP)
    cost: Whole = by_kind[kind]
    cost[draft.launches[rows]] = kinds.C_LAUNCH_CALL
    loading = [code for code in codes_in(timeline, rows) if DATA_LOADING.search(timeline.texts[code])]
    if loading:
        named = np.isin(core(timeline, "name")[rows], loading)
        cost[named & (kind != RUNTIME)] = kinds.C_DATA_LOADING
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
    trace = view(draft.timeline)
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
    calls = np.unique(launch[launch >= 0])
    calls = calls[(trace.thread[calls] == thread) & ~host_waits(trace).is_blocking(calls)]
    taken, names = trace.end[calls] - trace.start[calls], trace.name[calls]
    for code in np.unique(names).tolist():
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
    for thread in np.unique(draft.hosts.thread[is_backward]).tolist():
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
    delay = hosts.start[first] - times[place[woken]]
    sources, row = draft.chains.nodes[points][place[woken]], hosts.rows[first]
    draft.edges.add(sources, 2 * first, delay, kind=kinds.THREAD, cost=kinds.C_HANDOVER, row=row, inferred=1)
    draft.limit[2 * first] = 0


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
    last, after = ended[place[waits]], nodes[1:][waits]
    delay, row = times[1:][waits] - hosts.end[last], hosts.rows[last]
    draft.edges.add(2 * last + 1, after, delay, kind=kinds.THREAD, cost=kinds.C_HANDOVER, row=row, inferred=1)
    draft.limit[after] = 0


def _backward_events(draft: Draft) -> Mask:
    timeline, rows = draft.timeline, draft.hosts.rows
    codes = [code for code in codes_in(timeline, rows) if timeline.texts[code].startswith(_ENGINE)]
    named: Mask = np.isin(core(timeline, "name")[rows], codes)
    backward: Mask = named | (core(timeline, "forward_thread")[rows] > 0)
    return backward


def _caller(draft: Draft, engine: int, is_backward: Mask) -> int | None:
    """The thread whose backward pass runs on this one; None if it is its own."""
    timeline, hosts = draft.timeline, draft.hosts
    sequence = core(timeline, "sequence")[hosts.rows]
    mine = hosts.thread == engine
    is_forward = (sequence >= 0) & ~is_backward & (core(timeline, "kind")[hosts.rows] == OPERATOR)
    numbers, first = np.unique(sequence[is_forward], return_index=True)
    if len(numbers):
        wanted = sequence[is_backward & mine]
        place = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
        callers = hosts.thread[is_forward][first[place[numbers[place] == wanted]]]
        if len(callers):
            caller = int(np.bincount(callers).argmax())
            return None if caller == engine else caller
    others = np.bincount(hosts.thread[~mine])
    return int(others.argmax()) if len(others) else None


def add_helpers(draft: Draft, works: Mask) -> None:
    """Threads that neither compute nor launch (they poll, log, watch) are woken by the program, not by themselves.

    Each of their events follows what the busiest thread did last; else their idle time would look like work of the
    host. `works`: which host events are work.
    """
    hosts, chains = draft.hosts, draft.chains
    busy = set(np.unique(hosts.thread[works]).tolist())
    helpers = [thread for thread in chains.numbers if thread not in busy]
    draft.counts["helper_threads"] = len(helpers) if busy else 0
    if not busy or not helpers:
        return
    main = chains.of(int(np.bincount(hosts.thread[works]).argmax()))
    for thread in helpers:
        top = _top_events(draft, thread)
        place = np.searchsorted(chains.time[main], hosts.start[top], side="right") - 1
        top, place = top[place >= 0], place[place >= 0]
        delay, row = hosts.start[top] - chains.time[main][place], hosts.rows[top]
        sources = chains.nodes[main][place]
        draft.edges.add(sources, 2 * top, delay, kind=kinds.THREAD, cost=kinds.C_HANDOVER, row=row, inferred=1)
        draft.limit[2 * top] = 0
