"""Kernels by name, category, operator, phase, module and annotation."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_samples import Sketch

from stepscope.analyze.step.kernel_groups import TimesTable, tabulate
from stepscope.analyze.step.kernels import NO_ANNOTATION, NO_MODULE, NO_OPERATOR, list_kernels
from stepscope.analyze.step.numbers import top_by
from stepscope.formats.timeline import DEVICE_ANNOTATION
from stepscope.stats import quantile_sorted


def totals(table: TimesTable | None) -> dict[str, int]:
    assert table is not None
    return {row.name: round(row.total_s * 1e9) for row in table.rows}


def training_step() -> Sketch:
    """Forward, backward on another thread, optimizer and zero_grad; modules around the forward pass."""
    sketch = Sketch()
    sketch.step(1, 0, 1000)
    sketch.python("nn.Module: Net_0", 10, 200)
    sketch.python("nn.Module: Linear_0", 20, 100)
    sketch.operator("aten::linear", 25, 95, sequence=5, forward_thread=0)
    sketch.operator("aten::addmm", 30, 90, sequence=5, forward_thread=0)
    sketch.kernel("sgemm", 60, 160, call=(50, 55))
    sketch.operator("aten::relu", 110, 150)
    sketch.kernel("vectorized_elementwise_kernel<relu>", 170, 190, call=(120, 125))
    sketch.annotation("## backward ##", 210, 600)
    sketch.operator("autograd::engine::evaluate_function: AddmmBackward0", 220, 400, thread=2)
    sketch.operator("AddmmBackward0", 230, 390, thread=2, sequence=5, forward_thread=1)
    sketch.operator("aten::mm", 240, 380, thread=2)
    sketch.kernel("sgemm", 260, 460, call=(250, 255), thread=2)
    sketch.annotation("Optimizer.step#SGD.step", 610, 800)
    sketch.operator("aten::_foreach_add_", 620, 700)
    sketch.kernel("multi_tensor_apply_kernel<add>", 650, 690, call=(630, 640))
    sketch.annotation("Optimizer.zero_grad#SGD.zero_grad", 810, 900)
    sketch.fill(830, 840, call=(820, 825), bytes=100)
    return sketch


def test_a_training_step() -> None:
    found = list_kernels(training_step().build(), 1)
    assert (found.kernels, found.copies) == (4, 1)
    assert round(found.sum_s * 1e9) == 100 + 20 + 200 + 40 + 10
    assert totals(found.by_name)["sgemm"] == 300
    assert found.names["sgemm"].category == "gemm"
    assert totals(found.by_category) == {"gemm": 300, "optimizer": 40, "elementwise": 20, "set": 10}
    assert totals(found.by_operator) == {
        "aten::mm": 200,
        "aten::addmm": 100,
        "aten::_foreach_add_": 40,
        "aten::relu": 20,
        NO_OPERATOR: 10,
    }
    assert totals(found.by_top_operator)["autograd::engine::evaluate_function: AddmmBackward0"] == 200
    assert totals(found.by_top_operator)["aten::linear"] == 100
    assert totals(found.by_phase) == {"backward": 200, "forward": 120, "optimizer": 40, "other": 10}
    # The backward kernel belongs to the module whose forward operator has its sequence number.
    assert totals(found.by_module) == {"nn.Module: Linear_0": 300, NO_MODULE: 50, "nn.Module: Net_0": 20}
    assert totals(found.by_annotation) == {
        "## backward ##": 200,
        NO_ANNOTATION: 120,
        "Optimizer.step#SGD.step": 40,
        "Optimizer.zero_grad#SGD.zero_grad": 10,
    }
    assert [(one.name, one.bytes, one.count) for one in found.transfers] == [("Memset (Device)", 100, 1)]
    assert found.transfers[0].bytes_per_s == pytest.approx(100 / 10e-9)
    assert not found.notes


def test_host_operators_count_themselves_once() -> None:
    sketch = Sketch()
    sketch.operator("aten::to", 0, 100)
    sketch.operator("aten::to", 10, 60)
    sketch.operator("aten::copy_", 20, 50)
    found = {one.name: one for one in list_kernels(sketch.build(), None).host_operators}
    assert (found["aten::to"].count, found["aten::to"].total_s, found["aten::to"].self_s) == (2, 100e-9, 70e-9)
    assert found["aten::copy_"].self_s == 30e-9
    assert sum(one.share for one in found.values()) == pytest.approx(1)


def test_steps_are_kept_apart() -> None:
    sketch = training_step()
    sketch.step(2, 1000, 2000)
    sketch.kernel("sgemm", 1100, 1105, call=(1050, 1060))
    timeline = sketch.build()
    assert totals(list_kernels(timeline, 2).by_name) == {"sgemm": 5}
    assert totals(list_kernels(timeline, 2).by_phase) == {"forward": 5}
    assert totals(list_kernels(timeline, None).by_name)["sgemm"] == 305


def test_annotations_name_phases_where_there_are_no_operators() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    for name, start in (("forward", 10), ("Backward pass", 40), ("optimizer", 70)):
        sketch.annotation(name, start, start + 20)
        sketch.kernel("k", start + 5, start + 15, call=(start + 1, start + 2))
    assert totals(list_kernels(sketch.build(), 1).by_phase) == {"forward": 10, "backward": 10, "optimizer": 10}


def test_work_without_a_launch_takes_the_annotation_around_it() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    sketch.kernel("k", 20, 40)
    for name, start, end in (("outer", 5, 60), ("done", 6, 15), ("inner", 18, 45)):
        sketch.builder.add(DEVICE_ANNOTATION, name, start, end, device=0, stream=7)
    assert totals(list_kernels(sketch.build(), 1).by_annotation) == {"inner": 20}


def test_no_device() -> None:
    sketch = Sketch()
    sketch.operator("aten::mm", 0, 10)
    found = list_kernels(sketch.build(), None)
    assert found.by_name.rows == []
    assert "kernels do not apply" in found.notes[0]
    assert found.host_operators[0].self_s == 10e-9


@given(st.lists(st.integers(0, 50), max_size=400), st.integers(1, 9))
def test_the_largest_of_many(values: list[int], count: int) -> None:
    expected = sorted(range(len(values)), key=lambda place: -values[place])[:count]
    assert top_by(np.array(values, np.int64), count) == expected


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1000)), min_size=1, max_size=40))
def test_statistics_of_groups(pairs: list[tuple[int, int]]) -> None:
    group = np.array([one for one, _ in pairs])
    durations = np.array([duration for _, duration in pairs])
    table = tabulate(list("abcde"), group, durations)
    whole = sum(durations.tolist())
    for row in table.rows:
        mine = sorted(duration for one, duration in pairs if "abcde"[one] == row.name)
        assert row.count == len(mine)
        assert row.total_s * 1e9 == pytest.approx(sum(mine))
        assert row.mean_s * 1e9 == pytest.approx(statistics.fmean(mine))
        assert row.median_s * 1e9 == pytest.approx(statistics.median(mine))
        assert row.p95_s * 1e9 == pytest.approx(quantile_sorted(mine, 0.95))
        assert (row.min_s, row.max_s) == (mine[0] / 1e9, mine[-1] / 1e9)
        if len(mine) > 1:
            assert row.std_s is not None
            assert row.std_s * 1e9 == pytest.approx(statistics.stdev(mine), abs=1e-6)
        else:
            assert row.std_s is None
    reached = [sum(row.total_s for row in table.rows[:count]) * 1e9 for count in range(len(table.rows) + 1)]
    assert reached[table.covering] >= 0.8 * whole - 1e-6
    assert whole == 0 or reached[table.covering - 1] < 0.8 * whole
