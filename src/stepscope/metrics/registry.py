"""What a metric is, which there are, and how users add their own.

A metric is one function with its declaration. Tables, CSV, JSON, SQL and the documentation are made from what is
registered here: adding a metric touches one file.
"""

from __future__ import annotations

import math
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from stepscope.core.errors import UsageError, first_line
from stepscope.core.plugins import entry_points
from stepscope.stats import Summary, summarize
from stepscope.store import TPOT, TTFT, Ceilings, MeasuredCase, find_ceilings

GROUP = "stepscope.metrics"
"""Entry points of this group are modules or functions that register metrics when they are loaded or called."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
"""It is a column in SQL."""

Value = bool | int | float | str
Unit = Literal[
    "s", "B", "B/s", "flop/s", "flop/B", "1/s", "J", "fraction", "count", "rank", "yes/no", "text", "score"
]  # fmt: skip
Better = Literal["higher", "lower", "neither"]

OPERATORS = ("operator", "call")
COLLECTIVES = ("collective", "point_to_point")
MESSAGES = (*COLLECTIVES, "pair", "overlap")
GROUPS = ("process_group",)
EXCHANGES = (*MESSAGES, "pattern", *GROUPS)
WORKLOADS = ("workload",)
MODELS = (*WORKLOADS, "user_model")


class NotApplicable(NamedTuple):
    reason: str


class Failed(NamedTuple):
    cause: str


Outcome = Value | NotApplicable | Failed


class CaseInput:
    """A measured case and what its metrics need beside it."""

    def __init__(self, measured: MeasuredCase, peaks: Ceilings | None = None) -> None:
        self.measured, self.result, self.kind = measured, measured.result, measured.result.case.spec.kind
        self.peaks = peaks
        """Measured on the case's device in the same run; None: not measured."""

    @cached_property
    def times_s(self) -> list[float]:
        """Seconds per iteration of a case that was measured and gave the right result; else empty."""
        return self.measured.seconds() if self.result.status == "ok" else []

    @cached_property
    def summary(self) -> Summary | None:
        return summarize(self.times_s) if self.times_s else None


class Metric(NamedTuple):
    name: str
    """In CSV, JSON and SQL; it carries its unit."""
    title: str
    """Title of its column."""
    unit: Unit
    better: Better
    formula: str
    """For the documentation; symbols as docs/metrics.md introduces them."""
    kinds: tuple[str, ...]
    """Kinds of cases that have it; empty: all."""
    compute: Callable[[CaseInput], Outcome | None]
    """None says: not applicable, for a reason that the formula shows."""
    needs_times: bool
    """Only cases that were measured have it."""
    column: Literal["shown", "detail", "none"]
    """Whether tables have a column of it where it has values; those of detail are left out where there is no room."""
    hint: str
    """What the column means, for new readers."""
    mark: Callable[[CaseInput], str] | None
    """What stands behind the value in a table."""
    only_for: Callable[[CaseInput], bool] | None
    """Whether a table shows it for this case; None: always."""

    def belongs_to(self, case: CaseInput) -> bool:
        """Whether cases of its kind may have it."""
        return not self.kinds or case.kind in self.kinds

    def evaluate(self, case: CaseInput) -> Outcome:
        if not self.belongs_to(case):
            return NotApplicable(f"a case of kind {case.kind} has no {self.title or self.name}")
        if self.needs_times and case.summary is None:
            return NotApplicable("there are no times of a right result")
        try:
            found = self.compute(case)
        except Exception as error:  # noqa: BLE001 - one metric must not cost the others
            return Failed(f"{type(error).__name__}: {first_line(error)}")
        return NotApplicable(f"not known: {self.formula}") if found is None else found


_METRICS: dict[str, Metric] = {}


def metric(
    name: str,
    title: str,
    unit: Unit,
    formula: str,
    *,
    kinds: tuple[str, ...] = (),
    better: Better = "neither",
    needs_times: bool = True,
    column: Literal["shown", "detail", "none"] = "detail",
    hint: str = "",
    mark: Callable[[CaseInput], str] | None = None,
    only_for: Callable[[CaseInput], bool] | None = None,
) -> Callable[[Callable[[CaseInput], Outcome | None]], Callable[[CaseInput], Outcome | None]]:
    """Register the function below; it is called with a CaseInput."""

    def register(compute: Callable[[CaseInput], Outcome | None]) -> Callable[[CaseInput], Outcome | None]:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"a metric cannot be called {name!r}", hint="write letters, digits and _, as in noise_fraction"
            )
        if name in _METRICS:
            raise UsageError(f"there are two metrics {name!r}", hint="give one of them another name", where=title)
        _METRICS[name] = Metric(
            name, title, unit, better, formula, kinds, compute, needs_times, column, hint, mark, only_for
        )
        return compute

    return register


def list_metrics() -> Mapping[str, Metric]:
    """By name, in the order of columns: those of Stepscope, then those of installed packages and of named files."""
    _load_installed()
    return _METRICS


