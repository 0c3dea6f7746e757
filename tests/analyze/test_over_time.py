"""Queue length and bandwidths as functions of time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.over_time import add_rates, collective_bandwidth, copy_bandwidth, queue_length
from stepscope.analyze.step.intervals import StepFunction, value_at
from stepscope.analyze.step.launches import queue_depths
from stepscope.formats.timeline import COPY, SET
from trace_jobs import TraceDraft, communication_bound, compute_bound, copy_bound, on_cpu

US = 1000


def mean_over(function: StepFunction, low: int, high: int) -> float:
    edges = np.unique(np.concatenate(([low, high], function.time[(function.time > low) & (function.time < high)])))
    return float((value_at(function, edges[:-1]) * np.diff(edges)).sum() / (high - low))


def test_the_queue_agrees_with_its_mean_in_the_table() -> None:
    timeline = compute_bound().build()
    function = queue_length(timeline)
    (depth,) = queue_depths(timeline, 1)
    assert int(function.value.max()) == depth.pending_max == 8
    assert mean_over(function, 0, 1000 * US) == pytest.approx(depth.pending_mean)
    assert function.value[-1] == 0


def test_work_without_a_launch_is_in_no_queue() -> None:
    draft = TraceDraft()
    draft.step(0, 100)
    draft.builder.add(2, "kernel", 10 * US, 20 * US, device=0, stream=7, correlation=99)
    assert not queue_length(draft.build()).value.any()


def test_a_trace_without_a_device_has_nothing_over_time() -> None:
    timeline = on_cpu().build()
    assert not len(queue_length(timeline).time)
    assert not len(copy_bandwidth(timeline, with_host=True).time)
    assert not len(collective_bandwidth(timeline).time)


def test_copies_with_the_host_are_told_from_those_on_the_device() -> None:
    draft = copy_bound()
    draft.work("Memcpy DtoD (Device -> Device)", 900, 910, at=40, kind=COPY, bytes=1 << 20)
    draft.work("Memset (Device)", 920, 930, at=45, kind=SET, bytes=1 << 10)
    timeline = draft.build()
    host, device = (copy_bandwidth(timeline, with_host=with_host) for with_host in (True, False))
    assert value_at_s(host, 100 * US) == pytest.approx((8 << 20) / 880e-6)
    assert value_at_s(host, 905 * US) == 0
    assert value_at_s(device, 905 * US) == pytest.approx((1 << 20) / 10e-6)
    assert value_at_s(device, 925 * US) == pytest.approx((1 << 10) / 10e-6)


def value_at_s(function: StepFunction, time_ns: int) -> float:
    place = int(np.searchsorted(function.time, time_ns, side="right")) - 1
    return float(function.value[place]) if place >= 0 else 0.0


def test_collectives_have_their_algorithm_bandwidth() -> None:
    function = collective_bandwidth(communication_bound().build())
    assert value_at_s(function, 500 * US) == pytest.approx((4 << 24) / 874e-6)
    assert value_at_s(function, 991 * US) == 0


SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40), st.integers(-1, 1 << 40)), max_size=30)


@settings(deadline=None)
@given(SPANS)
def test_rates_add_up_to_the_bytes_moved_and_end_at_zero(spans: list[tuple[int, int, int]]) -> None:
    start, length, moved = (np.array(column, np.int64) for column in (zip(*spans, strict=True) if spans else [()] * 3))
    function = add_rates(start, start + length, moved)
    counted = moved[(moved > 0) & (length > 0)]
    area = float((function.value[:-1] * np.diff(function.time)).sum()) / 1e9
    assert area == pytest.approx(float(counted.sum()), rel=1e-6)
    assert (function.value >= 0).all()
    if len(function.value):
        assert function.value[-1] == 0
