"""Sets of time against brute force on single nanoseconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analyze.step import intervals
from stepscope.analyze.step.intervals import Intervals

END = 40
SPANS = st.lists(
    st.tuples(st.integers(0, END), st.integers(-2, 12)).map(lambda pair: (pair[0], min(END, pair[0] + pair[1]))),
    max_size=12,
)


def columns(spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([start for start, _ in spans], np.int64), np.array([end for _, end in spans], np.int64)


def points(spans: list[tuple[int, int]]) -> set[int]:
    return {time for start, end in spans for time in range(start, end)}


def covered(found: Intervals) -> set[int]:
    return points(list(zip(found.start.tolist(), found.end.tolist(), strict=True)))


def make(spans: list[tuple[int, int]]) -> Intervals:
    return intervals.union(*columns(spans))


@given(SPANS)
def test_union_is_sorted_disjoint_and_covers_the_same(spans: list[tuple[int, int]]) -> None:
    found = make(spans)
    assert covered(found) == points(spans)
    assert intervals.length(found) == len(points(spans))
    assert (found.end > found.start).all()
    assert (found.start[1:] > found.end[:-1]).all()


@given(SPANS)
def test_starts_in_order_save_sorting_only(spans: list[tuple[int, int]]) -> None:
    start, end = columns(sorted(spans))
    one, other = intervals.union(start, end, in_order=True), intervals.union(start, end)
    assert one.start.tolist() == other.start.tolist()
    assert one.end.tolist() == other.end.tolist()


@given(SPANS, SPANS)
def test_sets_combine_like_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    a, b = make(one), make(other)
    assert covered(intervals.intersect(a, b)) == points(one) & points(other)
    assert covered(intervals.subtract(a, b)) == points(one) - points(other)
    assert intervals.common_length(a, b) == len(points(one) & points(other))


@given(SPANS, st.integers(0, END), st.integers(0, END))
def test_windows(spans: list[tuple[int, int]], one: int, other: int) -> None:
    low, high = min(one, other), max(one, other)
    window = set(range(low, high))
    assert covered(intervals.clip(make(spans), low, high)) == points(spans) & window
    assert covered(intervals.complement(make(spans), low, high)) == window - points(spans)


@given(SPANS, SPANS)
def test_measures_of_spans(spans: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    found = make(spans)
    start, end = columns(asked)
    inside = intervals.measure_within(found, start, end)
    assert inside.tolist() == [len(points(spans) & set(range(low, high))) for low, high in asked]
    assert intervals.touches(found, start, end).tolist() == (inside > 0).tolist()


@given(SPANS)
def test_sweep_counts_open_intervals(spans: list[tuple[int, int]]) -> None:
    spans = [span for span in spans if span[1] >= span[0]]
    function = intervals.sweep(*columns(spans))
    asked = np.arange(END + 1)
    counts = [sum(start <= time < end for start, end in spans) for time in range(END + 1)]
    assert intervals.value_at(function, asked).tolist() == counts


@given(SPANS, st.integers(0, END), st.integers(1, END), st.sampled_from((0.0, 0.5, 0.95, 1.0)))
def test_open_intervals_in_a_window(spans: list[tuple[int, int]], low: int, length: int, share: float) -> None:
    spans = [span for span in spans if span[1] >= span[0]]
    counts = [sum(start <= time < end for start, end in spans) for time in range(low, low + length)]
    found = intervals.count_open(*columns(spans), low, low + length, share=share)
    assert found.mean * length == pytest.approx(sum(counts))
    assert found.most == max(counts)
    assert found.quantile in counts
    assert sum(count <= found.quantile for count in counts) >= share * length
    assert all(sum(count <= fewer for count in counts) < share * length for fewer in counts if fewer < found.quantile)


def test_nothing() -> None:
    nothing = intervals.no_intervals()
    assert intervals.length(nothing) == 0
    assert intervals.length(intervals.complement(nothing, 3, 10)) == 7
    assert intervals.length(intervals.intersect(nothing, nothing)) == 0
    assert not len(intervals.sweep(*nothing).time)
    assert intervals.count_open(*nothing, 5, 5, share=0.5) == (0, 0, 0)
    assert intervals.count_open(*nothing, 5, 9, share=0.5) == (0, 0, 0)
    assert intervals.length(intervals.subtract(nothing, nothing)) == 0
