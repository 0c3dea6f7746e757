"""Counters of kernels and counters over time."""

from __future__ import annotations

import json

import pytest
from trace_samples import Sketch

from stepscope.analyze.step.counters import count_by_operator
from stepscope.formats.timeline import COUNTER, OTHER

FLOPS = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"


def counted(sketch: Sketch, name: str, time: int, value: float, **values: object) -> None:
    arguments = json.dumps({FLOPS: value, "note": "x"})
    sketch.builder.add(COUNTER, name, time, time + 5, arguments=arguments, **values)


def two_operators() -> Sketch:
    sketch = Sketch()
    sketch.step(1, 0, 1000)
    sketch.operator("aten::linear", 10, 100)
    sketch.operator("aten::addmm", 20, 90)
    sketch.kernel("gemm", 110, 150, call=(30, 35))
    sketch.kernel("bias", 160, 170, call=(40, 45))
    sketch.operator("aten::relu", 120, 140)
    sketch.kernel("gemm", 180, 190, call=(130, 135))
    return sketch


def test_matched_by_correlation() -> None:
    sketch = two_operators()
    for correlation, value in ((1, 100.0), (3, 7.0)):
        counted(sketch, "range", 500 - correlation, value, correlation=correlation)
    found = count_by_operator(sketch.build(), 1)
    assert (found.ranges, found.matched, found.matched_by) == (2, 2, ["correlation"])
    sums = {one.operator: one.sums[FLOPS] for one in found.by_operator}
    assert sums == {"aten::addmm": 100, "aten::relu": 7}
    assert found.counters == [FLOPS]
    assert found.note is None


def test_matched_by_name_and_order() -> None:
    sketch = two_operators()
    for name, time, value in (("gemm", 500, 1.0), ("bias", 510, 2.0), ("gemm", 520, 4.0)):
        counted(sketch, name, time, value)
    found = count_by_operator(sketch.build(), 1)
    assert found.matched_by == ["name"]
    by_operator = {one.operator: one for one in found.by_operator}
    assert by_operator["aten::addmm"].sums[FLOPS] == 3
    assert by_operator["aten::addmm"].means[FLOPS] == pytest.approx(1.5)
    assert by_operator["aten::addmm"].top_operators == ["aten::linear"]
    assert by_operator["aten::relu"].sums[FLOPS] == 4


def test_matched_by_order_alone() -> None:
    sketch = two_operators()
    for number in range(3):
        counted(sketch, str(number), 500 + number, 10.0**number)
    found = count_by_operator(sketch.build(), 1)
    assert found.matched_by == ["order"]
    assert {one.operator: one.sums[FLOPS] for one in found.by_operator} == {"aten::addmm": 11, "aten::relu": 100}


def test_launches_stand_for_kernels_that_were_not_recorded() -> None:
    sketch = Sketch()
    sketch.operator("aten::mm", 0, 100)
    sketch.call("cudaLaunchKernel", 10, 20, correlation=5)
    counted(sketch, "0", 50, 3.0)
    found = count_by_operator(sketch.build(), None)
    assert {one.operator: one.kernels for one in found.by_operator} == {"aten::mm": 1}


def test_numbers_that_differ_are_not_matched() -> None:
    sketch = two_operators()
    counted(sketch, "gemm", 500, 1.0)
    found = count_by_operator(sketch.build(), 1)
    assert (found.ranges, found.matched) == (1, 0)
    assert found.note == "1 of 1 profiler ranges could not be matched with a launch"


def test_ranges_read_as_other_rows_and_strangers_among_them() -> None:
    sketch = two_operators()
    sketch.builder.add(OTHER, "range", 500, 505, correlation=1, arguments=json.dumps({FLOPS: "12.5"}))
    sketch.builder.add(OTHER, "Spans", 0, 900, arguments=json.dumps({"Op count": 3}))
    sketch.builder.add(OTHER, "broken", 0, 900, arguments="{")
    found = count_by_operator(sketch.build(), 1)
    assert found.ranges == 1
    assert found.by_operator[0].sums == {FLOPS: 12.5}


def test_counters_over_time() -> None:
    sketch = two_operators()
    for time, value in ((100, 1.0), (200, 3.0), (500, 5.0)):
        sketch.builder.add(COUNTER, "GPU power", time, time, value=value)
    (series,) = count_by_operator(sketch.build(), 1).series
    assert (series.samples, series.min, series.max, series.mean) == (3, 1, 5, 3)
    assert series.time_mean == pytest.approx((100 * 1 + 300 * 3) / 400)


def test_no_counters() -> None:
    found = count_by_operator(two_operators().build(), 1)
    assert (found.ranges, found.series, found.by_operator) == (0, [], [])
    assert found.note is not None
