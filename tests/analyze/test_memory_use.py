"""Steps found from repeating allocations: the grid of length, repetition inside a step, first steps and noise."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.analyze.memory_use import memory_use
from stepscope.formats.memory import MemoryHistory, Owner


def history(sizes: np.ndarray, kept: np.ndarray) -> MemoryHistory:
    """Blocks of each step (a row) are freed at its end but for those kept."""
    changes = np.concatenate([np.concatenate([row, -row[~keep]]) for row, keep in zip(sizes, kept, strict=True)])
    return MemoryHistory(
        source="made",
        format="made",
        device="0",
        owner_kind="category",
        owners=[Owner(name="all")],
        time_ns=np.arange(len(changes)) * 1000,
        change_bytes=changes,
        owner=np.zeros(len(changes), np.int64),
        start_bytes={0: 100},
        counts_blocks=True,
    )


@pytest.mark.parametrize("layers", [1, 12, 100])
@pytest.mark.parametrize("per_layer", [1, 7])
@pytest.mark.parametrize("steps", [3, 4, 10, 50])
@pytest.mark.parametrize("leak", [False, True])
def test_steps_of_many_layers(steps: int, layers: int, per_layer: int, *, leak: bool) -> None:
    generator = np.random.default_rng(layers * per_layer)
    layer = generator.integers(1, 1 << 20, per_layer)
    # The head of the model is what tells a step from a layer.
    one = np.concatenate([np.tile(layer, layers), [5 << 20, 7 << 20]])
    sizes = np.tile(one, (steps, 1))
    kept = np.zeros(sizes.shape, bool)
    kept[:, 0] = leak
    growth = memory_use(history(sizes, kept)).growth
    assert growth is not None
    assert len(growth.steps) == steps
    assert growth.bytes_per_step == (int(one[0]) if leak else 0)
    assert growth.grows is leak


@pytest.mark.parametrize("seed", range(5))
def test_odd_first_steps_and_noise(seed: int) -> None:
    """The first step allocates otherwise, and one allocation in a hundred has another size."""
    generator = np.random.default_rng(seed)
    sizes = np.tile(generator.integers(1, 1 << 20, 60), (12, 1))
    sizes[0] = generator.integers(1, 1 << 20, 60)
    odd = generator.random(sizes.shape) < 0.01
    sizes[odd] += 512
    growth = memory_use(history(sizes, np.zeros(sizes.shape, bool))).growth
    assert growth is not None
    assert len(growth.steps) == 12
    assert not growth.grows


def test_without_repetition_there_are_no_steps() -> None:
    generator = np.random.default_rng(1)
    for count in (1, 2, 3, 5, 50, 1000):
        sizes = generator.permutation(count)[None, :] + 1
        found = memory_use(history(sizes, np.zeros(sizes.shape, bool)))
        assert found.growth is None
        assert any("no steps" in note for note in found.notes)
        assert found.peak_bytes == 100 + int(sizes.sum())


def test_many_changes_keep_their_peak_in_few_points() -> None:
    generator = np.random.default_rng(2)
    sizes = generator.integers(1, 1 << 30, (300, 20))
    found = memory_use(history(sizes, np.zeros(sizes.shape, bool)))
    assert len(found.timeline) <= 1000
    assert max(point.allocated_bytes for point in found.timeline) == found.peak_bytes
