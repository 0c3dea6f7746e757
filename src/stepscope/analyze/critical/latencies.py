"""The least delays of a machine, measured in the trace itself: launch, stream order, return of a blocking call."""

from __future__ import annotations

import re
from math import ceil, floor
from typing import TYPE_CHECKING

import msgspec

from stepscope.analyze.critical.rows import core
from stepscope.formats.classify import STREAM_WAIT
from stepscope.formats.timeline import Timeline

if TYPE_CHECKING:
    from stepscope.analyze.critical.kinds import Mask, Whole
    from stepscope.analyze.critical.rows import Devices

LOW = 0.01
"""Which quantile stands for the least: the clocks of host and device are fitted, so the very least is noise."""
USUAL = 0.95
"""Up to this quantile a delay counts as usual for its edge; what is above is unexplained."""
MOST_USUAL_NS = 50_000
"""No usual delay is longer, whatever a trace with holes seems to say."""
FALLBACK_STREAM_NS = 1_000
QUEUE_LIMIT = 1_021
"""Launches that wait on one stream behind the work that runs; as on an H200 with CUDA 13, each stream for itself."""
NO_END = -(1 << 62)
"""Before every time in a trace: nothing had to end."""
FAMILY_FACTOR = 2
"""A call takes at most so many times the least latency of any other call that does the same."""
_FAMILIES = (
    ("graph", re.compile(r"Graph", re.IGNORECASE)),
    ("kernel", re.compile(r"Launch.*Kernel|LaunchByPtr|KernelLaunch", re.IGNORECASE)),
    ("copy", re.compile(r"Mem(ory)?cpy|MemoryCopy", re.IGNORECASE)),
    ("fill", re.compile(r"Mem(ory)?set|MemoryFill", re.IGNORECASE)),
)
"""What launching calls do, whatever the vendor calls them; the first that fits decides."""


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """Delays in ns. The lower ones are what a dependency costs at least, the others what is usual on top of it."""

    launch_ns: dict[str, int] = {}
    """Name of the call → from its start to the start of its work on an idle stream."""
    launch_other_ns: int = 0
    """For calls that never met an idle stream."""
    launch_usual_ns: int = 0
    stream_ns: int = FALLBACK_STREAM_NS
    """From the end of one piece of work to the start of the next that was already waiting."""
    stream_usual_ns: int = 0
    event_ns: int = 0
    """From the end of work to the start of work on another stream that waited for its event."""
    event_usual_ns: int = 0
    sync_ns: int | None = None
    """From the end of work to the return of the call that waited for it. None: measured in the window."""
    sync_usual_ns: int = 0
    call_ns: dict[str, int] = {}
    """Name of a blocking call → what it takes when there is nothing to wait for."""
    queue_limit: int = QUEUE_LIMIT
    """How many launches a stream holds before the next one has to wait; 0: no limit known."""


def least(delays: Whole) -> int:
    return _at(delays, floor(LOW * (len(delays) - 1))) if len(delays) else 0


def usual(delays: Whole) -> int:
    """What is usual above the least."""
    return min(_high(delays) - least(delays), MOST_USUAL_NS) if len(delays) else 0


def _most_usual(delays: Whole) -> int:
    """What is usual above nothing."""
    return min(_high(delays), MOST_USUAL_NS) if len(delays) else 0


def _high(delays: Whole) -> int:
    return _at(delays, ceil(USUAL * (len(delays) - 1)))


def _at(delays: Whole, place: int) -> int:
    """What would stand at this place if they were sorted."""
    import numpy as np

    return int(np.partition(delays, place)[place])


