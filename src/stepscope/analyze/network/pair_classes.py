"""Pairs that should take the same time: inside hosts, between hosts, and each split where it has tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from stepscope.analyze.network.explain import LEAST_EFFECT, LEAST_PAIRS, Cell
from stepscope.analyze.network.pair_matrix import Pair, Quantity
from stepscope.analyze.network.suspects import Layout
from stepscope.analyze.network.tiers import Tiers, find_tiers
from stepscope.analyze.network.usual import find_usual
from stepscope.stats import median

_SURE_SPREADS = 4.0


class Split(NamedTuple):
    """Groups that are near to each other, and how much slower the pairs between them are."""

    tiers: Tiers
    effects: dict[Quantity, float]
    """Logarithms; a quantity in which near and far do not differ is left out."""


def classify(cells: Mapping[Quantity, Mapping[Pair, Cell]], layout: Layout) -> tuple[list[list[Pair]], list[Split]]:
    """One set of classes for all quantities: what one of them tells of the wiring holds for the others."""
    pairs = sorted({pair for measured in cells.values() for pair in measured})
    waiting = [[pair for pair in pairs if layout.is_inside(pair) is inside] for inside in (True, False)]
    classes: list[list[Pair]] = []
    splits: list[Split] = []
    while waiting:
        chosen = waiting.pop()
        tiers = _find_tiers(cells, chosen, layout)
        if tiers is None:
            classes.append(chosen)
            continue
        far = [pair for pair in chosen if pair in tiers.far]
        near = [pair for pair in chosen if pair not in tiers.far]
        waiting += [near, far]
        splits.append(Split(tiers, _effects(cells, near, far)))
    return classes, splits


def _find_tiers(cells: Mapping[Quantity, Mapping[Pair, Cell]], chosen: Sequence[Pair], layout: Layout) -> Tiers | None:
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
            tiers = find_tiers(slowness, (median(others) or 0.0) / 2, _unit(layout, chosen[0]))
            if tiers is not None and len(slowness) - len(tiers.far) >= LEAST_PAIRS <= len(tiers.far):
                return tiers
    return None


def _unit(layout: Layout, pair: Pair) -> Callable[[int], str]:
    """What a group is made of: hosts, or ranks inside a host."""
    return str if layout.is_inside(pair) else layout.host.__getitem__


def _effects(
    cells: Mapping[Quantity, Mapping[Pair, Cell]], near: Sequence[Pair], far: Sequence[Pair]
) -> dict[Quantity, float]:
    effects = {}
    for quantity, measured in cells.items():
        ends = [[measured[pair].value for pair in side if pair in measured] for side in (near, far)]
        if all(ends):
            effect = find_usual(ends[1]).centre - find_usual(ends[0]).centre
            if effect >= LEAST_EFFECT:
                effects[quantity] = effect
    return effects
