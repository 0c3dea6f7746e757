"""One view model behind every format: plain values, ready to print, grouped so that systems never mix.

Everything here is derived from stored runs on reading; renderers only choose columns and write text.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Literal, NamedTuple

import msgspec

from stepscope._version import __version__
from stepscope.core.units import format_bytes, scale_score
from stepscope.records import (
    CaseResult,
    Communication,
    Failure,
    KernelUse,
    LatencyTarget,
    Load,
    Notice,
    Observed,
    Parameter,
    Reading,
    Scalar,
    Spec,
    Status,
    System,
)
from stepscope.records.kinds import CallSpec, CollectiveObserved, OperatorSpec
from stepscope.report.heatmap import PairView, find_pairs, is_in_matrix
from stepscope.report.labels import label_cases
from stepscope.report.reach import Reach, find_reach
from stepscope.report.rooflines import (
    Roofline,
    RooflineInput,
    RooflinePoint,
    find_rooflines,
    intensity_of,
    rate,
    read_ceilings,
)
from stepscope.report.samples import Histogram, SampleSeries, count_bins, read_series
from stepscope.report.sweeps import Sweep, SweepInput, SweepPoint, find_sweeps
from stepscope.stats import Summary, drift, median, quantile_sorted, summarize
from stepscope.store import TPOT, TTFT, Ceilings, MeasuredCase, Rates, is_ceiling

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
    request: Mapping[str, Any] = {}
    """What was asked of the worker."""


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
    score: float | None
    unit: str | None
    latency_target: LatencyTarget | None
    missed_latency: bool | None
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
    wall_median_s: float | None
    """By the host's clock, launching included; only where the case's own times are the device's."""
    graph_median_s: float | None
    """Replayed as a graph, without launches."""
    kernel_median_s: float | None
    """The kernels alone, by the profiler."""
    kernels: list[KernelUse]
    intensity: float | None
    """Flop per byte of compulsory traffic."""
    flops_per_s: float | None
    bytes_per_s: float | None
    """Compulsory bytes over median time."""
    compute_share: float | None
    """Of the matrix rate that this run measured on this device in this dtype."""
    memory_share: float | None
    """Of the copy bandwidth that this run measured on this device; may exceed 1 with warm caches."""
    algbw_bytes_per_s: float | None
    """Message size over median time; None for what is no collective."""
    busbw_bytes_per_s: float | None
    """The former times the collective's bus factor."""
    skew_s: float | None
    """From the first rank's beginning to the last one's, in the median; None where arrivals were not taken."""
    straggler_rank: int | None
    """The rank that began last most often."""
    straggler_share: float | None
    """Of the iterations in which it did."""
    loader_score: float | None = None
    """As the score, with every batch from a loader; only for whole models."""
    input_share: float | None = None
    """Of a step with a loader: waiting for input."""
    mfu: float | None = None
    """The model's operations a second over the device's stated peak."""
    ttft_s: dict[str, float] = {}
    """Time to first token of the timed batches: `p50`, `p95` and others; empty for what generates no text."""
    tpot_s: dict[str, float] = {}
    """Time of each token after the first."""
    observed: dict[str, Scalar]
    found: Observed | None
    """What was observed, by its kind; the former are its names and values."""
    size_bytes: float | None
    """What was really moved where that was observed, else what was asked for."""
    readings: list[Reading]
    notices: list[Notice]
    failure: Failure | None

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

    @property
    def wrong(self) -> int | None:
        return self.found.wrong if self.found is not None else None


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
    reach: Reach | None = None
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
    ceilings = [read_ceilings(run.cases) for run in runs]
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
        reach=find_reach(((one.result for one in run.cases), run.communication) for run in runs),
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
    result = measured.result
    case, benchmark = result.case, result.case.benchmark
    timing = _view_timing(measured) if result.status == "ok" else None
    algbw, busbw = read_bandwidths(result, timing.summary.median_s if timing is not None else None)
    straggler, straggler_share = measured.straggler() or (None, None)
    on_device = result.timing in {"device", "slowest_rank_device"}
    rates = rate(measured, timing.summary.median_s, ceilings) if timing is not None else Rates(None, None, None, None)
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
        score=_score(measured, timing),
        unit=result.score.unit if result.score is not None else None,
        latency_target=result.latency_target,
        missed_latency=measured.missed_latency() if timing is not None else None,
        started_at=result.started_at,
        elapsed_s=result.elapsed_s,
        is_ceiling=is_ceiling(measured),
        timing_kind=result.timing,
        timing=timing,
        series=read_series(measured),
        wall_median_s=median(measured.wall_seconds()) if timing is not None and on_device else None,
        graph_median_s=median(measured.extra_seconds("graph")) if timing is not None else None,
        kernel_median_s=median(measured.extra_seconds("kernel")) if timing is not None else None,
        kernels=result.kernels,
        intensity=intensity_of(result.observed),
        flops_per_s=rates.flops_per_s,
        bytes_per_s=rates.bytes_per_s,
        compute_share=rates.compute_share,
        loader_score=measured.loader_score() if timing is not None else None,
        input_share=measured.input_share() if timing is not None else None,
        mfu=measured.mfu() if timing is not None else None,
        ttft_s=measured.latency_s(TTFT) if timing is not None else {},
        tpot_s=measured.latency_s(TPOT) if timing is not None else {},
        memory_share=rates.memory_share,
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=busbw,
        skew_s=measured.skew_s(),
        straggler_rank=straggler,
        straggler_share=straggler_share,
        observed=result.facts,
        found=result.observed,
        size_bytes=result.size_bytes,
        readings=result.readings,
        notices=result.notices,
        failure=result.failure,
    )


