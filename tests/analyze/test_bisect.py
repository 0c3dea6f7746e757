"""Slow ranks found by halves: on simulated clusters with none, one and two of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.bench.comms.bisection import DEFAULT_THRESHOLD, Bisection, BisectionVerdict
from stepscope.core.errors import UsageError

Measure = Callable[[Sequence[int]], float]


def bisect_ranks(
    measure: Callable[[Sequence[int]], float], ranks: Sequence[int], *, threshold: float = DEFAULT_THRESHOLD
) -> BisectionVerdict:
    """The whole search, one subset after the other; `measure` gives the seconds of a collective over these ranks."""
    search = Bisection(ranks, threshold=threshold)
    while subsets := search.next_subsets():
        search.record([measure(subset) for subset in subsets])
    return search.verdict()


def cluster(slow: dict[int, float], *, noise: float = 0.05, held_up: float = 0.0, seed: int = 0) -> Measure:
    """A collective takes as long as its slowest rank lets it, and longer with more ranks."""
    source = random.Random(seed)

    def measure(subset: Sequence[int]) -> float:
        factor = max(slow.get(rank, 1.0) for rank in subset)
        disturbed = 3.0 if source.random() < held_up else 1.0
        return 1e-3 * math.log2(1 + len(subset)) * factor * disturbed * source.lognormvariate(0, noise)

    return measure


def search(ranks: Sequence[int], measure: Measure) -> BisectionVerdict:
    """Checks what every round asks for."""
    bisection = Bisection(ranks)
    while subsets := bisection.next_subsets():
        assert subsets == bisection.next_subsets()
        asked = [rank for subset in subsets for rank in subset]
        assert len(asked) == len(set(asked))
        assert set(asked) <= set(ranks)
        assert {len(subset) for subset in subsets} == {len(subsets[0])}
        assert len(subsets[0]) >= 2
        bisection.record([measure(subset) for subset in subsets])
    return bisection.verdict()


def names(verdict: BisectionVerdict) -> list[int]:
    return [found.rank for found in verdict.slow]


@given(st.integers(2, 64), st.integers(0, 10**6))
def test_none_is_blamed_where_none_is_slow(count: int, seed: int) -> None:
    verdict = search(range(count), cluster({}, seed=seed))
    assert verdict.slow == []
    assert verdict.together == []
    assert verdict.clean == list(range(count))


@given(st.integers(3, 64), st.data(), st.integers(0, 10**6))
def test_one_slow_rank_is_found(count: int, data: st.DataObject, seed: int) -> None:
    slow = data.draw(st.integers(0, count - 1))
    verdict = search(range(count), cluster({slow: 2.0}, seed=seed))
    assert names(verdict) == [slow]
    assert verdict.clean == [rank for rank in range(count) if rank != slow]
    assert verdict.slow[0].ratio == pytest.approx(2.0, rel=0.5)
    assert f"rank {slow} (" in verdict.sentence
    assert verdict.together == []


@given(st.integers(4, 64), st.data(), st.integers(0, 10**6))
def test_two_slow_ranks_are_found(count: int, data: st.DataObject, seed: int) -> None:
    slow = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=2))
    verdict = search(range(count), cluster({rank: 2.0 + 3.0 * (rank % 2) for rank in slow}, seed=seed))
    assert names(verdict) == sorted(slow)
    assert verdict.together == []


@pytest.mark.parametrize("count", [6, 7, 8, 15, 16, 31, 33, 64, 100, 512])
def test_rounds_grow_with_the_logarithm(count: int) -> None:
    for seed in range(20):
        chosen = random.Random(seed).sample(range(count), 2)
        for slow in ([], chosen[:1], chosen):
            verdict = search(range(count), cluster(dict.fromkeys(slow, 2.0), seed=seed))
            assert names(verdict) == sorted(slow)
            assert verdict.rounds <= math.log2(count) + 4


def test_many_slow_ranks_are_found_as_well() -> None:
    slow = [0, 4, 8, 12, 17]
    verdict = search(range(20), cluster(dict.fromkeys(slow, 2.0)))
    assert names(verdict) == slow


@pytest.mark.parametrize("count", [8, 16, 64])
def test_disturbances_now_and_then_rarely_mislead(count: int) -> None:
    """One measurement in twenty takes three times as long."""
    right = 0
    for seed in range(200):
        slow = random.Random(seed).sample(range(count), seed % 3)
        verdict = search(range(count), cluster(dict.fromkeys(slow, 2.0), held_up=0.05, seed=seed))
        right += names(verdict) == sorted(slow)
    assert right >= 190


def test_what_slows_down_everybody_is_not_blamed_on_one() -> None:
    """From the second round on the whole cluster is half as fast: a control in the same round shows it."""
    rounds = 0

    def measure(subset: Sequence[int]) -> float:
        slow = 9 in subset or (5 in subset and not rounds)
        return (2.0 if rounds else 1.0) * (3.0 if slow else 1.0) * len(subset)

    bisection = Bisection(range(16))
    while subsets := bisection.next_subsets():
        bisection.record([measure(subset) for subset in subsets])
        rounds += 1
    assert names(bisection.verdict()) == [9]


def test_names_of_ranks_may_be_any_numbers() -> None:
    ranks = [100, 7, 33, 12, 64, 5, 8, 9]
    assert names(bisect_ranks(cluster({12: 3.0}), ranks)) == [12]


@pytest.mark.parametrize("count", [4, 8, 16])
def test_a_slow_link_is_told_from_slow_ranks(count: int) -> None:
    """Two ranks that are slow only together, and in one half from the beginning."""

    def measure(subset: Sequence[int]) -> float:
        return (2.0 if {0, 1} <= set(subset) else 1.0) * math.log2(1 + len(subset))

    verdict = search(range(count), measure)
    assert verdict.slow == []
    assert verdict.together == [[0, 1]]
    assert "slow together" in verdict.sentence
    assert "bench pairs" in verdict.next_step


def test_what_does_not_end_is_slow() -> None:
    verdict = bisect_ranks(lambda subset: math.inf if 3 in subset else 1.0, range(16))
    assert names(verdict) == [3]
    assert verdict.slow[0].ratio == math.inf


def test_nothing_that_ends_is_told() -> None:
    verdict = bisect_ranks(lambda _: math.inf, range(16))
    assert verdict.slow == []
    assert verdict.sentence == "every subset was slow or did not end"


def test_two_ranks_cannot_be_told_apart() -> None:
    verdict = bisect_ranks(cluster({0: 9.0}), range(2))
    assert (verdict.slow, verdict.rounds) == ([], 1)
    assert "nobody can tell" in verdict.sentence


def test_the_threshold_decides_what_is_slow() -> None:
    measure = cluster({3: 1.3}, noise=0.0)
    assert names(bisect_ranks(measure, range(8))) == []
    assert names(bisect_ranks(measure, range(8), threshold=1.2)) == [3]


def test_wrong_use_is_told() -> None:
    with pytest.raises(UsageError, match="1 ranks cannot be bisected"):
        Bisection([4])
    with pytest.raises(UsageError, match="cannot be bisected"):
        Bisection([4, 4])
    with pytest.raises(UsageError, match="everything slow"):
        Bisection(range(4), threshold=1.0)
    bisection = Bisection(range(8))
    subsets = bisection.next_subsets()
    with pytest.raises(UsageError, match="1 times for 4 subsets"):
        bisection.record([1.0])
    with pytest.raises(UsageError, match="not above zero"):
        bisection.record([math.nan] * len(subsets))
    assert bisection.next_subsets() == subsets
