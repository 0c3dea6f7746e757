"""The bad link: which host, NIC, rank or link makes pairs of ranks slow, and what to look at next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from stepscope.analyze.network.explain import Cause, TierSplit, classify, explain, read_cells
from stepscope.analyze.network.pair_matrix import (
    ONE_WAY,
    QUANTITIES,
    Kind,
    Pair,
    PairMatrix,
    Quantity,
    RankLayout,
    Scope,
    Suspect,
    by_host,
    list_links,
    list_suspects,
)
from stepscope.core.units import count_of, format_share, format_significant

BOTH_WAYS = frozenset({"slow_host", "slow_nic", "slow_rank"})
LINKS = frozenset({"bad_link", "asymmetric_pair"})


class PairFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of slow or failed pairs."""

    kind: Kind
    """`tiers` is no fault: groups of hosts with slower links between them."""
    ranks: list[int]
    """At fault; of a link those of its first end, then those of the second."""
    hosts: list[str]
    nic: str | None = None
    latency_ratio: float | None = None
    """Over the usual one of such pairs: 2 is twice as long. None where the latency is not what stands out."""
    bandwidth_ratio: float | None = None
    """Over the usual one of such pairs: 0.5 is half as much. None where the bandwidth is not what stands out."""
    pairs: list[Pair]
    """Sources and targets that support it."""
    evidence: int
    """Measurements that support it; a pair may count twice, by its latency and by its bandwidth."""
    groups: list[list[int]] = []
    """Ranks that are near to each other, for `tiers`."""
    sentence: str
    next_step: str

    def ratio(self, quantity: Quantity) -> float | None:
        return self.latency_ratio if quantity == "latency" else self.bandwidth_ratio


def find_outliers(matrix: PairMatrix) -> list[PairFinding]:
    """Failed pairs first, then what is slow, the most evidence first; groups that are merely far apart come last.

    Nothing is said of a class of pairs (inside hosts, between hosts) with fewer than six of them. A host or rank is
    slow where its pairs take at least a fifth longer than the usual ones, beyond their intervals and the spread of
    the others; a single link must also be set apart from all other pairs by a gap.
    """
    layout = RankLayout(matrix)
    cells = {quantity: read_cells(matrix, quantity) for quantity in QUANTITIES}
    classes, splits = classify(cells, layout)
    causes = [(quantity, cause) for quantity, measured in cells.items() for cause in explain(measured, classes, layout)]
    return [*_find_failed(matrix, layout), *_find_slow(matrix, causes), *(_tiers(matrix, split) for split in splits)]


def _find_slow(matrix: PairMatrix, causes: Sequence[tuple[Quantity, Cause]]) -> list[PairFinding]:
    """What both quantities blame is one finding. Who is slow both ways is not named again for one of them."""
    slow_ranks = {cause.suspect.ranks for _, cause in causes if cause.suspect.kind in BOTH_WAYS}
    grouped: dict[tuple[object, ...], list[tuple[Quantity, Cause]]] = {}
    for quantity, cause in causes:
        suspect = cause.suspect
        if suspect.kind not in ONE_WAY or suspect.ranks not in slow_ranks:
            grouped.setdefault((suspect.kind, suspect.ranks, suspect.nic), []).append((quantity, cause))
    findings = [_slow_finding(matrix, said) for said in grouped.values()]
    return sorted(findings, key=lambda finding: -finding.evidence)


def _slow_finding(matrix: PairMatrix, said: Sequence[tuple[Quantity, Cause]]) -> PairFinding:
    # What was blamed twice by one quantity is so slow that once did not explain it.
    logs: dict[Quantity, float] = {}
    for quantity, cause in said:
        logs[quantity] = logs.get(quantity, 0.0) + cause.effect
    effects = _effects(matrix, logs)
    seen = {(quantity, pair) for quantity, cause in said for pair in cause.pairs}
    pairs = sorted({pair for _, pair in seen})
    scopes = {cause.suspect.scope for _, cause in said}
    suspect = said[0][1].suspect
    if len(scopes) > 1:
        suspect = suspect._replace(scope="everywhere")
    counted = count_of(len(pairs), "pair")
    return PairFinding(
        kind=suspect.kind,
        ranks=list(suspect.ranks),
        hosts=list(suspect.hosts),
        nic=suspect.nic,
        latency_ratio=effects.latency_ratio,
        bandwidth_ratio=effects.bandwidth_ratio,
        pairs=pairs,
        evidence=len(seen),
        sentence=f"{_who(suspect)} {_what(suspect)}: {_how_much(effects)} ({counted})",
        next_step=_STEPS[suspect.scope].get(suspect.kind) or _STEPS_ANYWHERE[suspect.kind],
    )


