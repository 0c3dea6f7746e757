"""Sets of time as sorted, disjoint intervals [start, end) in whole nanoseconds, and step functions over time.

Everything is exact: lengths are integers, and no interval is lost to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stepscope.analyze.step.numbers import Mask, Whole, expand
from stepscope.formats.timeline import Integers


class Intervals(NamedTuple):
    """Ascending, disjoint, not touching; [start, end)."""

    start: Integers
    end: Integers


class StepFunction(NamedTuple):
    """`value[i]` holds from `time[i]` until `time[i + 1]`; before the first time and after the last it is zero."""

    time: Integers
    value: Integers


class OpenCounts(NamedTuple):
    """How many intervals are open, over time."""

    mean: float
    quantile: int
    """Not exceeded during the wanted share of the time."""
    most: int


def no_intervals() -> Intervals:
    return Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))


def union(start: Integers, end: Integers, *, in_order: bool = False) -> Intervals:
    """Everything that any of these intervals covers; those that touch become one, those without length vanish.

    `in_order` says that the starts ascend already, which saves the sorting.
    """
    start, end = np.asarray(start, np.int64), np.asarray(end, np.int64)
    wanted = end > start
    if not wanted.all():
        start, end = start[wanted], end[wanted]
    if not len(start):
        return no_intervals()
    if in_order:
        end = np.maximum.accumulate(end)
    else:
        # A break lies before the i-th start exactly where i ends have passed by then, so both can be sorted apart.
        # Rows of a trace are mostly in order, which a stable sort turns into speed.
        start, end = np.sort(start, kind="stable"), np.sort(end, kind="stable")
    breaks = np.flatnonzero(start[1:] > end[:-1])
    first = np.concatenate(([0], breaks + 1))
    last = np.concatenate((breaks, [len(end) - 1]))
    return Intervals(start[first], end[last])


def length(intervals: Intervals) -> int:
    """Nanoseconds covered."""
    return int((intervals.end - intervals.start).sum())


def clip(intervals: Intervals, low: int, high: int) -> Intervals:
    """The part inside [low, high)."""
    if not len(intervals.start):
        return intervals
    start, end = np.maximum(intervals.start, low), np.minimum(intervals.end, high)
    kept = end > start
    return Intervals(start[kept], end[kept])


def complement(intervals: Intervals, low: int, high: int) -> Intervals:
    """What [low, high) has beside the intervals."""
    inside = (intervals.end >= low) & (intervals.start <= high)
    start = np.concatenate(([low], np.clip(intervals.end[inside], low, high)))
    end = np.concatenate((np.clip(intervals.start[inside], low, high), [high]))
    kept = end > start
    return Intervals(start[kept], end[kept])


def join(sets: Sequence[Intervals]) -> Intervals:
    """The union of several sets."""
    if not sets:
        return no_intervals()
    return union(np.concatenate([one.start for one in sets]), np.concatenate([one.end for one in sets]))


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """What is in both; cheap where one of them has few intervals."""
    few, many = (one, other) if len(one.start) < len(other.start) else (other, one)
    first = many.end.searchsorted(few.start, side="right")
    count = many.start.searchsorted(few.end, side="left") - first
    mine, place = expand(first, count)
    return Intervals(
        np.maximum(few.start[mine], many.start[place]).astype(np.int64),
        np.minimum(few.end[mine], many.end[place]).astype(np.int64),
    )


def subtract(one: Intervals, other: Intervals) -> Intervals:
    """What is in `one` and not in `other`."""
    if not len(one.start):
        return no_intervals()
    return intersect(one, complement(other, int(one.start[0]), int(one.end[-1])))


def touches(intervals: Intervals, start: Integers, end: Integers) -> Mask:
    """For each span [start, end) whether it shares time with the intervals."""
    following = np.searchsorted(intervals.end, start, side="right")
    begins = np.append(intervals.start, np.iinfo(np.int64).max)[following]
    shared: Mask = np.maximum(begins, start) < end
    return shared


def measure_before(intervals: Intervals, points: Integers) -> Whole:
    """For each point how much of the set lies before it: differences of it are lengths inside any span."""
    points = np.asarray(points, np.int64)
    whole = np.concatenate(([0], np.cumsum(intervals.end - intervals.start)))
    opened = np.searchsorted(intervals.start, points, side="right")
    before: Whole = whole[opened]
    if len(intervals.start):
        last = np.maximum(opened - 1, 0)
        before = before - np.where(opened > 0, np.maximum(intervals.end[last] - points, 0), 0)
    return before


def measure_within(intervals: Intervals, start: Integers, end: Integers) -> Whole:
    """For each span [start, end) how much of the set lies inside; 0 where the span is empty or turned round."""
    inside: Whole = measure_before(intervals, np.maximum(start, end)) - measure_before(intervals, start)
    return inside


def common_length(one: Intervals, other: Intervals) -> int:
    """Nanoseconds in both; cheap where one of them has few intervals."""
    few, many = (one, other) if len(one.start) < len(other.start) else (other, one)
    return int(measure_within(many, few.start, few.end).sum()) if len(few.start) else 0


def _changes(start: Integers, end: Integers, low: int, high: int | None = None) -> tuple[Whole, Whole]:
    """When these intervals, cut to [low, high), open or close, in order and counted from `low`; how many are open then.

    Of changes at one time those that close come first.
    """
    # The last bit says whether an interval opens: numbers sort several times faster than places of numbers.
    changes = np.concatenate((start, end)).astype(np.int64, copy=False)
    changes -= low
    if high is not None:
        np.maximum(changes, 0, out=changes)
        np.minimum(changes, high - low, out=changes)
    changes <<= 1
    changes[: len(start)] |= 1
    changes.sort(kind="stable")  # mostly in order: runs are only merged
    value = np.cumsum(((changes & 1) << 1) - 1)
    changes >>= 1
    return changes, value


def sweep(start: Integers, end: Integers) -> StepFunction:
    """How many of these intervals are open, over time. Empty intervals are never open."""
    if not len(start):
        return StepFunction(np.zeros(0, np.int64), np.zeros(0, np.int64))
    base = min(int(np.min(start)), int(np.min(end)))
    times, value = _changes(start, end, base)
    # The value after all changes of one instant counts: ties have no order of their own.
    is_last = np.append(times[1:] != times[:-1], True)
    return StepFunction(times[is_last] + base, value[is_last])


def count_open(start: Integers, end: Integers, low: int, high: int, *, share: float) -> OpenCounts:
    """How many of these intervals are open during [low, high); `share` says for which quantile over time."""
    whole = high - low
    if whole <= 0 or not len(start):
        return OpenCounts(0.0, 0, 0)
    times, value = _changes(start, end, low, high)  # those outside become empty
    np.maximum(value, 0, out=value)
    spent = np.bincount(value[:-1], weights=np.diff(times))
    spent[0] += whole - int(times[-1] - times[0])
    values = np.flatnonzero(spent)
    reached = min(int(np.searchsorted(np.cumsum(spent[values]), share * whole)), len(values) - 1)
    mean = float((spent * np.arange(len(spent))).sum()) / whole
    return OpenCounts(mean, int(values[reached]), int(value.max()))


def value_at(function: StepFunction, points: Integers) -> Whole:
    """The value at each point; 0 outside."""
    place = np.searchsorted(function.time, points, side="right")
    padded = np.concatenate(([0], function.value)).astype(np.int64)
    values: Whole = padded[place]
    return values


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
