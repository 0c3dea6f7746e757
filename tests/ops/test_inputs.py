from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.bench.ops.build import EVICTION_FACTOR, MAX_SETS, MAX_SETS_BYTES, CacheFlush, plan_rotation
from stepscope.bench.ops.inputs import CHUNK_ELEMENTS, Arena, Arenas, Maker


def test_two_makers_make_the_same() -> None:
    import torch

    first, second = Maker("float32", "cpu"), Maker("float32", "cpu")
    assert torch.equal(first.values(5, 7), second.values(5, 7))
    assert torch.equal(first.indices(100, 30), second.indices(100, 30))
    assert not torch.equal(first.values(5, 7), first.values(5, 7))


def test_what_stands_at_a_place_does_not_depend_on_how_the_arena_grew() -> None:
    import torch

    at_once, in_steps = Arena(torch.float32, "cpu"), Arena(torch.float32, "cpu")
    whole = at_once.take(CHUNK_ELEMENTS * 2 + 128)
    steps = [in_steps.take(CHUNK_ELEMENTS), in_steps.take(CHUNK_ELEMENTS), in_steps.take(128)]
    assert torch.equal(whole, torch.cat(steps))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20))
def test_slices_never_overlap_and_are_aligned(counts: list[int]) -> None:
    import torch

    arena = Arena(torch.float32, "cpu")
    arena.take(sum(counts) + 200 * len(counts))  # grown once, so that addresses can be compared
    arena.rewind()
    slices = [arena.take(count) for count in counts]
    spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in slices)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all((one.data_ptr() - slices[0].data_ptr()) % 512 == 0 for one in slices)


@pytest.mark.parametrize("dtype", ["float64", "float32", "tf32", "bfloat16", "float16", "float8_e4m3fn"])
def test_floats_are_normal(dtype: str) -> None:
    values = Maker(dtype, "cpu").values(200, 100).double()
    assert abs(float(values.mean())) < 0.05
    assert float(values.std()) == pytest.approx(1, abs=0.05)
    assert float(Maker("float32", "cpu").values(200, 100, scale=0.1).std()) == pytest.approx(0.1, abs=0.005)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_whole_numbers_fill_their_range(dtype: str) -> None:
    values = Maker(dtype, "cpu").values(10_000)
    assert (int(values.min()), int(values.max())) == (-100, 99)


def test_arenas_are_shared_and_given_back() -> None:
    arenas = Arenas()
    first = Maker("float32", "cpu", arenas).values(10).data_ptr()
    arenas.rewind()
    assert Maker("tf32", "cpu", arenas).values(10).data_ptr() == first
    assert arenas.size_bytes("cpu") == 4 * CHUNK_ELEMENTS
    arenas.release()
    assert arenas.size_bytes("cpu") == 0


@given(st.integers(1, 1 << 34), st.integers(1, 1 << 34), st.integers(1, 1 << 30))
def test_rotation_always_leaves_the_cache_cold(touched: int, footprint: int, cache: int) -> None:
    rotation = plan_rotation(touched, footprint, cache)
    assert 1 <= rotation.sets <= MAX_SETS
    assert rotation.flush or rotation.sets * touched >= EVICTION_FACTOR * cache
    assert rotation.sets == 1 or rotation.sets * footprint <= MAX_SETS_BYTES


def test_rotation_by_example() -> None:
    mib = 1 << 20
    assert plan_rotation(250 * mib, 250 * mib, 60 * mib) == (1, False)
    assert plan_rotation(200 * mib, 200 * mib, 60 * mib) == (2, False)
    assert plan_rotation(70 * mib, 70 * mib, 60 * mib) == (4, False)
    assert plan_rotation(50 * mib, 50 * mib, 60 * mib) == (MAX_SETS, True)
    assert plan_rotation(mib, mib, 60 * mib) == (MAX_SETS, True)
    # few rows looked up in a large table: no second table, a flush instead
    assert plan_rotation(8 * mib, 7000 * mib, 60 * mib) == (1, True)


def test_a_flush_writes_more_than_the_cache() -> None:
    flush = CacheFlush("cpu", 1 << 16)
    flush._buffer.fill_(1)
    flush()
    assert flush._buffer.nbytes == 4 << 16
    assert not flush._buffer.any()
