"""Latency and bandwidth from every rank to every other as matrices, and what could be behind slow pairs in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal, NamedTuple, TypeVar

import msgspec

from stepscope.core.errors import UsageError
from stepscope.records import Parameter, Spec
from stepscope.records.kinds import PairObserved, PairSpec
from stepscope.stats import median, median_interval
from stepscope.store import MeasuredCase

SMALL_BYTES = 16 << 10
"""Where only one size was measured: up to this its time is the latency, above it gives the bandwidth."""

Pair = tuple[int, int]
"""Source and target, as ranks."""

Quantity = Literal["latency", "bandwidth"]
QUANTITIES: tuple[Quantity, ...] = ("latency", "bandwidth")

Value = TypeVar("Value")

Grid = list[list[Value | None]]
"""One row a source, one column a target, None where nothing was measured (as on the diagonal)."""


class Interval(NamedTuple):
    low: float
    high: float


class PairFailure(msgspec.Struct, frozen=True, kw_only=True):
    source: int
    target: int
    message: str


class PairMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """What one benchmark measured between all its ranks. Rows are sources, columns targets, in the order of `ranks`."""

    benchmark: str
    parameters: dict[str, Parameter]
    """What all cases share: dtype, device and any other parameter."""
    ranks: list[int]
    hosts: list[str]
    """One per rank; a rank that no measured pair names has one of its own."""
    nics: list[str | None]
    """One per rank, where it is known and the same towards all others."""
    small_bytes: int | None
    """Size of the messages whose time is the latency."""
    large_bytes: int | None
    """Size of the messages whose rate is the bandwidth."""
    latency_s: Grid[float]
    """Time of one message, one way."""
    latency_interval_s: Grid[Interval]
    """Interval of the median, from the order of its samples."""
    bandwidth_bytes_per_s: Grid[float]
    bandwidth_interval_bytes_per_s: Grid[Interval]
    failures: list[PairFailure]
    """Pairs that were tried without a result, or whose data did not arrive as it was sent."""


class HostMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """The same folded to hosts: medians over the pairs of their ranks. The diagonal of the matrices is empty."""

    hosts: list[str]
    latency_s: Grid[float]
    bandwidth_bytes_per_s: Grid[float]
    inside_latency_s: list[float | None]
    """Between ranks of one host; None for a host with one rank."""
    inside_bandwidth_bytes_per_s: list[float | None]


class _Measured(NamedTuple):
    """Seconds of one message."""

    median_s: float
    interval: Interval


class _PairCase(NamedTuple):
    pair: Pair
    size_bytes: int
    shared: dict[str, Parameter]
    """Parameters that all pairs of a matrix have in common."""
    case: MeasuredCase


def read_pair_matrix(cases: Iterable[MeasuredCase]) -> PairMatrix:
    """The one matrix of these cases. Raises UsageError where they hold none, or several."""
    matrices = read_pair_matrices(cases)
    if not matrices:
        raise UsageError("no case measured a pair of ranks", hint="stepscope bench pairs measures them")
    if len(matrices) > 1:
        names = ", ".join(sorted({matrix.benchmark for matrix in matrices}))
        raise UsageError(
            f"there are {len(matrices)} matrices of pairs, not one ({names})",
            hint="take the cases of one run, benchmark, dtype and device",
        )
    return matrices[0]


def read_pair_matrices(cases: Iterable[MeasuredCase]) -> list[PairMatrix]:
    """One a benchmark and set of other parameters (dtype, device), in the order of first appearance."""
    groups: dict[tuple[str, ...], list[_PairCase]] = {}
    for measured in cases:
        case, spec = measured.result.case, measured.result.case.spec
        if (pair := find_pair(spec)) is not None and isinstance(spec, PairSpec):
            found = _PairCase(pair, spec.size_bytes, {"dtype": spec.dtype, "device": spec.device}, measured)
            groups.setdefault((case.benchmark.id, spec.dtype, spec.device), []).append(found)
    return [_build_matrix(group) for group in groups.values()]


def find_pair(spec: Spec) -> Pair | None:
    """The pair that a case measured; None where it has no place in a matrix."""
    if not isinstance(spec, PairSpec) or min(spec.source, spec.target, spec.size_bytes) < 0:
        return None
    return (spec.source, spec.target) if spec.source != spec.target else None


def _build_matrix(group: Sequence[_PairCase]) -> PairMatrix:
    ranks = sorted({rank for found in group for rank in found.pair})
    # The smallest for latency and the largest for bandwidth.
    sizes = {found.size_bytes for found in group}
    small: int | None = min(sizes) if len(sizes) > 1 or min(sizes) <= SMALL_BYTES else None
    large: int | None = max(sizes) if len(sizes) > 1 or small is None else None
    measured = {(found.pair, found.size_bytes): _measure(found.case) for found in group}
    latency = {pair: value for (pair, size), value in measured.items() if size == small and value is not None}
    transfer = {pair: value for (pair, size), value in measured.items() if size == large and value is not None}
    moved = float(large or 0)
    hosts = _read_end(group, "host")
    first = group[0].case.result.case
    return PairMatrix(
        benchmark=first.benchmark.id,
        parameters=group[0].shared,
        ranks=ranks,
        hosts=[hosts.get(rank) or f"host of rank {rank}" for rank in ranks],
        nics=[_read_end(group, "nic").get(rank) for rank in ranks],
        small_bytes=small,
        large_bytes=large,
        latency_s=_grid(ranks, latency, lambda value: value.median_s),
        latency_interval_s=_grid(ranks, latency, lambda value: value.interval),
        bandwidth_bytes_per_s=_grid(ranks, transfer, lambda value: moved / value.median_s),
        bandwidth_interval_bytes_per_s=_grid(
            ranks, transfer, lambda value: Interval(moved / value.interval.high, moved / value.interval.low)
        ),
        failures=_read_failures(group),
    )


def _measure(measured: MeasuredCase) -> _Measured | None:
    """None for what failed or is no time above zero."""
    if measured.result.status != "ok":
        return None
    ordered = sorted(measured.seconds())
    if not ordered or ordered[0] <= 0 or not math.isfinite(ordered[-1]):
        return None
    low, high, _ = median_interval(ordered)
    return _Measured(median(ordered) or ordered[0], Interval(low, high))


def _read_end(group: Sequence[_PairCase], what: str) -> dict[int, str | None]:
    """Rank → what the records say of it as source and as target; None where they contradict each other."""
    said: dict[int, set[str]] = {}
    for found in group:
        observed = found.case.result.observed
        for rank, end in zip(found.pair, ("source", "target"), strict=True):
            value = getattr(observed, f"{end}_{what}") if isinstance(observed, PairObserved) else None
            if value:
                said.setdefault(rank, set()).add(value)
    return {rank: next(iter(names)) if len(names) == 1 else None for rank, names in said.items()}


def _grid(ranks: Sequence[int], cells: Mapping[Pair, _Measured], read: Callable[[_Measured], Value]) -> Grid[Value]:
    return [
        [read(cells[source, target]) if (source, target) in cells else None for target in ranks] for source in ranks
    ]


def _read_failures(group: Sequence[_PairCase]) -> list[PairFailure]:
    """One a pair, in the order of ranks; a skipped pair was never tried."""
    said: dict[Pair, str] = {}
    for found in group:
        result = found.case.result
        message = f"{result.wrong} elements arrived wrong" if result.wrong else None
        if result.status == "failed":
            message = f"{result.failure.kind}: {result.failure.message}" if result.failure is not None else "failed"
        if message is not None:
            said.setdefault(found.pair, message)
    return [PairFailure(source=s, target=t, message=message) for (s, t), message in sorted(said.items())]


def by_host(matrix: PairMatrix) -> HostMatrix:
    hosts = list(dict.fromkeys(matrix.hosts))
    latency = _fold(matrix, hosts, matrix.latency_s)
    bandwidth = _fold(matrix, hosts, matrix.bandwidth_bytes_per_s)
    return HostMatrix(
        hosts=hosts,
        latency_s=_off_diagonal(latency),
        bandwidth_bytes_per_s=_off_diagonal(bandwidth),
        inside_latency_s=[row[place] for place, row in enumerate(latency)],
        inside_bandwidth_bytes_per_s=[row[place] for place, row in enumerate(bandwidth)],
    )


def _fold(matrix: PairMatrix, hosts: Sequence[str], grid: Grid[float]) -> Grid[float]:
    place = {host: number for number, host in enumerate(hosts)}
    blocks: list[list[list[float]]] = [[[] for _ in hosts] for _ in hosts]
    for source, row in zip(matrix.hosts, grid, strict=True):
        for target, value in zip(matrix.hosts, row, strict=True):
            if value is not None:
                blocks[place[source]][place[target]].append(value)
    return [[median(block) for block in row] for row in blocks]


def _off_diagonal(grid: Grid[float]) -> Grid[float]:
    return [[None if i == j else value for j, value in enumerate(row)] for i, row in enumerate(grid)]


Kind = Literal[
    "slow_host", "slow_nic", "slow_rank", "slow_sender", "slow_receiver", "bad_link", "asymmetric_pair",
    "tiers", "failed",
]  # fmt: skip

ONE_WAY = frozenset({"slow_sender", "slow_receiver"})
Scope = Literal["outside", "inside", "everywhere"]
"""Which pairs are concerned: those with other hosts, those inside one host, or both."""

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""All pairs from these sources to those targets."""


