"""The joined report."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from trace_samples import Sketch, timelines

from stepscope.analyze.step.report import StepReport, explain_step
from stepscope.core.errors import BadInputError
from stepscope.formats.timeline import Timeline, TimelineBuilder


def steps_of(lengths: list[int]) -> Timeline:
    sketch = Sketch()
    start = 0
    for number, length in enumerate(lengths):
        sketch.step(number, start, start + length)
        sketch.kernel("gemm", start + 5, start + 9, call=(start + 1, start + 2))
        start += length
    return sketch.build()


@pytest.mark.parametrize(
    ("lengths", "step"),
    [([10], 0), ([10, 30, 20], 2), ([10, 20], 0), ([10, 30, 20, 40], 2), ([1000, 30, 10, 20, 10], 3)],
)
def test_the_median_step_is_chosen(lengths: list[int], step: int) -> None:
    """First and last are left out where more than two others remain."""
    found = explain_step(steps_of([length + 10 for length in lengths]))
    assert found.step == step
    assert found.chosen is not None


def test_a_named_step() -> None:
    found = explain_step(steps_of([20, 30]), 1)
    assert (found.step, found.chosen, found.steps, found.step_marker) == (1, None, 2, "profiler")
    assert found.breakdown.step == found.idle.step == found.kernels.step == found.launches.step == 1
    assert (found.counters, found.memory) == (None, None)


def test_no_steps_is_said() -> None:
    sketch = Sketch()
    sketch.kernel("gemm", 20, 40, call=(5, 8))
    found = explain_step(sketch.build())
    assert (found.step_marker, found.step) == ("none", 0)
    assert any("no steps marked" in note for note in found.notes)


def test_an_empty_trace() -> None:
    with pytest.raises(BadInputError, match="no events"):
        explain_step(TimelineBuilder().build())


def has_no_nan(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(has_no_nan, value.values()))
    if isinstance(value, list):
        return all(map(has_no_nan, value))
    return not (isinstance(value, float) and not math.isfinite(value))


@settings(max_examples=60)
@given(timelines())
def test_any_trace_gives_a_report_that_json_can_hold(timeline: Timeline) -> None:
    found = explain_step(timeline)
    assert has_no_nan(msgspec.to_builtins(found))
    again = msgspec.json.decode(msgspec.json.encode(found), type=StepReport)
    assert again.breakdown == found.breakdown
    assert found.idle.idle_ns == 0 or found.breakdown.device != "cpu"
