from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.stats import compare_paired, compare_processes, holm, holm_levels, is_disturbed, quiet_time
from stepscope.stats.significance import LEAST_PROCESSES, SPELL_CHANCE, Noise, t_two_sided

seconds = st.floats(min_value=1e-6, max_value=10.0)
process = st.lists(seconds, min_size=1, max_size=40)
side = st.lists(process, min_size=1, max_size=8)
p_lists = st.lists(st.floats(min_value=0, max_value=1), max_size=30)


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-6)


def calm(count: int, rng: random.Random, *, level_s: float = 1e-3, samples: int = 60) -> list[list[float]]:
    return [
        [level_s * math.exp(shift + rng.gauss(0, 0.01)) for _ in range(samples)]
        for shift in (rng.gauss(0, 0.01) for _ in range(count))
    ]


@pytest.mark.parametrize(
    ("t", "df", "expected"),
    [(63.6567, 1, 0.01), (9.92484, 2, 0.01), (3.16927, 10, 0.01), (2.04227, 30, 0.05), (1.959964, 1e7, 0.05)],
)
def test_student_agrees_with_printed_tables(t: float, df: float, expected: float) -> None:
    assert t_two_sided(t, df) == pytest.approx(expected, rel=1e-4)
    assert t_two_sided(0, df) == 1


@given(side, side, st.floats(min_value=1e-3, max_value=1e3))
def test_scaling_both_sides_changes_nothing(a: list[list[float]], b: list[list[float]], factor: float) -> None:
    plain = compare_processes(a, b)
    scaled = compare_processes([[v * factor for v in p] for p in a], [[v * factor for v in p] for p in b])
    assert scaled.ratio == near(plain.ratio)
    assert (scaled.low, scaled.high, scaled.p_value) == (near(plain.low), near(plain.high), near(plain.p_value))


@given(side, side)
def test_swapping_sides_inverts_ratio_and_interval(a: list[list[float]], b: list[list[float]]) -> None:
    forth, back = compare_processes(a, b), compare_processes(b, a)
    assert back.ratio == near(1 / forth.ratio)
    assert (back.low, back.high) == (near(1 / forth.high), near(1 / forth.low))
    assert back.p_value == near(forth.p_value)
    assert (back.n_a, back.processes_b) == (forth.n_b, forth.processes_a)


@given(side)
def test_a_side_against_itself_has_ratio_one_and_no_alarm(a: list[list[float]]) -> None:
    estimate = compare_processes(a, a)
    assert estimate.ratio == 1
    assert estimate.p_value == 1
    assert estimate.low < 1 < estimate.high


@given(side, side, st.sampled_from([0.001, 0.01, 0.05]))
def test_interval_leaves_out_one_exactly_when_significant(
    a: list[list[float]], b: list[list[float]], level: float
) -> None:
    estimate = compare_processes(a, b, level=level)
    if abs(estimate.p_value / level - 1) > 1e-6:  # at the very edge rounding decides
        assert (estimate.p_value < level) == (not estimate.low <= 1 <= estimate.high)
    assert estimate.interval_at(level) == (near(estimate.low), near(estimate.high))


@given(st.permutations(range(6)))
def test_order_of_processes_does_not_matter(order: list[int]) -> None:
    a, b = calm(6, random.Random(1)), calm(6, random.Random(2))
    assert compare_processes([a[i] for i in order], b).p_value == near(compare_processes(a, b).p_value)