def _effects(matrix: PairMatrix, logs: dict[Quantity, float]) -> Effect:
    return Effect(
        latency_ratio=math.exp(logs["latency"]) if "latency" in logs else None,
        bandwidth_ratio=math.exp(-logs["bandwidth"]) if "bandwidth" in logs else None,
        has_latency=matrix.small_bytes is not None,
        has_bandwidth=matrix.large_bytes is not None,
    )


def _tiers(matrix: PairMatrix, split: TierSplit) -> PairFinding:
    host = dict(zip(matrix.ranks, matrix.hosts, strict=True))
    groups = split.tiers.groups
    effects = _effects(matrix, split.effects)
    sentence, next_step = describe_tiers(groups, host, effects)
    return PairFinding(
        kind="tiers",
        ranks=sorted(rank for group in groups for rank in group),
        hosts=list(dict.fromkeys(host[rank] for group in groups for rank in group)),
        latency_ratio=effects.latency_ratio,
        bandwidth_ratio=effects.bandwidth_ratio,
        pairs=sorted(split.tiers.far),
        evidence=len(split.tiers.far) * len(split.effects),
        groups=[list(group) for group in groups],
        sentence=sentence,
        next_step=next_step,
    )


def _find_failed(matrix: PairMatrix, layout: RankLayout) -> list[PairFinding]:
    """The largest things of which every pair failed, then links."""
    messages = {(failure.source, failure.target): failure.message for failure in matrix.failures}
    tried = {pair for quantity in QUANTITIES for pair in read_cells(matrix, quantity)} | messages.keys()
    ends = {rank for pair in messages for rank in pair}
    candidates = []
    for suspect in (*list_suspects(layout), *list_links(layout, sorted(messages))):
        pairs = {pair for pair in suspect.pairs() if pair in tried} if ends.issuperset(suspect.ranks) else set()
        if pairs and pairs <= messages.keys():
            candidates.append((suspect, pairs))
    left = set(messages)
    findings = []
    while left:
        # A link, where nothing larger explains more.
        suspect, pairs = max(candidates, key=lambda found: (len(left & found[1]), found[0].kind in LINKS))
        explained = sorted(left & pairs)
        findings.append(_failed_finding(suspect, explained, messages[explained[0]]))
        left -= pairs
    return findings


def _failed_finding(suspect: Suspect, pairs: list[Pair], message: str) -> PairFinding:
    way = {"slow_sender": " from", "slow_receiver": " to"}.get(suspect.kind, " to or from")
    is_link = suspect.kind in LINKS
    said = f"{_who(suspect)} gave no" if is_link else f"no message{way} {_who(suspect)} gave a"
    return PairFinding(
        kind="failed",
        ranks=list(suspect.ranks),
        hosts=list(suspect.hosts),
        nic=suspect.nic,
        pairs=pairs,
        evidence=len(pairs),
        sentence=f"{said} good result ({count_of(len(pairs), 'pair')}; {message})",
        next_step="look at the failed cases, then whether the two ends reach each other at all: address, port, "
        "firewall, cable",
    )


def pairs_to_dict(matrix: PairMatrix, findings: Sequence[PairFinding]) -> dict[str, Any]:
    """Everything for JSON: the matrices of ranks, those of hosts where they differ from them, and what was found."""
    content: dict[str, Any] = {"matrix": msgspec.to_builtins(matrix)}
    if len(set(matrix.hosts)) < len(matrix.ranks):
        content["by_host"] = msgspec.to_builtins(by_host(matrix))
    content["findings"] = msgspec.to_builtins(list(findings))
    return content


MOST_NAMES = 8
"""Named one by one; of more only the first ones."""


class Effect(NamedTuple):
    latency_ratio: float | None
    bandwidth_ratio: float | None
    has_latency: bool
    """Whether it was measured: only then can it be as usual."""
    has_bandwidth: bool


def describe_tiers(groups: Sequence[Sequence[int]], host: Mapping[int, str], effect: Effect) -> tuple[str, str]:
    homes = [{host[rank] for rank in group} for group in groups]
    whole_hosts = sum(map(len, homes)) == len(set().union(*homes))
    names = [
        _list_names(list(dict.fromkeys(host[rank] for rank in group)) if whole_hosts else [f"{rank}" for rank in group])
        for group in groups[:MOST_NAMES]
    ]
    more = f" and {len(groups) - MOST_NAMES} more" if len(groups) > MOST_NAMES else ""
    what = "hosts" if whole_hosts else "ranks"
    sentence = f"{what} form {len(groups)} groups ({'; '.join(names)}{more}), and between them {_how_much(effect)}"
    step = (
        "as it should be where the groups hang on different switches; else look at what connects them"
        if whole_hosts
        else "as it should be where the groups sit on different sockets or PCIe switches (nvidia-smi topo -m)"
    )
    return sentence, step


