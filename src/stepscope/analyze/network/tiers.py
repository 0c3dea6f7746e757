"""Groups of hosts (or of ranks inside hosts) that are near to each other: two tiers of links are no fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from stepscope.analyze.network.pair_matrix import Pair
from stepscope.stats import median

_CLEAR = 0.9
"""Share of the pairs between groups that must be slow, and of those inside groups that must not."""
_LONERS = 4
"""At most one in so many units may belong to no group."""


class Tiers(NamedTuple):
    groups: list[tuple[int, ...]]
    """Ranks."""
    far: frozenset[Pair]
    """Between two groups."""


def find_tiers(slowness: Mapping[Pair, float], slow_above: float, unit_of: Callable[[int], str]) -> Tiers | None:
    """Splits what these pairs connect into groups with slow pairs between them and faster ones inside.

    `unit_of` names what may not be torn apart: a host, or a rank. One unit alone is no group: it is slow. It goes with
    the group that is nearest to it.
    """
    near = _fold(slowness, unit_of)
    group_of = _connect(near, slow_above)
    sizes = Counter(group_of.values())
    alone = {unit for unit, name in group_of.items() if sizes[name] == 1}
    if len(alone) * _LONERS > len(group_of):
        return None
    for unit in sorted(alone):
        group_of[unit] = _nearest_group(unit, near, group_of, alone)
    far = {pair for pair in slowness if group_of[unit_of(pair[0])] != group_of[unit_of(pair[1])]}
    if not _is_clear(slowness, slow_above, far, lambda rank: unit_of(rank) in alone):
        return None
    groups: dict[str, set[int]] = {}
    for pair in slowness:
        for rank in pair:
            groups.setdefault(group_of[unit_of(rank)], set()).add(rank)
    return Tiers(sorted(tuple(sorted(ranks)) for ranks in groups.values()), frozenset(far))


def _is_clear(
    slowness: Mapping[Pair, float], slow_above: float, far: set[Pair], is_alone: Callable[[int], bool]
) -> bool:
    judged = {pair: value for pair, value in slowness.items() if not (is_alone(pair[0]) or is_alone(pair[1]))}
    apart = [value > slow_above for pair, value in judged.items() if pair in far]
    inside = [value <= slow_above for pair, value in judged.items() if pair not in far]
    return all(sides and sum(sides) >= _CLEAR * len(sides) for sides in (apart, inside))


def _fold(slowness: Mapping[Pair, float], unit_of: Callable[[int], str]) -> dict[tuple[str, str], float]:
    """The slower direction's median between every two units."""
    blocks: dict[tuple[str, str], list[float]] = {}
    for (source, target), value in slowness.items():
        blocks.setdefault((unit_of(source), unit_of(target)), []).append(value)
    folded: dict[tuple[str, str], float] = {}
    for (a, b), values in blocks.items():
        middle = median(values)
        if a != b and middle is not None:
            ends = (min(a, b), max(a, b))
            folded[ends] = max(middle, folded.get(ends, middle))
    return folded


def _connect(near: Mapping[tuple[str, str], float], slow_above: float) -> dict[str, str]:
    """Unit → its group: units that fast pairs connect, directly or through others, are in one."""
    group_of = {unit: unit for ends in near for unit in ends}
    for (a, b), value in near.items():
        if value <= slow_above and group_of[a] != group_of[b]:
            kept, dropped = group_of[a], group_of[b]
            group_of = {unit: kept if name == dropped else name for unit, name in group_of.items()}
    return group_of


def _nearest_group(
    unit: str, near: Mapping[tuple[str, str], float], group_of: Mapping[str, str], alone: set[str]
) -> str:
    distances: dict[str, list[float]] = {}
    for (a, b), value in near.items():
        other = b if a == unit else a if b == unit else None
        if other is not None and other not in alone:
            distances.setdefault(group_of[other], []).append(value)
    return min(distances, key=lambda name: _middle(distances[name]), default=group_of[unit])


def _middle(values: Sequence[float]) -> float:
    return median(values) or 0.0
