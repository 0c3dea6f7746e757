"""Matrices of pairs of ranks made readable: what of them is shown, and in which words and numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
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
from stepscope.analyze.network.pairs import PairFinding, find_outliers
from stepscope.core.units import count_of, format_bytes
from stepscope.report.charts import WIDTH, TimeScale, choose_time_scale, draw_text, wrap_svg
from stepscope.report.labels import format_parameter
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
    findings: list[PairFinding]


class Heatmap(NamedTuple):
    """One quantity between units, ranks or hosts, ready to be shown."""

    title: str
    unit: str
    units: MatrixUnits
    texts: list[list[str]]
    details: list[list[str]]
    """Value with its unit and, where it is known, its interval."""
    heat: Grid
    """From 0 (as fast as it gets) to 1 (slowest), on a logarithmic scale."""
    marked: frozenset[Place]
    """What a finding is about."""
    inside: list[str] | None
    """Values between the ranks of one host; None where the units are ranks."""


class MatrixUnits(NamedTuple):
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
    """One per matrix; runs by name."""
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


def _rank_units(view: PairView) -> tuple[MatrixUnits, Measured, Measured]:
    matrix = view.matrix
    place = {rank: number for number, rank in enumerate(matrix.ranks)}
    units = MatrixUnits(
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


def _host_units(view: PairView, hosts: HostMatrix) -> tuple[MatrixUnits, Measured, Measured]:
    host = dict(zip(view.matrix.ranks, view.matrix.hosts, strict=True))
    place = {name: number for number, name in enumerate(hosts.hosts)}
    units = MatrixUnits(
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


def _take_units(units: MatrixUnits, kept: Sequence[int]) -> MatrixUnits:
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


def _make_map(units: MatrixUnits, measured: Measured, title: str, scale: TimeScale, *, more_is_slower: bool) -> Heatmap:
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
    where = f"{len(matrix.ranks)} ranks on {count_of(hosts, 'host')}"
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


# As a plot: the stronger the colour, the slower; what a finding is about has an outline

MAX_WRITTEN = 10
"""Up to so many rows the cells have room for their numbers."""
MAX_NAMED = 24
"""Up to so many rows the hosts stand beside them."""

_RIGHT, _TOP, _BOTTOM = 4, 24, 20
_LEAST, _MOST = 0.05, 0.6
"""Opacity of the fastest and the slowest: numbers can be read above it in both themes."""
_LETTER = 6.2
"""Width of a letter of the axes at most."""
_LONGEST = 14
"""Letters of a host's name beside a row."""


class _Square(NamedTuple):
    """Where the matrix stands, and the size of one of its cells."""

    left: float
    cell: float


def draw_heatmap(heatmap: Heatmap, name: str) -> str:
    labels = _row_labels(heatmap)
    count = len(labels)
    left = 8 + _LETTER * max(map(len, labels), default=0)
    square = _Square(left, (WIDTH - left - _RIGHT) / max(1, count))
    parts = [_axes(heatmap, labels, square)]
    parts += [_cell(heatmap, square, i, j) for i in range(count) for j in range(count) if i != j]
    parts.append(_home_borders(heatmap.units.homes, square))
    return wrap_svg("heatmap", name, parts, height=math.ceil(_TOP + count * square.cell + _BOTTOM))


def _row_labels(heatmap: Heatmap) -> list[str]:
    """The rank, and its host where each has another one."""
    units = heatmap.units
    if len(set(units.homes)) < len(units.homes) or len(units.homes) > MAX_NAMED:
        return units.names
    return [f"{name} {_shorten(home)}" for name, home in zip(units.names, units.homes, strict=True)]


def _shorten(name: str) -> str:
    """The end of a host's name tells it apart."""
    return name if len(name) <= _LONGEST else f"…{name[-_LONGEST + 1 :]}"


def _axes(heatmap: Heatmap, labels: list[str], square: _Square) -> str:
    """Every label where there is room, else every second, fourth …"""
    left, cell = square
    names = heatmap.units.names
    widest = _LETTER * max(map(len, names), default=0) + 4
    across, down = (label_step(room, cell) for room in (widest, 12.0))
    parts = [
        draw_text(left - 4, _TOP + (i + 0.5) * cell + 4, labels[i], "", "end") for i in range(0, len(labels), down)
    ]
    parts += [
        draw_text(left + (j + 0.5) * cell, _TOP - 6, names[j], "", "middle") for j in range(0, len(names), across)
    ]
    foot = f"rows send, columns receive ({heatmap.units.kind})"
    parts.append(draw_text(left + len(names) * cell / 2, _TOP + len(names) * cell + 15, foot, "", "middle"))
    return "".join(parts)


def label_step(room: float, cell: float) -> int:
    """1 where every cell has room for its label, else 2, 4 …"""
    step = 1
    while step * cell < room:
        step *= 2
    return step


def _cell(heatmap: Heatmap, square: _Square, i: int, j: int) -> str:
    left, cell = square
    box = Box(left + j * cell, _TOP + i * cell, cell, cell)
    said = describe_cell(heatmap, i, j)
    if heatmap.heat[i][j] is None:
        return draw_cell(box, None, said, kind="failed" if (i, j) in heatmap.units.failed else "gap")
    text = heatmap.texts[i][j] if len(heatmap.texts) <= MAX_WRITTEN else ""
    return draw_cell(box, heatmap.heat[i][j], said, kind="marked" if (i, j) in heatmap.marked else "", text=text)


class Box(NamedTuple):
    x: float
    y: float
    wide: float
    high: float


def draw_cell(box: Box, heat: float | None, said: str, *, kind: str = "", text: str = "") -> str:
    """`heat` from 0 to 1; None: no value. `said` shows when the pointer rests on the cell, `text` stands in it."""
    x, y, wide, high = box
    narrow = min(wide, high)
    gap = min(1.0, narrow / 10)
    place = f'x="{x + gap / 2:.1f}" y="{y + gap / 2:.1f}" width="{wide - gap:.1f}" height="{high - gap:.1f}"'
    look = f'class="{f"cell {kind}".strip()}" {place}'
    if heat is not None:
        # In small cells a thick outline would hide what it marks.
        look += f' fill-opacity="{_LEAST + heat * (_MOST - _LEAST):.2f}" stroke-width="{min(1.4, narrow / 12):.1f}"'
    drawn = f"<rect {look}><title>{escape(said)}</title></rect>"
    return drawn + draw_text(x + wide / 2, y + high / 2 + 4, text, "value", "middle") if text else drawn


def describe_cell(heatmap: Heatmap, i: int, j: int) -> str:
    units = heatmap.units
    failure = units.failed.get((i, j))
    measured = heatmap.details[i][j] or (None if failure else "not measured")
    return f"{units.long_names[i]} → {units.long_names[j]}: {', '.join(filter(None, (measured, failure)))}"


def _home_borders(homes: list[str], square: _Square) -> str:
    """Lines between hosts, where one has several ranks."""
    if len(set(homes)) in {0, 1, len(homes)}:
        return ""
    left, cell = square
    size = len(homes) * cell
    steps = [
        f"M{left + k * cell:.1f} {_TOP}v{size:.1f}M{left:.1f} {_TOP + k * cell:.1f}h{size:.1f}"
        for k, (home, following) in enumerate(pairwise(homes), start=1)
        if home != following
    ]
    return f'<path class="home" d="{"".join(steps)}"/>'
