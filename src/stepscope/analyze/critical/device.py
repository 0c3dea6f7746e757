"""Edges of the device: launches, order on streams, the work itself, and waits between streams."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from stepscope.analyze.critical import kinds
from stepscope.analyze.critical.columns import core
from stepscope.analyze.critical.draft import UNLIMITED, Draft
from stepscope.analyze.critical.latencies import launch_latencies
from stepscope.analyze.critical.rows import NEVER, Devices, LaunchOrder
from stepscope.formats.classify import STREAM_WAIT
from stepscope.formats.timeline import COPY, MISSING, SET

if TYPE_CHECKING:
    from stepscope.analyze.critical.kinds import Whole

CLOSE_NS = 5_000
"""Work that starts within this time after work on another stream ended may have waited for it."""
CHANCE = 0.1
"""How likely it may at most be that this is chance."""
LONG_CALL, LONG_CALL_NS = 4, 20_000
"""A launch call is long if it takes so many times its least latency, and this on top."""
DEFAULT_STREAMS = (0, 7, MISSING)
"""7 is what the profiler calls the default stream of CUDA."""


def work_costs(draft: Draft) -> Whole:
    """What each piece of device work counts as."""
    import numpy as np

    from stepscope.formats import classify

    rows = draft.devices.rows
    kind, category = core(draft.timeline, "kind")[rows], core(draft.timeline, "category")[rows]
    copies = np.isin(kind, (COPY, SET)) | np.isin(category, (classify.COPY, classify.SET))
    cost = np.where(copies, kinds.C_COPY, kinds.C_COMPUTE)
    return np.where(category == classify.COMMUNICATION, kinds.C_COMMUNICATION, cost).astype(np.int64)


def add_work(draft: Draft, cost: Whole) -> None:
    """From start to end of each piece of work; a meeting with other ranks decides the length of some."""
    import numpy as np

    devices = draft.devices
    nodes = draft.rows.start_of[devices.rows]
    weight = np.where(draft.meets[devices.rows], 0, devices.end - devices.start)
    draft.edges.add(nodes, nodes + 1, weight, kind=kinds.WORK, cost=cost, row=devices.rows)


def add_launches(draft: Draft) -> Whole:
    """From the start of the call to the start of its work. Returns when the launch would have let each begin."""
    import numpy as np

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
    """From each piece of work to the next on its stream. Returns when each could have begun by that.

    Work that began before the one in front had ended (programmatic launches, graphs) follows its start instead, at the
    share of it that had passed; it cannot end before it.
    """
    import numpy as np

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
    """Work that ends after later work of its stream did holds up what comes then."""
    import numpy as np

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
    import numpy as np

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

    Returns when each piece of work could have begun by that.
    """
    import numpy as np

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
    import numpy as np

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
    import numpy as np

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
    import numpy as np

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
