"""Each kind of dependency on a timeline small enough to check by hand. Times are µs unless a name says otherwise."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from stepscope.analyze.critical.draft import Constants
from stepscope.analyze.critical.kinds import GRAPH_EDGE_KINDS
from stepscope.analyze.critical.model import build_graph
from stepscope.analyze.critical.path import critical_path
from stepscope.analyze.critical.schedule import StepGraph, retime
from stepscope.analyze.critical.what_if import find_limits, what_if
from stepscope.core.errors import UsageError
from stepscope.formats.classify import (
    ALLOCATION,
    BLOCKING_COPY,
    DEVICE_SYNC,
    EVENT_RECORD,
    EVENT_SYNC,
    PLAIN,
    STREAM_SYNC,
    STREAM_WAIT,
    classify_call,
)
from stepscope.formats.timeline import ANNOTATION, COPY, KERNEL, OPERATOR, RUNTIME, SYNC, Timeline, TimelineBuilder
from stepscope.traces.finish import finish

US = 1_000
FIXED = Constants(launch_other_ns=5 * US, stream_ns=1 * US, sync_ns=2 * US)


class Trace:
    """Writes a timeline in µs."""

    def __init__(self) -> None:
        self.builder = TimelineBuilder()

    def host(self, kind: int, name: str, start: float, end: float, *, thread: int = 1, **values: Any) -> int:
        return self.builder.add(kind, name, int(start * US), int(end * US), thread=(0, thread), **values)

    def op(self, name: str, start: float, end: float, **values: Any) -> int:
        return self.host(OPERATOR, name, start, end, **values)

    def call(self, name: str, start: float, end: float, **values: Any) -> int:
        return self.host(RUNTIME, name, start, end, **values)

    def work(self, name: str, start: float, end: float, *, stream: int = 20, kind: int = KERNEL, **values: Any) -> int:
        values.setdefault("device", 0)
        return self.builder.add(kind, name, int(start * US), int(end * US), stream=stream, **values)

    def launch(self, number: int, called: float, start: float, end: float, **values: Any) -> int:
        """A launch call of 3 µs and its kernel."""
        self.call("cudaLaunchKernel", called, called + 3, correlation=number)
        return self.work(values.pop("name", f"kernel_{number}"), start, end, correlation=number, **values)

    def build(self) -> Timeline:
        return finish(self.builder.build())


def edges(graph: StepGraph, kind: str) -> set[tuple[int, int]]:
    """(row, row) of all edges of a kind."""
    mine = graph.edges.kind == GRAPH_EDGE_KINDS.index(kind)
    source, target = graph.node_row[graph.edges.source[mine]], graph.node_row[graph.edges.target[mine]]
    return set(zip(source.tolist(), target.tolist(), strict=True))


def after_us(timeline: Timeline, edit: str, **options: Any) -> float:
    return what_if(build_graph(timeline, **options), edit).after_s * 1e6


def test_time_between_operators_is_work_of_the_host() -> None:
    trace = Trace()
    trace.op("aten::a", 0, 10)
    trace.op("aten::b", 40, 50)
    path = critical_path(trace.build())
    assert path.by_kind_s["gap"] == pytest.approx(30e-6)
    assert path.by_kind_s["operator"] == pytest.approx(20e-6)
    assert path.notes == ["no device work in this window: the path is that of the host"]
    assert after_us(trace.build(), "gaps=0") == pytest.approx(20)
    assert after_us(trace.build(), "operators:aten::b=3") == pytest.approx(70)


def test_a_kernel_waits_for_its_launch_and_for_its_stream() -> None:
    trace = Trace()
    first = trace.launch(1, 0, 5, 100)
    second = trace.launch(2, 10, 101, 150)
    graph = build_graph(trace.build(), constants=FIXED)
    assert (first, second) in edges(graph, "stream")
    assert len(edges(graph, "launch")) == 2
    path = critical_path(trace.build(), constants=FIXED)
    assert path.by_kind_s["compute"] == pytest.approx(144e-6)
    assert path.by_kind_s["launch"] == pytest.approx(5e-6)
    assert path.by_kind_s["stream"] == pytest.approx(1e-6)
    # With kernel_1 free the launch of kernel_2 decides.
    assert after_us(trace.build(), "kernels:kernel_1=0", constants=FIXED) == pytest.approx(10 + 5 + 49)


def test_work_that_overlaps_on_a_stream_follows_the_start_in_front() -> None:
    trace = Trace()
    trace.launch(1, 0, 5, 105)
    trace.launch(2, 4, 85, 135)
    timeline = trace.build()
    assert after_us(timeline, "kernels:kernel_1=2", constants=FIXED) == pytest.approx(5 + 160 + 50)
    assert after_us(timeline, "kernels:kernel_2=0", constants=FIXED) == pytest.approx(105)


def test_a_blocking_call_costs_what_the_device_makes_it_cost() -> None:
    trace = Trace()
    trace.launch(1, 0, 5, 200)
    trace.call("cudaDeviceSynchronize", 10, 202, correlation=2)
    trace.op("aten::after", 210, 220)
    timeline = trace.build()
    assert after_us(timeline, "kernels=0.5", constants=FIXED) == pytest.approx(220 - 97.5)
    assert after_us(timeline, "blocking=0", constants=FIXED) == pytest.approx(200)  # the kernel itself remains


def test_streams_and_events_of_recorded_waits_are_used() -> None:
    trace = Trace()
    a = trace.launch(1, 0, 5, 100, stream=20)
    trace.call("cudaEventRecord", 4, 5, correlation=2)
    trace.call("cudaStreamWaitEvent", 6, 7, correlation=3)
    kind = "Stream Wait Event"
    trace.builder.add(
        SYNC, kind, 6, 7, device=0, stream=21, correlation=3, sync_kind=kind, wait_stream=20, wait_correlation=2
    )
    trace.launch(4, 8, 101, 160, stream=20)
    b = trace.launch(5, 12, 100, 130, stream=21)
    graph = build_graph(trace.build(), constants=FIXED)
    assert edges(graph, "event") == {(a, b)}
    assert not graph.edges.inferred.any()


def test_events_are_inferred_from_the_order_of_calls() -> None:
    trace = Trace()
    a = trace.launch(1, 0, 5, 100, stream=20)
    trace.call("cudaEventRecord", 4, 5)
    trace.call("cudaStreamWaitEvent", 6, 7)
    b = trace.launch(2, 8, 100, 130, stream=21)
    graph = build_graph(trace.build(), constants=FIXED)
    assert edges(graph, "event") == {(a, b)}
    assert graph.edges.inferred[graph.edges.kind == GRAPH_EDGE_KINDS.index("event")].all()
    assert after_us(trace.build(), "kernels:kernel_1=0", constants=FIXED) == pytest.approx(8 + 5 + 30)


def test_a_start_right_after_an_end_on_another_stream_is_evidence_of_a_wait() -> None:
    trace = Trace()
    a = trace.launch(1, 0, 5, 500, stream=20)
    b = trace.launch(2, 8, 501, 530, stream=21)
    graph = build_graph(trace.build(), constants=FIXED)
    assert edges(graph, "event") == {(a, b)}


def test_among_many_ends_one_is_close_by_chance() -> None:
    trace = Trace()
    for number in range(40):
        trace.launch(number, 4 * number, 5 + 12 * number, 16 + 12 * number, stream=20)
    trace.launch(99, 165, 410, 420, stream=21)
    assert edges(build_graph(trace.build(), constants=FIXED), "event") == set()


def test_the_default_stream_orders_blocking_streams() -> None:
    """Work on stream 20 and the default stream take turns, though launched together."""
    trace = Trace()
    rows = [trace.launch(i, 4 * i, 5 + 100 * i, 104 + 100 * i, stream=(7, 20)[i % 2]) for i in range(6)]
    graph = build_graph(trace.build(), constants=FIXED)
    assert set(pairwise(rows)) <= edges(graph, "event")
    assert after_us(trace.build(), "stream:20=0", constants=FIXED) == pytest.approx(5 + 3 * 99 + 5)


def test_streams_that_overlap_the_default_stream_do_not_block() -> None:
    trace = Trace()
    for number in range(6):
        trace.launch(number, 4 * number, 9 + 60 * number, 107 + 60 * number, stream=(7, 20)[number % 2])
    assert edges(build_graph(trace.build(), constants=FIXED), "event") == set()


def test_one_launch_of_a_graph_starts_many_kernels() -> None:
    trace = Trace()
    trace.call("cudaGraphLaunch", 0, 8, correlation=1)
    for number in range(4):
        trace.work(f"kernel_{number}", 10 + 20 * number, 29 + 20 * number, correlation=1)
    graph = build_graph(trace.build(), constants=FIXED)
    assert len(edges(graph, "launch")) == 1
    assert len(edges(graph, "graph")) == 3
    assert len(edges(graph, "stream")) == 3
    assert after_us(trace.build(), "kernels=0", constants=FIXED) == pytest.approx(10 + 3)


def test_a_number_copied_back_holds_up_the_operator_that_wants_it() -> None:
    trace = Trace()
    trace.launch(1, 0, 5, 300)
    operator = trace.op("aten::_local_scalar_dense", 10, 320)
    trace.call("cudaMemcpyAsync", 12, 15, correlation=2)
    copy = trace.work("Memcpy DtoH (Device -> Pinned)", 301, 310, kind=COPY, correlation=2)
    assert edges(build_graph(trace.build(), constants=FIXED), "sync") == {(copy, operator)}


def test_a_copy_from_pageable_memory_holds_up_its_call() -> None:
    trace = Trace()
    trace.launch(1, 0, 5, 200)
    trace.call("cudaMemcpyAsync", 10, 301, correlation=2)
    trace.work("Memcpy HtoD (Pageable -> Device)", 201, 320, kind=COPY, correlation=2)
    trace.op("aten::after", 302, 400)
    timeline = trace.build()
    assert after_us(timeline, "kernels=0.5", constants=FIXED) == pytest.approx(400 - 97.5)
    assert after_us(timeline, "copies=0", constants=FIXED) == pytest.approx(400 - 100)


def test_freeing_memory_waits_where_the_times_say_so() -> None:
    trace = Trace()
    kernel = trace.launch(1, 0, 5, 200)
    waits = trace.call("cudaFree", 10, 210)
    trace.launch(2, 220, 225, 300)
    trace.call("cudaFree", 230, 600)  # goes on long after: not because of the kernel
    assert edges(build_graph(trace.build(), constants=FIXED), "sync") == {(kernel, waits)}


def backward_trace() -> Timeline:
    """Main thread: forward, 20 µs of Python, backward on thread 2 from 130 to 330, optimizer from 350."""
    trace = Trace()
    trace.op("aten::mm", 0, 100, sequence=5, forward_thread=0)
    name = "autograd::engine::evaluate_function: MmBackward0"
    trace.op(name, 130, 230, thread=2, sequence=5, forward_thread=1)
    trace.op("autograd::engine::evaluate_function: Other", 234, 330, thread=2)
    trace.op("aten::add_", 350, 400, sequence=6, forward_thread=0)
    return trace.build()


def test_a_backward_pass_is_handed_over_and_back() -> None:
    path = critical_path(backward_trace())
    assert path.by_kind_s["handover"] == pytest.approx(50e-6)
    assert path.by_kind_s["operator"] == pytest.approx((100 + 100 + 96 + 50) * 1e-6)
    assert path.checks.inferred == {"thread": 2}
    assert after_us(backward_trace(), "operators:evaluate=0") == pytest.approx(400 - 196)


def test_a_thread_that_only_watches_is_not_the_path() -> None:
    trace = Trace()
    trace.op("aten::a", 0, 400)
    for time in range(5, 405, 100):
        trace.call("cudaEventQuery", time, time + 2, thread=9)
    trace.call("cudaEventQuery", 405, 407, thread=9)
    path = critical_path(trace.build())
    assert path.by_kind_s["operator"] == pytest.approx(400e-6)
    assert path.by_kind_s["handover"] == pytest.approx(5e-6)


def two_steps() -> Timeline:
    """Two steps of 100 µs on the host; the device is late by half a step."""
    trace = Trace()
    for step in range(2):
        begin = 100 * step
        trace.host(ANNOTATION, f"ProfilerStep#{step}", begin, begin + 100)
        for number in range(2):
            place = 2 * step + number
            trace.launch(place, begin + 10 * number, 5 + 90 * place, 94 + 90 * place)
    return trace.build()


def test_a_step_begins_when_the_device_has_done_the_one_before() -> None:
    timeline = two_steps()
    path = critical_path(timeline, 1, constants=FIXED)
    assert path.length_s == pytest.approx((94 + 270 - 184) * 1e-6)
    assert path.by_kind_s["compute"] == pytest.approx((89 + 89) * 1e-6)
    graph = build_graph(timeline, 1, constants=FIXED)
    limits = {limit.name: limit.step_s for limit in find_limits(graph)}
    assert limits["host-bound"] == pytest.approx(100e-6)  # its launches lie before the window, and take their time
    assert limits["device-bound"] == pytest.approx(180e-6)
    assert critical_path(timeline, 0, constants=FIXED).length_s == pytest.approx(184e-6)
    with pytest.raises(UsageError, match="no step 7") as caught:
        critical_path(timeline, 7)
    assert caught.value.hint == "steps it has: 0, 1"


def test_work_without_a_launch_is_counted_and_kept() -> None:
    trace = Trace()
    trace.op("aten::a", 0, 10)
    trace.work("orphan", 30, 60, correlation=77)
    trace.work("orphan", 61, 80, correlation=78)
    path = critical_path(trace.build(), constants=FIXED)
    assert path.checks.without_launch == 2
    assert path.checks.loose == 1
    assert path.by_kind_s["unexplained"] == pytest.approx(30e-6)
    assert "2 of 2 device events have no launching call in the trace" in path.notes
    assert any("37.5 % of the path is unexplained" in note for note in path.notes)


def test_events_at_one_time_make_no_cycle() -> None:
    """Whole microseconds: a launch, its kernel of no length and the call that waits for it all at 5."""
    trace = Trace()
    for number in range(4):
        trace.call("cudaLaunchKernel", 5, 5, correlation=number)
        trace.work("kernel", 5, 5, correlation=number)
        trace.call("cudaStreamSynchronize", 5, 5)
    trace.op("aten::a", 5, 6)
    graph = build_graph(trace.build(), constants=FIXED)
    assert (retime(graph).time == graph.node_time).all()
    assert graph.counts["cycles_cut"] == 0


def test_host_events_that_cross_keep_the_order_of_time() -> None:
    trace = Trace()
    trace.op("aten::a", 0, 10)
    trace.op("aten::b", 5, 15)
    trace.op("aten::c", 12, 30)
    graph = build_graph(trace.build())
    assert (retime(graph).time == graph.node_time).all()
    assert graph.length_ns == 30 * US


def test_a_kernel_that_starts_before_its_launch_is_a_clock_that_differs() -> None:
    trace = Trace()
    trace.launch(1, 10, 9, 50)  # by 1 µs: the edge stays
    trace.launch(2, 60, 51, 90, stream=21)  # by 9 µs: the edge goes
    path = critical_path(trace.build(), constants=FIXED)
    assert path.checks.contradicted == {"launch": 1}
    assert path.checks.failures == []


def test_several_devices_have_streams_of_their_own() -> None:
    trace = Trace()
    a = trace.launch(1, 0, 5, 100, device=0)
    b = trace.launch(2, 4, 9, 80, device=1)
    graph = build_graph(trace.build(), constants=FIXED)
    assert edges(graph, "stream") == set()
    assert {row for _, row in edges(graph, "work")} == {a, b}


@pytest.mark.parametrize("empty", [True, False])
def test_an_empty_trace_has_an_empty_path(empty: bool) -> None:
    trace = Trace()
    if not empty:
        trace.op("aten::a", 3, 3)
    path = critical_path(trace.build())
    assert path.length_s == 0
    assert path.segments == []
    assert path.checks.failures == []


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("cudaDeviceSynchronize", DEVICE_SYNC),
        ("hipDeviceSynchronize", DEVICE_SYNC),
        ("cuCtxSynchronize", DEVICE_SYNC),
        ("aclrtSynchronizeDevice", DEVICE_SYNC),
        ("cudaStreamSynchronize", STREAM_SYNC),
        ("hipStreamSynchronize", STREAM_SYNC),
        ("aclrtSynchronizeStream", STREAM_SYNC),
        ("zeCommandQueueSynchronize", STREAM_SYNC),
        ("urQueueFinish", STREAM_SYNC),
        ("cudaEventSynchronize", EVENT_SYNC),
        ("zeEventHostSynchronize", EVENT_SYNC),
        ("cudaEventRecordWithFlags", EVENT_RECORD),
        ("hipEventRecord", EVENT_RECORD),
        ("cudaStreamWaitEvent", STREAM_WAIT),
        ("cuStreamWaitEvent", STREAM_WAIT),
        ("cudaMemcpy", BLOCKING_COPY),
        ("cuMemcpyDtoH_v2", BLOCKING_COPY),
        ("hipMemcpyWithStream", BLOCKING_COPY),
        ("cudaMemcpyAsync", PLAIN),
        ("cudaMallocAsync", PLAIN),
        ("cudaMalloc", ALLOCATION),
        ("cudaFreeHost", ALLOCATION),
        ("cudaLaunchKernel", PLAIN),
        ("cudaEventQuery", PLAIN),
    ],
)
def test_calls_are_told_apart_by_name(name: str, role: int) -> None:
    assert classify_call(name) == role
