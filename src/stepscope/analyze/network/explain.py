"""Slow pairs explained by as few causes as possible, among pairs that should take the same time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from stepscope.analyze.network.pair_matrix import (
    Pair,
    PairMatrix,
    Quantity,
    RankLayout,
    Suspect,
    list_links,
    list_suspects,
)
from stepscope.stats import median, quantile_sorted

LEAST_SPREAD = 0.03
"""Least spread of logarithms: no two links repeat better, so no class is taken to be narrower."""

_REACH = 4.0
"""Spreads around the centre that still count as usual."""

_SHARE = 4
"""At least one in so many values is usual."""


class Usual(NamedTuple):
    centre: float
    spread: float
    """Robust standard deviation."""


def find_usual(values: Sequence[float]) -> Usual:
    """Centre and spread of the usual values among these logarithms, though more than half of them may be too high.

    Starts from the fastest dense quarter and takes in its surroundings until nothing more belongs to it: noise
    without a gap ends with nearly all values, a second cluster behind a gap stays outside.
    """
    ordered = sorted(values)
    core = _densest(ordered)
    for _ in range(len(ordered)):
        centre, spread = _usual_of(core)
        grown = [value for value in ordered if abs(value - centre) <= _REACH * spread]
        if grown == core:
            break
        core = grown
    return _usual_of(core)


def _densest(ordered: Sequence[float]) -> list[float]:
    """The fastest of those windows that are narrow in themselves, or about as narrow as the narrowest."""
    count = min(len(ordered), max(2, math.ceil(len(ordered) / _SHARE)))
    widths = [ordered[i + count - 1] - ordered[i] for i in range(len(ordered) - count + 1)]
    wide = max(2 * min(widths), _REACH * LEAST_SPREAD)
    first = next(i for i, width in enumerate(widths) if width <= wide)
    return list(ordered[first : first + count])


def _usual_of(ordered: Sequence[float]) -> Usual:
    centre = quantile_sorted(ordered, 0.5)
    deviation = quantile_sorted(sorted(abs(value - centre) for value in ordered), 0.5)
    return Usual(centre, max(LEAST_SPREAD, 1.4826 * deviation))


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
    judged = {pair: value for pair, value in slowness.items() if alone.isdisjoint(map(unit_of, pair))}
    apart = [value > slow_above for pair, value in judged.items() if pair in far]
    inside = [value <= slow_above for pair, value in judged.items() if pair not in far]
    if not all(sides and sum(sides) >= _CLEAR * len(sides) for sides in (apart, inside)):
        return None
    groups: dict[str, set[int]] = defaultdict(set)
    for rank in chain.from_iterable(slowness):
        groups[group_of[unit_of(rank)]].add(rank)
    return Tiers(sorted(tuple(sorted(ranks)) for ranks in groups.values()), frozenset(far))


def _fold(slowness: Mapping[Pair, float], unit_of: Callable[[int], str]) -> dict[tuple[str, str], float]:
    """The slower direction's median between every two units."""
    blocks: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (source, target), value in slowness.items():
        blocks[unit_of(source), unit_of(target)].append(value)
    folded: dict[tuple[str, str], float] = {}
    for (a, b), values in blocks.items():
        if a != b:
            ends = (min(a, b), max(a, b))
            folded[ends] = max(_middle(values), folded.get(ends, -math.inf))
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
    distances: dict[str, list[float]] = defaultdict(list)
    for (a, b), value in near.items():
        other = b if a == unit else a if b == unit else None
        if other is not None and other not in alone:
            distances[group_of[other]].append(value)
    return min(distances, key=lambda name: _middle(distances[name]), default=group_of[unit])


LEAST_EFFECT = math.log(1.2)
"""Slower by less than a fifth is not called slow, however sure it is."""

LEAST_PAIRS = 6
"""Pairs per class: with fewer it is not known what is usual."""

_SURE_SPREADS = 4.0
"""How far the middle of several pairs must stand out."""
_SURE_ALONE = 7.0
"""The same for one pair or two, which must also be set apart from the others:"""
_GAP = 2.5
"""so many times further out than the next one, since the tails of noise are long but have no gaps."""
_FEW = 6
"""At most one in so many pairs of a class can stand alone; more of them are an unknown pattern."""
_AGREEING = 0.8
"""Share of a suspect's pairs that must be slow too."""
_SEVERAL = 3
"""Pairs that support each other; fewer have to stand out alone."""
_MOST_CAUSES = 64


class PairSlowness(NamedTuple):
    """How slow one pair is, as a logarithm: of its time, or of the inverse of its bandwidth."""

    value: float
    low: float
    """The fast end of its interval."""


class Cause(NamedTuple):
    suspect: Suspect
    effect: float
    """Logarithm of the time over the usual one."""
    pairs: tuple[Pair, ...]
    """Those that support it."""


