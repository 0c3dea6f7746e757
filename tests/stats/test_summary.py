from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.stats import drift, find_outliers, median_interval, quantile_sorted, summarize

times = st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=300)


@given(times)
def test_a_summary_is_ordered_and_counts(values: list[float]) -> None:
    summary = summarize(values)
    assert summary.n == len(values)
    assert summary.min_s <= summary.ci_low_s <= summary.median_s <= summary.ci_high_s <= summary.max_s
    assert summary.p50_s <= summary.p95_s <= summary.p99_s <= summary.max_s
    assert summary.median_s == pytest.approx(statistics.median(values))
    assert summary.mean_s == pytest.approx(statistics.fmean(values))


@given(times, st.floats(0.1, 10))
def test_a_summary_scales_with_its_values(values: list[float], factor: float) -> None:
    plain, scaled = summarize(values), summarize([value * factor for value in values])
    assert scaled.median_s == pytest.approx(plain.median_s * factor)
    assert scaled.ci_high_s == pytest.approx(plain.ci_high_s * factor)


def exact_coverage(n: int, rank: int) -> float:
    below = sum(math.comb(n, k) for k in range(rank))
    return 1 - 2 * below / 2**n


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("n", [*range(1, 40), 100, 999, 1000])
def test_the_interval_is_the_narrowest_that_covers(n: int, level: float) -> None:
    low, high, coverage = median_interval(list(range(1, n + 1)), level)
    rank = int(low)
    assert high == n + 1 - rank
    assert coverage == pytest.approx(exact_coverage(n, rank))
    if coverage < level:
        assert rank == 1, "a wider pair exists"
    elif rank + 1 <= n // 2:
        assert exact_coverage(n, rank + 1) < level


@pytest.mark.parametrize("n", [1001, 1500, 5000])
def test_the_approximation_for_many_samples_is_near_the_exact_one(n: int) -> None:
    low, _, coverage = median_interval(list(range(1, n + 1)), 0.95)
    assert coverage == pytest.approx(exact_coverage(n, int(low)), abs=2e-3)
    assert 0.94 < exact_coverage(n, int(low)) < 0.97


@pytest.mark.parametrize("n", [5, 20, 101])
def test_the_interval_covers_the_true_median_as_often_as_it_says(n: int) -> None:
    """Skewed data on purpose: no normal distribution is assumed."""
    rng = random.Random(n)
    truth, hits, trials, stated = math.log(2), 0, 2000, 0.0
    for _ in range(trials):
        low, high, stated = median_interval(sorted(rng.expovariate(1) for _ in range(n)), 0.95)
        hits += low <= truth <= high
    assert hits / trials == pytest.approx(stated, abs=4 * math.sqrt(stated * (1 - stated) / trials) + 1e-9)


def test_quantiles_are_those_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    rng = random.Random(1)
    for n in (1, 2, 3, 10, 57):
        values = sorted(rng.random() for _ in range(n))
        for q in (0, 0.05, 0.5, 0.95, 0.99, 1):
            assert quantile_sorted(values, q) == pytest.approx(float(numpy.quantile(values, q)))


def test_outliers_and_drift() -> None:
    assert find_outliers([1.0, 1.01, 0.99, 1.02, 0.98, 50.0]) == [5]
    assert find_outliers([1.0, 2.0, 100.0]) == []
    assert drift([1.0] * 10 + [1.1] * 10) == pytest.approx(0.1)
    assert drift([1.0]) == 0


def test_nothing_has_no_summary() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarize([])