def measure_constants(timeline: Timeline, queues: Devices, roles: Whole) -> Constants:
    """From all steps of a trace; `queues` is its device work on the clock of the trace, `roles` what its calls do.

    Work that another stream may have held up says nothing about launches or streams, and does not count there.
    """
    import numpy as np

    free_from = free_times(queues)
    others_end = ends_awaited(timeline, queues, roles)
    held = others_end > np.maximum(np.where(queues.call >= 0, queues.called, queues.start), free_from)
    usable = (queues.call >= 0) & ~held
    launched = usable & queues.alone
    idle = launched & (free_from <= queues.called) & (queues.start >= queues.called)
    latency = (queues.start - queues.called)[idle]
    name = core(timeline, "name")[queues.call[idle]]
    by_call = _like_their_family(
        {timeline.texts[code]: least(latency[name == code]) for code in np.unique(name).tolist()}
    )
    least_latency = least(latency)
    gap = (queues.start - free_from)[usable & queued(queues, free_from, least_latency)]
    # What began before those ends waited for something else, if at all; so did what was launched late.
    awaited = held & (queues.start >= others_end) & (queues.called + least_latency <= others_end)
    return Constants(
        launch_ns=by_call,
        launch_other_ns=min(by_call.values(), default=least((queues.start - queues.called)[launched])),
        launch_usual_ns=usual(latency),
        stream_ns=least(gap) if len(gap) else FALLBACK_STREAM_NS,
        stream_usual_ns=usual(gap),
        event_usual_ns=_most_usual((queues.start - others_end)[awaited]),
    )


def _like_their_family(by_call: dict[str, int]) -> dict[str, int]:
    """Calls that do the same take about the same: one that was only seen held up does not get a latency of its own."""
    families = {name: _family(name) for name in by_call}
    capped = {}
    for name, latency in by_call.items():
        others = [by_call[other] for other in by_call if other != name and families[other] == families[name]]
        capped[name] = min([latency, *(FAMILY_FACTOR * other for other in others)])
    return capped


def _family(name: str) -> str | None:
    """What a launching call does; None: nothing known, and then like no other."""
    return next((family for family, pattern in _FAMILIES if pattern.search(name)), None)


def ends_awaited(timeline: Timeline, queues: Devices, roles: Whole) -> Whole:
    """For work that may have waited for an event: when other streams had ended what they had been given before.

    That is the first work of each stream after any call that made a stream wait: the trace need not say which one. The
    least number for all other work.
    """
    import numpy as np

    ends = np.full(len(queues), NO_END, np.int64)
    waits = np.sort(core(timeline, "start_ns")[roles == STREAM_WAIT])
    if not len(waits):
        return ends
    issued = np.where(queues.call >= 0, queues.called, queues.start)
    orders = [mine.start + np.argsort(issued[mine], kind="stable") for mine in queues.queues]
    behind = np.zeros(len(queues), bool)
    for order in orders:
        behind[order] = np.diff(np.searchsorted(waits, issued[order], side="right"), prepend=0) > 0
    places = np.flatnonzero(behind)
    for number, order in enumerate(orders):
        before = np.searchsorted(issued[order], issued[places], side="left") - 1
        fits = (before >= 0) & (queues.queue[places] != number)
        fits &= queues.device[places] == queues.names[number][0]
        latest = np.maximum.accumulate(queues.end[order])
        ends[places[fits]] = np.maximum(ends[places[fits]], latest[before[fits]])
    return ends


def free_times(queues: Devices) -> Whole:
    """When everything before a piece of work on its stream had ended; the least number for the first one."""
    import numpy as np

    free = np.full(len(queues), NO_END, np.int64)
    for mine in queues.queues:
        free[mine.start + 1 : mine.stop] = np.maximum.accumulate(queues.end[mine])[:-1]
    return free


def queued(queues: Devices, free_from: Whole, latency: int) -> Mask:
    """Work that was waiting on its stream when what was before it ended."""
    waiting: Mask = (queues.call >= 0) & (queues.called + latency <= free_from) & (queues.start >= free_from)
    return waiting


def launch_latencies(timeline: Timeline, constants: Constants, calls: Whole) -> Whole:
    """The least latency for each launching call (rows)."""
    import numpy as np

    names = core(timeline, "name")[calls]
    delays = np.full(len(calls), constants.launch_other_ns, np.int64)
    for code in np.unique(names).tolist():
        if code >= 0:
            delays[names == code] = constants.launch_ns.get(timeline.texts[code], constants.launch_other_ns)
    return delays
