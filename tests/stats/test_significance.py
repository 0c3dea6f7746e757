from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stepscope.stats import (
    SPREAD_CONFIDENCE,
    compare_paired,
    compare_processes,
    holm,
    holm_levels,
    plan_processes,
    quantile_time,
    t_quantile,
    t_two_sided,
)

quantiles = st.sampled_from([0.1, 0.5, 0.95])
processes = st.lists(st.lists(st.floats(1e-6, 1e-2), min_size=5, max_size=40), min_size=1, max_size=4)


def noisy(rng: random.Random, median: float, n: int = 60, spread: float = 0.01) -> list[float]:
    return [median * math.exp(rng.gauss(0, spread)) for _ in range(n)]


# Values of Student's t from printed tables.
@pytest.mark.parametrize(
    ("df", "level", "t"),
    [(1, 0.05, 12.706), (4, 0.01, 4.604), (10, 0.01, 3.169), (10, 0.05, 2.228), (30, 0.001, 3.646), (120, 0.05, 1.980)],
)
def test_students_t_is_that_of_the_tables(df: int, level: float, t: float) -> None:
    assert t_quantile(level, df) == pytest.approx(t, rel=2e-4)
    assert t_two_sided(t, df) == pytest.approx(level, rel=2e-3)


def test_students_t_ends_in_the_normal_distribution() -> None:
    assert t_quantile(0.05, math.inf) == pytest.approx(1.959964, rel=1e-6)
    assert t_two_sided(2.0, 1e7) == pytest.approx(t_two_sided(2.0, math.inf), rel=1e-4)
    assert t_two_sided(0, 5) == 1


def test_a_low_quantile_stands_while_most_samples_are_disturbed() -> None:
    assert quantile_time([1.0] * 20 + [50.0] * 80, 0.1) == 1.0
    with pytest.raises(ValueError, match="no samples"):
        quantile_time([], 0.1)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="above zero"):
            quantile_time([1.0, wrong, 2.0], 0.1)


@given(processes, processes, st.floats(0.01, 100), quantiles)
def test_scaling_both_sides_changes_nothing(
    a: list[list[float]], b: list[list[float]], factor: float, quantile: float
) -> None:
    plain = compare_processes(a, b, quantile=quantile)
    scaled = compare_processes(
        [[v * factor for v in p] for p in a], [[v * factor for v in p] for p in b], quantile=quantile
    )
    assert scaled.ratio == pytest.approx(plain.ratio, rel=1e-6)
    assert scaled.p_value == pytest.approx(plain.p_value, rel=1e-4, abs=1e-12)


@given(processes, processes, quantiles)
def test_swapping_the_sides_inverts_everything(a: list[list[float]], b: list[list[float]], quantile: float) -> None:
    forth = compare_processes(a, b, quantile=quantile, explained=(0.1, 0.3))
    back = compare_processes(b, a, quantile=quantile, explained=(0.3, 0.1))
    assert back.ratio == pytest.approx(1 / forth.ratio)
    low, high = forth.interval_at(0.01)
    assume(high < math.inf)
    assert back.interval_at(0.01) == (pytest.approx(1 / high), pytest.approx(1 / low))
    assert back.p_value == pytest.approx(forth.p_value, abs=1e-12)


@given(processes, processes, st.sampled_from([0.001, 0.01, 0.05]), st.sampled_from([0.0, 0.2, math.inf]))
def test_interval_and_p_value_agree(a: list[list[float]], b: list[list[float]], level: float, explained: float) -> None:
    estimate = compare_processes(a, b, explained=(0.0, explained))
    assume(abs(estimate.p_value - level) > 1e-4 * level)
    low, high = estimate.interval_at(level)
    assert (low > 1 or high < 1) == (estimate.p_value < level)
    wider = estimate.interval_at(level / 10)
    assert wider[0] <= low <= estimate.ratio <= high <= wider[1]


