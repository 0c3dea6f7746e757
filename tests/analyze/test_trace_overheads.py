"""T1 to T5 by hand."""

from __future__ import annotations

import pytest
from trace_samples import Sketch

from stepscope.analyze.step.overheads import Sample, measure_overheads


def mean(sample: Sample | None) -> float:
    assert sample is not None
    return round(sample.mean_s * 1e9, 6)


def test_five_overheads() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 1000)
    sketch.operator("aten::linear", 100, 200)
    sketch.operator("aten::addmm", 105, 190)
    sketch.kernel("a", 300, 310, call=(120, 130))  # T2 20, T4 10
    sketch.kernel("b", 320, 330, call=(145, 155))  # T5 15, T3 45
    sketch.operator("aten::view", 206, 218)  # T1 6, T5 without a launch 12
    sketch.operator("aten::relu", 222, 260)  # T1 4
    sketch.kernel("c", 400, 410, call=(230, 238))  # T2 8, T3 22, T4 8
    sketch.call("cudaDeviceSynchronize", 262, 450)
    sketch.operator("aten::relu", 455, 470)  # not T1: the host waited
    found = measure_overheads(sketch.build(), 1)
    assert found.t1 is not None
    assert (found.t1.count, mean(found.t1), found.t1_left_out) == (2, 5, 1)
    assert mean(found.t4["cudaLaunchKernel"]) == pytest.approx(28 / 3, abs=1e-5)
    operators = {one.name: one for one in found.operators}
    assert list(operators) == ["aten::linear", "aten::relu", "aten::view"]
    linear = operators["aten::linear"]
    assert (mean(linear.t2), mean(linear.t3), mean(linear.t5)) == (20, 45, 15)
    assert (linear.launching, linear.launches, linear.events) == (1, 2, 3)
    relu = operators["aten::relu"]
    assert (relu.count, relu.launching) == (2, 1)
    assert (mean(relu.t2), mean(relu.t3), relu.t5) == (8, 22, None)
    assert mean(relu.t5_without_launch) == 15
    assert mean(operators["aten::view"].t5_without_launch) == 12
    assert operators["aten::view"].t2 is None


def test_the_trimmed_mean_leaves_outliers_out() -> None:
    sketch = Sketch()
    start = 0
    for gap in (10, 10, 11, 9, 10, 10_000):
        sketch.operator("aten::view", start, start + 5)
        start += 5 + gap
    sketch.operator("aten::view", start, start + 5)
    found = measure_overheads(sketch.build(), None).t1
    assert found is not None
    assert found.count == 6
    assert found.trimmed_mean_s == pytest.approx(10e-9)
    assert found.mean_s > 1000e-9


def test_gaps_between_steps_do_not_count() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 50)
    sketch.step(2, 50, 100)
    sketch.operator("aten::view", 10, 20)
    sketch.operator("aten::view", 60, 70)
    found = measure_overheads(sketch.build(), None)
    assert (found.t1, found.t1_left_out) == (None, 1)


def test_threads_do_not_mix() -> None:
    sketch = Sketch()
    sketch.operator("aten::view", 0, 10)
    sketch.operator("aten::view", 12, 20, thread=2)
    sketch.operator("aten::view", 25, 30)
    found = measure_overheads(sketch.build(), None)
    assert mean(found.t1) == 15
    assert found.note is not None
