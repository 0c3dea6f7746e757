"""Reasons of idle gaps and who is responsible, by hand."""

from __future__ import annotations

from trace_samples import NCCL_DATA, Sketch, read_public

from stepscope.analyze.step.idle import IdleReport, explain_idle


def reasons(found: IdleReport) -> dict[str, int]:
    return {name: value for name, value in found.by_reason_ns.items() if value}


def doers(found: IdleReport) -> dict[str, int]:
    return {one.operator: round(one.total_s * 1e9) for one in found.by_operator}


def test_the_host_launches_late() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 200)
    sketch.kernel("gemm", 20, 40, call=(10, 15))
    sketch.operator("aten::slow", 45, 130)
    sketch.kernel("gemm", 130, 200, call=(120, 126))
    found = explain_idle(sketch.build(), 1)
    assert reasons(found) == {"host_launch": 20 + 90}
    assert doers(found) == {"aten::slow": 90, "between operators in ProfilerStep#1": 20}
    longest = found.longest[0]
    assert (longest.reason, longest.operator, longest.call) == ("host_launch", "aten::slow", None)
    assert (longest.start_s, longest.duration_s, longest.next_name) == (40e-9, 90e-9, "gemm")


def test_the_host_waits() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 200)
    sketch.kernel("gemm", 20, 60, call=(10, 15))
    sketch.operator("aten::item", 20, 112)
    sketch.call("cudaStreamSynchronize", 25, 110)
    sketch.kernel("gemm", 130, 200, call=(120, 126))
    found = explain_idle(sketch.build(), 1)
    assert reasons(found) == {"host_launch": 20 + 20, "sync": 50}
    assert found.longest[0].reason == "sync"
    assert (found.longest[0].operator, found.longest[0].call) == ("aten::item", "cudaStreamSynchronize")
    assert found.longest[0].parts_s == {"host_launch": 20e-9, "sync": 50e-9}


def test_a_copy_that_does_not_let_the_host_go_on_is_a_wait() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 200)
    sketch.copy(20, 60, name="Memcpy DtoH (Device -> Pageable)", call=(10, 90))
    sketch.kernel("gemm", 130, 200, call=(120, 126))
    assert reasons(explain_idle(sketch.build(), 1)) == {"host_launch": 20 + 40, "sync": 30}


def test_an_autograd_thread_waits_with_the_main_one() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 200)
    sketch.kernel("gemm", 20, 60, call=(10, 15))
    sketch.call("cudaDeviceSynchronize", 30, 100)
    sketch.kernel("gemm", 130, 200, call=(120, 126), thread=2)
    assert reasons(explain_idle(sketch.build(), 1)) == {"host_launch": 20 + 30, "sync": 40}


def test_a_wait_of_a_thread_that_others_do_not_share() -> None:
    """A watchdog that sits in a blocking call all the time does not make the main thread's work wait."""
    sketch = Sketch()
    sketch.step(1, 0, 200)
    sketch.call("cudaEventSynchronize", 0, 200, thread=9)
    sketch.kernel("gemm", 20, 60, call=(10, 15))
    sketch.kernel("gemm", 130, 200, call=(120, 126))
    assert reasons(explain_idle(sketch.build(), 1)) == {"host_launch": 20 + 70}


def test_order_on_a_stream() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 200)
    sketch.kernel("gemm", 20, 100, call=(10, 15))
    sketch.kernel("gemm", 103, 200, call=(16, 20))
    assert reasons(explain_idle(sketch.build(), 1)) == {"host_launch": 20, "stream_order": 3}


def test_a_hand_over_does_not_take_that_long() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 200_000)
    sketch.kernel("gemm", 20, 100, call=(10, 15))
    sketch.kernel("gemm", 100_000, 200_000, call=(16, 20))
    assert reasons(explain_idle(sketch.build(), 1)) == {"host_launch": 20, "unknown": 99_900}


def test_work_of_one_graph_launch() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    sketch.call("cudaGraphLaunch", 5, 9, correlation=1)
    for start, stream in ((20, 7), (42, 8), (75, 7)):
        sketch.builder.add(2, "gemm", start, start + 20, device=0, stream=stream, correlation=1)
    assert reasons(explain_idle(sketch.build(), 1)) == {"host_launch": 20 + 5, "stream_order": 2 + 13}


def test_an_event_wait_recorded_and_inferred() -> None:
    for recorded in (True, False):
        sketch = Sketch()
        sketch.step(1, 0, 200)
        sketch.kernel("gemm", 20, 100, call=(10, 15))
        if recorded:
            sketch.sync("Stream Wait Event", 17, 17, stream=20)
        else:
            sketch.call("cudaStreamWaitEvent", 17, 18)
        sketch.communication(108, 200, call=(20, 25), stream=20)
        assert reasons(explain_idle(sketch.build(), 1)) == {"host_launch": 20, "event_wait": 8}


def test_without_a_wait_another_stream_explains_nothing() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 200)
    sketch.kernel("gemm", 20, 100, call=(10, 15))
    sketch.communication(108, 200, call=(20, 25), stream=20)
    assert reasons(explain_idle(sketch.build(), 1)) == {"host_launch": 20, "unknown": 8}


def test_work_without_a_launch_has_no_known_reason() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    sketch.kernel("gemm", 30, 100)
    assert reasons(explain_idle(sketch.build(), 1)) == {"unknown": 30}


def test_a_collective_on_the_host_holds_the_device_up() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 200)
    sketch.kernel("gemm", 20, 60, call=(10, 15))
    sketch.operator("gloo:all_reduce", 70, 110)
    sketch.kernel("gemm", 130, 200, call=(120, 126))
    found = explain_idle(sketch.build(), 1)
    assert reasons(found) == {"host_launch": 20 + 30, "collective_peer": 40}


def test_work_without_length_divides_a_gap() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 100)
    sketch.kernel("empty", 40, 40, call=(35, 36))
    sketch.kernel("gemm", 90, 100)
    found = explain_idle(sketch.build(), 1)
    assert found.gaps == 2
    assert reasons(found) == {"host_launch": 40, "unknown": 50}


def test_the_operator_that_covers_most_of_many() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 200)
    for name, start, end in (("aten::a", 5, 35), ("aten::b", 35, 75), ("aten::c", 80, 95)):
        sketch.operator(name, start, end)
    sketch.kernel("gemm", 100, 200, call=(95, 99))
    assert explain_idle(sketch.build(), 1).longest[0].operator == "aten::b"


def test_python_frames_are_named() -> None:
    sketch = Sketch()
    sketch.step(1, 0, 200)
    sketch.python("train.py(10): main", 0, 200)
    sketch.python("data.py(3): load", 5, 90)
    sketch.kernel("gemm", 100, 200, call=(95, 99))
    assert explain_idle(sketch.build(), 1).longest[0].operator == "data.py(3): load"


def test_no_device() -> None:
    sketch = Sketch()
    sketch.operator("aten::mm", 0, 10)
    found = explain_idle(sketch.build(), None)
    assert found.idle_ns == 0
    assert found.note is not None


def test_a_real_step() -> None:
    found = explain_idle(read_public(NCCL_DATA), 5)
    assert found.idle_ns == sum(found.by_reason_ns.values())
    assert found.by_operator[0].operator == "aten::cudnn_batch_norm"
    assert found.longest[0].operator == "aten::unflatten_dense_tensors"
    assert found.by_reason_ns["host_launch"] > 0.99 * found.idle_ns
