"""Runs of `bench pattern`: what each communication of a job's step took, and its share of the step.

Everything is derived from the times that ranks took from starting a communication to seeing it done (an iteration's
value is that of its slowest rank), and from how long of that they stood waiting. Where communication overlaps, times in
flight add up to more than the step; times waited never do.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec

from stepscope.core.units import format_bandwidth, format_bytes, format_duration, format_share
from stepscope.records import RankSamples
from stepscope.records.kinds import PatternLookup, PatternObserved, PatternSpec, PatternStep
from stepscope.report.text import align
from stepscope.stats import median, quantile_sorted
from stepscope.store import MeasuredCase

STEP, WAIT = "step:", "wait:"
"""Of the names of times."""
TITLES = ("part", "operation", "steps", "bytes", "median", "p95", "quickest", "busbw", "in flight", "waited")
NONE = "-"


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """One communication of the step."""

    name: str
    part: str
    """Steps that do the same for other layers, buckets or micro-batches have one part."""
    operation: str
    size_bytes: int
    bus_bytes: int
    median_s: float
    p95_s: float
    quickest_s: float
    """Median of the rank that took least, in each iteration: it came last and waited for nobody."""
    share: float
    """Of the whole step: in flight on the slowest rank. Steps that overlap share their time."""
    waited_s: float
    """How long a rank that takes part stood waiting for it, in the mean over ranks."""
    waited_share: float
    """Of all ranks' time in the step."""
    busbw_bytes_per_s: float | None


class LookupView(msgspec.Struct, frozen=True, kw_only=True):
    """Lookups in embedding tables, on the rank that has most."""

    name: str
    tables: int
    rows: int
    moved_bytes: int
    median_s: float
    bytes_per_s: float | None


class PatternView(msgspec.Struct, frozen=True, kw_only=True):
    """One case."""

    key: str
    label: str
    overlap: bool
    world_size: int
    median_s: float
    p95_s: float
    moved_bytes: float | None
    """Bus bytes of the busiest rank in one step."""
    busbw_bytes_per_s: float | None
    wrong: int | None
    steps: list[StepView]
    lookups: list[LookupView]


def by_iteration(samples: Sequence[RankSamples], name: str, fold: Callable[[Sequence[float]], float]) -> list[float]:
    """One value an iteration, from those of the ranks that took part; processes one behind the other."""
    processes: dict[int, list[list[float]]] = defaultdict(list)
    for rank in samples:
        if rank.extra_s.get(name):
            processes[rank.process].append(rank.extra_s[name])
    return [fold(row) for _, columns in sorted(processes.items()) for row in zip(*columns, strict=False)]


def read_pattern(measured: MeasuredCase) -> PatternView | None:
    """None for a case that is no pattern, or that has no samples."""
    seconds, case = sorted(measured.seconds()), measured.result.case
    if not isinstance(case.spec, PatternSpec) or not seconds or seconds[0] <= 0:
        return None
    found = measured.result.observed
    observed = found if isinstance(found, PatternObserved) else PatternObserved()
    step_s, moved = quantile_sorted(seconds, 0.5), observed.busiest_rank_bytes
    return PatternView(
        key=case.key,
        label=case.label,
        overlap=case.spec.overlap,
        world_size=case.world_size,
        median_s=step_s,
        p95_s=quantile_sorted(seconds, 0.95),
        moved_bytes=moved,
        busbw_bytes_per_s=_rate(moved, step_s),
        wrong=observed.wrong,
        steps=[view for step in observed.sequence if (view := _view_step(measured, step, step_s)) is not None],
        lookups=[lookup for one in observed.lookups if (lookup := _view_lookup(measured, one)) is not None],
    )


def _view_lookup(measured: MeasuredCase, lookup: PatternLookup) -> LookupView | None:
    median_s = median(by_iteration(measured.samples, f"{STEP}{lookup.name}", max))
    if median_s is None:
        return None
    rate = _rate(lookup.moved_bytes, median_s)
    return LookupView(**msgspec.structs.asdict(lookup), median_s=median_s, bytes_per_s=rate)


def _view_step(measured: MeasuredCase, step: PatternStep, whole_s: float) -> StepView | None:
    slowest = sorted(by_iteration(measured.samples, f"{STEP}{step.name}", max))
    if not slowest:
        return None
    median_s = quantile_sorted(slowest, 0.5)
    waited_s = median(by_iteration(measured.samples, f"{WAIT}{step.name}", fmean)) or 0.0
    taking_part = len({rank.rank for rank in measured.samples if f"{STEP}{step.name}" in rank.extra_s})
    return StepView(
        **msgspec.structs.asdict(step),
        part=step.name.partition(".")[0],
        median_s=median_s,
        p95_s=quantile_sorted(slowest, 0.95),
        quickest_s=median(by_iteration(measured.samples, f"{STEP}{step.name}", min)) or 0.0,
        share=median_s / whole_s,
        waited_s=waited_s,
        waited_share=waited_s / whole_s * taking_part / measured.result.case.world_size,
        busbw_bytes_per_s=_rate(step.bus_bytes, median_s),
    )


def _rate(moved: float | None, seconds: float) -> float | None:
    return moved / seconds if moved and seconds > 0 else None


def format_pattern_table(cases: Sequence[MeasuredCase]) -> str:
    """One table a case, one row a part; empty where there is no pattern."""
    views = [view for measured in cases if (view := read_pattern(measured)) is not None]
    return "\n#\n".join("\n".join(_format_pattern(view)) for view in views)


def _format_pattern(view: PatternView) -> list[str]:
    how = "overlapped" if view.overlap else "one at a time"
    rate = f", {format_bandwidth(view.busbw_bytes_per_s)} of bus bytes" if view.busbw_bytes_per_s else ""
    moved = f", {format_bytes(view.moved_bytes)} on the busiest rank{rate}" if view.moved_bytes else ""
    head = [
        f"# {view.label}: {how}",
        f"# one step takes {format_duration(view.median_s)} (p95 {format_duration(view.p95_s)}){moved}",
    ]
    parts: dict[str, list[StepView]] = defaultdict(list)
    for step in view.steps:
        parts[step.part].append(step)
    rows = align([TITLES, *(_format_part(name, steps) for name, steps in parts.items())], [False] * 2 + [True] * 8)
    foot = [
        f"# {one.name}: {one.tables} tables of {one.rows:,} rows on the busiest rank, {format_bytes(one.moved_bytes)} "
        f"in {format_duration(one.median_s)}" + (f", {format_bandwidth(one.bytes_per_s)}" if one.bytes_per_s else "")
        for one in view.lookups
    ]
    return [*head, f"# {rows[0]}", *(f"  {row}" for row in rows[1:]), *foot]


def _format_part(name: str, steps: Sequence[StepView]) -> list[str]:
    """Bytes and shares of all steps of the part together; times of the middle one, p95 of the worst."""
    took_s = math.fsum(step.median_s for step in steps)
    rate = _rate(math.fsum(step.bus_bytes for step in steps), took_s)
    return [
        name,
        steps[0].operation,
        str(len(steps)),
        format_bytes(sum(step.size_bytes for step in steps)),
        format_duration(median([step.median_s for step in steps]) or 0.0),
        format_duration(max(step.p95_s for step in steps)),
        format_duration(median([step.quickest_s for step in steps]) or 0.0),
        format_bandwidth(rate) if rate is not None else NONE,
        format_share(math.fsum(step.share for step in steps)),
        format_share(math.fsum(step.waited_share for step in steps)),
    ]
