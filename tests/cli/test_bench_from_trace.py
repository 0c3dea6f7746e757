"""`stepscope bench ops --from-trace`, as a command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_process import Stepscope

pytestmark = pytest.mark.usefixtures("one_thread")


def make_event(name: str, start_us: float, duration_us: float, **arguments: Any) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": start_us, "dur": duration_us,
        "args": arguments,
    }  # fmt: skip


def make_product(start_us: float, duration_us: float) -> dict[str, Any]:
    return make_event(
        "aten::mm", start_us, duration_us,
        **{"Input Dims": [[8, 4], [4, 2]], "Input type": ["float", "float"],
           "Input Strides": [[1, 8], [2, 1]], "Concrete Inputs": ["", ""]},
    )  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two steps on a CPU: three products, and a call of a library that is not torch's."""
    foreign = make_event("fbgemm::lookup", 60, 20, **{"Input Dims": [[4]], "Input type": ["float"]})
    events = [
        {**make_event("ProfilerStep#0", 0, 100), "cat": "user_annotation"},
        {**make_event("ProfilerStep#1", 100, 100), "cat": "user_annotation"},
        make_product(10, 10),
        make_product(30, 20),
        make_product(110, 30),
        foreign,
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def test_a_dry_run_lists_what_would_be_measured(here: Stepscope, trace: Path) -> None:
    answer = here("bench", "ops", "--from-trace", str(trace), "--dry-run")
    assert answer.code == 0
    assert "1.500 × aten::mm float32[8,4] float32[4,2]: 20.00 µs in the trace" in answer.out
    assert "skipped: fbgemm::lookup, 10.00 µs per step: it belongs to fbgemm" in answer.out
    assert "1 case, about" in answer.out


def test_measured_times_stand_beside_the_trace(here: Stepscope, trace: Path) -> None:
    data = here("bench", "ops", "--from-trace", str(trace), "--quick", "--json").data
    (case,) = data["cases"]
    assert case["status"] == "ok"
    assert json.loads(case["parameters"]["args"])[0]["strides"] == [1, 8]
    product, foreign = data["trace"]["calls"]
    assert (product["operator"], product["calls_per_step"], product["key"]) == ("aten::mm", 1.5, case["key"])
    assert product["trace_s"] == pytest.approx(20e-6)
    assert product["measured_s"] == case["summary"]["median_s"]
    assert data["trace"]["measured_step_s"] == pytest.approx(1.5 * case["summary"]["median_s"])
    assert data["trace"]["traced_step_s"] == pytest.approx(30e-6)
    assert data["trace"]["covered_share"] == pytest.approx(0.75)
    assert data["trace"]["profiled_step_s"] == pytest.approx(100e-6)
    assert "fbgemm" in foreign["skip"]


def test_for_people_the_comparison_takes_the_place_of_the_table(here: Stepscope, trace: Path) -> None:
    """Arguments may be lists of hundreds of tensors."""
    answer = here("bench", "ops", "--from-trace", str(trace), "--quick")
    assert answer.code == 0
    assert "1.500 × aten::mm float32[8,4] float32[4,2]: trace 20.00 µs, measured" in answer.out
    assert "they are 75.0 % of the work in a step of the trace, 40.00 µs" in answer.out
    assert "the profiled step: 100.0 µs" in answer.out
    assert "run: " in answer.out
    assert "args=" not in answer.out
    assert re.search(r"^next: stepscope report \S+-trace-\w+ -o report.html$", answer.err, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from-trace", "nowhere.json"], "is not there"),
        (["--top", "3"], "belong to --from-trace"),
        (["--from-trace", "here", "--dtype", "float16"], "says dtypes and passes itself"),
    ],
)
def test_wrong_use(here: Stepscope, options: list[str], message: str) -> None:
    answer = here("bench", "ops", *options, "--json")
    assert answer.code == 2
    assert message in answer.error["message"]


def test_a_trace_of_which_nothing_can_be_run(here: Stepscope, tmp_path: Path) -> None:
    path = tmp_path / "foreign.json"
    event = make_event("fbgemm::lookup", 0, 20, **{"Input Dims": [[4]], "Input type": ["float"]})
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [event]}))
    answer = here("bench", "ops", "--from-trace", str(path), "--json")
    assert answer.code == 2
    assert "no operator of this trace can be run again" in answer.error["message"]
