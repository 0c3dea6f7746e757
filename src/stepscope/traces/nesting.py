"""Which host event encloses which: intervals on a thread nest like calls on a stack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.traces.timeline import Integers

COMPILED_FROM = 50_000
"""Rows from which loading the compiled loop pays."""


def walk_stack(  # noqa: PLR0917 - compiled functions take no keywords
    order: Any, thread: Any, start: Any, end: Any, parent: Any, stack: Any
) -> int:
    """Fill `parent` (rows) for the rows in `order`: by thread, start, longest first. Returns how many rows end after
    their parent does.

    Plain enough to be compiled; also runs on lists.
    """
    depth = 0
    crossing = 0
    last_thread = -1
    for row in order:
        if thread[row] != last_thread:
            depth = 0
            last_thread = thread[row]
        while depth > 0:
            top = stack[depth - 1]
            # An instant inside an instant at the same time is its child; else what has ended encloses nothing.
            if end[top] > start[row] or (start[top] == start[row] and end[top] == end[row]):
                break
            depth -= 1
        if depth > 0:
            parent[row] = stack[depth - 1]
            if end[stack[depth - 1]] < end[row]:
                crossing += 1
        stack[depth] = row
        depth += 1
    return crossing


def fill_parents(
    rows: Integers, *, thread: Integers, start: Integers, end: Integers, index: Integers, parent: Integers
) -> int:
    """Write into `parent` the row of the innermost event that encloses each of `rows`; tells how many cross theirs."""
    order = _nested_order(rows, thread, start, end, index)
    if len(order) >= COMPILED_FROM:
        import numpy as np

        from stepscope.traces.machine_code import load

        columns = [np.ascontiguousarray(column, np.int64) for column in (order, thread, start, end)]
        sizes = np.array([len(order), len(parent)])
        columns += [parent, np.zeros(len(order) + 1, np.int64), sizes]
        return load("nesting", "walk_stack_at", "ppppqpp")(*(column.ctypes.data for column in columns))
    listed = [-1] * len(parent)
    crossing = walk_stack(order.tolist(), thread.tolist(), start.tolist(), end.tolist(), listed, [0] * (len(order) + 1))
    parent[rows] = [listed[row] for row in rows.tolist()]
    return crossing


def _nested_order(rows: Integers, thread: Integers, start: Integers, end: Integers, index: Integers) -> Integers:
    """Thread, then start, then longest first, then creation. Files are nearly in that order, which makes it cheap."""
    import numpy as np

    by_start = rows[np.argsort(start[rows], kind="stable")]
    ordered = start[by_start]
    tied = np.zeros(len(rows), bool)
    tied[1:] = ordered[1:] == ordered[:-1]
    tied[:-1] |= tied[1:]
    if tied.any():
        # Only ties need the other keys: sorting everything by three keys takes three times as long.
        among = by_start[tied]
        by_start[tied] = among[np.lexsort((index[among], -end[among], start[among]))]
    by_thread: Integers = by_start[np.argsort(thread[by_start], kind="stable")]
    return by_thread