def _list_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return f"{shown} and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else shown


def _who(suspect: Suspect) -> str:
    several = len(suspect.ranks) > 1
    ranks = f"rank {suspect.ranks[0]}" if not several else f"ranks {_list_names(list(map(str, suspect.ranks)))}"
    if suspect.kind in LINKS:
        return _link_name(suspect)
    host = suspect.hosts[0]
    if suspect.nic is not None:
        return f"NIC {suspect.nic} of host {host} ({ranks})"
    # A whole host is meant with all its ranks, of which there may be one.
    is_host = suspect.kind == "slow_host" or (suspect.kind in {"slow_sender", "slow_receiver"} and several)
    return f"host {host} ({ranks})" if is_host else f"{ranks} on host {host}"


def _link_name(suspect: Suspect) -> str:
    arrow = "→" if suspect.kind == "asymmetric_pair" else "–"
    (first, second), names = suspect.blocks[0], suspect.hosts
    if suspect.scope == "inside":
        return f"ranks {first[0]} {arrow} {second[0]} on host {names[0]}"
    if len(first) == len(second) == 1:
        return f"rank {first[0]} on host {names[0]} {arrow} rank {second[0]} on host {names[1]}"
    return f"hosts {names[0]} {arrow} {names[1]}"


def _what(suspect: Suspect) -> str:
    words = {
        "bad_link": "is a slow link",
        "asymmetric_pair": "is slow in this direction only",
        "slow_sender": f"sends slowly to {_WHOM[suspect.scope]}",
        "slow_receiver": f"receives slowly from {_WHOM[suspect.scope]}",
    }
    return words.get(suspect.kind, f"is slow to and from {_WHOM[suspect.scope]}")


_WHOM: dict[Scope, str] = {
    "outside": "every other host",
    "inside": "the ranks of its own host",
    "everywhere": "every other rank",
}


def _how_much(effect: Effect) -> str:
    parts = []
    if effect.latency_ratio is not None:
        parts.append(f"latency is {format_significant(effect.latency_ratio, 3)} times the usual")
    elif effect.has_latency:
        parts.append("latency is as usual")
    if effect.bandwidth_ratio is not None:
        parts.append(f"bandwidth is {format_share(effect.bandwidth_ratio, 0)} of the usual")
    elif effect.has_bandwidth:
        parts.append("bandwidth is as usual")
    # What stands out comes first.
    if effect.latency_ratio is None:
        parts.reverse()
    return ", ".join(parts)


_STEPS: dict[Scope, dict[Kind, str]] = {
    "everywhere": {"slow_host": "look at the host itself: clocks, power limit, other work (stepscope doctor there)"},
    "outside": {"slow_rank": "look at this rank's way to the NIC: NUMA binding, PCIe path, which NIC it is given"},
    "inside": {
        "slow_host": "look inside the host: PCIe and NVLink state, NUMA binding, memory (stepscope doctor there)",
        "slow_rank": "look at the device's links inside the host: nvidia-smi nvlink -s, PCIe width, NUMA binding",
        "bad_link": "look at what connects the two inside the host: nvidia-smi topo -m, PCIe width, NUMA binding",
        "asymmetric_pair": "measure this pair again; if it stays, look at PCIe width and NUMA binding of both ends",
    },
}

_STEPS_ANYWHERE: dict[Kind, str] = {
    "slow_host": "compare its NIC, cable and switch port with a good host's: speed, error counters (ethtool, ibstat)",
    "slow_nic": "compare this NIC with the others of the host: link speed, PCIe width, cable, error counters",
    "slow_rank": "look at this rank's cores and device: binding, clocks, other work (stepscope doctor there)",
    "slow_sender": "look at its sending side: retransmissions, pause frames, transmit queues, what else sends there",
    "slow_receiver": "look at its receiving side: dropped packets, interrupts, buffers, what else arrives there",
    "bad_link": "measure this pair again; if it stays, look at the path: cables, switch ports, routing",
    "asymmetric_pair": "measure this pair again; if it stays, compare the routes of the two directions",
}
