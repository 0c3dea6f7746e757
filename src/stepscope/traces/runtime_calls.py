"""What calls of a device's runtime do, by name: the vendors' names differ in their prefix alone, mostly."""

from __future__ import annotations

import re
from functools import lru_cache

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


@lru_cache(8192)
def classify_call(name: str) -> int:
    for role, pattern in _RULES:
        if pattern.search(name):
            return role
    return PLAIN


_LAUNCH = re.compile(r"Launch|EnqueueKernel|(cu|hip)\w*Graph\w*Launch", re.IGNORECASE)


def is_launch_name(name: str) -> bool:
    """Whether a runtime call hands work to a device (cudaLaunchKernel, hipExtModuleLaunchKernel, cudaGraphLaunch)."""
    return _LAUNCH.search(name) is not None


HOST_WAITS = frozenset({DEVICE_SYNC, STREAM_SYNC, EVENT_SYNC, BLOCKING_COPY})
"""Roles of calls that return only when device work has ended."""
