"""One view model behind every format: plain values, ready to print, grouped so that systems never mix.

Everything here is derived from stored runs on reading; renderers only choose columns and write text.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Literal, NamedTuple

import msgspec

from stepscope._version import __version__
from stepscope.core.units import format_bytes
from stepscope.metrics import CaseInput, Failed, Value, evaluate_case, list_metrics, read_value
from stepscope.records import Benchmark, CaseResult, Communication, Load, Request, Spec, System
from stepscope.records.kinds import CallSpec, OperatorSpec
from stepscope.report.heatmap import PairView, find_pairs, is_in_matrix
from stepscope.report.labels import ScaleScope, find_coverage, label_cases
from stepscope.report.series import (
    Histogram,
    Roofline,
    RooflinePoint,
    SampleSeries,
    SweepCurves,
    SweepPoint,
    count_bins,
    find_rooflines,
    find_sweeps,
    read_series,
)
from stepscope.stats import Summary, drift, median, quantile_sorted
from stepscope.store import Ceilings, MeasuredCase, find_ceilings

RunStatus = Literal["complete", "interrupted", "running"]

SIZE_COLUMN = frozenset({"size_bytes"})
"""The parameter that tables show in a column of its own."""

PERCENTILES = (5.0, 25.0, 50.0, 75.0, 95.0, 99.0)


class ReportRun(NamedTuple):
    """A stored run as a report takes it."""

    id: str
    created_at: str
    status: str
    """`complete`, `interrupted` or `running`."""
    command: list[str]
    system: System | None
    cases: list[MeasuredCase]
    communication: Communication | None = None
    """Who took part and what carried the data, where several ranks did."""
    request: Request | None = None
    """How the cases were measured."""


class Percentile(msgspec.Struct, frozen=True, kw_only=True):
    percent: float
    seconds: float


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """What the samples of one measured case say; seconds per iteration."""

    summary: Summary
    percentiles: list[Percentile]
    drift: float
    """Median of the later half over that of the earlier half, minus one."""
    device_median_s: float | None
    histogram: Histogram


class CaseView(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a results table and everything known about it."""

    anchor: str
    """Unique in the report."""
    run_id: str
    result: CaseResult
    difference: str
    """What sets this case apart from the others of its benchmark in this table, or from what the benchmark usually is;
    empty where nothing does."""
    timing: Timing | None
    """None for a case that failed or was skipped."""
    series: SampleSeries
    metrics: dict[str, Value]
    """Every metric that the case has, by name."""
    marks: dict[str, str] = {}
    """What stands behind the value of a metric in tables."""
    untabled: list[str] = []
    """Metrics that tables do not show for this case."""
    failed_metrics: dict[str, str] = {}
    """Metrics that could not be computed, with the cause."""

    @property
    def benchmark(self) -> Benchmark:
        return self.result.case.benchmark

    @property
    def spec(self) -> Spec:
        return self.result.case.spec

    @property
    def unit(self) -> str | None:
        return self.result.score.unit if self.result.score is not None else None

    def value(self, name: str) -> float | None:
        """The value of a metric that is a number; None where the case does not have it."""
        found = self.metrics.get(name)
        return None if found is None or isinstance(found, str) else found

    @property
    def size_bytes(self) -> float | None:
        return self.value("size_bytes")

    @property
    def missed_latency(self) -> bool:
        return bool(self.value("missed_latency"))

    @property
    def name(self) -> str:
        """Benchmark, what sets the case apart, and its batch: enough to find its row."""
        size = f"size={format_bytes(self.size_bytes)}" if self.size_bytes is not None else ""
        rest = " ".join(filter(None, (self.difference, size, _batch(self))))
        return f"{self.benchmark.id} [{rest}]" if rest else self.benchmark.id

    @property
    def cache(self) -> str:
        return (self.spec.cache if isinstance(self.spec, OperatorSpec | CallSpec) else None) or "warm"


class HostMoment(msgspec.Struct, frozen=True, kw_only=True):
    """What may differ between two runs of one system."""

    name: str
    governor: str | None
    load: Load


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created_at: str
    status: str
    command: str
    """Quoted for a shell."""
    hosts: list[HostMoment]
    commit: str | None
    ok: int
    failed: int
    skipped: int


