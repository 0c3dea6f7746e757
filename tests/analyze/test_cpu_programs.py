"""What is said about programs that run on the CPU, on recordings of small ones: see data/cpu_programs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trace_samples import Sketch

from stepscope.analyze.answers.compose import Answer, answer
from stepscope.analyze.job import JobReport, explain_job
from stepscope.analyze.step.breakdown import break_down
from stepscope.analyze.step.report import explain_step
from stepscope.formats.classify import does_no_work, is_device_wait, is_launch_name
from stepscope.formats.timeline import Timeline
from stepscope.report.trace_text import format_job
from stepscope.traces.read import read_timeline, read_traces
from trace_jobs import report_job

DATA = Path(__file__).parent / "data" / "cpu_programs"


def explain(path: Path, **changes: Any) -> tuple[JobReport, Answer]:
    job = msgspec.structs.replace(explain_job(read_traces(path, cache=False)), **changes)
    return job, answer(job, limits=job.limits)


@pytest.mark.parametrize(
    ("name", "bound_by", "share", "action", "because"),
    [
        ("loader", "data_loading", 0.98, "more DataLoader workers", "_SingleProcessDataLoaderIter.__next__"),
        ("loader_stacks", "data_loading", 0.974, "more DataLoader workers", "sleep> takes 36.07 ms of it, called by"),
        ("sleep_stacks", "sleeping", 0.74, "the sleep in pure.py(6): rest", "<built-in function sleep>"),
        ("python_stacks", "python", 0.762, "make pure2.py(4): tokenise faster", "takes 107.6 ms of it"),
        ("sleep", None, 0.985, "record the step again with stacks", "outside recorded calls"),
    ],
)
def test_what_a_program_does_beside_operators(
    name: str, bound_by: str | None, share: float, action: str, because: str
) -> None:
    job, found = explain(DATA / f"{name}.json.gz")
    assert found.bound_by == bound_by
    assert action in found.try_first.action
    assert because in found.try_first.because
    told = [float(part.split(" %")[0]) for part in found.sentence.split(": ")[1].split(", ")]
    assert told[0] == pytest.approx(100 * share, abs=0.1)
    assert sum(told) == pytest.approx(100, abs=0.6)
    breakdown = job.detail.breakdown
    assert sum(breakdown.breakdown_ns.values()) == breakdown.window_end_ns - breakdown.window_start_ns
    shares = breakdown.breakdown_s
    told_s = sum(one.time_s for one in breakdown.host_activities)
    assert told_s == pytest.approx(shares.host_idle + shares.sync_idle)


def recategorised(folder: Path, category: str) -> Path:
    for name in ("rank0.json.gz", "rank1.json.gz"):
        content = json.loads(gzip.decompress((DATA / "gloo" / name).read_bytes()))
        for event in content["traceEvents"]:
            if event.get("name", "").startswith("gloo:"):
                event["cat"] = category
        (folder / name).write_bytes(gzip.compress(json.dumps(content).encode()))
    return folder


@pytest.mark.parametrize("category", ["user_annotation", "cpu_op", "gloo", "Trace"])
def test_collectives_on_the_host_are_communication_whatever_their_category(category: str, tmp_path: Path) -> None:
    job, found = explain(recategorised(tmp_path, category))
    shares = job.detail.breakdown.breakdown_s
    assert shares.exposed_comm / job.detail.breakdown.step_s == pytest.approx(0.902, abs=0.002)
    assert found.bound_by == "communication"
    assert "exposed all-reduce" in found.evidence
    assert job.across is not None
    assert {row.collective for row in job.across.table} == {"all_reduce"}


def test_a_profiler_that_costs_nothing_is_no_advice() -> None:
    _, found = explain(DATA / "loader.json.gz", unprofiled_step_s=0.039)
    assert found.sentence.startswith("Without the profiler a step takes 39.00 ms. Profiled step 10 takes 38.42 ms: ")
    assert found.caution is None
    _, found = explain(DATA / "python_stacks.json.gz", unprofiled_step_s=0.05)
    assert found.caution is not None
    assert found.caution.startswith("The profiled step is 2.847× as long")


def operators(*rows: tuple[str, int, int]) -> Sketch:
    """Operators one after the other: name, how many, nanoseconds each."""
    sketch = Sketch()
    time = 0
    for name, count, each in rows:
        for _ in range(count):
            sketch.operator(name, time, time + each)
            time += each
    return sketch


def answer_of(sketch: Sketch) -> Answer:
    from stepscope.analyze.job.report import JobReport, RankSummary

    detail = explain_step(sketch.build())
    breakdown = detail.breakdown
    summary = RankSummary(
        rank=0, source="", step=0, step_s=breakdown.step_s, breakdown_s=breakdown.breakdown_s, device_busy_s=0.0,
        kernels=0, copies=0, device=breakdown.device, hidden_comm_share=None, repairs={},
    )  # fmt: skip
    job = JobReport(
        source="", format="kineto", devices=[], world_size=None, steps=[], step=0, chosen="", ranks=[summary],
        telling_rank=0, detail=detail, details=[detail], across=None, critical=None, limits=[], notes=[],
    )  # fmt: skip
    return answer(job)


def test_advice_names_no_view() -> None:
    found = answer_of(operators(("aten::as_strided", 60, 9_000), ("aten::expand", 10, 9_000), ("aten::mm", 9, 80_000)))
    assert "start with aten::mm" in found.try_first.action
    assert all("as_strided" not in point.text for point in found.points)


def test_where_views_take_most_nothing_that_computes_is_blamed() -> None:
    """Recording a view takes longer than the view: what little computes is not where the step went."""
    found = answer_of(
        operators(("aten::as_strided", 900, 9_000), ("aten::expand", 500, 9_000), ("aten::mm", 9, 80_000))
    )
    assert found.try_first.action.startswith("run fewer and larger operators")
    assert "12.60 ms of operators' own time are 1400 views and allocations" in found.try_first.because
    assert "as_strided" not in found.try_first.because


def test_a_function_takes_no_more_of_an_activity_than_the_activity() -> None:
    """`wait` lasts 80 µs, and for 60 of them another thread computes: Python code has 20."""
    sketch = Sketch()
    sketch.step(0, 0, 100_000)
    sketch.python("train.py(1): run", 0, 100_000)
    sketch.python("train.py(9): backward", 10_000, 90_000)
    sketch.operator("aten::mm", 20_000, 80_000, thread=2)
    sketch.operator("aten::mm", 90_000, 100_000)
    (python,) = break_down(sketch.build(), 0).host_activities
    assert (python.activity, python.time_s) == ("python", pytest.approx(30e-6))
    assert (python.function, python.function_s) == ("train.py(9): backward", pytest.approx(20e-6))
    assert python.caller == "train.py(1): run"


def late_program(rank: int, *, sleeps: bool) -> Timeline:
    """Three steps, each with one all-reduce that ends on both ranks together."""
    sketch = Sketch()
    for number in range(3):
        start = 1_000_000 * number
        sketch.step(number, start, start + 1_000_000)
        sketch.python("train.py(1): run", start, start + 1_000_000)
        if sleeps:
            sketch.python("<built-in function sleep>", start + 100_000, start + 800_000)
        begins = start + (820_000 if sleeps else 120_000)
        sketch.operator("aten::mm", begins - 15_000, begins)
        sketch.operator("gloo:all_reduce", begins, start + 980_000, collective="all_reduce", group_size=2,
                        group_ranks="[0, 1]", group="0", collective_sequence=number)  # fmt: skip
    return replace(sketch.build(), rank=rank, world_size=2)


def test_a_rank_that_sleeps_is_named_though_its_lateness_decides_nothing() -> None:
    job = report_job([late_program(rank, sleeps=rank == 1) for rank in range(2)])
    found = answer(job)
    assert job.across is not None
    assert job.across.stragglers.stragglers == []
    assert (found.bound_by, job.telling_rank) == ("stragglers", 0)
    assert found.try_first.action == "look at rank 1: it sleeps"
    assert "rank 1 spends 700.0 µs more than rank 0 sleeping" in found.try_first.because
    assert "3 steps do not tell whether one rank is always late: 6 would" in found.try_first.because


def test_waiting_on_the_cpu_has_one_name() -> None:
    sketch = Sketch()
    for number in range(2):
        sketch.step(number, 100_000 * number, 100_000 * (number + 1))
        sketch.python("threading.py(295): wait", 100_000 * number, 100_000 * number + 90_000)
        sketch.operator("aten::mm", 100_000 * number + 90_000, 100_000 * (number + 1))
    job = report_job([sketch.build()])
    found = answer(job)
    shown = format_job(job, found)
    assert "90.0 % waiting in synchronisation" in found.sentence
    assert "waiting in synchronisation" in shown
    assert "idle in synchronisation" not in shown


def test_many_small_operators_are_the_cost_of_calling_them() -> None:
    found = answer_of(operators(("aten::add", 1000, 4_000), ("aten::view", 500, 2_000)))
    assert "fewer and larger operators" in found.try_first.action
    assert "1000 operators take 4.000 µs each" in found.try_first.because


@pytest.mark.parametrize(
    "name", ["aten::as_strided", "aten::view", "aten::expand", "aten::t", "aten::empty.memory_format"]
)
def test_operators_without_work(name: str) -> None:
    assert does_no_work(name)
    assert not does_no_work("aten::mm")
    assert not does_no_work("aten::addmm.out")


def test_a_device_that_was_not_recorded_gets_no_advice_for_the_cpu(tmp_path: Path) -> None:
    """Kernels under hardware counters leave no device rows: operators show what it takes to launch them."""
    work = [event("cpu_op", "aten::mm", 100 * number, 90) for number in range(9)]
    counted = event("cuda_profiler_range", "gemm", 10, 5, pid=0, sm__cycles=1)
    launched = event("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1)
    for more, evidence in ((counted, "1 counter of a device"), (launched, "1 call launches device work")):
        _, found = explain(write_trace(tmp_path / "a100.json", [*work, more], devices=[{"id": 0, "name": "A100"}]))
        assert found.bound_by is None
        assert "more threads" not in found.try_first.action
        assert "with device activities" in found.try_first.action
        assert f"no device rows in this trace, though {evidence}" in found.try_first.because
    _, found = explain(write_trace(tmp_path / "cpu.json", work, devices=[{"id": 0, "name": "A100"}]))
    assert found.bound_by == "compute"


@pytest.mark.parametrize(
    "name",
    ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "hipLaunchKernel", "hipExtModuleLaunchKernel",
     "cudaGraphLaunch", "hipGraphLaunch", "cudaLaunchCooperativeKernel"],
)  # fmt: skip
def test_launch_calls(name: str) -> None:
    assert is_launch_name(name)
    assert not is_launch_name("cudaMalloc")


def write_trace(path: Path, events: list[dict[str, Any]], *, devices: Sequence[dict[str, Any]] = ()) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": list(devices), "traceEvents": events}))
    return path


def event(cat: str, name: str, ts: float, dur: float, *, pid: int = 1, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def test_mtia_copies_and_waits(tmp_path: Path) -> None:
    """MTIA writes its copies and its waits among the kernels; no device number stands in their arguments."""
    events = [event("user_annotation", "ProfilerStep#1", 0, 1000)]
    for number in range(8):
        begin = 10 + 100 * number
        events += [
            event("mtia_runtime", "runtime_launch", begin, 5, correlation=3 * number),
            event("mtia_ccp_events", "fc_kernel", begin + 10, 30, pid=0, tid=2, stream=2, correlation=3 * number),
            event("mtia_ccp_events", "dma_request", begin + 45, 20, pid=0, tid=3, stream=3, correlation=3 * number + 1),
            event("mtia_ccp_events", "event_wait", begin + 40, 55, pid=0, tid=2, stream=2, correlation=3 * number + 2),
        ]
    timeline = read_timeline(write_trace(tmp_path / "mtia.json", events))
    found = break_down(timeline, 1)
    assert found.breakdown_s.compute == pytest.approx(8 * 30e-6)
    assert found.breakdown_s.exposed_copy == pytest.approx(8 * 20e-6)
    assert found.kernels == 16
    report = explain_step(timeline)
    assert {row.name: row.count for row in report.kernels.by_category.rows} == {"other": 8, "copy": 8}
    assert report.idle.idle_s <= report.breakdown.step_s


def test_amd_calls_and_kernels(tmp_path: Path) -> None:
    events = [event("user_annotation", "ProfilerStep#1", 0, 1000), event("cpu_op", "aten::mm", 5, 980)]
    for number in range(9):
        begin = 10 + 100 * number
        events += [
            event("cuda_runtime", "hipExtModuleLaunchKernel", begin, 90, correlation=number + 1),
            event("kernel", "Cijk_Ailk_Bljk_SB_MT64x64x8", begin + 92, 6, pid=0, tid=0, device=2, stream=0,
                  correlation=number + 1),
        ]  # fmt: skip
    job, found = explain(write_trace(tmp_path / "amd.json", events))
    assert found.bound_by == "host"
    assert job.detail.kernels.by_category.rows[0].name == "gemm"
    assert "hip" not in found.try_first.action
    assert "CUDA graphs" in found.try_first.action


def test_gaps_of_several_streams_count_once(tmp_path: Path) -> None:
    """Short kernels on many streams: the time between them on each stream adds up to more than the trace."""
    events = [event("user_annotation", "ProfilerStep#1", 0, 1000)]
    for stream in range(16):
        for number in range(9):
            ids = 100 * stream + number
            at = 10 + 100 * number + stream
            events += [
                event("cuda_runtime", "cudaLaunchKernel", at, 1, tid=stream, correlation=ids),
                event("kernel", f"small_{number % 3}", at + 5, 2, pid=0, tid=stream, device=0, stream=stream,
                      correlation=ids),
            ]  # fmt: skip
    report = explain_step(read_timeline(write_trace(tmp_path / "streams.json", events)))
    assert report.sequences.sequences
    for one in report.sequences.sequences:
        assert one.gap_s <= report.idle.idle_s <= report.breakdown.step_s


def test_waits_of_devices_by_name() -> None:
    assert [
        name for name in ("event_wait", "EVENT_RECORD", "wait_event", "semaphore_signal") if not is_device_wait(name)
    ] == []
    assert not is_device_wait("put_signal_kernel")
    assert not is_device_wait("wait_for_all_blocks_kernel")


@pytest.mark.parametrize(
    ("name", "activity"),
    [
        ("<built-in function sleep>", "sleeping"),
        ("<built-in method sleep of module object at 0x7f>", "sleeping"),
        ("<method 'acquire' of '_thread.lock' objects>", "synchronisation"),
        ("<built-in method acquire of _thread.lock object at 0x7f>", "synchronisation"),
        ("<method 'poll' of 'select.poll' objects>", "synchronisation"),
        ("<built-in function waitpid>", "synchronisation"),
        ("threading.py(1080): join", "synchronisation"),
        ("concurrent/futures/_base.py(428): result", "synchronisation"),
        ("multiprocessing/connection.py(917): wait", "synchronisation"),
        ("torch/utils/data/dataloader.py(720): __next__", "data_loading"),
        ("<method 'join' of 'str' objects>", "python"),
        ("<built-in method select of Tensor object at 0x7f>", "python"),
        ("train.py(3): sleepless", "python"),
        ("queue_model.py(3): get", "python"),
    ],
)
def test_python_functions_by_name(name: str, activity: str) -> None:
    sketch = Sketch()
    sketch.annotation("ProfilerStep#0", 0, 1_000)
    sketch.python("train.py(1): <module>", 0, 1_000)
    sketch.operator("aten::mm", 0, 100)
    sketch.python(name, 200, 900)
    found = {one.activity: one for one in break_down(sketch.build(), 0).host_activities}
    expected = {"python": 900e-9} if activity == "python" else {activity: 700e-9, "python": 200e-9}
    assert {name: one.time_s for name, one in found.items()} == pytest.approx(expected)
    assert found[activity].function == name
    assert found[activity].caller == "train.py(1): <module>"
