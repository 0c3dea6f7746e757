"""What calls do, by name: those of a device's runtime, whatever the vendor, and operators that do no work."""

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


_WITHOUT_WORK = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "as_strided", "t", "transpose", "permute", "expand",
    "expand_as", "detach", "detach_", "alias", "slice", "select", "narrow", "split", "split_with_sizes", "chunk",
    "unbind", "unsqueeze", "squeeze", "unflatten", "flatten", "contiguous", "to", "diagonal", "unfold", "real",
    "imag", "view_as", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    "resize_", "resolve_conj", "resolve_neg", "result_type", "is_same_size", "size", "stride", "set_data",
    "requires_grad_", "retain_grad", "resize_output_", "_resize_output_", "swapaxes", "movedim", "numpy_T",
    "is_complex", "is_floating_point",
})  # fmt: skip
"""On the host these are rows like others; on a device they launch nothing."""


def does_no_work(name: str) -> bool:
    """Whether an operator (`aten::as_strided`, with or without its overload) only makes a view or allocates."""
    return name.partition("::")[2].partition(".")[0] in _WITHOUT_WORK