class SystemView(msgspec.Struct, frozen=True, kw_only=True):
    """One table: every case measured on one system."""

    fingerprint: str | None
    """None where the run kept no record of its system; such a run has a table to itself."""
    name: str
    system: System | None
    runs: list[RunView]
    cases: list[CaseView]
    sweeps: list[SweepCurves]
    rooflines: list[Roofline]
    pairs: list[PairView] = []
    """Matrices of point-to-point measurements."""
    coverage: ScaleScope | None = None
    shared: list[str] = []
    """What is unusual in every row alike (`scale=tiny`), and is therefore said in none."""


class Report(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="report"):
    schema_version: int = 1
    tool_version: str
    systems: list[SystemView]
    sweeps: list[SweepCurves] = []
    """Benchmarks that were measured on several systems; a table never mixes those, a plot with names may."""

    @property
    def cases(self) -> list[CaseView]:
        return [case for system in self.systems for case in system.cases]


def build_report(runs: Sequence[ReportRun]) -> Report:
    """Groups by system fingerprint in the order of first appearance; reads nothing from disk."""
    groups: dict[str, list[ReportRun]] = {}
    for position, run in enumerate(runs):
        # Two unknown systems may be two different ones.
        group = run.system.fingerprint if run.system is not None else f"unknown-{position}"
        groups.setdefault(group, []).append(run)
    numbers = count(1)
    systems = [_view_system(group, numbers) for group in groups.values()]
    return Report(tool_version=__version__, systems=systems, sweeps=_sweeps_across(systems, runs))


def _view_system(runs: Sequence[ReportRun], numbers: count[int]) -> SystemView:
    system = runs[0].system
    pairs = _order_cases(runs)
    labels = label_cases((measured.result.case for _, measured in pairs), hidden=SIZE_COLUMN)
    ceilings = [find_ceilings(run.cases) for run in runs]
    cases = [
        _view_case(
            runs[place],
            measured,
            difference=labels.differences[measured.key],
            anchor=f"case-{next(numbers)}",
            ceilings=ceilings[place].get(measured.result.case.spec.device or ""),
        )
        for place, measured in pairs
    ]
    points = [
        (place, case.spec.device or "", point)
        for (place, _), case in zip(pairs, cases, strict=True)
        if not case.spec.is_measured_peak and (point := _roofline_point(case)) is not None
    ]
    several = len(runs) > 1
    return SystemView(
        fingerprint=system.fingerprint if system is not None else None,
        name=system.name if system is not None else "unknown system",
        system=system,
        runs=[_view_run(run) for run in runs],
        cases=cases,
        sweeps=find_sweeps(
            _sweep_inputs(cases, lambda one: (one.difference, _batch(one), one.run_id if several else ""))
        ),
        rooflines=find_rooflines([run.id for run in runs], ceilings, points),
        pairs=find_pairs((run.id, run.cases) for run in runs),
        coverage=find_coverage(((one.result for one in run.cases), run.communication) for run in runs),
        shared=labels.shared,
    )


def _order_cases(runs: Sequence[ReportRun]) -> list[tuple[int, MeasuredCase]]:
    """By benchmark, then case, then run: what is read side by side stands side by side. With the run's place."""
    pairs = [(place, measured) for place, run in enumerate(runs) for measured in run.cases]
    benchmarks: dict[str, int] = {}
    keys: dict[str, int] = {}
    for _, measured in pairs:
        benchmarks.setdefault(measured.result.case.benchmark.id, len(benchmarks))
        keys.setdefault(measured.key, len(keys))
    return sorted(pairs, key=lambda pair: (benchmarks[pair[1].result.case.benchmark.id], keys[pair[1].key]))