def read_cells(matrix: PairMatrix, quantity: Quantity) -> dict[Pair, PairSlowness]:
    values, intervals = matrix.latency_s, matrix.latency_interval_s
    if quantity == "bandwidth":
        values, intervals = matrix.bandwidth_bytes_per_s, matrix.bandwidth_interval_bytes_per_s
    sign = 1 if quantity == "latency" else -1
    cells = {}
    for i, source in enumerate(matrix.ranks):
        for j, target in enumerate(matrix.ranks):
            value, interval = values[i][j], intervals[i][j]
            if value is not None and interval is not None:
                fast = interval.low if quantity == "latency" else interval.high
                cells[source, target] = PairSlowness(sign * math.log(value), sign * math.log(fast))
    return cells


def explain(cells: Mapping[Pair, PairSlowness], classes: Sequence[Sequence[Pair]], layout: RankLayout) -> list[Cause]:
    """`classes`: pairs that should take the same time."""
    measured = [[pair for pair in pairs if pair in cells] for pairs in classes]
    state = _State(cells, [pairs for pairs in measured if len(pairs) >= LEAST_PAIRS], len(layout.ranks))
    causes: list[Cause] = []
    suspects = list_suspects(layout)
    while len(causes) < _MOST_CAUSES:
        links = list_links(layout, state.slow)
        found = _best_of_several(state, (*suspects, *links))
        if found is None:
            break
        causes.append(found)
        state.remove(found)
    return causes + _explain_alone(state, suspects, layout)


class _State:
    """What is not explained yet: how slow every pair is, and what is usual in its class."""

    def __init__(self, cells: Mapping[Pair, PairSlowness], classes: Sequence[Sequence[Pair]], ranks: int) -> None:
        self.classes = classes
        self.class_of = {pair: number for number, pairs in enumerate(classes) for pair in pairs}
        self._cells = {pair: cells[pair] for pair in self.class_of}
        self._missing = ranks * (ranks - 1) - len(self._cells)
        self._find_usual()

    def _find_usual(self) -> None:
        self.usual = [find_usual([self._cells[pair].value for pair in pairs]) for pairs in self.classes]
        self.slowness: dict[Pair, float] = {}
        """Beyond the usual."""
        self.surely: dict[Pair, float] = {}
        """The same at the fast end of the interval."""
        for pair, cell in self._cells.items():
            centre = self.usual[self.class_of[pair]].centre
            self.slowness[pair], self.surely[pair] = cell.value - centre, cell.low - centre
        self.slow = [pair for pair, value in self.slowness.items() if value >= LEAST_EFFECT]
        self._slow_ends = Counter(rank for pair in self.slow for rank in pair)

    def sure_effect(self, number: int, spreads: float) -> float:
        """What stands out from this class. The spread of a few pairs is itself known badly."""
        caution = 1 + 3 / len(self.classes[number])
        return max(LEAST_EFFECT, spreads * caution * self.usual[number].spread)

    def may_be_slow(self, suspect: Suspect) -> bool:
        """Whether half of its measured pairs could be slow, told from counts alone: most suspects end here."""
        return 2 * sum(self._slow_ends[rank] for rank in suspect.ranks) >= suspect.size() - self._missing

    def remove(self, cause: Cause) -> None:
        for pair in cause.suspect.pairs():
            if pair in self._cells:
                value, low = self._cells[pair]
                self._cells[pair] = PairSlowness(value - cause.effect, low - cause.effect)
        self._find_usual()


def _best_of_several(state: _State, suspects: Iterable[Suspect]) -> Cause | None:
    """The suspect with several pairs that leaves the least unexplained. Of equals the first."""
    best: Cause | None = None
    most = 0.0
    for suspect in filter(state.may_be_slow, suspects):
        if (cause := _judge(state, suspect)) is None:
            continue
        explained = math.fsum(
            abs(value) - abs(value - cause.effect)
            for pair in suspect.pairs()
            if (value := state.slowness.get(pair)) is not None
        )
        if explained > most * (1 + 1e-9):
            best, most = cause, explained
    return best


def _judge(state: _State, suspect: Suspect) -> Cause | None:
    """Whether its pairs are slow together, beyond their intervals and the spread of their class."""
    pairs = [pair for pair in suspect.pairs() if pair in state.slowness]
    if len(pairs) < _SEVERAL:
        return None
    effect = _middle([state.slowness[pair] for pair in pairs])
    if effect < LEAST_EFFECT:
        return None
    sure = max(state.sure_effect(number, _SURE_SPREADS) for number in {state.class_of[pair] for pair in pairs})
    surely = _middle([state.surely[pair] for pair in pairs])
    agreeing = tuple(pair for pair in pairs if state.slowness[pair] >= effect / 2)
    if effect < sure or surely < LEAST_EFFECT / 2 or len(agreeing) < _AGREEING * len(pairs):
        return None
    return Cause(suspect, effect, agreeing)


