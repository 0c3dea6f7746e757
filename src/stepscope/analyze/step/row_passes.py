"""Passes over the rows of a timeline: which are of a device or on top, what encloses what, what follows on a stream.

The first functions are plain enough to be compiled (`stepscope.analyze.step.native`), and ask for little memory; only
compiled are they faster than array operations.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.formats.timeline import DEVICE_KINDS, HOST_KINDS, KINDS, MISSING

if TYPE_CHECKING:
    from stepscope.formats.timeline import Integers

COUNTS, IS_DEVICE, IS_HOST = 1, 2, 4
"""Bits that say what a kind is: counted in the window of a trace, work of a device, nested on a thread."""


NEVER = 1 << 62
"""After every time in a trace."""


class Columns(NamedTuple):
    """Columns that every row has, as they lie in the timeline, of whatever width."""

    kind: Any
    start: Any
    end: Any
    name: Any
    thread: Any
    stream: Any
    parent: Any


def survey_rows(columns: Columns, role: Any, device: Any, top: Any) -> tuple[int, int, int, int]:
    """First start and last end of the rows that count (turned round where none does), number of device and of top rows.

    Fills `device` and `top` with these rows (top: host rows without parent; there is room for all). `role` is by kind.
    """
    kind, start, end, parent = columns.kind, columns.start, columns.end, columns.parent
    first, last = NEVER, -NEVER
    devices = tops = 0
    for row in range(len(kind)):
        # Without branches: kinds come in no order that a processor could foresee.
        is_role = role[kind[row]]
        first = min(first, start[row] if is_role & COUNTS else first)
        last = max(last, end[row] if is_role & COUNTS else last)
        device[devices] = row
        devices += 1 if is_role & IS_DEVICE else 0
        top[tops] = row
        tops += 1 if (is_role & IS_HOST) and parent[row] < 0 else 0
    return first, last, devices, tops


def find_touching(rows: Any, columns: Columns, times: Any, found: Any) -> int:
    """Fill `found` with those of the rows that share time with any of the intervals `times`; returns how many.

    Fast where rows come nearly in order.
    """
    start, end = columns.start, columns.end
    begins, ends = times
    count = one = 0
    for row in rows:
        while one < len(ends) and ends[one] <= start[row]:
            one += 1
        while one > 0 and ends[one - 1] > start[row]:
            one -= 1
        if one < len(ends) and max(begins[one], start[row]) < end[row]:
            found[count] = row
            count += 1
    return count


def follow_streams(stream: Any, end: Any, previous: Any, free_from: Any) -> int:
    """For rows of one device in order of start: what stood before each on its stream. Returns the number of streams.

    `previous` begins as −1 and `free_from` as −NEVER everywhere.
    """
    last = [0 for _ in stream[:1]]
    here = 0
    for place in range(len(stream)):
        if stream[last[here]] != stream[place]:
            here = 0
            while here < len(last) and stream[last[here]] != stream[place]:
                here += 1
        if here == len(last):
            last.append(place)
        elif place > 0:
            before = last[here]
            previous[place] = before
            free_from[place] = max(free_from[before], end[before])
            last[here] = place
    return len(last)


COUNTED = (*HOST_KINDS, *DEVICE_KINDS)
"""Kinds that a window begins and ends with: what a profiler writes about itself does not stretch it."""


class RowSurvey(NamedTuple):
    first_ns: int
    """When the first row of the counted kinds began; after `last_ns` where there is none."""
    last_ns: int
    device: Integers
    """Rows of device work, in file order."""
    top: Integers
    """Host rows that nothing encloses."""


def survey(columns: Columns) -> RowSurvey:
    import numpy as np

    from stepscope.analyze.step.native import survey_rows

    role = np.zeros(len(KINDS), np.uint8)
    for kinds, bit in ((COUNTED, COUNTS), (DEVICE_KINDS, IS_DEVICE), (HOST_KINDS, IS_HOST)):
        role[list(kinds)] |= bit
    device, top = (np.empty(len(columns.kind), np.int64) for _ in range(2))
    first, last, devices, tops = survey_rows(columns, role, device, top)
    return RowSurvey(first, last, device[:devices], top[:tops])


class StreamOrder(NamedTuple):
    """For each row of a device's work: what was before it on its stream."""

    previous: Integers
    """Place of the row that began last before it on the stream; −1 for the first."""
    free_from: Integers
    """When everything before it on the stream had ended; long ago (−NEVER) for the first."""


def order_on_streams(stream: Integers, end: Integers, *, compiled: bool) -> StreamOrder:
    """Rows come in order of start."""
    import numpy as np

    found = StreamOrder(np.full(len(end), MISSING, np.int64), np.full(len(end), -NEVER, np.int64))
    if compiled:
        from stepscope.analyze.step.native import follow_streams

        follow_streams(stream, end, *found)
        return found
    for one in np.unique(stream).tolist():
        mine = np.flatnonzero(stream == one)
        found.previous[mine[1:]] = mine[:-1]
        found.free_from[mine[1:]] = np.maximum.accumulate(end[mine])[:-1]
    return found


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