class Suspect(NamedTuple):
    """If this one is at fault, all its pairs are slow."""

    kind: Kind
    ranks: tuple[int, ...]
    """At fault; for a link all ranks of its first end, then those of the second."""
    hosts: tuple[str, ...]
    nic: str | None
    scope: Scope
    blocks: tuple[Block, ...]

    def pairs(self) -> Iterator[Pair]:
        for sources, targets in self.blocks:
            for source in sources:
                for target in targets:
                    if source != target:
                        yield source, target

    def size(self) -> int:
        """How many pairs, without listing them."""
        return sum(len(sources) * len(targets) - len(set(sources) & set(targets)) for sources, targets in self.blocks)


class RankLayout:
    """Which ranks share a host and a NIC."""

    def __init__(self, matrix: PairMatrix) -> None:
        self.ranks = tuple(matrix.ranks)
        self.host = dict(zip(matrix.ranks, matrix.hosts, strict=True))
        self.nic = dict(zip(matrix.ranks, matrix.nics, strict=True))
        self.on_host: dict[str, tuple[int, ...]] = {}
        for rank in matrix.ranks:
            self.on_host[self.host[rank]] = (*self.on_host.get(self.host[rank], ()), rank)

    def is_inside(self, pair: Pair) -> bool:
        return self.host[pair[0]] == self.host[pair[1]]

    def nics_of(self, host: str) -> dict[str, tuple[int, ...]]:
        """Ranks by NIC; empty where the host has fewer than two of them, or they are unknown."""
        groups: dict[str, tuple[int, ...]] = {}
        for rank in self.on_host[host]:
            nic = self.nic[rank]
            if nic is None:
                return {}
            groups[nic] = (*groups.get(nic, ()), rank)
        return groups if len(groups) > 1 else {}