def _view_case(
    run: ReportRun, measured: MeasuredCase, *, difference: str, anchor: str, ceilings: Ceilings | None
) -> CaseView:
    given = CaseInput(measured, ceilings)
    outcomes = evaluate_case(given)
    values = {name: value for name, outcome in outcomes.items() if (value := read_value(outcome)) is not None}
    declared = [one for one in list_metrics().values() if one.name in values]
    return CaseView(
        anchor=anchor,
        run_id=run.id,
        result=measured.result,
        difference=difference,
        timing=_view_timing(given),
        series=read_series(measured),
        metrics=values,
        marks={one.name: mark for one in declared if one.mark is not None and (mark := one.mark(given))},
        untabled=[one.name for one in declared if one.only_for is not None and not one.only_for(given)],
        failed_metrics={name: found.cause for name, found in outcomes.items() if isinstance(found, Failed)},
    )


def _view_timing(case: CaseInput) -> Timing | None:
    if case.summary is None:
        return None
    ordered, device = sorted(case.times_s), case.measured.device_seconds()
    return Timing(
        summary=case.summary,
        percentiles=[Percentile(percent=p, seconds=quantile_sorted(ordered, p / 100)) for p in PERCENTILES],
        drift=drift(case.times_s),
        device_median_s=median(device) if device else None,
        histogram=count_bins(ordered),
    )


def _view_run(run: ReportRun) -> RunView:
    statuses = [measured.result.status for measured in run.cases]
    hosts = run.system.hosts if run.system is not None else []
    git = run.system.git if run.system is not None else None
    return RunView(
        id=run.id,
        created_at=run.created_at,
        status=run.status,
        command=shlex.join(run.command),
        hosts=[HostMoment(name=host.name, governor=host.cpu.governor, load=host.load) for host in hosts],
        commit=f"{git.commit}{' with local changes' if git.dirty else ''}" if git is not None else None,
        ok=statuses.count("ok"),
        failed=statuses.count("failed"),
        skipped=statuses.count("skipped"),
    )


def _sweep_inputs(
    cases: Iterable[CaseView], label: Callable[[CaseView], Iterable[str]]
) -> Iterator[tuple[str, str, SweepPoint]]:
    for case in cases:
        if (point := _sweep_point(case)) is not None:
            yield case.benchmark.id, ", ".join(filter(None, label(case))), point


def _sweeps_across(systems: Sequence[SystemView], runs: Sequence[ReportRun]) -> list[SweepCurves]:
    places = Counter(name for system in systems for name in {sweep.benchmark for sweep in system.sweeps})
    shared = {name for name, count in places.items() if count > 1}
    if not shared:
        return []
    labels = label_cases((case.result.case for run in runs for case in run.cases), hidden=SIZE_COLUMN).differences
    return find_sweeps(
        one
        for system in systems
        for one in _sweep_inputs(
            [case for case in system.cases if case.benchmark.id in shared],
            lambda case, name=system.name: (name, labels[case.result.case.key], _batch(case), case.run_id),  # type: ignore[misc]
        )
    )


def _batch(case: CaseView) -> str:
    return f"batch={case.result.case.batch_size}" if case.result.case.batch_size is not None else ""


def _sweep_point(case: CaseView) -> SweepPoint | None:
    if case.timing is None or case.size_bytes is None or is_in_matrix(case):
        return None
    summary = case.timing.summary
    return SweepPoint(
        size_bytes=case.size_bytes,
        median_s=summary.median_s,
        ci_low_s=summary.ci_low_s,
        ci_high_s=summary.ci_high_s,
        algbw_bytes_per_s=case.value("algbw_bytes_per_s"),
        busbw_bytes_per_s=case.value("busbw_bytes_per_s"),
    )


def _roofline_point(case: CaseView) -> RooflinePoint | None:
    intensity, flops, moved = map(case.value, ("intensity_flops_per_byte", "flops_per_s", "bytes_per_s"))
    if case.timing is None or intensity is None or flops is None or moved is None:
        return None
    return RooflinePoint(
        anchor=case.anchor,
        label=case.name,
        operator=case.spec.op if isinstance(case.spec, OperatorSpec | CallSpec) else case.benchmark.model,
        dtype=case.spec.dtype or "",
        cache=case.cache,
        intensity=intensity,
        median_s=case.timing.summary.median_s,
        flops_per_s=flops,
        bytes_per_s=moved,
        compute_share=case.value("compute_share"),
        memory_share=case.value("memory_share"),
    )
