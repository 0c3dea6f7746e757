"""The bad link: which host, NIC, rank or link makes pairs of ranks slow, and what to look at next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from stepscope.analyze.network.explain import Cause, explain, read_cells
from stepscope.analyze.network.pair_classes import Split, classify
from stepscope.analyze.network.pair_matrix import (
    QUANTITIES,
    HostMatrix,
    Pair,
    PairMatrix,
    Quantity,
    by_host,
    read_pair_matrices,
    read_pair_matrix,
)
from stepscope.analyze.network.pair_wording import Effect, describe_failed, describe_slow, describe_tiers
from stepscope.analyze.network.suspects import Kind, Layout, Suspect, list_links, list_suspects

__all__ = [
    "Finding",
    "HostMatrix",
    "PairMatrix",
    "by_host",
    "find_outliers",
    "pairs_to_dict",
    "read_pair_matrices",
    "read_pair_matrix",
]

BOTH_WAYS = frozenset({"slow_host", "slow_nic", "slow_rank"})
ONE_WAY = frozenset({"slow_sender", "slow_receiver"})
LINKS = frozenset({"bad_link", "asymmetric_pair"})


class Finding(msgspec.Struct, frozen=True, kw_only=True):
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
    """Sources and targets that speak for it."""
    evidence: int
    """Measurements that speak for it; a pair may count twice, by its latency and by its bandwidth."""
    groups: list[list[int]] = []
    """Ranks that are near to each other, for `tiers`."""
    sentence: str
    next_step: str

    def ratio(self, quantity: Quantity) -> float | None:
        return self.latency_ratio if quantity == "latency" else self.bandwidth_ratio


class _Named(NamedTuple):
    quantity: Quantity
    cause: Cause


def find_outliers(matrix: PairMatrix) -> list[Finding]:
    """Failed pairs first, then what is slow, the most evidence first; groups that are merely far apart come last.

    Nothing is said of a class of pairs (inside hosts, between hosts) with fewer than six of them. A host or rank is
    slow where its pairs take at least a fifth longer than the usual ones, beyond their intervals and the spread of
    the others; a single link must also be set apart from all other pairs by a gap.
    """
    layout = Layout(matrix)
    cells = {quantity: read_cells(matrix, quantity) for quantity in QUANTITIES}
    classes, splits = classify(cells, layout)
    causes = [
        _Named(quantity, cause) for quantity, measured in cells.items() for cause in explain(measured, classes, layout)
    ]
    return [*_find_failed(matrix, layout), *_find_slow(matrix, causes), *(_tiers(matrix, split) for split in splits)]


def _find_slow(matrix: PairMatrix, causes: Sequence[_Named]) -> list[Finding]:
    """What both quantities blame is one finding. Who is slow both ways is not named again for one of them."""
    slow_ranks = {named.cause.suspect.ranks for named in causes if named.cause.suspect.kind in BOTH_WAYS}
    grouped: dict[tuple[object, ...], list[_Named]] = {}
    for named in causes:
        suspect = named.cause.suspect
        if suspect.kind not in ONE_WAY or suspect.ranks not in slow_ranks:
            grouped.setdefault((suspect.kind, suspect.ranks, suspect.nic), []).append(named)
    findings = [_slow_finding(matrix, said) for said in grouped.values()]
    return sorted(findings, key=lambda finding: -finding.evidence)


def _slow_finding(matrix: PairMatrix, said: Sequence[_Named]) -> Finding:
    # What was blamed twice by one quantity is so slow that once did not explain it.
    logs: dict[Quantity, float] = {}
    for quantity, cause in said:
        logs[quantity] = logs.get(quantity, 0.0) + cause.effect
    effects = _effects(matrix, logs)
    seen = {(quantity, pair) for quantity, cause in said for pair in cause.pairs}
    pairs = sorted({pair for _, pair in seen})
    scopes = {cause.suspect.scope for _, cause in said}
    suspect = said[0].cause.suspect
    if len(scopes) > 1:
        suspect = suspect._replace(scope="everywhere")
    sentence, next_step = describe_slow(suspect, effects, len(pairs))
    return Finding(
        kind=suspect.kind,
        ranks=list(suspect.ranks),
        hosts=list(suspect.hosts),
        nic=suspect.nic,
        latency_ratio=effects.latency_ratio,
        bandwidth_ratio=effects.bandwidth_ratio,
        pairs=pairs,
        evidence=len(seen),
        sentence=sentence,
        next_step=next_step,
    )


def _effects(matrix: PairMatrix, logs: dict[Quantity, float]) -> Effect:
    latency, bandwidth = logs.get("latency"), logs.get("bandwidth")
    return Effect(
        latency_ratio=math.exp(latency) if latency is not None else None,
        bandwidth_ratio=math.exp(-bandwidth) if bandwidth is not None else None,
        has_latency=matrix.small_bytes is not None,
        has_bandwidth=matrix.large_bytes is not None,
    )


def _tiers(matrix: PairMatrix, split: Split) -> Finding:
    host = dict(zip(matrix.ranks, matrix.hosts, strict=True))
    groups = split.tiers.groups
    effects = _effects(matrix, split.effects)
    sentence, next_step = describe_tiers(groups, host, effects)
    return Finding(
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


def _find_failed(matrix: PairMatrix, layout: Layout) -> list[Finding]:
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


def _failed_finding(suspect: Suspect, pairs: list[Pair], message: str) -> Finding:
    sentence, next_step = describe_failed(suspect, len(pairs), message)
    return Finding(
        kind="failed",
        ranks=list(suspect.ranks),
        hosts=list(suspect.hosts),
        nic=suspect.nic,
        pairs=pairs,
        evidence=len(pairs),
        sentence=sentence,
        next_step=next_step,
    )


def pairs_to_dict(matrix: PairMatrix, findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything for JSON: the matrices of ranks, those of hosts where they differ from them, and what was found."""
    content: dict[str, Any] = {"matrix": msgspec.to_builtins(matrix)}
    if len(set(matrix.hosts)) < len(matrix.ranks):
        content["by_host"] = msgspec.to_builtins(by_host(matrix))
    content["findings"] = msgspec.to_builtins(list(findings))
    return content
