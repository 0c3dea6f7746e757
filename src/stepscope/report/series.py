"""What plots need of cases: samples as taken and in bins, sweeps over message sizes, rooflines. All bounded in size."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from stepscope.records import RankSamples
from stepscope.stats import quantile_sorted
from stepscope.store import Ceilings
from stepscope.store.view import MeasuredCase

MAX_SERIES_POINTS = 2000
"""A longer series is thinned evenly to this many points, and says so."""

_FENCE_REACH = 3.0
"""Interquartile ranges; the same far fences as `stepscope.stats.find_outliers`."""
_MIN_BINS, _MAX_BINS = 8, 48


class SampleSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per iteration in the order taken, warm-ups included, ranks folded as the result says."""

    total: int
    """Samples there are; more than are listed here when the series was thinned."""
    positions: list[int]
    """Place of each listed sample among all of them, from 0."""
    seconds: list[float]
    warmup: list[bool]
    process: list[int]

    @property
    def thinned(self) -> bool:
        return len(self.positions) < self.total


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """All measured samples (never thinned, no warm-ups) in bins of equal width."""

    low_s: float
    high_s: float
    counts: list[int]
    below: int
    above: int
    """Far outliers, which would squeeze the rest into one bin; counted beside the bins."""


def read_series(measured: MeasuredCase, limit: int = MAX_SERIES_POINTS) -> SampleSeries:
    seconds: list[float] = []
    warmup: list[bool] = []
    process: list[int] = []
    ranks_of: dict[int, list[RankSamples]] = defaultdict(list)
    for samples in measured.samples:
        ranks_of[samples.process].append(samples)
    for number in sorted(ranks_of):
        values, marks = _fold_ranks(ranks_of[number], measured.result.timing)
        seconds += values
        warmup += marks
        process += [number] * len(values)
    kept = even_positions(len(seconds), limit)
    return SampleSeries(
        total=len(seconds),
        positions=kept,
        seconds=[seconds[i] for i in kept],
        warmup=[warmup[i] for i in kept],
        process=[process[i] for i in kept],
    )


def _fold_ranks(ranks: list[RankSamples], timing: str) -> tuple[list[float], list[bool]]:
    columns = [
        [seconds / number for seconds, number in zip(_durations(rank, timing), rank.iterations, strict=True)]
        for rank in ranks
    ]
    if not timing.startswith("slowest_rank"):
        return [value for column in columns for value in column], [mark for rank in ranks for mark in rank.warmup]
    # Ranks of a case that failed half-way may differ in length: what all of them have is shown.
    rows = [max(row) for row in zip(*columns, strict=False)]
    return rows, [any(row) for row in zip(*(rank.warmup for rank in ranks), strict=False)]


def _durations(rank: RankSamples, timing: str) -> list[float]:
    return rank.device_s if timing.endswith("device") and rank.device_s is not None else rank.duration_s


def even_positions(total: int, limit: int) -> list[int]:
    """At most `limit` places out of `total`, evenly spread, first and last included."""
    if total <= limit:
        return list(range(total))
    return [round(i * (total - 1) / (limit - 1)) for i in range(limit)]


def count_bins(ordered: Sequence[float]) -> Histogram:
    """Freedman and Diaconis's width within bounds; needs at least one value, sorted."""
    first, third = quantile_sorted(ordered, 0.25), quantile_sorted(ordered, 0.75)
    spread = third - first
    low, high = ordered[0], ordered[-1]
    if spread > 0:
        low, high = max(low, first - _FENCE_REACH * spread), min(high, third + _FENCE_REACH * spread)
    inside = [value for value in ordered if low <= value <= high]
    low, high = inside[0], inside[-1]
    below = bisect_left(ordered, low)
    above = len(ordered) - len(inside) - below
    if high <= low:
        return Histogram(low_s=low, high_s=low, counts=[len(inside)], below=below, above=above)
    # The range over the width overflows for spreads near the smallest float; the bound then decides.
    width = 2 * spread / len(ordered) ** (1 / 3)
    wanted = (high - low) / width if width > 0 else math.inf
    bins = _MAX_BINS if wanted >= _MAX_BINS else max(_MIN_BINS, math.ceil(wanted))
    counts = [0] * bins
    for value in inside:
        counts[min(bins - 1, int((value - low) / (high - low) * bins))] += 1
    return Histogram(low_s=low, high_s=high, counts=counts, below=below, above=above)


# Cases of one benchmark that differ in message size, as lines to plot


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: float
    median_s: float
    ci_low_s: float
    ci_high_s: float
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None


class SweepSeries(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    """What sets this line apart; empty where the benchmark has only one."""
    points: list[SweepPoint]
    """By growing size."""


class SweepCurves(msgspec.Struct, frozen=True, kw_only=True):
    benchmark: str
    series: list[SweepSeries]


def find_sweeps(inputs: Iterable[tuple[str, str, SweepPoint]]) -> list[SweepCurves]:
    """`inputs`: benchmark, what sets the line apart, point. Lines of at least two sizes; a single point is already in
    the table. Sizes and times of zero have no place on logarithmic axes and are left out."""
    grouped: dict[str, dict[str, list[SweepPoint]]] = {}
    for benchmark, label, point in inputs:
        if point.size_bytes > 0 and point.ci_low_s > 0:
            grouped.setdefault(benchmark, {}).setdefault(label, []).append(point)
    sweeps = []
    for benchmark, lines in grouped.items():
        series = [
            SweepSeries(label=label, points=sorted(points, key=lambda point: point.size_bytes))
            for label, points in lines.items()
            if len({point.size_bytes for point in points}) > 1
        ]
        if series:
            sweeps.append(SweepCurves(benchmark=benchmark, series=series))
    return sweeps


# Measured peaks of one device with its cases

LEAST, MOST = 1e-30, 1e30
"""What lies beyond is no measurement and would push all others to the edge of a logarithmic axis."""


class RooflinePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One measured case with floating-point work."""

    anchor: str
    """Anchor of the case on the page."""
    label: str
    operator: str
    dtype: str
    cache: str
    """`warm` or `cold`."""
    intensity: float
    """Flop per byte of compulsory traffic."""
    median_s: float
    flops_per_s: float
    bytes_per_s: float
    compute_share: float | None
    memory_share: float | None


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """What one run measured on one device. Peaks of another run are never used."""

    run_id: str
    device: str
    matrix_flops_per_s: dict[str, float]
    """By dtype."""
    bytes_per_s: dict[str, float]
    """`read`, `write`, `copy`."""
    points: list[RooflinePoint]
    """Measured peaks are not among them: they are the roofs."""


def find_rooflines(
    run_ids: Sequence[str], ceilings: Sequence[Mapping[str, Ceilings]], inputs: Iterable[tuple[int, str, RooflinePoint]]
) -> list[Roofline]:
    """One per run and device with measured peaks; `ceilings` in the order of the runs.

    `inputs`: the run's place, as two runs may bear one name; device, point."""
    points: dict[tuple[int, str], list[RooflinePoint]] = {}
    for run, device, point in inputs:
        if drawable(point.intensity) and drawable(point.flops_per_s):
            points.setdefault((run, device), []).append(point)
    return [
        Roofline(
            run_id=run_ids[run],
            device=device,
            matrix_flops_per_s=measured.matrix_flops_per_s,
            bytes_per_s=measured.bytes_per_s,
            points=points.get((run, device), []),
        )
        for run, devices in enumerate(ceilings)
        for device, measured in devices.items()
    ]


def drawable(value: float) -> bool:
    return LEAST < value < MOST
