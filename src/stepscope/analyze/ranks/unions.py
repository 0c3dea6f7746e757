"""Lengths of unions of intervals, for many groups at once."""

from __future__ import annotations
from stepscope.analyze.step.numbers import Whole
import numpy as np

from typing import Any


def union_lengths(start: Any, end: Any, group: Whole, groups: int) -> Whole:
    """By group (0 … groups − 1): how long at least one of its intervals lasted. Any order of rows."""
    if not len(start):
        return np.zeros(groups, np.int64)
    order = np.lexsort((start, group))
    start, end, group = start[order].astype(np.int64), end[order].astype(np.int64), group[order]
    end = np.maximum(end, start)
    # Groups are laid one behind the other, so that one running maximum serves all of them.
    first = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    count = np.diff(np.r_[first, len(group)])
    span = np.maximum.reduceat(end, first) - start[first]
    shift = np.repeat(np.cumsum(span) - span - start[first], count)
    start, end = start + shift, end + shift
    reached = np.maximum.accumulate(np.r_[0, end[:-1]])
    covered = np.maximum(end - np.maximum(start, reached), 0)
    total: Whole = np.bincount(group, weights=covered, minlength=groups).astype(np.int64)
    return total