def _view_timing(measured: MeasuredCase) -> Timing | None:
    values = measured.seconds()
    if not values:
        return None
    ordered = sorted(values)
    device = measured.device_seconds()
    return Timing(
        summary=summarize(ordered),
        percentiles=[Percentile(percent=p, seconds=quantile_sorted(ordered, p / 100)) for p in PERCENTILES],
        drift=drift(values),
        device_median_s=median(device) if device else None,
        histogram=count_bins(ordered),
    )


def _score(measured: MeasuredCase, timing: Timing | None) -> float | None:
    """The same as `MeasuredCase.score`, from the summary at hand: summaries are what building a report costs."""
    rule = measured.result.score
    if rule is None or timing is None or timing.summary.median_s <= 0:
        return None
    typical_s = measured.typical_s(timing.summary)
    return scale_score(rule.work / typical_s, rule.unit) if typical_s else None


def read_bandwidths(result: CaseResult, median_s: float | None) -> tuple[float | None, float | None]:
    """Algorithmic and bus bandwidth as observed, or from size and median where only the bus factor was kept."""
    observed = result.observed
    if observed is None:
        return None, None
    algbw, busbw = None, None
    if isinstance(observed, CollectiveObserved):
        algbw, busbw = observed.algbw_bytes_per_s, observed.busbw_bytes_per_s
    size, factor = observed.size_bytes, observed.bus_factor
    if size is not None and factor is not None and median_s is not None and median_s > 0:
        algbw = size / median_s if algbw is None else algbw
        busbw = algbw * factor if busbw is None else busbw
    return algbw, busbw


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
        algbw_bytes_per_s=case.algbw_bytes_per_s,
        busbw_bytes_per_s=case.busbw_bytes_per_s,
    )


def _roofline_inputs(places: Sequence[int], cases: Sequence[CaseView]) -> list[RooflineInput]:
    return [
        RooflineInput(place, case.spec.device or "", point)
        for place, case in zip(places, cases, strict=True)
        if not case.is_ceiling and (point := _roofline_point(case)) is not None
    ]


def _roofline_point(case: CaseView) -> RooflinePoint | None:
    if case.timing is None or case.intensity is None or case.flops_per_s is None or case.bytes_per_s is None:
        return None
    return RooflinePoint(
        anchor=case.anchor,
        label=case.name,
        operator=case.spec.op if isinstance(case.spec, OperatorSpec | CallSpec) else case.model,
        dtype=case.spec.dtype or "",
        cache=case.cache,
        intensity=case.intensity,
        median_s=case.timing.summary.median_s,
        flops_per_s=case.flops_per_s,
        bytes_per_s=case.bytes_per_s,
        compute_share=case.compute_share,
        memory_share=case.memory_share,
    )
