"""A thread's time cut into pieces."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepscope.formats.timeline import OPERATOR, PYTHON, TimelineBuilder
from stepscope.traces.chakra_schedule import HostSegments, cut_host_time
from stepscope.traces.finish import finish


def cut(spans: list[tuple[int, int, int]], *, python: tuple[int, ...] = ()) -> HostSegments:
    """Spans are (thread, start, end); rows in `python` are left out."""
    builder = TimelineBuilder()
    for row, (thread, start, end) in enumerate(spans):
        kind = PYTHON if row in python else OPERATOR
        builder.add(kind, f"op{row}", start, end, thread=(1, thread), event_index=row)
    timeline = finish(builder.build())
    return cut_host_time(timeline, np.array([row for row in range(len(spans)) if row not in python], np.int64))


def pieces(segments: HostSegments) -> list[tuple[int, int, int, bool]]:
    return list(
        zip(
            segments.start_ns.tolist(),
            segments.end_ns.tolist(),
            segments.owner.tolist(),
            segments.is_head.tolist(),
            strict=True,
        )
    )


def test_nested_calls_and_gaps() -> None:
    segments = cut([(1, 0, 100), (1, 10, 40), (1, 15, 20), (1, 60, 100), (1, 130, 140)])
    assert pieces(segments) == [
        (0, 10, 0, True),
        (10, 15, 1, True),
        (15, 20, 2, True),
        (20, 40, 1, False),
        (40, 60, 0, False),
        (60, 100, 3, True),
        (100, 130, -1, False),
        (130, 140, 4, True),
    ]
    assert segments.head_of.tolist() == [0, 1, 2, 5, 7]
    assert segments.last_of.tolist() == [5, 3, 2, 5, 7]
    assert segments.parent.tolist() == [-1, 0, 1, 0, -1]


def test_what_is_left_out_gives_its_time_to_what_encloses_it() -> None:
    segments = cut([(1, 0, 100), (1, 10, 90), (1, 20, 30)], python=(1,))
    assert pieces(segments) == [(0, 20, 0, True), (20, 30, 2, True), (30, 100, 0, False)]
    assert segments.parent.tolist() == [-1, -1, 0]


def test_a_call_that_outlives_its_parent_is_cut() -> None:
    segments = cut([(1, 0, 50), (1, 40, 70), (1, 60, 65)])
    assert segments.clipped == 2
    assert segments.end_ns.max() == 50


def test_nothing() -> None:
    assert not len(cut([(1, 0, 5)], python=(0,)).start_ns)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=40))
def test_pieces_have_neither_holes_nor_overlaps(found: list[tuple[int, int, int]]) -> None:
    segments = cut([(thread, start, start + length) for thread, start, length in found])
    for thread in np.unique(segments.thread):
        of_thread = segments.thread == thread
        start, end = segments.start_ns[of_thread], segments.end_ns[of_thread]
        assert (start[1:] == end[:-1]).all()
        assert (end >= start).all()
    assert segments.is_head.sum() == len(found)
    assert (segments.last_of >= segments.head_of).all()
    assert (segments.owner[segments.head_of] == np.arange(len(found))).all()
