"""Matrices of pairs of ranks made readable: what of them is shown, and in which words and numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope.analyze.network.pair_matrix import (
    QUANTITIES,
    HostMatrix,
    Interval,
    PairMatrix,
    Quantity,
    by_host,
    find_pair,
    read_pair_matrices,
)
from stepscope.analyze.network.pairs import Finding, find_outliers
from stepscope.core.units import format_bytes
from stepscope.report.labels import format_parameter
from stepscope.report.scale import TimeScale, choose_time_scale
from stepscope.stats import median
from stepscope.store import MeasuredCase

if TYPE_CHECKING:
    from stepscope.report.view import CaseView, SystemView

MAX_TEXT_UNITS = 16
"""Rows and columns of a matrix in text; a larger one is folded to hosts or cut to its slowest."""
MAX_DRAWN_UNITS = 64
"""The same of a heat map."""

MARK = "!"
MISSING, SELF = "-", "·"
_DIGITS = 3

Grid = list[list[float | None]]

Place = tuple[int, int]
"""Row and column."""


class PairView(msgspec.Struct, frozen=True, kw_only=True):
    """What one run measured between its ranks."""

    run_id: str
    matrix: PairMatrix
    hosts: HostMatrix | None
    """None where every rank has a host of its own, or all share one."""
    findings: list[Finding]


class Heatmap(NamedTuple):
    """One quantity between units, ranks or hosts, ready to be shown."""

    title: str
    unit: str
    units: Units
    texts: list[list[str]]
    details: list[list[str]]
    """Value with its unit and, where it is known, its interval."""
    heat: Grid
    """From 0 (as fast as it gets) to 1 (slowest), on a logarithmic scale."""
    marked: frozenset[Place]
    """What a finding is about."""
    inside: list[str] | None
    """Of hosts: between their own ranks."""


class Units(NamedTuple):
    """What the rows and columns of a matrix are."""

    kind: str
    """`ranks` or `hosts`."""
    names: list[str]
    """Short, for a column."""
    long_names: list[str]
    homes: list[str]
    """The host of each."""
    failed: dict[Place, str]
    """What went wrong."""
    left_out: int = 0
    """Units that did not fit; the slowest are kept."""


class Measured(NamedTuple):
    """One quantity between units, in seconds or bytes per second."""

    values: Grid
    intervals: list[list[Interval | None]]
    marked: frozenset[Place]
    inside: list[float | None] | None = None


def find_pairs(runs: Iterable[tuple[str, Sequence[MeasuredCase]]]) -> list[PairView]:
    """One a matrix; runs by name."""
    return [view_pairs(matrix, name) for name, cases in runs for matrix in read_pair_matrices(cases)]


def view_pairs(matrix: PairMatrix, run_id: str) -> PairView:
    folded = 1 < len(set(matrix.hosts)) < len(matrix.ranks)
    return PairView(
        run_id=run_id,
        matrix=matrix,
        hosts=by_host(matrix) if folded else None,
        findings=find_outliers(matrix),
    )


def is_in_matrix(case: CaseView) -> bool:
    """Whether a matrix shows its result, so that it needs no row of its own."""
    return find_pair(case.spec) is not None


def without_pairs(system: SystemView) -> SystemView:
    """The system with the cases alone that its matrices do not show."""
    if not system.pairs:
        return system
    return msgspec.structs.replace(system, cases=[case for case in system.cases if not is_in_matrix(case)])


# What is shown of a matrix


def make_heatmaps(view: PairView, most: int) -> list[Heatmap]:
    """Latency and bandwidth, as far as they were measured: of ranks if those are not too many, else of hosts."""
    units, latency, bandwidth = _rank_units(view)
    if len(units.names) > most and view.hosts is not None:
        units, latency, bandwidth = _host_units(view, view.hosts)
    kept = _choose_slowest(latency, bandwidth, most)
    units, latency, bandwidth = _take_units(units, kept), _take(latency, kept), _take(bandwidth, kept)
    small, large = (format_bytes(size or 0) for size in (view.matrix.small_bytes, view.matrix.large_bytes))
    maps = []
    if (typical := _typical(latency.values)) is not None:
        scale = choose_time_scale(typical)
        maps.append(_make_map(units, latency, f"latency of {small}", scale, more_is_slower=True))
    if _typical(bandwidth.values) is not None:
        maps.append(_make_map(units, bandwidth, f"bandwidth of {large}", _RATES, more_is_slower=False))
    return maps


_RATES = TimeScale("GB/s", 1e9)
"""The same for rates: a unit, and how many bytes per second it is."""


def _typical(values: Grid) -> float | None:
    return median([value for row in values for value in row if value is not None])


def _rank_units(view: PairView) -> tuple[Units, Measured, Measured]:
    matrix = view.matrix
    place = {rank: number for number, rank in enumerate(matrix.ranks)}
    units = Units(
        kind="ranks",
        names=[str(rank) for rank in matrix.ranks],
        long_names=[f"rank {rank} ({host})" for rank, host in zip(matrix.ranks, matrix.hosts, strict=True)],
        homes=matrix.hosts,
        failed={(place[failure.source], place[failure.target]): failure.message for failure in matrix.failures},
    )
    marks = [
        frozenset((place[source], place[target]) for source, target in _marked_pairs(view, quantity))
        for quantity in QUANTITIES
    ]
    latency = Measured(matrix.latency_s, matrix.latency_interval_s, marks[0])
    return units, latency, Measured(matrix.bandwidth_bytes_per_s, matrix.bandwidth_interval_bytes_per_s, marks[1])


def _marked_pairs(view: PairView, quantity: Quantity) -> set[tuple[int, int]]:
    """Those that stand out by this quantity, or failed. Tiers are a matter of wiring, not of single pairs."""
    return {
        pair
        for finding in view.findings
        if finding.kind == "failed" or (finding.kind != "tiers" and finding.ratio(quantity) is not None)
        for pair in finding.pairs
    }


def _host_units(view: PairView, hosts: HostMatrix) -> tuple[Units, Measured, Measured]:
    host = dict(zip(view.matrix.ranks, view.matrix.hosts, strict=True))
    place = {name: number for number, name in enumerate(hosts.hosts)}
    units = Units(
        kind="hosts",
        names=[str(number) for number in range(len(hosts.hosts))],
        long_names=hosts.hosts,
        homes=hosts.hosts,
        failed={
            (place[host[failure.source]], place[host[failure.target]]): failure.message
            for failure in view.matrix.failures
        },
    )
    nothing: list[list[Interval | None]] = [[None] * len(hosts.hosts) for _ in hosts.hosts]
    marks = [_marked_hosts(view, place, quantity) for quantity in QUANTITIES]
    latency = Measured(hosts.latency_s, nothing, marks[0], hosts.inside_latency_s)
    return units, latency, Measured(hosts.bandwidth_bytes_per_s, nothing, marks[1], hosts.inside_bandwidth_bytes_per_s)


def _marked_hosts(view: PairView, place: Mapping[str, int], quantity: Quantity) -> frozenset[Place]:
    """A pair of hosts is marked where most of the pairs between their ranks are."""
    host = dict(zip(view.matrix.ranks, view.matrix.hosts, strict=True))
    ranks = Counter(view.matrix.hosts)
    marks = Counter((host[source], host[target]) for source, target in _marked_pairs(view, quantity))
    return frozenset(
        (place[a], place[b]) for (a, b), count in marks.items() if a != b and 2 * count > ranks[a] * ranks[b]
    )


def _choose_slowest(latency: Measured, bandwidth: Measured, most: int) -> list[int]:
    """All that fit; else those with most marks, then those with the slowest pairs, in their old order."""
    count, marked = len(latency.values), latency.marked | bandwidth.marked
    if count <= most:
        return list(range(count))

    def slowness(unit: int) -> tuple[int, float]:
        marks = sum(unit in place for place in marked)
        grids = (latency.values, bandwidth.values)
        time, rate = (_typical([values[unit], [row[unit] for row in values]]) for values in grids)
        return marks, math.log(time or 1.0) - math.log(rate or 1.0)

    return sorted(sorted(range(count), key=slowness)[-most:])


def _take_units(units: Units, kept: Sequence[int]) -> Units:
    new = {old: place for place, old in enumerate(kept)}
    return units._replace(
        names=[units.names[i] for i in kept],
        long_names=[units.long_names[i] for i in kept],
        homes=[units.homes[i] for i in kept],
        failed={(new[i], new[j]): said for (i, j), said in units.failed.items() if i in new and j in new},
        left_out=len(units.names) - len(kept),
    )


def _take(measured: Measured, kept: Sequence[int]) -> Measured:
    new = {old: place for place, old in enumerate(kept)}
    return Measured(
        [[measured.values[i][j] for j in kept] for i in kept],
        [[measured.intervals[i][j] for j in kept] for i in kept],
        frozenset((new[i], new[j]) for i, j in measured.marked if i in new and j in new),
        [measured.inside[i] for i in kept] if measured.inside is not None else None,
    )


def _make_map(units: Units, measured: Measured, title: str, scale: TimeScale, *, more_is_slower: bool) -> Heatmap:
    def number(value: float | None) -> str:
        return MISSING if value is None else scale.format(value, _DIGITS)

    return Heatmap(
        title=title,
        unit=scale.unit,
        units=units,
        texts=[
            [SELF if i == j else number(value) for j, value in enumerate(row)] for i, row in enumerate(measured.values)
        ],
        details=[
            [_detail(value, interval, scale) for value, interval in zip(row, intervals, strict=True)]
            for row, intervals in zip(measured.values, measured.intervals, strict=True)
        ],
        heat=_heat(measured.values, more_is_slower=more_is_slower),
        marked=measured.marked,
        inside=[number(value) for value in measured.inside] if measured.inside is not None else None,
    )


def _detail(value: float | None, interval: Interval | None, scale: TimeScale) -> str:
    if value is None:
        return ""
    span = f" ({scale.format(interval.low)}–{scale.format(interval.high)})" if interval is not None else ""
    return f"{scale.format(value)} {scale.unit}{span}"


LEAST_RANGE = math.log(2)
"""A range of colours never spans less: the noise of a healthy cluster shall look like one colour."""


def _heat(values: Grid, *, more_is_slower: bool) -> Grid:
    sign = 1.0 if more_is_slower else -1.0
    slow = [[sign * math.log(value) if value else None for value in row] for row in values]
    known = [value for row in slow for value in row if value is not None]
    if not known:
        return slow
    least, span = min(known), max(LEAST_RANGE, max(known) - min(known))
    return [[None if value is None else (value - least) / span for value in row] for row in slow]


# As text


def describe_matrix(view: PairView) -> str:
    """`pair/micro/gloo/4ranks (dtype=float32, device=cpu): 4 ranks on 1 host`."""
    matrix = view.matrix
    hosts = len(set(matrix.hosts))
    shared = ", ".join(format_parameter(name, value) for name, value in matrix.parameters.items())
    where = f"{len(matrix.ranks)} ranks on {hosts} host{'s' if hosts > 1 else ''}"
    return f"{matrix.benchmark}{f' ({shared})' if shared else ''}: {where}"


def describe_findings(view: PairView) -> list[tuple[str, str]]:
    """Sentences and next steps; one sentence without a step where nothing was found."""
    found = [(finding.sentence, finding.next_step) for finding in view.findings]
    return found or [("no host, link or rank stands out", "")]


def explain_map(heatmap: Heatmap) -> str:
    """What the rows, columns and marks of a table are."""
    units = heatmap.units
    said = f"{heatmap.title} in {heatmap.unit}; rows send, columns receive"
    if heatmap.marked:
        said += f"; {MARK} marks what is named below"
    if units.left_out:
        said += f"; the {len(units.names)} slowest {units.kind}, {units.left_out} are left out"
    return said


def matrix_rows(heatmap: Heatmap) -> tuple[list[str], list[list[str]], list[bool]]:
    """Titles, rows and which columns are numbers."""
    units = heatmap.units
    pad = " " if heatmap.marked else ""
    titles = ["rank" if units.kind == "ranks" else "", "host", *(name + pad for name in units.names)]
    numeric = [True, False, *(True for _ in units.names)]
    rows = [
        [name, home, *(text + (MARK if (i, j) in heatmap.marked else pad) for j, text in enumerate(heatmap.texts[i]))]
        for i, (name, home) in enumerate(zip(units.names, units.homes, strict=True))
    ]
    if heatmap.inside is not None and set(heatmap.inside) != {MISSING}:
        titles, numeric = [*titles, "inside"], [*numeric, True]
        rows = [[*row, inside] for row, inside in zip(rows, heatmap.inside, strict=True)]
    return titles, rows, numeric
