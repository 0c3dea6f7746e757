"""Calls inside calls, as arrays: how deep, how many, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stepscope.traces.timeline import Integers


class Nesting(NamedTuple):
    """By place, as the parents are given."""

    depth: Integers
    size: Integers
    """How many each encloses, with itself."""
    levels: list[Integers]
    """Places of each depth, ascending, the outermost first. What leads to no root is in none of them."""


def nest(parent: Integers) -> Nesting:
    """From the place of each one's parent, −1 at the top."""
    import numpy as np

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
    import numpy as np

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
