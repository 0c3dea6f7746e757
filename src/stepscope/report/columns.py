"""Which columns a results table has and what stands in them; shared by text, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepscope.core.units import format_bytes, format_duration, format_significant
from stepscope.metrics import Metric, Value, list_metrics
from stepscope.records.kinds import WorkloadObserved
from stepscope.report.charts import TimeScale, choose_time_scale, format_interval
from stepscope.report.labels import format_flop_rate, format_percent
from stepscope.report.table import NONE, Cell, Column
from stepscope.report.view import CaseView, SystemView
from stepscope.stats import Summary

DETAIL, METRIC = 2, 1
"""What is left out first where there is no room, and what is left out then."""


def choose_columns(system: SystemView, *, scale: TimeScale | None = None) -> list[Column[CaseView]]:
    """The published seven, with those added that this system's cases fill.

    With `scale` all times are in that unit, which the column names; without it each row names its own.
    """
    cases = system.cases
    columns: list[Column[CaseView]] = [
        Column("Model", lambda case: _text(case.benchmark.model), role="benchmark"),
        Column("Implementation", lambda case: _text(case.benchmark.implementation), role="benchmark"),
        Column("Mode", lambda case: _text(case.benchmark.mode), role="benchmark"),
        Column("Config", lambda case: _text(case.benchmark.config), role="benchmark"),
    ]
    if any(case.difference for case in cases):
        columns.append(Column("Case", lambda case: _text(case.difference or NONE), role="case"))
    if any(case.size_bytes is not None for case in cases):
        columns.append(Column("Size", lambda case: _number(case.size_bytes, format_bytes), True, role="case"))
    columns.append(Column("Batch Size", lambda case: _number(case.result.case.batch_size, str), True, role="setting"))
    for one in list_metrics().values():
        if one.name == "score" or any(_is_tabled(one, case) for case in cases):
            columns.append(make_column(one, scale))
        if one.name == "score":
            columns.append(Column("Units", lambda case: _text(case.unit or NONE), role="setting"))
        elif one.name == "memory_share":  # what a score means stands before the times that it comes from
            columns += _time_columns(cases, scale)
    if any(case.result.notices for case in cases):
        columns.append(
            Column("Notices", lambda case: _number(len(case.result.notices), str), numeric=True, drop=DETAIL)
        )
    if len(system.runs) > 1:
        endings = {run.id: run.id.rpartition("-")[2] for run in system.runs}
        brief = endings if len(set(endings.values())) == len(endings) else {}
        columns.append(
            Column("Run", lambda case: _text(case.run_id), role="setting",
                   brief=lambda case: brief.get(case.run_id, case.run_id))
        )  # fmt: skip
    return columns


def _is_tabled(one: Metric, case: CaseView) -> bool:
    return one.column != "none" and one.name in case.metrics and one.name not in case.untabled


def make_column(one: Metric, scale: TimeScale | None) -> Column[CaseView]:
    """The column of a metric, in the unit that it declares."""
    units = {"s": scale.unit if scale is not None else "", "B/s": "GB/s"}

    def cell(case: CaseView) -> Cell:
        if one.name == "score" and case.result.status != "ok":
            return Cell(case.result.status)
        if not _is_tabled(one, case):
            return Cell(NONE)
        value = case.metrics[one.name]
        return Cell(format_value(one.unit, value, scale) + case.marks.get(one.name, ""), value)

    drop = 0 if one.name == "score" else DETAIL if one.column == "detail" else METRIC
    return Column(one.title, cell, one.unit not in _WORDS, units.get(one.unit, ""), drop, hint=one.hint)


_WORDS = frozenset({"text", "rank", "yes/no"})
_FORMATS: dict[str, Callable[[float], str]] = {
    "B": format_bytes,
    "B/s": lambda value: format_significant(value / 1e9),
    "flop/s": format_flop_rate,
    "fraction": format_percent,
    "count": lambda value: str(int(value)),
    "rank": lambda value: f"rank {int(value)}",
    "yes/no": lambda value: "yes" if value else "no",
}


def format_value(unit: str, value: Value, scale: TimeScale | None = None) -> str:
    """A metric's value as tables show it; rates without their prefix."""
    if isinstance(value, str):
        return value
    if unit == "s":
        return (scale.format if scale is not None else format_duration)(value)
    return _FORMATS.get(unit, format_significant)(value)


_UNITS = {"B/s": " GB/s", "1/s": "/s", "J": " J", "flop/B": " flop per byte"}


def format_with_unit(unit: str, value: Value) -> str:
    """The same where no title names the unit."""
    return format_value(unit, value) + _UNITS.get(unit, "")


