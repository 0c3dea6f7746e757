"""Rows that belong together, as arrays: what encloses what, how deep, the nearest above, equal numbers elsewhere."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from stepscope.formats.machine_code import load
from stepscope.formats.timeline import Array, Integers

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
        columns = [np.ascontiguousarray(column, np.int64) for column in (order, thread, start, end)]
        sizes = np.array([len(order), len(parent)])
        columns += [parent, np.zeros(len(order) + 1, np.int64), sizes]
        return load("compiled", "walk_stack_at", "ppppqpp")(*(column.ctypes.data for column in columns))
    listed = [-1] * len(parent)
    crossing = walk_stack(order.tolist(), thread.tolist(), start.tolist(), end.tolist(), listed, [0] * (len(order) + 1))
    parent[rows] = [listed[row] for row in rows.tolist()]
    return crossing


def _nested_order(rows: Integers, thread: Integers, start: Integers, end: Integers, index: Integers) -> Integers:
    """Thread, then start, then longest first, then creation. Files are nearly in that order, which makes it cheap."""
    by_start = rows[np.argsort(start[rows], kind="stable")]
    ordered = start[by_start]
    tied = np.zeros(len(rows), bool)
    tied[1:] = ordered[1:] == ordered[:-1]
    tied[:-1] |= tied[1:]
    if tied.any():
        # Only ties need the other keys: sorting everything by three keys takes three times as long.
        among = by_start[tied]
        by_start[tied] = among[np.lexsort((index[among], -end[among], start[among]))]
    return by_start[np.argsort(thread[by_start], kind="stable")]


class Nesting(NamedTuple):
    """By place, as the parents are given."""

    depth: Integers
    size: Integers
    """How many each encloses, with itself."""
    levels: list[Integers]
    """Places of each depth, ascending, the outermost first. What leads to no root is in none of them."""


def nest(parent: Integers) -> Nesting:
    """From the place of each one's parent, −1 at the top."""
    depth = np.zeros(len(parent), np.int64)
    resolved = parent < 0
    levels = [np.flatnonzero(resolved)]
    left = np.flatnonzero(~resolved)
    while len(left):
        ready = resolved[parent[left]]
        level = left[ready]
        if not len(level):
            break
        depth[level] = len(levels)
        resolved[level] = True
        levels.append(level)
        left = left[~ready]
    size = np.ones(len(parent), np.int64)
    for level in reversed(levels[1:]):
        np.add.at(size, parent[level], size[level])
    return Nesting(depth, size, levels)


def order_calls(parent: Integers, nesting: Nesting) -> Integers:
    """Places, each before what it encloses, and those side by side in the order given; all must lead to a root."""
    # Brothers stand together, in order: the sizes of those before them say where each begins inside its parent.
    together = np.argsort(parent, kind="stable")
    before = np.cumsum(nesting.size[together]) - nesting.size[together]
    family = parent[together]
    is_first = np.ones(len(parent), bool)
    is_first[1:] = family[1:] != family[:-1]
    position = np.empty(len(parent), np.int64)
    position[together] = before - before[np.flatnonzero(is_first)[np.cumsum(is_first) - 1]]
    for level in nesting.levels[1:]:
        position[level] += position[parent[level]] + 1
    order = np.empty(len(parent), np.int64)
    order[position] = np.arange(len(parent))
    return order


_STEPS = 64
"""Levels climbed one by one; more than any program nests, so the whole table is followed for hostile ones only."""


def follow(above: Integers) -> Integers:
    """Where `above` leads from each row, itself where it leads nowhere: rounds double, so depth costs its logarithm."""
    while True:
        further = above[above]
        if (further == above).all():
            return further
        above = further


def nearest(rows: Integers, parent: Integers, wanted: Array) -> Integers:
    """For each row the nearest of itself and the rows above it for which `wanted` holds; −1 where none does."""
    found = np.array(rows, np.int64)
    searching = np.flatnonzero(found >= 0)
    for _ in range(_STEPS):
        searching = searching[~wanted[found[searching]]]
        found[searching] = parent[found[searching]]
        searching = searching[found[searching] >= 0]
        if not len(searching):
            return found
    own = np.arange(len(parent))
    last = follow(np.where(wanted | (parent < 0), own, parent))[found[searching]]
    found[searching] = np.where(wanted[last], last, -1)
    return found


def farthest(rows: Integers, parent: Integers, wanted: Array) -> Integers:
    """Like `nearest`, but the last of them on the way up."""
    found = nearest(rows, parent, wanted)
    searching = np.flatnonzero(found >= 0)
    for _ in range(_STEPS):
        above = nearest(parent[found[searching]], parent, wanted)
        searching = searching[above >= 0]
        found[searching] = above[above >= 0]
        if not len(searching):
            return found
    own = np.arange(len(parent))
    above = nearest(parent, parent, wanted)
    found[searching] = follow(np.where(above >= 0, above, own))[found[searching]]
    return found


def nearest_after(rows: Integers, parent: Integers, end: Integers, times: Integers) -> Integers:
    """For each row the nearest of itself and the rows above it that ends after its time; −1 where none does."""
    found = np.array(rows, np.int64)
    searching = np.flatnonzero(found >= 0)
    for _ in range(_STEPS):
        searching = searching[end[found[searching]] <= times[searching]]
        found[searching] = parent[found[searching]]
        searching = searching[found[searching] >= 0]
        if not len(searching):
            return found
    # One row more, above all, that never ends; runs of 1, 2, 4, … rows are passed where their latest end is over.
    top = len(parent)
    above = [np.append(np.where(parent < 0, top, parent), top)]
    latest = [np.append(end, np.iinfo(np.int64).max)]
    while (above[-1] != top).any():
        latest.append(np.maximum(latest[-1], latest[-1][above[-1]]))
        above.append(above[-1][above[-1]])
    here = found[searching]
    for jump, over in zip(reversed(above), reversed(latest), strict=True):
        here = np.where(over[here] <= times[searching], jump[here], here)
    found[searching] = np.where(here == top, -1, here)
    return found


def climb(value: Integers, parent: Integers, rows: Integers) -> Integers:
    """For each row its value, or that of the nearest enclosing row whose value is not negative; −1 where none is."""
    found = nearest(rows, parent, value >= 0)
    return np.where(found >= 0, value[found], -1)


def look_up(wanted: Integers, keys: Integers, values: Integers) -> Integers:
    """For each number from 0 the value of the first key that equals it; −1 where none does."""
    if not len(keys):
        return np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    place = np.minimum(np.searchsorted(ordered, wanted), len(keys) - 1)
    return np.where((ordered[place] == wanted) & (wanted >= 0), values[order[place]], -1)
