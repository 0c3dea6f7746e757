"""Small programs recorded on an NVIDIA H200 (torch 2.11): streams, synchronisation, graphs, stacks, NCCL."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stepscope.analyze.answers.compose import answer
from stepscope.analyze.critical.path import critical_path
from stepscope.analyze.job.report import JobReport, explain_job
from stepscope.bench.ops.from_trace import find_trace_files, read_traced_calls
from stepscope.formats.execution_trace import read_execution_trace
from stepscope.formats.timeline import KERNEL, SYNC
from stepscope.traces import read_timeline, read_traces
from stepscope.traces.link import link

DATA = Path(__file__).parents[1] / "traces" / "data" / "h200_small"
NAMES = ("streams", "sync", "graph", "stacks", "compiled", "ddp")


def explain(name: str) -> JobReport:
    return explain_job(read_traces(DATA / name, cache=False))


@pytest.mark.parametrize("name", NAMES)
def test_every_event_is_joined_and_every_step_adds_up(name: str) -> None:
    timeline = read_timeline(DATA / f"{name}.json.gz")
    joined = link(read_execution_trace(DATA / f"{name}.et.json.gz"), timeline)
    assert joined.linked_share == 1.0
    job = explain(f"{name}.json.gz")
    assert job.devices == ["NVIDIA H200"]
    (rank,) = job.ranks
    assert math.fsum(msgspec.to_builtins(rank.breakdown_s).values()) == pytest.approx(rank.step_s, abs=1e-12)
    assert critical_path(timeline, job.step).length_s == pytest.approx(rank.step_s, abs=2e-9)


def test_a_graph_is_one_launch_for_all_its_kernels() -> None:
    job = explain("graph.json.gz")
    assert job.detail.launches is not None
    assert (job.detail.launches.calls, job.ranks[0].kernels, job.ranks[0].copies) == (1, 28, 3)
    assert job.ranks[0].breakdown_s.compute > 0.8 * job.ranks[0].step_s


def test_synchronisation_rows_are_read() -> None:
    timeline = read_timeline(DATA / "sync.json.gz")
    assert np.count_nonzero(timeline.column("kind") == SYNC) > 0
    streams = timeline.column("stream")[timeline.column("kind") == KERNEL]
    assert len(np.unique(streams)) == 2


def test_stacks_and_memory() -> None:
    detail = explain("stacks.json.gz").detail
    assert {"nn.Module: Linear_0", "nn.Module: LayerNorm_0"} <= {row.name for row in detail.kernels.by_module.rows}
    assert detail.memory is not None
    peaks = {one.device: one.peak_bytes for one in detail.memory.devices}
    assert peaks["0"] > 256 * 1024 * 4


def test_nccl_rows_have_sizes_and_groups() -> None:
    job = explain("ddp.json.gz")
    assert job.across is not None
    table = {(row.collective, row.size_bytes) for row in job.across.table}
    assert ("all_reduce", 4 << 20) in table
    assert ("broadcast", 4 << 20) in table


def test_a_flight_recorder_dump_is_communication() -> None:
    """Written by NCCL 2.28; ends of work are those that a watchdog noticed."""
    job = explain("nccl_trace_rank_0")
    (rank,) = job.ranks
    assert rank.breakdown_s.exposed_comm == pytest.approx(rank.step_s)
    assert answer(job).bound_by == "communication"
    assert job.across is not None
    assert {row.collective for row in job.across.table} == {"all_reduce", "broadcast", "all_gather"}


def test_a_recording_is_read_as_a_folder() -> None:
    found = read_traces(DATA / "recording", cache=False)
    assert [path.parent.name for path in found.paths] == ["kineto"]
    assert len(found.timeline()) > 1000


def test_a_recording_knows_the_step_without_profiler() -> None:
    job = explain("recording")
    assert job.unprofiled_step_s == pytest.approx(4.149e-3, rel=1e-3)
    found = answer(job, limits=job.limits)
    assert found.sentence.startswith("Without the profiler a step takes 4.149 ms. Profiled step 10 takes 21.96 ms: ")
    assert found.caution is not None
    assert "17.81 ms of the launch-bound idle time above is the profiler's" in found.caution
    assert "of the 4.149 ms that a step takes without the profiler: at most 6.57× faster" in found.try_first.because
    assert explain("streams.json.gz").unprofiled_step_s is None


def test_numbers_that_a_kernel_reads_on_the_host_stay_there() -> None:
    """With its seed on the device, this kernel ends the process."""
    files = find_trace_files(DATA / "recording")
    calls = {call.operator: call for call in read_traced_calls(files, device="cuda").calls}
    attention = calls["aten::_efficient_attention_backward"]
    assert attention.shape is not None
    arguments = msgspec.json.decode(str(attention.shape["args"]))
    assert [one["host"] for one in arguments if isinstance(one, dict) and one["dtype"] == "int64"] == [True, True]
    alone = {call.operator: call for call in read_traced_calls(files._replace(graph=None), device="cuda").calls}
    assert "where its input philox_seed was" in str(alone["aten::_efficient_attention_backward"].skip)
