"""Runs of workload cases in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stepscope.bench.workloads import find_workload
from stepscope.measure import QUICK
from stepscope.records import Case, make_request
from stepscope.run.execute import execute
from stepscope.store import StoredRun, create_run

SMALL = "dlrm/ootb/train/small.1dev-embed32-fp32"
SERVED = "dlrm/ootb/infer/default.1dev-fp32"


def tiny(benchmark_id: str, **chosen: Any) -> Case:
    return find_workload(benchmark_id).make_case(device="cpu", scale="tiny", **chosen)


def measure(store: Path, *cases: Case, **request: Any) -> StoredRun:
    settings = msgspec.to_builtins(QUICK)
    asked = {"device": "cpu", "settings": settings, "loader_workers": None, "compile_backend": "eager", **request}
    folder = create_run(
        store,
        verb="workload",
        name="test",
        command=["test"],
        request=make_request("workload", asked),
        cases=list(cases),
    )
    return execute(StoredRun(folder))
