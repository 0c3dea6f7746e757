"""`stepscope trace` on files that are no profiler traces: Chakra with and without launches, sums of nsys, memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from test_trace import KINETO, PAIR, call

from stepscope.cli.main import run
from stepscope.traces.chakra.files import read_chakra

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
