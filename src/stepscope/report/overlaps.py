"""Runs of `bench overlap` (what is hidden, what each side pays) and `bench pattern` (what each communication took).

Overlaps are derived from the times of single cycles, in which each side ran alone and all ran together; a cycle's value
is that of its slowest rank. Values of one cycle are compared with each other only, so that what disturbs a machine for
a while disturbs both sides of a ratio.

Patterns are derived from the times that ranks took from starting a communication to seeing it done, and from how long
of that they stood waiting. Where communication overlaps, times in flight add up to more than the step; times waited
never do.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from stepscope.core.units import format_bandwidth, format_bytes, format_duration, format_ratio, format_share
from stepscope.records import RankSamples
from stepscope.records.kinds import (
    COMM,
    COMPUTE,
    TOGETHER,
    OverlapObserved,
    OverlapSpec,
    PatternLookup,
    PatternObserved,
    PatternSpec,
    PatternStep,
)
from stepscope.report.table import NONE, Column, format_table, show
from stepscope.stats import DEFAULT_LEVEL, mean, median, median_interval, quantile_sorted
from stepscope.store import MeasuredCase


class OverlapEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Median over cycles, and the interval of it that needs no assumption but independent cycles."""

    value: float
    low: float
    high: float
    level: float
    """Coverage the interval really has at this n."""
    n: int


class SideView(msgspec.Struct, frozen=True, kw_only=True):
    """One of the things that ran beside each other."""

    name: str
    """`compute`, `comm`, `comm2` …: the name its times have in the samples."""
    what: str
    """The kernel or the collective."""
    alone_s: float
    beside_s: float
    slowdown: OverlapEstimate | None
    """Time beside the others over time alone, by cycle."""
    size_bytes: float | None = None
    bus_bytes: float | None = None
    """None for what computes."""

    @property
    def alone_busbw(self) -> float | None:
        return self.bus_bytes / self.alone_s if self.bus_bytes and self.alone_s > 0 else None


class OverlapView(msgspec.Struct, frozen=True, kw_only=True):
    """One case."""

    key: str
    label: str
    world_size: int
    repeat: int | None
    """Kernels per measurement; None where nothing computes."""
    sides: list[SideView]
    """The collectives as they were asked for, then what computes."""
    together_s: float
    efficiency: OverlapEstimate | None
    busbw_bytes_per_s: float | None
    """All collectives' bus bytes over the joint time."""
    wrong: int | None


def overlap_efficiency(alone_s: Sequence[float], together_s: float) -> float | None:
    """(sum − together) / (sum − longest): 1 where all is hidden behind the longest, 0 where one followed the other.

    Of two sides the denominator is the shorter one's time. Below 0: together takes longer than one after the other;
    above 1: shorter than the longest alone (noise, or a clock that rose). None where there is nothing to hide.
    """
    total = math.fsum(alone_s)
    hideable = total - max(alone_s)
    return (total - together_s) / hideable if hideable > 0 else None


def by_iteration(samples: Sequence[RankSamples], name: str, fold: Callable[[Sequence[float]], float]) -> list[float]:
    """One value per iteration, from those of the ranks that took part; processes one behind the other."""
    processes: dict[int, list[list[float]]] = defaultdict(list)
    for rank in samples:
        if rank.extra_s.get(name):
            processes[rank.process].append(rank.extra_s[name])
    return [fold(row) for _, columns in sorted(processes.items()) for row in zip(*columns, strict=False)]


def estimate(values: Sequence[float], level: float = DEFAULT_LEVEL) -> OverlapEstimate | None:
    if not values:
        return None
    ordered = sorted(values)
    low, high, covered = median_interval(ordered, level)
    return OverlapEstimate(value=median(ordered) or 0.0, low=low, high=high, level=covered, n=len(ordered))


