"""Delays measured in a trace are those of launches and streams, not of what another stream made them wait for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analyze.critical.draft import (
    LOW,
    MOST_USUAL_NS,
    USUAL,
    least,
    usual,
)
from stepscope.analyze.critical.model import build_graph, build_graph_of_ranks
from stepscope.analyze.critical.path import critical_path
from stepscope.analyze.critical.rows import device_queues
from stepscope.analyze.critical.what_if import find_limits, what_if
from stepscope.analyze.step.view import view
from stepscope.core.errors import UsageError
from stepscope.formats.timeline import ANNOTATION, COPY, KERNEL, RUNTIME, Timeline, TimelineBuilder
from stepscope.traces.finish import finish

US = 1_000
GEMM, REDUCE = "ampere_sgemm_128", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
GEMM_US, REDUCE_US, EVENT_US, LAUNCH_US, PAIRS = 500, 100, 3, 18, 3


class Writer:
    """Calls of one thread and the work they launch, in µs."""

    def __init__(self) -> None:
        self.builder = TimelineBuilder()
        self.correlation = 0

    def call(self, name: str, start: int, end: int) -> int:
        self.correlation += 1
        self.builder.add(RUNTIME, name, start * US, end * US, thread=(1, 1), correlation=self.correlation)
        return self.correlation

    def launch(
        self, call: str, called: int, name: str, start: int, length: int, *, stream: int, kind: int = KERNEL
    ) -> int:
        """Returns when the work ends."""
        number = self.call(call, called, called + 4)
        self.builder.add(kind, name, start * US, (start + length) * US, device=0, stream=stream, correlation=number)
        return start + length

    def step(self, number: int, start: int, end: int) -> None:
        self.builder.add(ANNOTATION, f"ProfilerStep#{number}", start * US, end * US, thread=(1, 1))

    def build(self, rank: int = 0) -> Timeline:
        return finish(self.builder.build(rank=rank))


def in_series(*, copy_us: int = 0) -> Timeline:
    """Steps of gemm, all-reduce, gemm, all-reduce …: each waits for the one before by an event of the other stream.

    NCCL is the only one to use its launch call, and every one of its launches has to wait. With `copy_us` the stream is
    busy at first, so that the host is ahead of the device.
    """
    trace = Writer()
    for number in range(4):
        begin = 1_000 + 4_000 * number
        free, host = begin + 12 + LAUNCH_US, begin + 12
        if copy_us:
            free = (
                trace.launch(
                    "cudaMemcpyAsync", host, "Memcpy HtoD (Pinned -> Device)", free, copy_us, stream=7, kind=COPY
                )
                + 1
            )
            host += 10
        for _ in range(PAIRS):
            free = EVENT_US + trace.launch("cudaLaunchKernel", host, GEMM, free, GEMM_US, stream=7)
            trace.call("cudaEventRecord", host + 20, host + 21)
            trace.call("cudaStreamWaitEvent", host + 22, host + 23)
            free = EVENT_US + trace.launch("cudaLaunchKernelExC", host + 27, REDUCE, free, REDUCE_US, stream=20)
            trace.call("cudaEventRecord", host + 48, host + 49)
            trace.call("cudaStreamWaitEvent", host + 50, host + 51)
            host += 55
        trace.call("cudaDeviceSynchronize", host, free - EVENT_US + 6)
        trace.step(number, begin, begin + 3_000)
    return trace.build()


@pytest.mark.parametrize("copy_us", [0, 400])
def test_work_behind_an_event_is_no_measure_of_a_launch(copy_us: int) -> None:
    graph = build_graph(in_series(copy_us=copy_us), 2)
    (constants,) = graph.constants
    assert set(constants.launch_ns.values()) == {LAUNCH_US * US}
    assert "cudaLaunchKernelExC" not in constants.launch_ns
    assert constants.launch_other_ns == LAUNCH_US * US
    assert constants.stream_ns == US
    assert constants.event_usual_ns == EVENT_US * US
    path = critical_path(in_series(copy_us=copy_us), 2)
    assert path.by_kind_s["compute"] == PAIRS * GEMM_US / 1e6
    assert path.by_kind_s["communication"] == PAIRS * REDUCE_US / 1e6
    assert path.by_kind_s["stream"] * 1e6 == pytest.approx((2 * PAIRS - 1) * EVENT_US + bool(copy_us))
    assert path.by_kind_s["unexplained"] == 0
    assert what_if(graph, "communication=0").saved_s == PAIRS * REDUCE_US / 1e6
    # Without a copy in front, the first all-reduce is launched 27 µs after the first gemm, and can begin no earlier.
    late_us = 0 if copy_us else 27 - EVENT_US
    assert what_if(graph, "compute=0").saved_s == (PAIRS * GEMM_US - late_us) / 1e6
    limits = {limit.name: limit for limit in find_limits(graph)}
    assert limits["no communication"].saved_s == PAIRS * REDUCE_US / 1e6


def test_calls_that_do_the_same_take_about_the_same() -> None:
    """The all-reduce waits, but nothing in the trace says so."""
    trace = Writer()
    for number in range(20):
        begin = 1_000 * number
        trace.launch("cudaLaunchKernel", begin, GEMM, begin + 8, 300, stream=7)
        trace.launch("cudaLaunchKernelExC", begin + 10, REDUCE, begin + 310, 100, stream=20)
        trace.launch(
            "cudaMemcpyAsync", begin + 500, "Memcpy DtoH (Device -> Pinned)", begin + 530, 10, stream=7, kind=COPY
        )
    (constants,) = build_graph(trace.build()).constants
    assert constants.launch_ns == {
        "cudaLaunchKernel": 8 * US,
        "cudaLaunchKernelExC": 16 * US,
        "cudaMemcpyAsync": 30 * US,
    }


def lone_rank(rank: int) -> Timeline:
    trace = Writer()
    trace.launch("cudaLaunchKernel", 0, GEMM, 10, 100 * (rank + 1), stream=7)
    trace.call("cudaDeviceSynchronize", 6, 12 + 100 * (rank + 1))
    return trace.build(rank)


def test_a_rank_is_named_by_its_number_though_others_are_missing() -> None:
    graph = build_graph_of_ranks([lone_rank(rank) for rank in (0, 2, 3)], [])
    assert what_if(graph, "compute@3=0.5").saved_s == 100 / 1e6  # then rank 2 is the last to end
    assert what_if(graph, "compute@2=0.5").saved_s == 0
    with pytest.raises(UsageError, match="there is no rank 1") as refused:
        what_if(graph, "compute@1=0.5")
    assert refused.value.hint == "this path has the ranks 0, 2, 3"


def test_seconds_are_the_nearest_to_what_people_write() -> None:
    trace = Writer()
    trace.step(0, 1_000, 1_900)
    trace.launch("cudaLaunchKernel", 1_000, GEMM, 1_010, 700, stream=7)
    path = critical_path(trace.build(), 0)
    assert path.length_s == 0.0009
    assert path.by_kind_s["gap"] == 0.000896
    assert path.by_rank_s == [0.0009]


@given(st.lists(st.integers(-1_000, 100_000), min_size=1, max_size=400))
def test_least_and_usual_are_quantiles(delays: list[int]) -> None:
    low = np.quantile(delays, LOW, method="lower")
    assert least(np.array(delays)) == low
    assert usual(np.array(delays)) == min(np.quantile(delays, USUAL, method="higher") - low, MOST_USUAL_NS)


@given(st.lists(st.tuples(st.integers(-1, 2), st.sampled_from((-1, 0, 7, 20, 1 << 40))), max_size=20))
def test_queues_are_the_pairs_of_device_and_stream_in_order(pairs: list[tuple[int, int]]) -> None:
    builder = TimelineBuilder()
    for number, (device, stream) in enumerate(pairs):
        builder.add(KERNEL, GEMM, number * US, (number + 1) * US, device=device, stream=stream)
    queues = device_queues(view(finish(builder.build())))
    assert queues.names == sorted(set(pairs))
    assert [queues.names[queue] for queue in queues.queue] == [pairs[row] for row in queues.rows]
