"""Compiled passes give the same answers as array operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from trace_samples import NCCL_DATA, Sketch, read_public, timelines

from stepscope.analyze.step import view as view_module
from stepscope.analyze.step.breakdown import break_down
from stepscope.analyze.step.host_waits import CompiledSurvey, host_waits
from stepscope.analyze.step.idle import explain_idle, idle_by_cause
from stepscope.analyze.step.kernels import time_annotations
from stepscope.analyze.step.launches import launch_statistics, queue_depths, study_launches
from stepscope.analyze.step.view import TraceView, view
from stepscope.formats.timeline import DEVICE_KINDS, Timeline

pytest.importorskip("numba")

QUESTIONS: tuple[Callable[[Timeline, int | None], object], ...] = (
    idle_by_cause,
    explain_idle,
    break_down,
    launch_statistics,
    queue_depths,
    study_launches,
    time_annotations,
)


def look_at(timeline: Timeline, *, compiled: bool) -> TraceView:
    """A view of its own, so that nothing is known yet."""
    least = 0 if compiled else len(timeline) + 1
    with patch.multiple(view_module, COMPILED_FROM=least, COMPILED_WHEN_LOADED_FROM=least):
        trace = view(replace(timeline))
        assert trace.is_compiled == compiled
    return trace


def check(timeline: Timeline, step: int | None) -> None:
    for ask in QUESTIONS:
        compiled, plain = (look_at(timeline, compiled=one).timeline for one in (True, False))
        assert ask(compiled, step) == ask(plain, step)


def check_parts(timeline: Timeline) -> None:
    compiled, plain = (look_at(timeline, compiled=one) for one in (True, False))
    assert compiled.window(None) == plain.window(None)
    assert compiled.rows(*DEVICE_KINDS).tolist() == plain.rows(*DEVICE_KINDS).tolist()
    assert compiled.top_rows.tolist() == plain.top_rows.tolist()
    one, other = host_waits(compiled).launches, host_waits(plain).launches
    assert isinstance(one, CompiledSurvey)
    assert not isinstance(other, CompiledSurvey)
    assert one.least.tolist() == other.least.tolist()
    assert one.threads == other.threads
    assert one.blocking.tolist() == other.blocking.tolist()
    assert one.held.keys() == other.held.keys()
    for thread, held in one.held.items():
        assert sorted(set(other.held[thread].tolist())) == held.tolist()


@settings(deadline=None)
@given(timelines())
def test_any_timeline(timeline: Timeline) -> None:
    check_parts(timeline)
    for step in (None, *(span.number for span in timeline.steps)):
        check(timeline, step)


@pytest.mark.parametrize("step", [None, 5])
def test_a_real_trace(step: int | None) -> None:
    check(read_public(NCCL_DATA), step)
    check_parts(read_public(NCCL_DATA))


def sketch_waits() -> Sketch:
    """Streams, threads and waits of all kinds at once: rows out of order, a graph, copies that block."""
    sketch = Sketch()
    sketch.step(1, 0, 400)
    sketch.kernel("gemm", 130, 140, call=(120, 126), thread=2, stream=9)
    sketch.kernel("gemm", 20, 40, call=(10, 15))
    sketch.copy(50, 60, name="Memcpy DtoH (Device -> Pageable)", call=(45, 55))
    sketch.copy(65, 70, call=(61, 72), stream=9)
    sketch.call("cudaEventSynchronize", 80, 118, thread=2)
    sketch.call("cudaStreamWaitEvent", 141, 142)
    sketch.call("cudaStreamWaitEvent", 143, 144, thread=2)
    sketch.kernel("gemm", 150, 190, call=(145, 148), thread=2, stream=9)
    sketch.kernel("gemm", 210, 240, call=(150, 152), stream=7)
    sketch.kernel("orphan", 250, 260)
    sketch.call("cudaDeviceSynchronize", 262, 300)
    sketch.kernel("gemm", 320, 330, call=(310, 312), stream=11)
    return sketch


def test_a_trace_with_waits() -> None:
    timeline = sketch_waits().build()
    held = host_waits(look_at(timeline, compiled=True)).launches
    assert {thread: times.tolist() for thread, times in held.held.items() if len(times)} == {0: [150], 1: [145]}
    assert len(held.blocking) == 2
    check_parts(timeline)
    for step in (None, 1):
        check(timeline, step)


def test_only_large_timelines_load_the_compiler() -> None:
    timeline = sketch_waits().build()
    assert not view(timeline).is_compiled
