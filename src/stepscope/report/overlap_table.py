"""Runs of `bench overlap`: how much of the shorter work is hidden behind the longer, and what each side pays for it.

Everything is derived from the times of single cycles, in which each side ran alone and all ran together; a cycle's
value is that of its slowest rank. Values of one cycle are compared with each other only, so that what disturbs a
machine for a while disturbs both sides of a ratio.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from stepscope.core.units import format_bandwidth, format_bytes, format_duration, format_ratio, format_share
from stepscope.records import RankSamples
from stepscope.records.kinds import COMM, COMPUTE, TOGETHER, OverlapObserved, OverlapSpec
from stepscope.report.text import align
from stepscope.stats import DEFAULT_LEVEL, median, median_interval
from stepscope.store import MeasuredCase

NONE = "-"


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
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
    slowdown: Estimate | None
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
    """Kernels a stretch; None where nothing computes."""
    sides: list[SideView]
    """The collectives as they were asked for, then what computes."""
    together_s: float
    efficiency: Estimate | None
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


def slowest_by_cycle(samples: Sequence[RankSamples], name: str) -> list[float]:
    """Per cycle, the longest time of that name on any rank; processes one behind the other."""
    processes: dict[int, list[list[float]]] = defaultdict(list)
    for rank in samples:
        if name in rank.extra_s:
            processes[rank.process].append(rank.extra_s[name])
    return [max(row) for _, columns in sorted(processes.items()) for row in zip(*columns, strict=True)]


def estimate(values: Sequence[float], level: float = DEFAULT_LEVEL) -> Estimate | None:
    if not values:
        return None
    ordered = sorted(values)
    low, high, covered = median_interval(ordered, level)
    return Estimate(value=median(ordered) or 0.0, low=low, high=high, level=covered, n=len(ordered))


def read_overlap(measured: MeasuredCase) -> OverlapView | None:
    """None for a case that is no overlap, or that has no samples."""
    together = slowest_by_cycle(measured.samples, TOGETHER)
    names = _side_names(measured)
    if not isinstance(measured.result.case.spec, OverlapSpec) or not together or not names:
        return None
    found = measured.result.observed
    observed = found if isinstance(found, OverlapObserved) else OverlapObserved()
    alone = {name: slowest_by_cycle(measured.samples, name) for name in names}
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
    spec, beside = measured.result.case.spec, slowest_by_cycle(measured.samples, f"{name}_beside")
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


# Text

_HEAD = (
    "efficiency = (sum of times alone − time together) / (sum − longest): 100 % all hidden, 0 % one after the other",
    "times are medians over cycles of the slowest rank; [low, high] is the interval of the median over cycles",
    "slow-down = time beside the others / time alone; bus: bytes over the time alone, and of all over the joint time",
)
_TITLES = (
    "what", "size", "kernels", "alone", "beside", "slow-down", "[low, high]", "bus alone", "together", "efficiency",
    "[low, high]", "bus together", "n", "#wrong",
)  # fmt: skip
_NUMERIC = tuple(title not in {"what"} for title in _TITLES)


def format_overlap_table(cases: Sequence[MeasuredCase]) -> str:
    """A few rows a case: one a side, the first with what they did together. Empty where no case is an overlap."""
    views = [view for measured in cases if (view := read_overlap(measured)) is not None]
    if not views:
        return ""
    rows = [row for view in views for row in _make_rows(view)]
    titles, *lines = align([_TITLES, *rows], _NUMERIC)
    levels = sorted({view.efficiency.level for view in views if view.efficiency is not None})
    covered = f"# intervals cover the median with {format_share(levels[0])} or more" if levels else "#"
    return "\n".join([*(f"# {line}" for line in _HEAD), covered, f"# {titles}", *(f"  {line}" for line in lines)])


def _make_rows(view: OverlapView) -> list[list[str]]:
    efficiency = view.efficiency
    joint = [
        format_duration(view.together_s),
        _show(efficiency.value if efficiency is not None else None, format_share),
        _format_interval(efficiency, format_share),
        _show(view.busbw_bytes_per_s, format_bandwidth),
        str(efficiency.n) if efficiency is not None else NONE,
        str(view.wrong) if view.wrong is not None else "N/A",
    ]
    ordered = sorted(view.sides, key=lambda side: side.name == COMPUTE)
    return [
        [*_make_side_cells(view, side), *(joint if not place else [""] * len(joint))]
        for place, side in enumerate(ordered)
    ]


def _make_side_cells(view: OverlapView, side: SideView) -> list[str]:
    computes = side.name == COMPUTE
    return [
        side.what if side.name == COMM else f"+ {side.what}",
        _show(side.size_bytes, format_bytes),
        str(view.repeat) if computes and view.repeat is not None else NONE,
        format_duration(side.alone_s),
        format_duration(side.beside_s),
        _show(side.slowdown.value if side.slowdown is not None else None, format_ratio),
        _format_interval(side.slowdown, format_ratio),
        _show(side.alone_busbw, format_bandwidth),
    ]


def _show(value: float | None, form: Callable[[float], str]) -> str:
    return form(value) if value is not None else NONE


def _format_interval(found: Estimate | None, form: Callable[[float], str]) -> str:
    return f"[{form(found.low)}, {form(found.high)}]" if found is not None else NONE