@given(p_lists)
def test_holm_never_lowers_and_keeps_the_order(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(after >= before for before, after in zip(p_values, adjusted, strict=True))
    assert all(value <= 1 for value in adjusted)
    ordered = [value for _, value in sorted(zip(p_values, adjusted, strict=True))]
    assert ordered == sorted(ordered)


def test_holm_against_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@given(p_lists, st.sampled_from([0.01, 0.05]))
def test_deciding_by_own_level_equals_deciding_by_adjusted_p(p_values: list[float], level: float) -> None:
    levels = holm_levels(p_values, level)
    by_level = [p <= own for p, own in zip(p_values, levels, strict=True)]
    for decided, adjusted in zip(by_level, holm(p_values), strict=True):
        if abs(adjusted - level) > 1e-12:
            assert decided == (adjusted <= level)


def test_quiet_time_is_the_fastest_process_and_survives_disturbance() -> None:
    calm_process = [1.0 + 0.001 * i for i in range(20)]
    disturbed = [1.0 + 0.001 * i if i < 8 else 50.0 for i in range(20)]
    assert quiet_time([disturbed]) == pytest.approx(1.0019, rel=1e-3)
    assert quiet_time([[80.0] * 20, calm_process]) == quiet_time([calm_process])


def test_constant_samples_are_compared_without_error() -> None:
    same, twice = [[0.5] * 10], [[1.0] * 10]
    assert compare_processes(same, same).p_value == 1
    estimate = compare_processes(same, twice)
    assert estimate.ratio == near(2)
    assert estimate.p_value < 0.01


@pytest.mark.parametrize("bad", [[], [[]], [[0.0]], [[1.0, -1.0]], [[math.inf]]])
def test_nothing_and_impossible_times_are_refused(bad: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"no samples|above zero"):
        compare_processes([[1.0]], bad)


def test_few_processes_leave_a_spell_possible_and_many_rule_it_out() -> None:
    rng = random.Random(3)
    slower = 1.12
    few = compare_processes(calm(1, rng), calm(1, rng, level_s=1e-3 * slower))
    many = compare_processes(calm(8, rng), calm(8, rng, level_s=1e-3 * slower))
    assert few.p_value > 0.5
    assert few.between_source == "assumed"
    assert many.p_value < 0.01
    assert many.between_source == "estimated"
    assert 2 * SPELL_CHANCE**LEAST_PROCESSES < 0.01 < 2 * SPELL_CHANCE ** (LEAST_PROCESSES - 1)


def test_a_calm_history_sharpens_and_a_restless_one_blunts() -> None:
    rng = random.Random(4)
    a, b = calm(3, rng), calm(3, rng)
    restless = [1e-3 * (1.0 if i % 2 else 1.2) for i in range(30)]
    peaceful = [1e-3 * (1 + 0.001 * i) for i in range(30)]
    widths = [compare_processes(a, b, history=past).high for past in (peaceful, (), restless)]
    assert widths == sorted(widths)
    assert compare_processes(a, b, history=peaceful).between_source == "history"
    assert compare_processes(a, b, history=peaceful[:4]).between_source == "assumed"


@given(
    st.floats(min_value=1e-4, max_value=0.3),
    st.floats(3, 50),
    st.floats(0, 0.3),
    st.floats(0, 0.8),
    st.floats(1e-4, 0.2),
)
def test_reach_is_where_the_chance_equals_the_level(
    log_se: float, df: float, spell_log: float, spell_chance: float, level: float
) -> None:
    noise = Noise(log_se=log_se, df=df, spell_log=spell_log, spell_chance=spell_chance)
    reach = noise.reach(level)
    assert noise.p_value(reach * 1.0001) <= level <= noise.p_value(reach * 0.9999)


def test_samples_on_the_scheduler_tick_betray_a_busy_machine() -> None:
    usual = [[1e-4 * (1 + 0.001 * i) for i in range(40)]]
    starved = [[0.008 + 1e-6 * (i % 5) for i in range(40)]]
    slow_but_calm = [[0.0091 + 1e-6 * (i % 5) for i in range(40)]]
    uneven = [[1e-4 if i == 0 else 5e-4 + 1e-6 * i for i in range(40)]]
    assert is_disturbed(starved, usual)
    assert is_disturbed(uneven, usual)
    assert not is_disturbed(slow_but_calm, usual)
    assert not is_disturbed(starved, starved)
    assert not is_disturbed(usual, uneven)


def pairs_with(ratio: float, count: int, rng: random.Random) -> list[tuple[float, float]]:
    return [
        (weather * math.exp(rng.gauss(0, 0.03)), weather * ratio * math.exp(rng.gauss(0, 0.03)))
        for weather in (math.exp(rng.gauss(0, 0.5)) for _ in range(count))
    ]


@pytest.mark.parametrize("count", [3, 5, 6, 10, 20])
def test_paired_interval_covers_the_truth_as_often_as_it_says(count: int) -> None:
    rng, ratio, trials = random.Random(count), 1.1, 600
    estimates = [compare_paired(pairs_with(ratio, count, rng)) for _ in range(trials)]
    covered = sum(estimate.low <= ratio <= estimate.high for estimate in estimates) / trials
    assert covered >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / trials)
    assert {estimate.method for estimate in estimates} == {"student" if count < 6 else "sign"}


def test_one_spoilt_pair_in_ten_does_not_hide_a_difference() -> None:
    rng, trials = random.Random(7), 200
    found = 0
    for _ in range(trials):
        pairs = pairs_with(1.2, 10, rng)
        pairs[3] = (pairs[3][0] * 80, pairs[3][1])
        found += compare_paired(pairs).p_value < 0.05
    assert found / trials > 0.95


@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=14))
def test_swapping_within_pairs_inverts(pairs: list[tuple[float, float]]) -> None:
    forth, back = compare_paired(pairs), compare_paired([(b, a) for a, b in pairs])
    assert back.ratio == near(1 / forth.ratio)
    assert (back.low, back.high) == (near(1 / forth.high), near(1 / forth.low))
    assert forth.low <= forth.ratio * (1 + 1e-12)
    assert forth.ratio <= forth.high * (1 + 1e-12)


@pytest.mark.parametrize("count", [2, 5, 6, 15])
def test_identical_pairs_give_one_and_no_alarm(count: int) -> None:
    estimate = compare_paired([(0.25, 0.25)] * count)
    assert (estimate.ratio, estimate.low, estimate.high, estimate.p_value) == (1, 1, 1, 1)


def test_pairs_need_two() -> None:
    with pytest.raises(ValueError, match="two pairs"):
        compare_paired([(1.0, 2.0)])