def test_identical_and_constant_data() -> None:
    same = compare_processes([[1.0] * 10] * 3, [[1.0] * 10] * 3)
    assert (same.ratio, same.p_value) == (1.0, 1.0)
    assert compare_processes([[1.0] * 10], [[20.0] * 10]).p_value < 0.01, "a factor of twenty needs no second process"
    assert compare_processes([[1.0] * 10], [[2.0] * 10]).p_value > 0.01
    exact = compare_processes([[1.0] * 10] * 5, [[2.0] * 10] * 5)
    assert exact.p_value == 0.0
    with pytest.raises(ValueError, match="no processes"):
        compare_processes([], [[1.0]])


@pytest.mark.parametrize(("k", "called"), [(1, False), (2, False), (3, True), (5, True)])
def test_a_slow_phase_explains_a_fifth_until_too_many_processes_must_have_been_in_one(k: int, called: bool) -> None:
    found = compare_processes([[1.0] * 40] * k, [[1.2] * 40] * k)
    assert (found.p_value <= 0.01) == called
    beyond = compare_processes([[1.0] * 40] * max(k, 2), [[1.7] * 40] * max(k, 2))
    assert beyond.p_value <= 0.01, "no slow phase is longer than half"


def test_every_process_counts_alike() -> None:
    outlier = compare_processes([[1.0] * 40] * 5, [[1.0] * 40] * 4 + [[1.3] * 40])
    assert outlier.ratio == pytest.approx(1.3 ** (1 / 5))
    assert outlier.p_value > 0.1


def test_more_processes_narrow_the_interval_and_wild_ones_widen_it() -> None:
    rng = random.Random(1)
    few, many, wild = (
        compare_processes(*([[noisy(rng, math.exp(rng.gauss(0, sd))) for _ in range(k)] for _ in range(2)]))
        for k, sd in ((5, 0.02), (20, 0.02), (5, 0.2))
    )
    widths = [found.noise.half_width(0.01) for found in (many, few, wild)]
    assert widths == sorted(widths)
    assert many.between_sd == pytest.approx(0.02, abs=0.008)


def test_processes_that_agree_by_luck_have_at_least_the_noise_of_their_samples() -> None:
    rng = random.Random(4)
    wild = sorted(noisy(rng, 1.0, n=30, spread=0.3))
    agreeing = compare_processes([wild] * 4, [wild] * 4, quantile=0.5)
    assert agreeing.between_sd > 0.03, "equal medians of noisy samples are luck"


@pytest.mark.parametrize(
    ("counts", "spread"),
    [
        ((2, 2), 0.003),
        ((3, 3), 0.15),
        ((5, 5), 0.05),
        ((20, 20), 0.08),
        ((1, 5), 0.05),
        ((20, 5), 0.15),
        ((3, 10), 0.01),
    ],
)
def test_the_level_is_kept(counts: tuple[int, int], spread: float) -> None:
    """One case, p10 alone, at 5 %; benchmarks/verdict_grid.py has the whole grid, by whole comparisons."""
    rng, trials, level = random.Random(f"{counts}{spread}"), 300, 0.05
    alarms = 0
    for _ in range(trials):
        sides = [[noisy(rng, math.exp(rng.gauss(0, spread)), n=12) for _ in range(count)] for count in counts]
        alarms += compare_processes(*sides).p_value <= level
    assert alarms <= trials * level + 3 * math.sqrt(trials * level)


def test_power_grows_with_processes_and_with_quiet_machines() -> None:
    def power(k: int, spread: float, trials: int = 60) -> float:
        rng = random.Random(f"{k}{spread}")
        found = 0
        for _ in range(trials):
            a, b = (
                [noisy(rng, m * math.exp(rng.gauss(0, spread)), n=12, spread=0.002) for _ in range(k)]
                for m in (1, 1.05)
            )
            found += compare_processes(a, b).p_value <= 0.01
        return found / trials

    assert power(3, 0.003) >= 0.9
    assert power(5, 0.003) == 1.0
    assert power(5, 0.05) < power(20, 0.05) < power(20, 0.01) == 1.0


@given(st.integers(2, 12), st.floats(0.5, 2.0))
def test_pairs_cancel_what_the_machine_did_to_both(k: int, factor: float) -> None:
    rng = random.Random(k)
    states = [math.exp(rng.gauss(0, 0.3)) for _ in range(k)]
    jitter = [math.exp(rng.gauss(0, 0.001)) for _ in range(k)]
    pairs = [([state] * 9, [state * factor * j] * 9) for state, j in zip(states, jitter, strict=True)]
    found = compare_paired(pairs)
    assert found.ratio == pytest.approx(factor, rel=0.01)
    assert found.between_sd < 0.01
    loose = compare_processes([a for a, _ in pairs], [b for _, b in pairs])
    assert loose.noise.log_se > found.noise.log_se