@cache
def _load_installed() -> None:
    for entry in entry_points(group=GROUP):
        loaded = entry.load()
        if callable(loaded):
            loaded()


def load_metrics_file(path: Path) -> list[Metric]:
    """Run a user's file, which registers metrics; those that it added. Raises UsageError with what is wrong in it.

    What it prints, then or when its functions are called, goes to stderr: stdout is the answer of a command.
    """
    known = dict(list_metrics())
    try:
        with redirect_stdout(sys.stderr):
            runpy.run_path(str(path), run_name=path.stem)
    except UsageError:
        raise
    except Exception as error:
        message = f"the metrics of {path.name} cannot be loaded: {type(error).__name__}: {first_line(error)}"
        raise UsageError(message, hint="see docs/metrics.md#your-own-metrics", where=str(path)) from error
    added = [one._replace(compute=_print_aside(one.compute)) for name, one in _METRICS.items() if name not in known]
    if not added:
        hint = "write @metric(…) from stepscope.metrics above a function of a case"
        raise UsageError(f"{path.name} registers no metric", hint=hint, where=str(path))
    _METRICS.update((one.name, one) for one in added)
    return added


def _print_aside(compute: Callable[[CaseInput], Outcome | None]) -> Callable[[CaseInput], Outcome | None]:
    def compute_quietly(case: CaseInput) -> Outcome | None:
        with redirect_stdout(sys.stderr):
            return compute(case)

    return compute_quietly


def forget_metrics(names: Iterable[str]) -> None:
    """As if they had not been registered."""
    for name in names:
        _METRICS.pop(name, None)


def evaluate_case(case: CaseInput) -> dict[str, Outcome]:
    """Every metric that cases of its kind may have."""
    return {name: one.evaluate(case) for name, one in list_metrics().items() if one.belongs_to(case)}


_NO_VALUE = (NotApplicable, Failed)


def read_value(outcome: Outcome) -> Value | None:
    return None if isinstance(outcome, _NO_VALUE) else outcome


def with_peaks(cases: Iterable[MeasuredCase]) -> list[CaseInput]:
    """The cases of one run, each beside what the run measured as the peaks of its device."""
    listed = list(cases)
    peaks = find_ceilings(listed)
    return [CaseInput(one, peaks.get(one.result.case.spec.device or "")) for one in listed]


# One measured case by names: what programs see in JSON, CSV and SQL


def flatten_case(case: CaseInput) -> dict[str, Any]:
    """Times in seconds, sizes in bytes; facts and metrics under the names that they have everywhere."""
    measured, result, outcomes = case.measured, case.result, evaluate_case(case)
    asked = result.case
    content: dict[str, Any] = {
        "key": asked.key,
        "label": asked.label,
        "benchmark": asked.benchmark.id,
        "version": asked.benchmark.version,
        "kind": asked.spec.kind,
        "parameters": asked.parameters,
        "batch_size": asked.batch_size,
        "world_size": asked.world_size,
        "status": result.status,
        "samples_s": measured.seconds(),
        "device_samples_s": measured.device_seconds(),
        "summary": measured.summary(),
        "unit": result.score.unit if result.score else None,
        "notices": result.notices,
        "failure": result.failure,
        "readings": result.readings,
        "timing": result.timing,
        "kernels": result.kernels,
        **{name: read_value(one) for name, one in outcomes.items() if name not in Summary.__struct_fields__},
        **result.facts,
    }
    failed = {name: found.cause for name, found in outcomes.items() if isinstance(found, Failed)}
    return content | _list_times(case) | ({"failed_metrics": failed} if failed else {})


def _list_times(case: CaseInput) -> dict[str, Any]:
    """Those that are more than one number."""
    measured, result = case.measured, case.result
    content: dict[str, Any] = {}
    if result.latency_target is not None:
        content |= {"latency_s": measured.latency_s(), "latency_target": result.latency_target}
        content |= {f"{name}_s": measured.latency_s(name) for name in (TTFT, TPOT) if measured.extra_seconds(name)}
    if result.timing.startswith("slowest_rank"):
        means = measured.rank_means_s()
        content |= {"latency_s": measured.latency_s(), "parts_s": measured.parts_s()}
        content["rank_mean_s"] = [{"rank": rank, "mean_s": mean_s} for rank, mean_s in means.items()]
        content["mean_s"] = math.fsum(means.values()) / len(means) if means else None
        content["total_s"] = math.fsum(measured.seconds()) if means else None
    return content


def format_metrics_markdown() -> str:
    """The documentation's list of metrics."""
    lines = ["| name | column | unit | better | kinds | definition |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(_format_row(one) for one in list_metrics().values())])


def _format_row(one: Metric) -> str:
    kinds = ", ".join(kind.replace("_", " ") for kind in one.kinds) or "all"
    column = one.title if one.column != "none" else "–"
    better = "–" if one.better == "neither" else one.better
    unit = "–" if one.unit in {"count", "text", "yes/no", "fraction", "rank"} else one.unit
    return f"| `{one.name}` | {column} | {unit} | {better} | {kinds} | {one.formula} |"
