"""The command line is a caller of the Python API: each verb reaches its function there, with what the user typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_process import Stepscope

from builders import make_case, make_result, make_samples, make_system
from stepscope import api
from stepscope.cli import report as report_verb
from stepscope.core.errors import UsageError
from stepscope.records import make_request
from stepscope.store import RunWriter, create_run

TRACE = str(Path(__file__).parents[1] / "traces" / "data" / "h200_small" / "recording" / "kineto" / "rank0.json.gz")
OPS = ["bench", "ops", "--op", "gemm", "--shape", "m=8,n=8,k=8", "--iterations", "1", "--warmup", "0"]
COMMS = ["bench", "comms", "--backend", "fake", "--ranks", "2", "--collective", "barrier"]
SIDE = " ".join(OPS[1:])
VERBS = [
    ("plan", OPS),
    ("start", OPS),
    ("execute", OPS),
    ("report", OPS),
    ("plan", ["bench", "suite", "micro", "--benchmark", "dlrm/micro/linear/linear_tiny.1dev"]),
    ("start", COMMS),
    ("execute", COMMS),
    ("start", ["bench", "workload", "dlrm/ootb/infer/A.1dev-embed4-fp32", "--scale", "tiny", "--no-loader"]),
    ("ab", ["ab", SIDE, SIDE]),
    ("compare", ["compare", "latest", "latest"]),
    ("compare", ["check", "latest", "--baseline", "latest"]),
    ("compare_implementations", ["compare", "latest", "--view", "ootb-optimized"]),
    ("report", ["report", "latest"]),
    ("explain", ["trace", "summary", TRACE]),
    ("explain", ["trace", "report", TRACE, "-o", "page.html"]),
]


@pytest.mark.parametrize(("name", "words"), VERBS)
def test_a_verb_calls_the_function_of_its_name(
    name: str, words: list[str], here: Stepscope, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(*given: Any, **options: Any) -> None:
        raise UsageError(f"reached {name}")

    if "latest" in words:
        write_run(store)
    monkeypatch.chdir(store.parent)
    for module in (api, report_verb):
        monkeypatch.setattr(module, name, reached, raising=module is api)
    answer = here(*words)
    assert (answer.code, f"error: reached {name}" in answer.err) == (2, True), answer.err


def write_run(store: Path) -> None:
    case = make_case(m=1)
    folder = create_run(
        store, verb="ops", name="one", command=["stepscope"], request=make_request("ops", {}), cases=[case]
    )
    with RunWriter(folder) as writer:
        writer.write_system(make_system())
        writer.append(make_result(case), [make_samples(case, [1.0, 1.1])])
        writer.finish()
