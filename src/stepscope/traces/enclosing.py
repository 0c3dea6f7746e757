"""From a row to the nearest enclosing row that has something."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.traces.timeline import Integers


def climb(value: Integers, parent: Integers, rows: Integers) -> Integers:
    """For each row its value, or that of the nearest enclosing row whose value is not negative; −1 where none is."""
    import numpy as np

    found = np.full(len(rows), -1, np.int64)
    here = np.array(rows, np.int64)
    open_places = np.flatnonzero(here >= 0)
    while len(open_places):
        current = here[open_places]
        values = value[current]
        found[open_places] = values
        above = parent[current]
        here[open_places] = above
        open_places = open_places[(values < 0) & (above >= 0)]
    return found
