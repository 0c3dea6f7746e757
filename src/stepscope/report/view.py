"""One view model behind every format: plain values, ready to print, grouped so that systems never mix.

Everything here is derived from stored runs on reading; renderers only choose columns and write text.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Literal, NamedTuple

import msgspec

from stepscope._version import __version__
from stepscope.core.units import format_bytes
from stepscope.metrics import CaseInput, Failed, Value, evaluate_case, list_metrics, read_value
from stepscope.records import (
    Communication,
    Failure,
    KernelUse,
    LatencyTarget,
    Load,
    Notice,
    Observed,
    Parameter,
    Reading,
    Request,
    Scalar,
    Spec,
    Status,
    System,
)
from stepscope.records.kinds import CallSpec, OperatorSpec
from stepscope.report.heatmap import PairView, find_pairs, is_in_matrix
from stepscope.report.labels import Coverage, find_coverage, label_cases
from stepscope.report.series import (
    Histogram,
    Roofline,
    RooflineInput,
    RooflinePoint,
    SampleSeries,
    Sweep,
    SweepInput,
    SweepPoint,
    count_bins,
    find_rooflines,
    find_sweeps,
    read_series,
)
from stepscope.stats import Summary, drift, median, quantile_sorted
from stepscope.store import Ceilings, MeasuredCase, find_ceilings

RunStatus = Literal["complete", "interrupted", "running"]
TimingKind = Literal["own", "slowest_rank", "device", "slowest_rank_device"]

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
    key: str
    benchmark: str
    model: str
    implementation: str
    mode: str
    config: str
    version: int
    difference: str
    """What sets this case apart from the others of its benchmark in this table, or from what the benchmark usually is;
    empty where nothing does."""
    parameters: dict[str, Parameter]
    spec: Spec
    """What was asked for, by its kind; the parameters are its names and values."""
    batch_size: int | None
    world_size: int
    status: Status
    unit: str | None
    latency_target: LatencyTarget | None
    started_at: str
    elapsed_s: float
    is_ceiling: bool
    """Measured to know what the machine can do at best."""
    timing_kind: TimingKind
    """Whose times are the case's: those of the host's clock, of the slowest rank, of the device, or of the slowest
    rank's device."""
    timing: Timing | None
    """None for a case that failed or was skipped."""
    series: SampleSeries
    kernels: list[KernelUse]
    metrics: dict[str, Value]
    """Every metric that the case has, by name."""
    marks: dict[str, str] = {}
    """What stands behind the value of a metric in tables."""
    untabled: list[str] = []
    """Metrics that tables do not show for this case."""
    failed_metrics: dict[str, str] = {}
    """Metrics that could not be computed, with the cause."""
    observed: dict[str, Scalar]
    found: Observed | None
    """What was observed, by its kind; the former are its names and values."""
    readings: list[Reading]
    notices: list[Notice]
    failure: Failure | None

    def value(self, name: str) -> float | None:
        """The value of a metric that is a number; None where the case does not have it."""
        found = self.metrics.get(name)
        return None if found is None or isinstance(found, str) else found

    @property
    def score(self) -> float | None:
        return self.value("score")

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
        batch = f"batch={self.batch_size}" if self.batch_size is not None else ""
        rest = " ".join(part for part in (self.difference, size, batch) if part)
        return f"{self.benchmark} [{rest}]" if rest else self.benchmark

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
    sweeps: list[Sweep]
    rooflines: list[Roofline]
    pairs: list[PairView] = []
    """Matrices of point-to-point measurements."""
    coverage: Coverage | None = None
    shared: list[str] = []
    """What is unusual in every row alike (`scale=tiny`), and is therefore said in none."""


