"""Passes over the rows of a timeline that ask for little memory.

Plain enough to be compiled (`stepscope.analyze.native.step`); only then are they faster than array operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