def test_pairs_need_two_and_equal_ones_never_alarm() -> None:
    with pytest.raises(ValueError, match="two pairs"):
        compare_paired([([1.0], [1.0])])
    assert compare_paired([([1.0] * 5, [1.0] * 5)] * 20).p_value == 1.0


@given(st.floats(0.001, 0.1), st.sampled_from([0.02, 0.05, 0.1]), st.booleans())
def test_a_plan_is_the_least_that_is_enough(spread: float, effect: float, paired: bool) -> None:
    needed = plan_processes(spread, math.log1p(effect), 0.01, paired=paired)
    assume(needed is not None)
    assert needed is not None
    assert needed >= 2
    louder = plan_processes(2 * spread, math.log1p(effect), 0.01, paired=paired)
    assert louder is None or louder >= needed
    larger = plan_processes(spread, math.log1p(2 * effect), 0.01, paired=paired)
    assert larger is not None
    assert larger <= needed


def test_what_was_planned_finds_the_change() -> None:
    rng, spread, effect = random.Random(8), 0.02, 0.05
    needed = plan_processes(spread, math.log1p(effect), 0.01)
    assert needed is not None
    found = 0
    for _ in range(100):
        a, b = ([[math.exp(rng.gauss(0, spread)) * m] * 5 for _ in range(needed)] for m in (1, 1 + effect))
        found += compare_processes(a, b).p_value <= 0.01
    assert found >= 80
    assert plan_processes(1.0, 0.01, 0.01) is None
    assert plan_processes(spread, math.log1p(effect), 0.01, other=2) is None, "two processes opposite decide nothing"


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_the_bound_of_the_spread_covers_it_as_often_as_stated(count: int) -> None:
    rng, spread, trials = random.Random(count), 0.02, 2000
    covered = 0
    for _ in range(trials):
        a, b = ([[math.exp(rng.gauss(0, spread))] for _ in range(count)] for _ in range(2))
        covered += compare_processes(a, b).between_bound >= spread
    assert covered / trials == pytest.approx(SPREAD_CONFIDENCE, abs=0.04)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_holm_never_lowers_a_p_value_and_keeps_their_order(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(after >= before for before, after in zip(p_values, adjusted, strict=True))
    assert [a for _, a in sorted(zip(p_values, adjusted, strict=True))] == sorted(adjusted)
    assert max(adjusted) <= 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.sampled_from([0.01, 0.05]))
def test_each_case_is_decided_at_its_own_level(p_values: list[float], level: float) -> None:
    levels = holm_levels(p_values, level)
    for p, adjusted, own in zip(p_values, holm(p_values), levels, strict=True):
        assume(abs(p - own) > 1e-9)
        assert (p <= own) == (adjusted <= level)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == [pytest.approx(0.03), pytest.approx(0.06), pytest.approx(0.06)]
    assert holm([]) == []


def test_processes_in_one_of_two_states_reach_far_values_no_more_often_than_the_level_says() -> None:
    """By halves 2 % apart: every number of slow processes on each side with its chance, a few draws of each."""
    count, draws, chance = 20, 20, random.Random(5)
    levels = (1e-2, 1e-3, 1.6e-4, 4e-5)
    reached = dict.fromkeys(levels, 0.0)

    def draw(slow: int) -> list[list[float]]:
        return [[math.exp(0.02 * (number < slow) + chance.gauss(0, 0.001))] for number in range(count)]

    for more in range(count + 1):
        for fewer in range(more):
            weight = 2 * math.comb(count, more) * math.comb(count, fewer) / 4**count
            if weight < 1e-8:
                continue
            p_values = [compare_processes(draw(more), draw(fewer)).p_value for _ in range(draws)]
            for level in levels:
                reached[level] += weight * sum(p <= level for p in p_values) / draws
    assert {level: round(rate / level, 2) for level, rate in reached.items() if rate > level} == {}
