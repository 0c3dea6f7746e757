"""Orders of rows: what encloses what on a thread of the host, what follows what on a stream."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepscope.analyze.step.numbers import distinct
from stepscope.formats.timeline import DEVICE_KINDS, HOST_KINDS, MISSING, Integers

if TYPE_CHECKING:
    from stepscope.analyze.step.view import TraceView

NEVER = 1 << 62
"""After every time in a trace."""
COUNTED = (*HOST_KINDS, *DEVICE_KINDS)
"""Kinds that a window begins and ends with: what a profiler writes about itself does not stretch it."""


class StreamOrder(NamedTuple):
    """For each row of a device's work: what was before it on its stream."""

    previous: Integers
    """Place of the row that began last before it on the stream; −1 for the first."""
    free_from: Integers
    """When everything before it on the stream had ended; long ago (−NEVER) for the first."""


def order_on_streams(stream: Integers, end: Integers) -> StreamOrder:
    """Rows come in order of start."""
    found = StreamOrder(np.full(len(end), MISSING, np.int64), np.full(len(end), -NEVER, np.int64))
    for one in distinct(stream):
        mine = np.flatnonzero(stream == one)
        found.previous[mine[1:]] = mine[:-1]
        found.free_from[mine[1:]] = np.maximum.accumulate(end[mine])[:-1]
    return found


class HostStack(NamedTuple):
    """The host events of a thread: by start, those that enclose before those inside."""

    rows: Integers
    start: Integers


def stack_up(rows: Integers, trace: TraceView) -> dict[int, HostStack]:
    """Thread → its events among these rows; rows without a thread are in none."""
    rows = nested_order(rows[trace.thread[rows] >= 0], trace)
    thread = trace.thread[rows]
    borders = [0, *(np.flatnonzero(thread[1:] != thread[:-1]) + 1).tolist(), len(rows)]
    stacks = {}
    for first, last in pairwise(borders):
        if last > first:
            mine = rows[first:last]
            stacks[int(thread[first])] = HostStack(mine, trace.start[mine])
    return stacks


def nested_order(rows: Integers, trace: TraceView) -> Integers:
    """By thread, then start, then longest first, then creation: what encloses comes before what is inside.

    Files are nearly in order of time, which a stable sort turns into speed; only rows that share their start need more.
    """
    start = trace.start[rows]
    order = np.argsort(start, kind="stable")
    rows, start = rows[order], start[order]
    same = start[1:] == start[:-1]
    if same.any():
        tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
        some = rows[tied]
        rows[tied] = some[np.lexsort((trace.column("event_index")[some], -trace.end[some], start[tied]))]
    thread = trace.thread[rows]
    if len(thread) and thread.max() < 1 << 16:
        thread = thread.astype(np.uint16)  # numpy sorts short integers by radix
    by_thread: Integers = rows[np.argsort(thread, kind="stable")]
    return by_thread