def read_overlap(measured: MeasuredCase) -> OverlapView | None:
    """None for a case that is no overlap, or that has no samples."""
    together = by_iteration(measured.samples, TOGETHER, max)
    names = _side_names(measured)
    if not isinstance(measured.result.case.spec, OverlapSpec) or not together or not names:
        return None
    found = measured.result.observed
    observed = found if isinstance(found, OverlapObserved) else OverlapObserved()
    alone = {name: by_iteration(measured.samples, name, max) for name in names}
    cycles = zip(zip(*alone.values(), strict=True), together, strict=True)
    efficiencies = [overlap_efficiency(row, joint_s) for row, joint_s in cycles]
    together_s = median(together) or 0.0
    sides = [_view_side(measured, observed, name, alone[name]) for name in names]
    bus_bytes = math.fsum(side.bus_bytes or 0.0 for side in sides)
    return OverlapView(
        key=measured.key,
        label=measured.result.case.label,
        world_size=measured.result.case.world_size,
        repeat=observed.repeat,
        sides=sides,
        together_s=together_s,
        efficiency=estimate([value for value in efficiencies if value is not None]),
        busbw_bytes_per_s=bus_bytes / together_s if bus_bytes and together_s > 0 else None,
        wrong=observed.wrong,
    )


def _side_names(measured: MeasuredCase) -> list[str]:
    """Those with both times, in the order in which the samples have them."""
    found = dict.fromkeys(name for rank in measured.samples for name in rank.extra_s)
    return [name for name in found if f"{name}_beside" in found]


def _view_side(measured: MeasuredCase, observed: OverlapObserved, name: str, alone: Sequence[float]) -> SideView:
    spec, beside = measured.result.case.spec, by_iteration(measured.samples, f"{name}_beside", max)
    assert isinstance(spec, OverlapSpec)
    side = next((one for one in observed.sides if one.name == name), None)
    what = side.collective if side is not None else spec.compute
    return SideView(
        name=name,
        what=str(what or name),
        alone_s=median(alone) or 0.0,
        beside_s=median(beside) or 0.0,
        slowdown=estimate([b / a for a, b in zip(alone, beside, strict=True) if a > 0]),
        size_bytes=side.size_bytes if side is not None else None,
        bus_bytes=side.bus_bytes if side is not None else None,
    )


class _SideRow(NamedTuple):
    """A side of a case; the first of them also shows what all did together."""

    view: OverlapView
    side: SideView
    is_first: bool


def _joint_column(title: str, text: Callable[[OverlapView], str], *, drop: int = 0) -> Column[_SideRow]:
    return Column(title, lambda row: text(row.view) if row.is_first else "", numeric=True, drop=drop)


def _kernels(row: _SideRow) -> str:
    return str(row.view.repeat) if row.side.name == COMPUTE and row.view.repeat is not None else NONE


OVERLAPS: tuple[Column[_SideRow], ...] = (
    Column("what", lambda row: row.side.what if row.side.name == COMM else f"+ {row.side.what}", role="case"),
    Column("size", lambda row: show(row.side.size_bytes, format_bytes), True, role="case"),
    Column("kernels", _kernels, numeric=True, drop=2),
    Column("alone", lambda row: format_duration(row.side.alone_s), numeric=True),
    Column("beside", lambda row: format_duration(row.side.beside_s), numeric=True, drop=1),
    Column("slow-down", lambda row: _value(row.side.slowdown, format_ratio), numeric=True, drop=1),
    Column("[low, high]", lambda row: _interval(row.side.slowdown, format_ratio), numeric=True, drop=1),
    Column("bus alone", lambda row: show(row.side.alone_busbw, format_bandwidth), numeric=True, drop=2),
    _joint_column("together", lambda view: format_duration(view.together_s), drop=1),
    _joint_column("efficiency", lambda view: _value(view.efficiency, format_share)),
    _joint_column("[low, high]", lambda view: _interval(view.efficiency, format_share)),
    _joint_column("bus together", lambda view: show(view.busbw_bytes_per_s, format_bandwidth), drop=2),
    _joint_column("n", lambda view: show(view.efficiency, lambda found: str(found.n))),
    _joint_column("#wrong", lambda view: show(view.wrong, str, "N/A"), drop=1),
)
_HEAD = (
    "efficiency = (sum of times alone − time together) / (sum − longest): 100 % all hidden, 0 % one after the other",
    "times are medians over cycles of the slowest rank; [low, high] is the interval of the median over cycles",
    "slow-down = time beside the others / time alone; bus: bytes over the time alone, and of all over the joint time",
)


