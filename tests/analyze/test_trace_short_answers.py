"""Short questions get the same answers as long ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from trace_samples import NCCL_DATA, read_public, timelines

from stepscope.analyze.step.breakdown import break_down, measure_overlap
from stepscope.analyze.step.idle import explain_idle, idle_by_cause
from stepscope.analyze.step.kernels import kernel_times, list_kernels, list_transfers, time_annotations
from stepscope.analyze.step.launches import launch_statistics, queue_depths, study_launches
from stepscope.formats.timeline import ANNOTATION, DEVICE_ANNOTATION, Timeline


def check(timeline: Timeline, step: int | None) -> None:
    assert measure_overlap(timeline, step) == break_down(timeline, step).overlap
    idle, causes = explain_idle(timeline, step), idle_by_cause(timeline, step)
    for name in causes.__struct_fields__:
        assert getattr(causes, name) == getattr(idle, name)
    kernels, times = list_kernels(timeline, step), kernel_times(timeline, step)
    for name in times.__struct_fields__:
        assert getattr(times, name) == getattr(kernels, name)
    assert list_transfers(timeline, step) == kernels.transfers
    launches = study_launches(timeline, step)
    assert launch_statistics(timeline, step) == launches.by_call
    assert queue_depths(timeline, step) == launches.queue


@given(timelines())
def test_any_timeline(timeline: Timeline) -> None:
    for step in (None, *(span.number for span in timeline.steps)):
        check(timeline, step)


@pytest.mark.parametrize("step", [None, 5])
def test_a_real_trace(step: int | None) -> None:
    check(read_public(NCCL_DATA), step)


def test_annotations_of_a_real_trace() -> None:
    timeline = read_public(NCCL_DATA)
    found = time_annotations(timeline, None)
    for table, kind in ((found.host, ANNOTATION), (found.device, DEVICE_ANNOTATION)):
        rows = timeline.rows(kind)
        assert sum(row.count for row in table.rows) == len(rows) > 0
        whole = int((timeline.core["end_ns"][rows] - timeline.core["start_ns"][rows]).sum())
        assert sum(row.total_s for row in table.rows) == pytest.approx(whole / 1e9)
