"""What calls of a device's runtime do, by name: the vendors' names differ in their prefix alone, mostly."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stepscope.analyze.critical.columns import codes_in, core, rows_of_kind
from stepscope.traces.timeline import RUNTIME, Timeline

if TYPE_CHECKING:
    from stepscope.traces.timeline import Integers

PLAIN, DEVICE_SYNC, STREAM_SYNC, EVENT_SYNC, EVENT_RECORD, STREAM_WAIT, BLOCKING_COPY, ALLOCATION = range(8)
"""What a call does: nothing that others wait for; wait for a device, a stream, an event; mark or await a place in a
stream; copy and return when the copy has ended; take or give back memory, which may wait for everything."""

_RULES = (
    (STREAM_WAIT, re.compile(r"StreamWaitEvent|EventsWaitWithBarrier|AppendWaitOnEvents", re.IGNORECASE)),
    (EVENT_RECORD, re.compile(r"EventRecord|RecordEvent|AppendSignalEvent", re.IGNORECASE)),
    (EVENT_SYNC, re.compile(r"Event(Host)?Synchronize|SynchronizeEvent|urEventWait|piEventsWait", re.IGNORECASE)),
    (
        STREAM_SYNC,
        re.compile(r"(Stream|Queue|List|Fence)(Host)?Synchronize|SynchronizeStream|QueueFinish", re.IGNORECASE),
    ),
    (DEVICE_SYNC, re.compile(r"Synchroni[sz]e", re.IGNORECASE)),
    (PLAIN, re.compile(r"Async|Peer", re.IGNORECASE)),
    (BLOCKING_COPY, re.compile(r"^(cuda|cu|hip|musa|mu)Memcpy", re.IGNORECASE)),
    (
        ALLOCATION,
        re.compile(
            r"^(cuda|cu|hip|musa|mu)(Malloc|Free|Mem(Alloc|Free)|HostAlloc|HostRegister|HostUnregister)", re.IGNORECASE
        ),
    ),
)
"""The first that fits decides. A name that only says Synchronize waits for the device."""


def classify_call(name: str) -> int:
    for role, pattern in _RULES:
        if pattern.search(name):
            return role
    return PLAIN


def call_roles(timeline: Timeline) -> Integers:
    """The role of every row; PLAIN for all that are no runtime calls."""
    import numpy as np

    calls = rows_of_kind(timeline, RUNTIME)
    by_code = np.zeros(len(timeline.texts) + 1, np.int8)
    for code in codes_in(timeline, calls):
        by_code[code] = classify_call(timeline.texts[code])
    roles = np.full(len(timeline), PLAIN, np.int8)
    roles[calls] = by_code[core(timeline, "name")[calls]]
    return roles
