"""Launch calls, delays and the queue."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from trace_samples import Sketch, read_public, timelines

from stepscope.analyze.step.launches import study_launches
from stepscope.formats.timeline import Timeline


def test_delays_by_hand() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 1000)
    sketch.operator("aten::mm", 5, 50)
    sketch.kernel("a", 20, 120, call=(10, 15))  # empty stream: latency 10
    sketch.kernel("b", 122, 130, call=(30, 50))  # behind a: queueing 92; the call took longer than its kernel
    sketch.kernel("c", 205, 300, call=(200, 210))  # empty again: latency 5, started before the call returned
    sketch.call("cudaStreamWaitEvent", 310, 312)
    sketch.kernel("d", 420, 430, call=(320, 325), stream=20)  # empty, but behind an event: held 100
    sketch.kernel("e", 500, 510)
    found = study_launches(sketch.build(), 1)
    assert (found.calls, found.launched, found.without_launch) == (4, 4, 1)
    assert round(found.call_s * 1e9) == 5 + 20 + 10 + 5
    (call,) = found.by_call
    assert (call.name, call.calls, call.launched) == ("cudaLaunchKernel", 4, 4)
    assert call.latency is not None
    assert (call.latency.count, call.latency.min_s, call.latency.max_s) == (2, 5e-9, 10e-9)
    assert call.queueing is not None
    assert call.queueing.max_s == pytest.approx(92e-9)
    assert call.held is not None
    assert call.held.max_s == 100e-9
    assert (call.started_early, call.longer_than_work) == (1, 1)
    slowest = found.slowest_calls[0]
    assert (slowest.launched, slowest.operator, slowest.call_s, slowest.waited_for) == (
        "b",
        "aten::mm",
        20e-9,
        "stream",
    )
    assert [one.delay_s for one in found.latest_starts] == [10e-9, 5e-9]


def test_outliers() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 1_000_000)
    sketch.kernel("a", 200_000, 300_000, call=(10, 60_000))
    found = study_launches(sketch.build(), 1).by_call[0]
    assert (found.slow_calls, found.late_starts) == (1, 1)


def test_a_graph_is_one_call() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    sketch.call("cudaGraphLaunch", 5, 25, correlation=1)
    for start in (20, 42, 75):
        sketch.builder.add(2, "gemm", start, start + 5, device=0, stream=7, correlation=1)
    found = study_launches(sketch.build(), 1)
    assert (found.calls, found.launched) == (1, 3)
    assert found.by_call[0].longer_than_work == 1
    assert found.queue[0].pending_max == 3


def test_the_queue_over_time() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    sketch.kernel("a", 20, 60, call=(10, 12))
    sketch.kernel("b", 60, 80, call=(20, 22))
    (depth,) = study_launches(sketch.build(), 1).queue
    # Pending: 1 in 10–20, 1 in 20–60; outstanding: 1 in 10–20, 2 in 20–60, 1 in 60–80.
    assert depth.pending_mean == pytest.approx(0.5)
    assert (depth.pending_max, depth.outstanding_max) == (1, 2)
    assert depth.outstanding_mean == pytest.approx((10 + 80 + 20) / 100)
    assert depth.outstanding_p95 == 2


def test_streams_have_queues_of_their_own() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    sketch.kernel("a", 20, 60, call=(10, 12))
    sketch.kernel("b", 30, 80, call=(20, 22), stream=20)
    assert [one.stream for one in study_launches(sketch.build(), 1).queue] == [None, 7, 20]


def test_a_full_queue_blocks() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100_000)
    for number in range(100):
        slow = number >= 95
        called = 10 * number if not slow else 1000 + 200 * (number - 95)
        sketch.kernel("a", 5_000 + number * 50, 5_040 + number * 50, call=(called, called + (150 if slow else 5)))
    blocked = study_launches(sketch.build(), 1).blocked
    assert (blocked.calls, round(blocked.total_s * 1e9)) == (5, 750)
    assert blocked.share == pytest.approx(750 / (750 + 475))


def test_a_copy_that_waits_for_itself_is_not_blocked() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100_000)
    for number in range(100):
        sketch.copy(5_000 + number * 50, 5_040 + number * 50, call=(10 * number, 10 * number + 5))
    sketch.copy(11_000, 11_010, call=(1100, 12_000))
    assert study_launches(sketch.build(), 1).blocked.calls == 0


def test_no_device() -> None:
    sketch = Sketch()
    sketch.operator("aten::mm", 0, 10)
    found = study_launches(sketch.build(), None)
    assert (found.calls, found.by_call, found.queue) == (0, [], [])
    assert found.note is not None


@settings(max_examples=60)
@given(timelines())
def test_everything_is_counted_once(timeline: Timeline) -> None:
    found = study_launches(timeline, None)
    assert found.launched == sum(one.launched for one in found.by_call)
    assert found.calls == sum(one.calls for one in found.by_call)
    for one in found.by_call:
        parts = (one.latency, one.held, one.queueing)
        assert one.launched == sum(part.count for part in parts if part is not None)
    for depth in found.queue:
        assert 0 <= depth.pending_mean <= depth.pending_max
        assert depth.pending_max <= depth.outstanding_max


@pytest.mark.parametrize(
    ("name", "early", "launched"),
    [("h200/gpt2_bf16_b8_s1024/kineto.json.gz", 148, 932), ("public/param/linear_kineto.json.gz", 3061, 10_356)],
)
def test_kernels_that_start_before_the_call_returns(name: str, early: int, launched: int) -> None:
    found = study_launches(read_public(name), None)
    assert (sum(one.started_early for one in found.by_call), found.launched) == (early, launched)
