"""How long does a training or inference step take, why, and how long would it take somewhere else?

The names below are what programs use; each is imported when it is first asked for, so that `import stepscope` is cheap:

    run = stepscope.find_run(Path("stepscope-runs"), "20261115")
    for case in run.cases():
        print(case.result.case.label, case.summary(), case.score())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepscope._version import __version__

if TYPE_CHECKING:
    from stepscope.compare import check_regression, compare_cases
    from stepscope.measure import MeasureSettings, measure
    from stepscope.metrics import query_runs
    from stepscope.store import StoredRun, find_run, list_runs, verify_run
    from stepscope.system import collect_system, diagnose
    from stepscope.traces import TraceSet, read_traces
    from stepscope.traces.recording import record, step

_HOMES = {
    "MeasureSettings": "measure",
    "StoredRun": "store",
    "TraceSet": "traces",
    "check_regression": "compare",
    "collect_system": "system",
    "compare_cases": "compare",
    "diagnose": "system",
    "find_run": "store",
    "list_runs": "store",
    "measure": "measure",
    "query_runs": "metrics",
    "read_traces": "traces",
    "record": "traces.recording",
    "step": "traces.recording",
    "verify_run": "store",
}

__all__ = [
    "MeasureSettings",
    "StoredRun",
    "TraceSet",
    "__version__",
    "check_regression",
    "collect_system",
    "compare_cases",
    "diagnose",
    "find_run",
    "list_runs",
    "measure",
    "query_runs",
    "read_traces",
    "record",
    "step",
    "verify_run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stepscope' has no attribute {name!r}")
    return getattr(import_module(f"stepscope.{_HOMES[name]}"), name)
