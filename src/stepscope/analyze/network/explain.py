"""Slow pairs explained by as few causes as possible: the cause that explains most first, then what is left."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from stepscope.analyze.network.pair_matrix import Pair, PairMatrix, Quantity
from stepscope.analyze.network.suspects import Layout, Suspect, list_links, list_suspects
from stepscope.analyze.network.usual import find_usual
from stepscope.stats import median

LEAST_EFFECT = math.log(1.2)
"""Slower by less than a fifth is not called slow, however sure it is."""

LEAST_PAIRS = 6
"""Of one class: with fewer nobody knows what is usual."""

_SURE_SPREADS = 4.0
"""How far the middle of several pairs must stand out."""
_SURE_ALONE = 7.0
"""The same for one pair or two, which must also be set apart from the others:"""
_GAP = 2.5
"""so many times further out than the next one, since the tails of noise are long but have no gaps."""
_FEW = 6
"""At most one in so many pairs of a class can stand alone; more of them are a pattern that nobody here knows."""
_AGREEING = 0.8
"""Share of a suspect's pairs that must be slow too."""
_SEVERAL = 3
"""Pairs that speak for each other; fewer have to stand alone."""
_MOST_CAUSES = 64


class Cell(NamedTuple):
    """How slow one pair is, as a logarithm: of its time, or of the inverse of its bandwidth."""

    value: float
    low: float
    """The fast end of its interval."""


class Cause(NamedTuple):
    suspect: Suspect
    effect: float
    """Logarithm of the time over the usual one."""
    pairs: tuple[Pair, ...]
    """Those that speak for it."""


def read_cells(matrix: PairMatrix, quantity: Quantity) -> dict[Pair, Cell]:
    cells = {}
    for i, source in enumerate(matrix.ranks):
        for j, target in enumerate(matrix.ranks):
            if quantity == "latency":
                value, interval = matrix.latency_s[i][j], matrix.latency_interval_s[i][j]
                if value is not None and interval is not None:
                    cells[source, target] = Cell(math.log(value), math.log(interval.low))
            else:
                value, interval = matrix.bandwidth_bytes_per_s[i][j], matrix.bandwidth_interval_bytes_per_s[i][j]
                if value is not None and interval is not None:
                    cells[source, target] = Cell(-math.log(value), -math.log(interval.high))
    return cells


def explain(cells: Mapping[Pair, Cell], classes: Sequence[Sequence[Pair]], layout: Layout) -> list[Cause]:
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

    def __init__(self, cells: Mapping[Pair, Cell], classes: Sequence[Sequence[Pair]], ranks: int) -> None:
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
                self._cells[pair] = Cell(value - cause.effect, low - cause.effect)
        self._find_usual()


def _best_of_several(state: _State, suspects: Iterable[Suspect]) -> Cause | None:
    """The suspect with several pairs that leaves the least unexplained. Of equals the first."""
    best: Cause | None = None
    most = 0.0
    for suspect in suspects:
        if not state.may_be_slow(suspect):
            continue
        cause = _judge(state, suspect)
        if cause is None:
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


def _explain_alone(state: _State, suspects: Sequence[Suspect], layout: Layout) -> list[Cause]:
    """Pairs that stand out one by one or two by two."""
    alone = {pair for number in range(len(state.classes)) for pair in _set_apart(state, number)}
    # Seen from its other direction a pair need not be set apart to belong to the same link.
    alone |= {
        (b, a) for a, b in alone if state.slowness.get((b, a), 0.0) >= max(LEAST_EFFECT, state.slowness[a, b] / 2)
    }
    causes = []
    # A link that is slow both ways, then whoever has but two pairs, then single directions.
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
            return [pair for pair in pairs[:count] if _holds_throughout(state, pair)]
    return []


def _holds_throughout(state: _State, pair: Pair) -> bool:
    """Whether nearly all samples are slow, not just the middle one: else the pair was held up for a while."""
    return state.surely[pair] >= max(LEAST_EFFECT, state.slowness[pair] / 2)
