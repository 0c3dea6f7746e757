"""How long does a training or inference step take, why, and how long would it take somewhere else?

The names below are what programs use; each is imported when it is first asked for, so that `import stepscope` is cheap:

    run = stepscope.bench_op("gemm", shape="m=512,n=512,k=512")
    for case in run.cases():
        print(case.result.case.label, case.summary(), case.score())
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stepscope._version import __version__

if TYPE_CHECKING:
    from stepscope.api import (
        ab,
        bench_collective,
        bench_op,
        compare,
        compare_implementations,
        execute,
        explain,
        find_run,
        measure,
        plan,
        report,
        run,
        start,
    )
    from stepscope.compare.gate import check_regression
    from stepscope.compare.verdict import compare_cases
    from stepscope.measure import MeasureSettings
    from stepscope.metrics.sql import query_runs
    from stepscope.store import StoredRun, list_runs, verify_run
    from stepscope.system import collect_system, diagnose
    from stepscope.traces import TraceSet, read_traces
    from stepscope.traces.recording import record, step

_HOMES = {
    "MeasureSettings": "measure",
    "StoredRun": "store",
    "TraceSet": "traces",
    "ab": "api",
    "bench_collective": "api",
    "bench_op": "api",
    "check_regression": "compare.gate",
    "collect_system": "system",
    "compare": "api",
    "compare_cases": "compare.verdict",
    "compare_implementations": "api",
    "diagnose": "system",
    "execute": "api",
    "explain": "api",
    "find_run": "api",
    "list_runs": "store",
    "measure": "api",
    "plan": "api",
    "query_runs": "metrics.sql",
    "read_traces": "traces",
    "record": "traces.recording",
    "report": "api",
    "run": "api",
    "start": "api",
    "step": "traces.recording",
    "verify_run": "store",
}

_PACKAGES = ("compare", "measure", "report", "run")
"""Functions that have the name of a package."""

__all__ = [
    "MeasureSettings",
    "StoredRun",
    "TraceSet",
    "__version__",
    "ab",
    "bench_collective",
    "bench_op",
    "check_regression",
    "collect_system",
    "compare",
    "compare_cases",
    "compare_implementations",
    "diagnose",
    "execute",
    "explain",
    "find_run",
    "list_runs",
    "measure",
    "plan",
    "query_runs",
    "read_traces",
    "record",
    "report",
    "run",
    "start",
    "step",
    "verify_run",
]


class _CallablePackage(ModuleType):
    """A package that is also the function of its name: `stepscope.measure(body)`."""

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        """The function's, as it is what people ask about."""
        return str(self.__wrapped__.__doc__)

    @property
    def __wrapped__(self) -> Any:
        """The function; signatures are shown of it."""
        return getattr(import_module("stepscope.api"), self.__name__.rpartition(".")[2])

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.__wrapped__(*arguments, **options)


class _Stepscope(ModuleType):
    """Python binds a package to its parent when it is imported: that is the moment to make it callable."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PACKAGES and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Stepscope


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stepscope' has no attribute {name!r}")
    if name in _PACKAGES:
        return import_module(f"stepscope.{name}")
    return getattr(import_module(f"stepscope.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
