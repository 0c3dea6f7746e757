"""A host thread cut into pieces that follow each other without a hole: what a schedule can be made of.

Calls nest, so their durations cannot be put in a row. A thread's time is cut at every beginning and end of a call: each
call owns the piece from its beginning to that of the first call inside it (its *head*), and the pieces after each of
them; what lies outside every call is a gap. All pieces of a thread, in order, are its whole time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stepscope.formats.nesting import climb, nest
from stepscope.formats.timeline import Integers, Timeline


class HostTiles(NamedTuple):
    """Pieces ordered by thread, then time."""

    thread: Integers
    start_ns: Integers
    end_ns: Integers
    owner: Integers
    """Row whose own time it is; −1: a gap outside every call."""
    is_head: Integers
    head_of: Integers
    """By row of the timeline: its head's place among the pieces; −1 for rows that are not part."""
    last_of: Integers
    """By row: the last piece that lies inside it."""
    parent: Integers
    """By row: the enclosing row among those that are part."""
    clipped: int
    """Rows that ended after the call they began in, and were cut there."""


def cut_host_time(timeline: Timeline, rows: Integers) -> HostTiles:
    """Pieces of the given host rows. Heads are always there, other pieces only where they take time."""
    core = timeline.core
    is_part = np.full(len(timeline), -1, np.int64)
    is_part[rows] = rows
    rows = rows[
        np.lexsort((core["event_index"][rows], -core["end_ns"][rows], core["start_ns"][rows], core["thread"][rows]))
    ]
    above = core["parent"].astype(np.int64)
    parent_row = np.full(len(timeline), -1, np.int64)
    parent_row[rows] = climb(is_part, above, above[rows])
    place_of = np.full(len(timeline), -1, np.int64)
    place_of[rows] = np.arange(len(rows))
    parent = np.where(parent_row[rows] >= 0, place_of[parent_row[rows]], -1)
    depth, size, levels = nest(parent)
    start, end, clipped = _clip(core["start_ns"][rows], core["end_ns"][rows], parent, levels)

    count = len(rows)
    begins = 2 * np.arange(count) - depth
    ends = 2 * (np.arange(count) + size) - depth - 1
    time = np.zeros(2 * count, np.int64)
    time[begins], time[ends] = start, end
    owner = np.full(2 * count, -1, np.int64)
    owner[begins], owner[ends] = rows, parent_row[rows]
    is_head = np.zeros(2 * count, bool)
    is_head[begins] = True
    thread = np.zeros(2 * count, np.int64)
    thread[begins] = thread[ends] = core["thread"][rows]
    until = np.concatenate([time[1:], time[-1:]])
    same_thread = np.concatenate([thread[1:] == thread[:-1], [False]]) if count else np.zeros(0, bool)
    keep = is_head | (same_thread & (until > time))
    until = np.maximum(until, time)
    number = np.cumsum(keep) - 1
    head_of, last_of = np.full(len(timeline), -1, np.int64), np.full(len(timeline), -1, np.int64)
    head_of[rows] = number[begins]
    last_of[rows] = number[ends - 1]
    return HostTiles(
        thread=thread[keep],
        start_ns=time[keep],
        end_ns=until[keep],
        owner=owner[keep],
        is_head=is_head[keep],
        head_of=head_of,
        last_of=last_of,
        parent=parent_row,
        clipped=clipped,
    )


def _clip(start: Integers, end: Integers, parent: Integers, levels: list[Integers]) -> tuple[Integers, Integers, int]:
    """Times inside those of the parent, from the outside in."""
    start, end = start.astype(np.int64), end.astype(np.int64)
    clipped = 0
    for level in levels[1:]:
        above = parent[level]
        clipped += int((end[level] > end[above]).sum())
        start[level] = np.clip(start[level], start[above], end[above])
        end[level] = np.clip(end[level], start[level], end[above])
    return start, end, clipped
