"""Hardware counters of kernels by the operator that launched them, and counters over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.analyze.section import Field, Section, field, make_table
from stepscope.analyze.step.kernels import NO_OPERATOR
from stepscope.analyze.step.numbers import distinct
from stepscope.analyze.step.view import TraceView, view
from stepscope.formats.nesting import look_up
from stepscope.formats.timeline import COUNTER, KERNEL, MISSING, OPERATOR, OTHER, RUNTIME, Integers, Timeline

if TYPE_CHECKING:
    from stepscope.analyze.job import JobReport

NO_COUNTERS = "no counters recorded: the trace has neither counter rows nor profiler ranges"
MOST_COUNTERS = 12
"""In the table of the page; all of them are in the report."""
_COUNTER_MARK = "__"
"""CUPTI writes `unit__what.how`: an object without such a key is no set of counters."""


class OperatorCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of the kernels that one operator launched."""

    operator: str
    """Innermost operator."""
    top_operators: list[str]
    """Outermost operators it was called by."""
    kernels: int
    sums: dict[str, float]
    means: dict[str, float]


class CounterSeries(msgspec.Struct, frozen=True, kw_only=True):
    """A counter over time."""

    name: str
    samples: int
    min: float
    max: float
    mean: float
    """Mean of the samples."""
    time_mean: float
    """Each sample weighted by the time until the next; equal to mean where all have one time."""


class CounterReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a step."""

    step: int | None
    ranges: int
    """Profiler ranges: one a kernel."""
    matched: int
    """Ranges whose launch was found."""
    matched_by: list[str]
    """How: correlation, name, order."""
    counters: list[str]
    by_operator: list[OperatorCounters]
    series: list[CounterSeries]
    note: str | None = None


def count_by_operator(timeline: Timeline, step: int | None) -> CounterReport:
    """Counters of one step; None: of the whole trace."""
    trace = view(timeline)
    trace.check(step)
    rows, values = _find_ranges(trace)
    launch, ways = _match(trace, rows)
    if step is not None:
        of_launch = launch >= 0
        inside = trace.step[rows] == step
        inside[of_launch] = trace.step[launch[of_launch]] == step
        rows, launch = rows[inside], launch[inside]
        values = [one for one, kept in zip(values, inside, strict=True) if kept]
    series = _find_series(trace, step)
    matched, found = int((launch >= 0).sum()), len(rows)
    note = None if found or series else NO_COUNTERS
    if matched < found:
        note = f"{found - matched} of {found} profiler ranges could not be matched with a launch"
    return CounterReport(
        step=step,
        ranges=found,
        matched=matched,
        matched_by=ways,
        counters=sorted({name for one in values for name in one}),
        by_operator=_sum_up(trace, launch, values),
        series=series,
        note=note,
    )


def _find_ranges(trace: TraceView) -> tuple[Integers, list[dict[str, float]]]:
    """Rows of profiler ranges in order of time, and the counters of each."""
    rows = trace.rows(COUNTER, OTHER)
    codes = trace.column("arguments")[rows] if len(rows) else rows
    rows, codes = rows[codes != MISSING], codes[codes != MISSING]
    parsed = {code: _parse(trace.text(code)) for code in distinct(codes)}
    has_values = np.array([bool(parsed[code]) for code in codes.tolist()], bool)
    rows, codes = rows[has_values], codes[has_values]
    order = np.argsort(trace.start[rows], kind="stable")
    return rows[order], [parsed[code] for code in codes[order].tolist()]


def _parse(text: str) -> dict[str, float]:
    """Numbers of an object that looks like a set of counters; empty for anything else."""
    try:
        content = msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return {}
    if not isinstance(content, dict) or not any(_COUNTER_MARK in name for name in content):
        return {}
    return {name: value for name, found in content.items() if (value := _number(found)) is not None}


def _number(value: object) -> float | None:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _match(trace: TraceView, rows: Integers) -> tuple[Integers, list[str]]:
    """The call that launched what each range counted (−1: not found), and how they were found.

    By correlation where ranges have one; else the n-th range of a name is the n-th kernel of that name on the stream;
    else, where there are as many ranges as launches, the n-th is the n-th. Numbers that differ are never matched: every
    value after the first difference would go to a wrong operator.
    """
    launch = np.full(len(rows), MISSING, np.int64)
    ways = []
    for way, find in (("correlation", _by_correlation), ("name", _by_name), ("order", _by_order)):
        missing = np.flatnonzero(launch == MISSING)
        if len(missing):
            launch[missing] = find(trace, rows[missing])
            if (launch[missing] >= 0).any():
                ways.append(way)
    return launch, ways


def _by_correlation(trace: TraceView, rows: Integers) -> Integers:
    correlation, calls = trace.column("correlation"), trace.rows(RUNTIME)
    return look_up(correlation[rows], correlation[calls], calls)


def _by_name(trace: TraceView, rows: Integers) -> Integers:
    """Ranges that name their stream are counted on it, others over all streams."""
    kernels = trace.rows(KERNEL)
    kernels = kernels[np.argsort(trace.start[kernels], kind="stable")]
    stream = trace.column("stream")
    found = np.full(len(rows), MISSING, np.int64)
    for code in trace.codes_in(rows):
        mine = trace.name[rows] == code
        of_name = kernels[trace.name[kernels] == code]
        for one in distinct(stream[rows[mine]]):
            here = np.flatnonzero(mine & (stream[rows] == one))
            there = of_name if one == MISSING else of_name[stream[of_name] == one]
            if len(here) == len(there):
                found[here] = trace.parent[there]
    return found


def _by_order(trace: TraceView, rows: Integers) -> Integers:
    """Kernels in order of time, or the calls that launch kernels where the profiler recorded no kernels."""
    kernels = trace.rows(KERNEL)
    if len(kernels):
        launches = trace.parent[kernels[np.argsort(trace.start[kernels], kind="stable")]]
    else:
        launches = trace.named(trace.rows(RUNTIME), lambda name: "LaunchKernel" in name or "LaunchCooperative" in name)
        launches = launches[np.argsort(trace.start[launches], kind="stable")]
    return launches if len(launches) == len(rows) else np.full(len(rows), MISSING, np.int64)


def _sum_up(trace: TraceView, launch: Integers, values: Sequence[Mapping[str, float]]) -> list[OperatorCounters]:
    is_operator = trace.is_kind(OPERATOR)
    inner = trace.enclosing(launch, is_operator)
    outer = trace.outermost(inner, is_operator)
    groups: dict[str, list[int]] = {}
    tops: dict[str, dict[str, None]] = {}
    for place, (own, top) in enumerate(zip(inner.tolist(), outer.tolist(), strict=True)):
        name = trace.label(own) or NO_OPERATOR
        groups.setdefault(name, []).append(place)
        if top >= 0:
            tops.setdefault(name, {})[trace.text(int(trace.name[top]))] = None
    found = []
    for name, places in groups.items():
        values_of: dict[str, list[float]] = {}
        for place in places:
            for counter, value in values[place].items():
                values_of.setdefault(counter, []).append(value)
        found.append(
            OperatorCounters(
                operator=name,
                top_operators=list(tops.get(name, {})),
                kernels=len(places),
                sums={counter: sum(each) for counter, each in values_of.items()},
                means={counter: sum(each) / len(each) for counter, each in values_of.items()},
            )
        )
    return sorted(found, key=lambda one: -one.kernels)


def _find_series(trace: TraceView, step: int | None) -> list[CounterSeries]:
    rows = trace.rows_of(step, COUNTER)
    values = trace.column("value")[rows] if len(rows) else rows
    rows, values = (rows[~np.isnan(values)], values[~np.isnan(values)]) if len(rows) else (rows, values)
    series = []
    for code in trace.codes_in(rows):
        mine = trace.name[rows] == code
        order = np.argsort(trace.start[rows[mine]], kind="stable")
        times, found = trace.start[rows[mine]][order], values[mine][order]
        spans = np.diff(times)
        weighted = float((found[:-1] * spans).sum() / spans.sum()) if spans.sum() else float(found.mean())
        series.append(
            CounterSeries(
                name=trace.text(code),
                samples=len(found),
                min=float(found.min()),
                max=float(found.max()),
                mean=float(found.mean()),
                time_mean=weighted,
            )
        )
    return series


def counters_section(job: JobReport) -> Section | None:
    counters = job.detail.counters
    if counters is None:
        return None

    def summed(name: str) -> Field:
        return field(name, lambda one: one.sums.get(name), "value")

    by_operator = make_table(
        "Counters by operator", "Sums over the kernels that each operator launched", counters.by_operator, [
            field("Operator", "operator"),
            field("Kernels", "kernels", "count"),
            *map(summed, counters.counters[:MOST_COUNTERS]),
        ]
    )  # fmt: skip
    series = make_table("Counters over time", "As recorded", counters.series, [
        field("Counter", "name"),
        field("Samples", "samples", "count"),
        field("Mean over time", "time_mean", "value"),
        field("Least", "min", "value"),
        field("Most", "max", "value"),
    ])  # fmt: skip
    first, *rest = [table for table in (by_operator, series) if table.rows]
    return Section(id="counters", title="Counters", tables=[first._replace(is_folded=False), *rest])
