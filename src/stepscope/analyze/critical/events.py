"""Which work of one stream waited for which work of another: recorded by the profiler, or inferred from the calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.analyze.critical.draft import Draft
from stepscope.analyze.critical.rows import core
from stepscope.formats.classify import EVENT_RECORD, STREAM_WAIT
from stepscope.formats.timeline import MISSING

if TYPE_CHECKING:
    from stepscope.analyze.critical.kinds import Whole

STREAM_WAIT_EVENT = "Stream Wait Event"


def find_event_waits(draft: Draft) -> tuple[Whole, Whole, Whole]:
    """(before, after, inferred): places of device work."""
    import numpy as np

    recorded, inferred = _recorded_waits(draft), _inferred_waits(draft)
    before, after = (np.concatenate(pair) for pair in zip(recorded, inferred, strict=True))
    return before, after, (np.arange(len(before)) >= len(recorded[0])).astype(np.int64)


def _recorded_waits(draft: Draft) -> tuple[Whole, Whole]:
    import numpy as np

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
    import numpy as np

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
    import numpy as np

    hosts = draft.hosts
    records = np.flatnonzero(draft.roles[hosts.rows] == EVENT_RECORD)
    found = np.full(len(thread), -1, np.int64)
    for number in np.unique(thread).tolist():
        begins = np.sort(hosts.start[records[hosts.thread[records] == number]])
        mine = np.flatnonzero(thread == number)
        place = np.searchsorted(begins, time[mine], side="left") - 1
        found[mine[place >= 0]] = begins[place[place >= 0]]
    return found