def format_overlap_table(cases: Sequence[MeasuredCase], *, width: int | None = None) -> str:
    """A few rows per case: one per side, the first with what they did together. Empty where no case is an overlap."""
    views = [view for measured in cases if (view := read_overlap(measured)) is not None]
    if not views:
        return ""
    rows = [
        _SideRow(view, side, is_first=place == 0)
        for view in views
        for place, side in enumerate(sorted(view.sides, key=lambda side: side.name == COMPUTE))
    ]
    levels = sorted({view.efficiency.level for view in views if view.efficiency is not None})
    covered = f"# intervals cover the median with {format_share(levels[0])} or more" if levels else "#"
    return "\n".join([*(f"# {line}" for line in _HEAD), covered, *format_table(OVERLAPS, rows, width=width)])


def _value(found: OverlapEstimate | None, form: Callable[[float], str]) -> str:
    return show(found, lambda one: form(one.value))


def _interval(found: OverlapEstimate | None, form: Callable[[float], str]) -> str:
    return show(found, lambda one: f"[{form(one.low)}, {form(one.high)}]")


# Patterns

STEP, WAIT = "step:", "wait:"
"""How the names of a step's times begin."""


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
    """Fraction of the whole step: in flight on the slowest rank. Steps that overlap share their time."""
    waited_s: float
    """How long a rank that takes part stood waiting for it, in the mean over ranks."""
    waited_share: float
    """Fraction of all ranks' time in the step."""
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
    waited_s = median(by_iteration(measured.samples, f"{WAIT}{step.name}", mean)) or 0.0
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


class _Part(NamedTuple):
    """The steps of one part: bytes and fractions of all together; times of the middle one, p95 of the worst."""

    name: str
    steps: list[StepView]

    def total(self, field: str) -> float:
        return math.fsum(getattr(step, field) for step in self.steps)

    def middle(self, field: str) -> str:
        return format_duration(median([getattr(step, field) for step in self.steps]) or 0.0)


PARTS: tuple[Column[_Part], ...] = (
    Column("part", lambda part: part.name, role="case"),
    Column("operation", lambda part: part.steps[0].operation),
    Column("steps", lambda part: str(len(part.steps)), numeric=True),
    Column("bytes", lambda part: format_bytes(part.total("size_bytes")), numeric=True),
    Column("median", lambda part: part.middle("median_s"), numeric=True),
    Column("p95", lambda part: format_duration(max(step.p95_s for step in part.steps)), numeric=True, drop=1),
    Column("quickest", lambda part: part.middle("quickest_s"), numeric=True, drop=2),
    Column("busbw", lambda part: show(_rate(part.total("bus_bytes"), part.total("median_s")), format_bandwidth),
           numeric=True, drop=1),
    Column("in flight", lambda part: format_share(part.total("share")), numeric=True),
    Column("waited", lambda part: format_share(part.total("waited_share")), numeric=True),
)  # fmt: skip


def format_pattern_table(cases: Sequence[MeasuredCase], *, width: int | None = None) -> str:
    """One table per case, one row per part; empty where there is no pattern."""
    views = [view for measured in cases if (view := read_pattern(measured)) is not None]
    return "\n#\n".join("\n".join(_format_pattern(view, width)) for view in views)


def _format_pattern(view: PatternView, width: int | None) -> list[str]:
    how = "overlapped" if view.overlap else "one at a time"
    rate = f", {format_bandwidth(view.busbw_bytes_per_s)} of bus bytes" if view.busbw_bytes_per_s else ""
    moved = f", {format_bytes(view.moved_bytes)} on the busiest rank{rate}" if view.moved_bytes else ""
    parts: dict[str, list[StepView]] = defaultdict(list)
    for step in view.steps:
        parts[step.part].append(step)
    return [
        f"# {view.label}: {how}",
        f"# one step takes {format_duration(view.median_s)} (p95 {format_duration(view.p95_s)}){moved}",
        *format_table(PARTS, [_Part(name, steps) for name, steps in parts.items()], width=width),
        *(
            f"# {one.name}: {one.tables} tables of {one.rows:,} rows on the busiest rank, "
            f"{format_bytes(one.moved_bytes)} in {format_duration(one.median_s)}, "
            f"{show(one.bytes_per_s, format_bandwidth)}"
            for one in view.lookups
        ),
    ]
