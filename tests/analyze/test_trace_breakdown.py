"""Shares of a step: by hand, against brute force, and exact sums for anything."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from trace_samples import Sketch, timelines

from stepscope.analyze.step.breakdown import SHARES, Breakdown, break_down, break_down_steps
from stepscope.analyze.step.idle import HOST_REASONS, OTHER_REASONS, REASONS, SYNC_REASONS, explain_idle
from stepscope.core.errors import UsageError
from stepscope.formats.timeline import DEVICE_ANNOTATION, Timeline


def shares(found: Breakdown) -> dict[str, int]:
    return {name: value for name, value in found.breakdown_ns.items() if value}


def test_a_step_by_hand() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    sketch.operator("aten::mm", 5, 25)
    sketch.kernel("gemm", 20, 40, call=(10, 15))  # idle 0–20: launched at 10 only
    sketch.communication(30, 60, call=(16, 20), stream=20)  # exposed 40–60
    sketch.copy(50, 70, call=(40, 45))  # exposed 60–70
    sketch.call("cudaDeviceSynchronize", 65, 80)  # idle 70–80 inside it
    found = break_down(sketch.build(), 1)
    assert shares(found) == {
        "compute": 20,
        "exposed_comm": 20,
        "exposed_copy": 10,
        "host_idle": 20 + 20,
        "sync_idle": 10,
    }
    assert found.step_s == 100e-9
    assert found.device_busy_s == 50e-9
    assert (found.kernels, found.copies) == (2, 1)
    assert (found.head_idle_s, found.between_idle_s, found.tail_idle_s) == (20e-9, 0, 30e-9)
    assert found.combinations_s == {
        "compute": 10e-9,
        "communication": 10e-9,
        "copy": 10e-9,
        "compute+communication": 10e-9,
        "communication+copy": 10e-9,
    }
    assert found.overlap.hidden_share == pytest.approx(1 / 3)
    assert found.overlap.exposed_from_all_s == 10e-9
    assert found.note is None
    assert found.profiled


def test_json_has_the_promised_names() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 50)
    sketch.kernel("gemm", 20, 40, call=(10, 15))
    content = msgspec.to_builtins(break_down(sketch.build(), 1))
    assert set(content["breakdown_s"]) == set(SHARES)
    assert {"step_s", "breakdown_s", "device_busy_s", "kernels", "copies", "window_start_ns", "overlap"} <= set(content)


def test_the_window_reaches_to_the_end_of_the_launched_work() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 50)
    sketch.step(2, 50, 90)
    sketch.kernel("gemm", 40, 70, call=(10, 15))
    sketch.kernel("gemm", 75, 85, call=(55, 60))
    first, second = break_down_steps(sketch.build())
    assert (first.step_s, first.host_s) == (70e-9, 50e-9)
    assert (first.window_start_ns, first.window_end_ns) == (0, 70)
    # While the device still runs the step before, the time is that step's.
    assert (second.window_start_ns, second.window_end_ns) == (70, 90)
    assert shares(second) == {"compute": 10, "host_idle": 5 + 5}
    assert (second.kernels, second.other_steps_s) == (1, 0.0)
    assert (second.step_s, second.launch_to_completion_s) == (20e-9, 40e-9)
    assert second.note is not None
    assert "40.00 ns (launch to completion), of which the device spends 20.00 ns on the steps before" in second.note


def test_work_of_a_later_step_on_another_stream_is_told_apart() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 50)
    sketch.step(2, 50, 90)
    sketch.kernel("gemm", 40, 50, call=(10, 15))
    sketch.kernel("gemm", 70, 80, call=(20, 25))
    sketch.kernel("copy", 55, 65, call=(51, 52), stream=8)
    first, second = break_down_steps(sketch.build())
    assert first.step_s == 80e-9
    assert first.other_steps_s == 10e-9
    assert first.note is not None
    assert "only work of other steps" in first.note
    assert second.step_s == 10e-9


def test_sync_rows_and_device_annotations_are_never_busy() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    sketch.kernel("gemm", 20, 30, call=(10, 15))
    sketch.sync("Context Sync", 30, 90)
    sketch.builder.add(DEVICE_ANNOTATION, "ProfilerStep#1", 10, 95, device=0, stream=7)
    found = break_down(sketch.build(), 1)
    assert found.device_busy_s == 10e-9
    # No call stands for that wait, so the sync row itself is the evidence of it.
    assert shares(found) == {"compute": 10, "host_idle": 20 + 10, "sync_idle": 60}


def test_several_devices() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    sketch.kernel("gemm", 20, 30, call=(10, 15), device=0)
    sketch.kernel("gemm", 20, 60, call=(16, 18), device=1)
    found = break_down(sketch.build(), 1)
    assert found.device == "1"
    assert [one.device for one in found.devices] == ["0", "1"]
    assert found.note is not None
    assert "busy longest" in found.note
    for one in found.devices:
        assert sum(one.breakdown_ns.values()) == 100


def test_communication_by_process_group() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    sketch.kernel("gemm", 10, 40, call=(1, 2))
    sketch.communication(20, 50, call=(3, 4), stream=20, group="dp", group_description="data parallel")
    sketch.communication(60, 70, call=(5, 6), stream=21, group="tp")
    groups = {one.group: one for one in break_down(sketch.build(), 1).overlap.groups}
    assert groups["dp"].hidden_share == pytest.approx(2 / 3)
    assert groups["dp"].description == "data parallel"
    assert groups["tp"].exposed_s == 10e-9


def test_a_trace_without_devices() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    sketch.operator("aten::mm", 10, 30)
    sketch.operator("autograd::engine::evaluate_function: AddBackward0", 20, 60, thread=2)
    sketch.operator("c10d::allreduce_", 40, 50, thread=2)
    sketch.operator("gloo:all_reduce", 45, 80, thread=3)
    found = break_down(sketch.build(), 1)
    assert found.device == "cpu"
    # Thread 2 computes 20–40 and 50–60; 40–50 it is inside the collective, which no other thread hides.
    assert shares(found) == {"compute": 40, "exposed_comm": 30, "other_idle": 30}
    assert found.overlap.communication_s == 40e-9
    assert found.note is not None
    assert "no device rows" in found.note


def test_a_step_that_is_not_there() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 10)
    with pytest.raises(UsageError, match="no step 7"):
        break_down(sketch.build(), 7)


def test_the_whole_trace() -> None:
    sketch = Sketch()
    sketch.operator("aten::mm", 0, 10)
    sketch.kernel("gemm", 20, 40, call=(5, 8))
    found = break_down(sketch.build(), None)
    assert found.step is None
    assert shares(found) == {"compute": 20, "host_idle": 20}


def brute_force(timeline: Timeline, found: Breakdown) -> dict[str, int]:
    """Compute, exposed communication and exposed copy counted nanosecond by nanosecond."""
    from stepscope.formats.classify import COMMUNICATION
    from stepscope.formats.timeline import COPY, KERNEL, SET

    core = timeline.core
    counts = dict.fromkeys(("compute", "exposed_comm", "exposed_copy"), 0)
    rows = [row for row in range(len(timeline)) if core["kind"][row] in (KERNEL, COPY, SET)]
    rows = [row for row in rows if str(core["device"][row]) == found.device]
    for time in range(found.window_start_ns, found.window_end_ns):
        on = [row for row in rows if core["start_ns"][row] <= time < core["end_ns"][row]]
        kinds = {
            "copy" if core["kind"][row] != KERNEL else "comm" if core["category"][row] == COMMUNICATION else "compute"
            for row in on
        }
        if "compute" in kinds:
            counts["compute"] += 1
        elif "comm" in kinds:
            counts["exposed_comm"] += 1
        elif "copy" in kinds:
            counts["exposed_copy"] += 1
    return counts


@settings(max_examples=100)
@given(timelines())
def test_shares_are_exact_for_anything(timeline: Timeline) -> None:
    for step in [None, *(span.number for span in timeline.steps)]:
        found = break_down(timeline, step)
        window = found.window_end_ns - found.window_start_ns
        assert sum(found.breakdown_ns.values()) == window
        assert min(found.breakdown_ns.values()) >= 0
        for one in found.devices:
            assert sum(one.breakdown_ns.values()) == window
        idle = found.head_idle_s + found.between_idle_s + found.tail_idle_s
        assert round(idle * 1e9) == sum(found.breakdown_ns[name] for name in SHARES[3:])
        if found.device == "cpu":
            continue
        assert brute_force(timeline, found).items() <= found.breakdown_ns.items()
        report = explain_idle(timeline, step)
        assert report.device == found.device
        assert sum(report.by_reason_ns.values()) == report.idle_ns == sum(found.breakdown_ns[n] for n in SHARES[3:])
        assert round(sum(one.total_s for one in report.by_operator) * 1e9) == report.idle_ns
        for share, reasons in (
            ("host_idle", HOST_REASONS),
            ("sync_idle", SYNC_REASONS),
            ("other_idle", OTHER_REASONS),
        ):
            assert found.breakdown_ns[share] == sum(report.by_reason_ns[REASONS[reason]] for reason in reasons)