def list_suspects(layout: RankLayout) -> list[Suspect]:
    """Hosts, NICs and ranks, both ways, then one way. Of two with the same pairs only the first is kept: the larger
    thing."""
    outside: tuple[Scope, ...] = ("outside",)
    of_host: tuple[Scope, ...] = ("outside", "everywhere", "inside")
    everywhere: tuple[Scope, ...] = ("everywhere", "outside", "inside")
    found: list[Suspect] = []
    for host, ranks in layout.on_host.items():
        found += _suspects(layout, "slow_host", ranks, None, both_ways=of_host, one_way=outside)
        for nic, sharing in layout.nics_of(host).items():
            found += _suspects(layout, "slow_nic", sharing, nic, both_ways=outside, one_way=outside)
    for rank in layout.ranks:
        found += _suspects(layout, "slow_rank", (rank,), None, both_ways=everywhere, one_way=everywhere)
    found.sort(key=lambda suspect: suspect.kind in ONE_WAY)
    return _without_twins(suspect for suspect in found if suspect.size())


def _suspects(
    layout: RankLayout,
    kind: Kind,
    ranks: tuple[int, ...],
    nic: str | None,
    *,
    both_ways: tuple[Scope, ...],
    one_way: tuple[Scope, ...],
) -> Iterator[Suspect]:
    host = layout.host[ranks[0]]
    away = tuple(rank for rank in layout.ranks if layout.host[rank] != host)
    near = tuple(rank for rank in layout.on_host[host] if rank not in ranks)
    on_host = len(ranks) + len(near)
    outside: tuple[Block, ...] = ((ranks, away), (away, ranks))
    within: tuple[Block, ...] = ((ranks, ranks), (ranks, near), (near, ranks))
    blocks = {"outside": outside, "inside": within, "everywhere": (*outside, *within)}
    others = {"outside": away, "inside": near, "everywhere": (*away, *near)}
    for scope in both_ways:
        if _can_be_told(layout, kind == "slow_host", scope, on_host):
            yield Suspect(kind, ranks, (host,), nic, scope, blocks[scope])
    for scope in one_way:
        if _can_be_told(layout, not near and nic is None, scope, on_host):
            yield Suspect("slow_sender", ranks, (host,), nic, scope, ((ranks, others[scope]),))
            yield Suspect("slow_receiver", ranks, (host,), nic, scope, ((others[scope], ranks),))