def _time_columns(cases: Sequence[CaseView], scale: TimeScale | None) -> list[Column[CaseView]]:
    if all(case.timing is None for case in cases):
        return []
    unit = scale.unit if scale is not None else ""

    def column(title: str, read: Callable[[Summary], Cell], hint: str, unit: str = unit) -> Column[CaseView]:
        return Column(
            title, lambda case: Cell(NONE) if case.timing is None else read(case.timing.summary), True, unit, hint=hint
        )

    def median(summary: Summary) -> Cell:
        return Cell((scale.format if scale is not None else format_duration)(summary.median_s), summary.median_s)

    def interval(summary: Summary) -> Cell:
        row_scale = scale or choose_time_scale(summary.median_s)
        text = format_interval(summary.ci_low_s, summary.ci_high_s, row_scale)
        return Cell(text if scale is not None else f"{text} {row_scale.unit}", summary.relative_half_width)

    return [
        column("Median", median, "Time of one iteration: half of the samples took longer"),
        column("Interval", interval, "Where the true median lies, with at least 95 % confidence where n allows"),
        column("n", lambda summary: _number(summary.n, str), "Samples measured, warm-ups not counted", unit=""),
    ]


def _text(text: str) -> Cell:
    return Cell(text, text)


def _number(value: float | None, format_value: Callable[[float], str]) -> Cell:
    return Cell(NONE) if value is None else Cell(format_value(value), value)


def explain_fractions(cases: Sequence[CaseView]) -> list[str]:
    """Sentences without a full stop, for below a table that has fractions of peaks."""
    fractions = [list_metrics()[name] for name in ("compute_share", "memory_share")]
    titles = [one.title for one in fractions if any(one.name in case.metrics for case in cases)]
    if not titles:
        return []
    lines = [f"{' and '.join(titles)}: fractions of the peaks that the same run measured on this machine"]
    if any("memory_share" in case.marks for case in cases):
        lines.append("(cache): faster than a copy, since warm caches hold some of the data")
    return lines


def explain(cases: Sequence[CaseView]) -> list[str]:
    """Sentences without a full stop, for below a table: what its columns mean and what its results rest on."""
    return [*explain_fractions(cases), *explain_generation(cases), *disclose(cases), *_name_failed_metrics(cases)]


def _name_failed_metrics(cases: Sequence[CaseView]) -> list[str]:
    """One sentence per metric and cause, without a full stop."""
    failed: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for told in case.failed_metrics.items():
            failed.setdefault(told, []).append(case.name)
    return [
        f"metric {name} failed in {len(names)} of {len(cases)} cases, for example {names[0]}: {cause}"
        for (name, cause), names in failed.items()
    ]


def disclose(cases: Sequence[CaseView]) -> list[str]:
    """What optimized implementations changed, and what had to be changed to run at all: part of the result."""
    lines: dict[str, None] = {}
    for case in cases:
        found = case.result.observed
        told = {"changes": found.changes, "porting": found.porting} if isinstance(found, WorkloadObserved) else {}
        for kind, text in told.items():
            if text is not None:
                lines[f"{kind} in {case.benchmark.id} ({case.spec.precision}): {text}"] = None
    return list(lines)


# Latency limits: what they are on, and which rows missed them


def describe_target(case: CaseView) -> str | None:
    """`p95 of a batch ≤ 20 ms`, where the benchmark has a latency target."""
    if case.timing is None:  # nobody knows what it would have been judged by
        return _describe(case, "")
    return _describe(case, " of TTFT" if generates(case) else " of a batch")


def _describe(case: CaseView, what: str) -> str | None:
    target = case.result.latency_target
    return f"p{target.percentile:g}{what} ≤ {format_duration(target.limit_s)}" if target is not None else None


def explain_stars(cases: Sequence[CaseView]) -> list[str]:
    """What each `*` of a table says, without the mark itself; one sentence per limit, without a full stop."""
    batches = _group(cases, lambda case: case.missed_latency, describe_target)
    served = _group(
        cases, lambda case: bool(case.value("serving_missed_latency")),
        lambda case: _describe(case, " of TTFT with waiting"),
    )  # fmt: skip
    return [
        *(f"missed its latency limit, {limit}: {names}" for limit, names in batches),
        *(
            f"at Served TTFT: missed {limit}, or more was offered than full batches do: {names}"
            for limit, names in served
        ),
    ]


def _group(
    cases: Sequence[CaseView], is_late: Callable[[CaseView], bool], describe: Callable[[CaseView], str | None]
) -> list[tuple[str, str]]:
    """Limits, and the benchmarks that missed each."""
    found: dict[str, dict[str, None]] = {}
    for case in cases:
        if is_late(case):
            found.setdefault(describe(case) or "its latency limit", {})[case.benchmark.id] = None
    return [(limit, ", ".join(names)) for limit, names in found.items()]


# Models that generate text


def generates(case: CaseView) -> bool:
    return "ttft_p50_s" in case.metrics


def explain_generation(cases: Sequence[CaseView]) -> list[str]:
    """Sentences without a full stop, for below a table in which text is generated."""
    if not any(generates(case) for case in cases):
        return []
    lines = ["TTFT: time to first token, on which the latency limit is; TPOT: each token after it"]
    if any(generates(case) and case.result.latency_target is not None for case in cases):
        lines.append("P95 and P99 of a model that generates: from the prompts to the last token")
    if any("serving_requests" in case.metrics for case in cases):
        lines.append("Served: requests that came at their own pace, after the timed batches; waiting is included")
    return lines
