from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stepscope.stats import (
    compare_paired,
    compare_processes,
    holm,
    holm_levels,
    quiet_time,
    t_quantile,
    t_two_sided,
)

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


def test_the_quiet_time_stands_while_most_samples_are_disturbed() -> None:
    assert quiet_time([1.0] * 20 + [50.0] * 80) == 1.0
    with pytest.raises(ValueError, match="no samples"):
        quiet_time([])
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="above zero"):
            quiet_time([1.0, wrong])


@given(processes, processes, st.floats(0.01, 100))
def test_scaling_both_sides_changes_nothing(a: list[list[float]], b: list[list[float]], factor: float) -> None:
    plain = compare_processes(a, b)
    scaled = compare_processes([[v * factor for v in p] for p in a], [[v * factor for v in p] for p in b])
    assert scaled.ratio == pytest.approx(plain.ratio, rel=1e-6)
    assert scaled.p_value == pytest.approx(plain.p_value, rel=1e-4, abs=1e-12)


@given(processes, processes)
def test_swapping_the_sides_inverts_everything(a: list[list[float]], b: list[list[float]]) -> None:
    forth, back = compare_processes(a, b), compare_processes(b, a)
    assert back.ratio == pytest.approx(1 / forth.ratio)
    assert (back.low, back.high) == (pytest.approx(1 / forth.high), pytest.approx(1 / forth.low))
    assert back.p_value == pytest.approx(forth.p_value, abs=1e-12)


@given(processes, processes, st.sampled_from([0.001, 0.01, 0.05]))
def test_interval_and_p_value_agree(a: list[list[float]], b: list[list[float]], level: float) -> None:
    estimate = compare_processes(a, b, level=level)
    assume(abs(estimate.p_value - level) > 1e-6 * level)
    assert (estimate.low > 1 or estimate.high < 1) == (estimate.p_value < level)
    assert estimate.interval_at(level) == (pytest.approx(estimate.low), pytest.approx(estimate.high))
    wider = estimate.interval_at(level / 10)
    assert wider[0] <= estimate.low <= estimate.ratio <= estimate.high <= wider[1]


def test_identical_and_constant_data() -> None:
    same = compare_processes([[1.0] * 10], [[1.0] * 10])
    assert (same.ratio, same.p_value) == (1.0, 1.0)
    assert compare_processes([[1.0] * 10], [[2.0] * 10]).p_value < 0.001
    exact = compare_processes([[1.0] * 10], [[2.0] * 10], between_sd=0.0)
    assert exact.p_value == 0.0
    assert exact.low == pytest.approx(2 / math.exp(0.3))


def test_one_process_cannot_tell_a_spell_from_a_change_and_five_can() -> None:
    one = compare_processes([[1.0] * 40], [[1.2] * 40])
    assert one.p_value > 0.1
    five = compare_processes([[1.0] * 40] * 5, [[1.2] * 40] * 5)
    assert five.p_value < 0.001
    held = compare_processes([[1.0] * 40] * 5, [[1.3] * 40] * 4 + [[1.0] * 40])
    assert held.ratio == 1.0, "the quietest process speaks"


def test_more_processes_narrow_the_interval_and_wild_ones_widen_it() -> None:
    rng = random.Random(1)
    few, many, wild = (
        compare_processes(*([[noisy(rng, math.exp(abs(rng.gauss(0, sd)))) for _ in range(k)] for _ in range(2)]))
        for k, sd in ((5, 0.0), (20, 0.0), (5, 0.2))
    )
    assert many.high / many.low < few.high / few.low < wild.high / wild.low
    assert many.between_sd == pytest.approx(0.02, abs=0.012)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_level_is_kept_where_the_assumptions_hold(count: int) -> None:
    """Processes differ by 2 %, samples by 1 %, one in ten is in a spell: alarms stay within the level of 5 %."""
    rng, trials = random.Random(count), 1000
    alarms = 0
    for _ in range(trials):
        spells = [[0.25 * (rng.random() < 0.1) for _ in range(count)] for _ in range(2)]
        sides = [[noisy(rng, math.exp(rng.gauss(0, 0.02) + spell), n=25) for spell in side] for side in spells]
        alarms += compare_processes(*sides, level=0.05).p_value <= 0.05
    assert alarms / trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_pairs_vote() -> None:
    pairs = [(1.0, 1.1)] * 9 + [(1.0, 0.5)]
    estimate = compare_paired(pairs, level=0.05)
    assert estimate.ratio == pytest.approx(1.1)
    assert estimate.p_value == pytest.approx(2 * 11 / 1024)
    assert estimate.low > 1
    with pytest.raises(ValueError, match="bound to the level"):
        estimate.interval_at(0.01)


def test_a_spoilt_pair_has_one_vote() -> None:
    rng = random.Random(3)
    pairs = [(1.0, 1.2 * math.exp(rng.gauss(0, 0.01))) for _ in range(11)] + [(1.0, 1e6)]
    assert compare_paired(pairs).ratio == pytest.approx(1.2, rel=0.03)


def test_few_pairs_use_students_t() -> None:
    assert compare_paired([(1.0, 2.0), (1.0, 2.01), (1.0, 1.99)]).p_value < 0.01
    assert compare_paired([(1.0, 1.0), (2.0, 2.0)]).p_value == 1.0
    with pytest.raises(ValueError, match="two pairs"):
        compare_paired([(1.0, 1.0)])


def test_equal_pairs_never_alarm() -> None:
    assert compare_paired([(1.0, 1.0)] * 20).p_value == 1.0


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