class Report(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="report"):
    schema_version: int = 1
    tool_version: str
    systems: list[SystemView]
    sweeps: list[Sweep] = []
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
    places = [place for place, _ in pairs]
    return SystemView(
        fingerprint=system.fingerprint if system is not None else None,
        name=system.name if system is not None else "unknown system",
        system=system,
        runs=[_view_run(run) for run in runs],
        cases=cases,
        sweeps=find_sweeps(_sweep_inputs(cases, several_runs=len(runs) > 1)),
        rooflines=find_rooflines([run.id for run in runs], ceilings, _roofline_inputs(places, cases)),
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
    result, given = measured.result, CaseInput(measured, ceilings)
    case, benchmark, outcomes = result.case, result.case.benchmark, evaluate_case(given)
    values = {name: value for name, outcome in outcomes.items() if (value := read_value(outcome)) is not None}
    declared = [one for one in list_metrics().values() if one.name in values]
    return CaseView(
        anchor=anchor,
        run_id=run.id,
        key=case.key,
        benchmark=benchmark.id,
        model=benchmark.model,
        implementation=benchmark.implementation,
        mode=benchmark.mode,
        config=benchmark.config,
        version=benchmark.version,
        difference=difference,
        parameters=case.parameters,
        spec=case.spec,
        batch_size=case.batch_size,
        world_size=case.world_size,
        status=result.status,
        unit=result.score.unit if result.score is not None else None,
        latency_target=result.latency_target,
        started_at=result.started_at,
        elapsed_s=result.elapsed_s,
        is_ceiling=case.spec.is_measured_peak,
        timing_kind=result.timing,
        timing=_view_timing(given),
        series=read_series(measured),
        kernels=result.kernels,
        metrics=values,
        marks={one.name: mark for one in declared if one.mark is not None and (mark := one.mark(given))},
        untabled=[one.name for one in declared if one.only_for is not None and not one.only_for(given)],
        failed_metrics={name: found.cause for name, found in outcomes.items() if isinstance(found, Failed)},
        observed=result.facts,
        found=result.observed,
        readings=result.readings,
        notices=result.notices,
        failure=result.failure,
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


def _sweep_inputs(cases: Sequence[CaseView], *, several_runs: bool) -> list[SweepInput]:
    return [
        SweepInput(case.benchmark, _line_label(case, several_runs=several_runs), point)
        for case in cases
        if (point := _sweep_point(case)) is not None
    ]


def _sweeps_across(systems: Sequence[SystemView], runs: Sequence[ReportRun]) -> list[Sweep]:
    places = Counter(name for system in systems for name in {sweep.benchmark for sweep in system.sweeps})
    shared = {name for name, count in places.items() if count > 1}
    if not shared:
        return []
    labels = label_cases((case.result.case for run in runs for case in run.cases), hidden=SIZE_COLUMN)
    return find_sweeps(
        SweepInput(
            case.benchmark, _join_label(system.name, labels.differences[case.key], _batch(case), case.run_id), point
        )
        for system in systems
        for case in system.cases
        if case.benchmark in shared and (point := _sweep_point(case)) is not None
    )


def _line_label(case: CaseView, *, several_runs: bool) -> str:
    return _join_label(case.difference, _batch(case), case.run_id if several_runs else "")


def _batch(case: CaseView) -> str:
    return f"batch={case.batch_size}" if case.batch_size is not None else ""


def _join_label(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


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


def _roofline_inputs(places: Sequence[int], cases: Sequence[CaseView]) -> list[RooflineInput]:
    return [
        RooflineInput(place, case.spec.device or "", point)
        for place, case in zip(places, cases, strict=True)
        if not case.is_ceiling and (point := _roofline_point(case)) is not None
    ]


def _roofline_point(case: CaseView) -> RooflinePoint | None:
    intensity, flops, moved = map(case.value, ("intensity_flops_per_byte", "flops_per_s", "bytes_per_s"))
    if case.timing is None or intensity is None or flops is None or moved is None:
        return None
    return RooflinePoint(
        anchor=case.anchor,
        label=case.name,
        operator=case.spec.op if isinstance(case.spec, OperatorSpec | CallSpec) else case.model,
        dtype=case.spec.dtype or "",
        cache=case.cache,
        intensity=intensity,
        median_s=case.timing.summary.median_s,
        flops_per_s=flops,
        bytes_per_s=moved,
        compute_share=case.value("compute_share"),
        memory_share=case.value("memory_share"),
    )
