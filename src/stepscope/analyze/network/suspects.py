"""Who could be behind slow pairs: hosts, NICs and ranks, as senders, receivers or both, and links between two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Literal, NamedTuple

from stepscope.analyze.network.pair_matrix import Pair, PairMatrix

Kind = Literal[
    "slow_host", "slow_nic", "slow_rank", "slow_sender", "slow_receiver", "bad_link", "asymmetric_pair",
    "tiers", "failed",
]  # fmt: skip

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


class Layout:
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


def list_suspects(layout: Layout) -> list[Suspect]:
    """Hosts, NICs and ranks. Of two with the same pairs only the first is kept: the larger thing."""
    hosts = list(layout.on_host)
    both, one_way = list[Suspect](), list[Suspect]()
    for host in hosts:
        ranks = layout.on_host[host]
        both += _both_ways(layout, "slow_host", ranks, None, ("outside", "everywhere", "inside"))
        one_way += _one_way(layout, ranks, None, ("outside",))
        for nic, sharing in layout.nics_of(host).items():
            both += _both_ways(layout, "slow_nic", sharing, nic, ("outside",))
            one_way += _one_way(layout, sharing, nic, ("outside",))
    for rank in layout.ranks:
        both += _both_ways(layout, "slow_rank", (rank,), None, ("everywhere", "outside", "inside"))
        one_way += _one_way(layout, (rank,), None, ("everywhere", "outside", "inside"))
    return _without_twins(suspect for suspect in (*both, *one_way) if suspect.size())


def _both_ways(
    layout: Layout, kind: Kind, ranks: tuple[int, ...], nic: str | None, scopes: tuple[Scope, ...]
) -> Iterator[Suspect]:
    host = layout.host[ranks[0]]
    away, near = _others(layout, host, ranks)
    outside: tuple[Block, ...] = ((ranks, away), (away, ranks))
    within: tuple[Block, ...] = ((ranks, ranks), (ranks, near), (near, ranks))
    blocks = {"outside": outside, "inside": within, "everywhere": (*outside, *within)}
    for scope in scopes:
        if _can_be_told(layout, kind == "slow_host", scope, len(ranks) + len(near)):
            yield Suspect(kind, ranks, (host,), nic, scope, blocks[scope])


def _one_way(layout: Layout, ranks: tuple[int, ...], nic: str | None, scopes: tuple[Scope, ...]) -> Iterator[Suspect]:
    host = layout.host[ranks[0]]
    away, near = _others(layout, host, ranks)
    others = {"outside": away, "inside": near, "everywhere": (*away, *near)}
    whole_host = not near and nic is None
    for scope in scopes:
        if not _can_be_told(layout, whole_host, scope, len(ranks) + len(near)):
            continue
        yield Suspect("slow_sender", ranks, (host,), nic, scope, ((ranks, others[scope]),))
        yield Suspect("slow_receiver", ranks, (host,), nic, scope, ((others[scope], ranks),))


def _can_be_told(layout: Layout, whole_host: bool, scope: Scope, on_host: int) -> bool:
    """Of two hosts either may be the slow one, and of two ranks inside a host too: that is a link between them."""
    if scope == "inside":
        return on_host > 2 and (not whole_host or len(layout.on_host) > 1)
    return not whole_host or len(layout.on_host) > 2


def _others(layout: Layout, host: str, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks on other hosts, and further ranks on this one."""
    away = tuple(rank for rank in layout.ranks if layout.host[rank] != host)
    return away, tuple(rank for rank in layout.on_host[host] if rank not in ranks)


def _without_twins(suspects: Iterable[Suspect]) -> list[Suspect]:
    seen: dict[tuple[tuple[Block, ...], int], Suspect] = {}
    for suspect in suspects:
        blocks = tuple(sorted(block for block in suspect.blocks if all(block) and _has_pairs(block)))
        seen.setdefault((blocks, suspect.size()), suspect)
    return list(seen.values())


def _has_pairs(block: Block) -> bool:
    return not (len(block[0]) == len(block[1]) == 1 and block[0] == block[1])


def list_links(layout: Layout, slow: Iterable[Pair]) -> list[Suspect]:
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


def _links_between(layout: Layout, first: tuple[int, ...], second: tuple[int, ...]) -> Iterator[Suspect]:
    scope: Scope = "inside" if layout.is_inside((first[0], second[0])) else "outside"
    for kind, blocks in (
        ("bad_link", ((first, second), (second, first))),
        ("asymmetric_pair", ((first, second),)),
        ("asymmetric_pair", ((second, first),)),
    ):
        ranks = (*blocks[0][0], *blocks[0][1])
        hosts = tuple(dict.fromkeys(layout.host[rank] for rank in ranks))
        yield Suspect(kind, ranks, hosts, None, scope, blocks)  # type: ignore[arg-type]
