"""`stepscope trace` on files that are no profiler traces: Chakra with and without launches, sums of nsys, memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from test_trace import DATA, KINETO, PAIR, SHARED, call

from stepscope.cli.main import run
from stepscope.formats.chakra import read_chakra

DEVICE_EVENTS = 369


def without_launches(tmp_path: Path, *, kept: int) -> tuple[Path, int]:
    """The real trace with only every so many of its launch calls (0: none), and how many device events lost theirs."""
    trace = json.loads(gzip.decompress(KINETO.read_bytes()))
    calls = [event for event in trace["traceEvents"] if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    gone = {id(event) for number, event in enumerate(calls) if not kept or number % kept}
    lost = {event["args"]["correlation"] for event in calls if id(event) in gone}
    trace["traceEvents"] = [event for event in trace["traceEvents"] if id(event) not in gone]
    work = ("kernel", "gpu_memcpy", "gpu_memset")
    count = sum(e.get("cat") in work and e["args"]["correlation"] in lost for e in trace["traceEvents"])
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    return path, count


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kept", [0, 3, 1])
def test_device_events_without_launch_are_kept_on_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *, kept: int, graph: bool
) -> None:
    source, lost = without_launches(tmp_path, kept=kept)
    target = tmp_path / "out.et"
    given = ["--et", PAIR / "et.json.gz"] if graph else []
    if kept != 1:
        error = call(capsys, "convert", source, target, *given, code=2)
        assert not target.exists()
        assert graph or "--keep-unlinked" in error["hint"]
    data = call(capsys, "convert", source, target, *given, "--keep-unlinked")
    coverage = data["coverage"]
    assert coverage["device_events_without_launch"] == lost
    assert coverage["device_events_with_launch"] + lost == coverage["device_events"] == DEVICE_EVENTS
    on_device = [node for node in read_chakra(target).nodes if not node.is_cpu_op]
    assert len(on_device) == DEVICE_EVENTS
    assert sum(not node.ctrl_deps for node in on_device) == lost
    assert run(["trace", "convert", str(source), str(target), "--keep-unlinked"]) == 0
    told = capsys.readouterr().err
    assert (f"{lost} of {DEVICE_EVENTS} device events have no launch" in told) is bool(lost)


def test_an_execution_trace_of_another_run_is_refused_whatever_is_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = json.loads(gzip.decompress((PAIR / "et.json.gz").read_bytes()))
    for node in other["nodes"]:
        node["name"] += "_of_another_run"
    graph = tmp_path / "et.json"
    graph.write_text(json.dumps(other))
    error = call(capsys, "convert", KINETO, tmp_path / "out.et", "--et", graph, "--keep-unlinked", code=2)
    assert "could be joined" in error["message"]


SUMS_A = """\
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
60.0,6000000,30,200000.0,200000,190000,210000,10.0,void moe::fused_kernel<128>(float*)
30.0,3000000,10,300000.0,300000,290000,310000,10.0,ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)
10.0,1000000,100,10000.0,10000,9000,11000,10.0,void at::native::vectorized_elementwise_kernel<4>(int)
"""
SUMS_B = """\
Processing [report.sqlite] with [cuda_gpu_kern_sum.py]...

Time (%),Total Time (ms),Instances,Avg (ms),Name
50.0,"4.5",30,0.15,void moe::fused_kernel<256>(float*)
45.0,"5.0",20,0.25,ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)
5.0,"0.5",1,0.5,softmax_warp_forward
"""
CALL_SUMS = "Time (%),Total Time (ns),Num Calls,Avg (ns),Name\n100.0,1000,10,100.0,cudaLaunchKernel\n"


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_two_tables_of_sums_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a, b = write(tmp_path, "a.csv", SUMS_A), write(tmp_path, "b.csv", SUMS_B)
    data = call(capsys, "diff", a, b)
    assert data["change_s"] == pytest.approx(0.0)
    assert sum(one["change_s"] for one in data["names"]) == pytest.approx(data["change_s"])
    assert sum(one["change_s"] for one in data["categories"]) == pytest.approx(data["change_s"])
    named = {one["short_name"]: one for one in data["names"]}
    reduce = named["ncclDevKernel_AllReduce_Sum_bf16_RING_LL"]
    assert (reduce["calls_a"], reduce["calls_b"], reduce["status"]) == (10, 20, "same")
    assert (reduce["from_calls_s"], reduce["from_duration_s"]) == (pytest.approx(3e-3), pytest.approx(-1e-3))
    assert sorted(one["status"] for one in data["names"]) == ["added", "removed", "renamed", "same"]
    assert any("different amounts of work" in note for note in data["notes"])
    assert run(["trace", "diff", str(a), str(b)]) == 0
    told = capsys.readouterr().out
    assert "300.0 µs → 250.0 µs, 10 → 20" in told
    same = call(capsys, "diff", a, a)
    assert (same["change_s"], len(same["notes"])) == (0.0, 1)
    assert "as long as" in same["sentence"]


def test_sums_are_compared_with_sums_of_the_same_kind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a, calls = write(tmp_path, "a.csv", SUMS_A), write(tmp_path, "calls.csv", CALL_SUMS)
    assert "sums of kernels, B of calls" in call(capsys, "diff", a, calls, code=2)["message"]
    assert call(capsys, "diff", calls, calls)["report"] == "calls"
    assert call(capsys, "diff", KINETO, a, code=2)["where"] == "B"
    assert "no steps" in call(capsys, "diff", a, a, "--steps-a", "3", code=2)["message"]


@pytest.mark.skipif(not SHARED.exists(), reason="the shared traces are not here")
def test_real_sums_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    data = call(capsys, "diff", SHARED / "public/nsys/EPLB_off.csv", SHARED / "public/nsys/EPLB_on.csv")
    assert data["change_s"] == pytest.approx(11.99, abs=0.01)
    assert [one["category"] for one in data["categories"][:2]] == ["communication", "moe"]
    assert data["categories"][0]["change_s"] == pytest.approx(6.569, abs=0.001)


def test_memory_is_summarised(capsys: pytest.CaptureFixture[str]) -> None:
    path = DATA / "memory" / "memory_timeline.raw.json.gz"
    (found,) = call(capsys, "summary", path)["memory"]
    assert (found["format"], found["owner_kind"]) == ("raw memory timeline", "category")
    assert run(["trace", "summary", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == found["sentence"]
    assert any("held at the peak, by category" in line for line in lines)
    error = call(capsys, "diff", path, path, code=2)
    assert "trace summary" in error["hint"]


def test_what_a_file_with_a_trace_format_prints_is_no_part_of_the_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from stepscope.formats.readers import TraceFormat\n"
        "print('own.py is loaded')\n"
        "FORMAT = TraceFormat('own', lambda head, path: False, lambda path: [])\n"
    )
    monkeypatch.setenv("STEPSCOPE_TRACE_FORMATS", str(own))
    assert run(["trace", "summary", str(KINETO), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["ok"]
    assert "own.py is loaded" in told.err
