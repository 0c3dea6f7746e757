"""The host events of each thread in the order in which they enclose each other."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from stepscope.analyze.step.row_loops import Columns
    from stepscope.formats.timeline import Integers


class HostStack(NamedTuple):
    """The host events of a thread: by start, those that enclose before those inside."""

    rows: Integers
    start: Integers


def stack_up(rows: Integers, columns: Columns, event_index: Integers) -> dict[int, HostStack]:
    """Thread → its events among these rows; rows without a thread are in none."""
    import numpy as np

    rows = _nested_order(rows[columns.thread[rows] >= 0], columns, event_index)
    thread = columns.thread[rows]
    borders = [0, *(np.flatnonzero(thread[1:] != thread[:-1]) + 1).tolist(), len(rows)]
    stacks = {}
    for first, last in pairwise(borders):
        if last > first:
            mine = rows[first:last]
            stacks[int(thread[first])] = HostStack(mine, columns.start[mine])
    return stacks


def _nested_order(rows: Integers, columns: Columns, event_index: Any) -> Integers:
    """By thread, then start, then longest first, then creation: what encloses comes before what is inside.

    Files are nearly in order of time, which a stable sort turns into speed; only rows that share their start need more.
    """
    import numpy as np

    start = columns.start[rows]
    order = np.argsort(start, kind="stable")
    rows, start = rows[order], start[order]
    same = start[1:] == start[:-1]
    if same.any():
        tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
        some = rows[tied]
        rows[tied] = some[np.lexsort((event_index[some], -columns.end[some], start[tied]))]
    thread = columns.thread[rows]
    if len(thread) and thread.max() < 1 << 16:
        thread = thread.astype(np.uint16)  # numpy sorts short integers by radix
    by_thread: Integers = rows[np.argsort(thread, kind="stable")]
    return by_thread