def _middle(values: Sequence[float]) -> float:
    return median(values) or 0.0


def _explain_alone(state: _State, suspects: Sequence[Suspect], layout: RankLayout) -> list[Cause]:
    """Pairs that stand out one by one or two by two."""
    alone = {pair for number in range(len(state.classes)) for pair in _set_apart(state, number)}
    # Seen from its other direction a pair need not be set apart to belong to the same link.
    alone |= {
        (b, a) for a, b in alone if state.slowness.get((b, a), 0.0) >= max(LEAST_EFFECT, state.slowness[a, b] / 2)
    }
    causes = []
    # A link that is slow both ways, then hosts, NICs and ranks with two pairs, then single directions.
    two = [*list_links(layout, sorted(alone)), *suspects]
    for wanted in (2, 1):
        for suspect in two:
            pairs = tuple(pair for pair in suspect.pairs() if pair in state.slowness)
            if len(pairs) == wanted and alone.issuperset(pairs):
                causes.append(Cause(suspect, _middle([state.slowness[pair] for pair in pairs]), pairs))
                alone -= set(pairs)
    return causes


def _set_apart(state: _State, number: int) -> list[Pair]:
    """The slowest pairs of a class, where a gap divides them from all others."""
    pairs = sorted(state.classes[number], key=lambda pair: -state.slowness[pair])
    least = state.sure_effect(number, _SURE_ALONE)
    for count in range(max(2, len(pairs) // _FEW), 0, -1):
        last, following = state.slowness[pairs[count - 1]], state.slowness[pairs[count]]
        if last >= max(least, _GAP * following):
            # Nearly all samples must be slow, not just the middle one: else the pair was contended for a while.
            return [pair for pair in pairs[:count] if state.surely[pair] >= max(LEAST_EFFECT, state.slowness[pair] / 2)]
    return []


class TierSplit(NamedTuple):
    """Groups that are near to each other, and how much slower the pairs between them are."""

    tiers: Tiers
    effects: dict[Quantity, float]
    """Logarithms; a quantity in which near and far do not differ is left out."""


def classify(
    cells: Mapping[Quantity, Mapping[Pair, PairSlowness]], layout: RankLayout
) -> tuple[list[list[Pair]], list[TierSplit]]:
    """One set of classes for all quantities: what one of them shows of the wiring holds for the others."""
    pairs = sorted({pair for measured in cells.values() for pair in measured})
    waiting = [[pair for pair in pairs if layout.is_inside(pair) is inside] for inside in (True, False)]
    classes: list[list[Pair]] = []
    splits: list[TierSplit] = []
    while waiting:
        chosen = waiting.pop()
        tiers = _find_tiers(cells, chosen, layout)
        if tiers is None:
            classes.append(chosen)
            continue
        far = [pair for pair in chosen if pair in tiers.far]
        near = [pair for pair in chosen if pair not in tiers.far]
        waiting += [near, far]
        splits.append(TierSplit(tiers, _effects(cells, near, far)))
    return classes, splits


def _find_tiers(
    cells: Mapping[Quantity, Mapping[Pair, PairSlowness]], chosen: Sequence[Pair], layout: RankLayout
) -> Tiers | None:
    """By the first quantity that shows any."""
    for measured in cells.values():
        values = {pair: measured[pair].value for pair in chosen if pair in measured}
        if len(values) < 2 * LEAST_PAIRS:
            continue
        usual = find_usual(list(values.values()))
        slowness = {pair: value - usual.centre for pair, value in values.items()}
        sure = max(LEAST_EFFECT, _SURE_SPREADS * usual.spread)
        # What is usual may be the near pairs or, where those are fewer, the far ones.
        for others in (
            [value for value in slowness.values() if value >= sure],
            [value for value in slowness.values() if value <= -sure],
        ):
            if len(others) < LEAST_PAIRS:
                continue
            # A group is made of hosts, or of ranks inside a host.
            unit_of = str if layout.is_inside(chosen[0]) else layout.host.__getitem__
            tiers = find_tiers(slowness, (median(others) or 0.0) / 2, unit_of)
            if tiers is not None and len(slowness) - len(tiers.far) >= LEAST_PAIRS <= len(tiers.far):
                return tiers
    return None


def _effects(
    cells: Mapping[Quantity, Mapping[Pair, PairSlowness]], near: Sequence[Pair], far: Sequence[Pair]
) -> dict[Quantity, float]:
    effects = {}
    for quantity, measured in cells.items():
        ends = [[measured[pair].value for pair in side if pair in measured] for side in (near, far)]
        if all(ends):
            near_usual, far_usual = map(find_usual, ends)
            if (effect := far_usual.centre - near_usual.centre) >= LEAST_EFFECT:
                effects[quantity] = effect
    return effects