def _can_be_told(layout: RankLayout, whole_host: bool, scope: Scope, on_host: int) -> bool:
    """Not with two hosts alone, or two ranks inside one: either may be the slow one, so it is the link between them."""
    if scope == "inside":
        return on_host > 2 and (not whole_host or len(layout.on_host) > 1)
    return not whole_host or len(layout.on_host) > 2


def _without_twins(suspects: Iterable[Suspect]) -> list[Suspect]:
    seen: dict[tuple[tuple[Block, ...], int], Suspect] = {}
    for suspect in suspects:
        # One rank with itself is no pair.
        blocks = tuple(sorted(b for b in suspect.blocks if all(b) and not (len(b[0]) == 1 and b[0] == b[1])))
        seen.setdefault((blocks, suspect.size()), suspect)
    return list(seen.values())


def list_links(layout: RankLayout, slow: Iterable[Pair]) -> list[Suspect]:
    """Links between hosts and between ranks that any of these pairs uses: both ways first, then one way each."""
    ends: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
    chosen = list(slow)
    for source, target in chosen:
        if not layout.is_inside((source, target)):
            ends[_ordered(layout.on_host[layout.host[source]], layout.on_host[layout.host[target]])] = None
    for source, target in chosen:
        ends[_ordered((source,), (target,))] = None
    return list(chain.from_iterable(_links_between(layout, first, second) for first, second in ends))


def _ordered(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (a, b) if a < b else (b, a)


def _links_between(layout: RankLayout, first: tuple[int, ...], second: tuple[int, ...]) -> Iterator[Suspect]:
    scope: Scope = "inside" if layout.is_inside((first[0], second[0])) else "outside"
    for kind, blocks in (
        ("bad_link", ((first, second), (second, first))),
        ("asymmetric_pair", ((first, second),)),
        ("asymmetric_pair", ((second, first),)),
    ):
        ranks = (*blocks[0][0], *blocks[0][1])
        hosts = tuple(dict.fromkeys(layout.host[rank] for rank in ranks))
        yield Suspect(kind, ranks, hosts, None, scope, blocks)  # type: ignore[arg-type]
