"""From a row to the nearest enclosing row that has something."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from stepscope.traces.timeline import Integers

    Mask = NDArray[np.bool_]


_STEPS = 64
"""Levels climbed one by one; more than any program nests, so the whole table is followed for hostile ones only."""


def follow(above: Integers) -> Integers:
    """Where `above` leads from each row, itself where it leads nowhere: rounds double, so depth costs its logarithm."""
    while True:
        further = above[above]
        if (further == above).all():
            return further
        above = further


def nearest(rows: Integers, parent: Integers, wanted: Mask) -> Integers:
    """For each row the nearest of itself and the rows above it for which `wanted` holds; −1 where none does."""
    import numpy as np

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


def farthest(rows: Integers, parent: Integers, wanted: Mask) -> Integers:
    """Like `nearest`, but the last of them on the way up."""
    import numpy as np

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
    import numpy as np

    found = np.array(rows, np.int64)
    searching = np.flatnonzero(found >= 0)
    for _ in range(_STEPS):
        searching = searching[end[found[searching]] <= times[searching]]
        found[searching] = parent[found[searching]]
        searching = searching[found[searching] >= 0]
        if not len(searching):
            return found
    # One row more, above all, that never ends; stretches of 1, 2, 4, … rows are passed where their latest end is over.
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
    import numpy as np

    found = nearest(rows, parent, value >= 0)
    return np.where(found >= 0, value[found], -1)
