"""Climbing from a row to those above it: in chains of any depth the same as one step after the other."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.formats.nesting import climb, farthest, nearest, nearest_after


def ancestors(row: int, parent: list[int]) -> list[int]:
    found = []
    while row >= 0:
        found.append(row)
        row = parent[row]
    return found


@pytest.mark.parametrize("depth", [1, 5, 63, 64, 65, 130, 700])
@pytest.mark.parametrize("seed", [1, 2])
def test_deep_and_shallow_chains(depth: int, seed: int) -> None:
    """Each row hangs below one of the two before it, so that chains of all lengths up to `depth` arise."""
    dice = np.random.default_rng(seed)
    size = 2 * depth + 3
    parent = np.array([max(-1, row - int(dice.integers(1, 3))) if row % (depth + 1) else -1 for row in range(size)])
    wanted = dice.random(size) < dice.choice([0.0, 0.02, 0.5])
    end = dice.integers(0, 50, size)
    rows = np.append(dice.permutation(size), -1)
    times = dice.integers(0, 60, len(rows))
    chains = [ancestors(row, parent.tolist()) for row in rows.tolist()]
    matching = [[row for row in chain if wanted[row]] for chain in chains]
    assert nearest(rows, parent, wanted).tolist() == [chain[0] if chain else -1 for chain in matching]
    assert farthest(rows, parent, wanted).tolist() == [chain[-1] if chain else -1 for chain in matching]
    value = np.where(wanted, np.arange(size) + 1000, -1)
    assert climb(value, parent, rows).tolist() == [value[chain[0]] if chain else -1 for chain in matching]
    open_then = [
        next((row for row in chain if end[row] > time), -1) for chain, time in zip(chains, times.tolist(), strict=True)
    ]
    assert nearest_after(rows, parent, end, times).tolist() == open_then
