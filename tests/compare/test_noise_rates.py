"""How often verdicts are wrong, and how often they find what is there, under a real machine's recorded noise."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from noise import OPERATORS, as_case, draw_sides, recorded, redraw, slow

from stepscope.compare.sides import NOTABLE_LOAD
from stepscope.compare.verdict import DEFAULT_FAMILY_LEVEL, compare_cases

PAIRS = 1000
ENOUGH = 5
"""Processes a side from which enough are undisturbed nearly always."""
ALARMS = {"better", "worse"}


def count_verdicts(
    operator: str, processes: int, slowdown: float, part: str = "quiet", pairs: int = PAIRS
) -> Counter[str]:
    rng, pool = random.Random(f"{operator}{processes}{slowdown}"), recorded(operator, part)
    counts: Counter[str] = Counter()
    for _ in range(pairs):
        a, b = draw_sides(rng, pool, processes, slowdown)
        counts[compare_cases([as_case(a)], [as_case(b)]).rows[0].verdict] += 1
    return counts


@pytest.mark.parametrize(("part", "processes"), [("quiet", 2), ("quiet", ENOUGH), ("earlier", 3)])
@pytest.mark.parametrize("operator", OPERATORS)
def test_same_against_same_alarms_no_more_often_than_the_level_says(operator: str, part: str, processes: int) -> None:
    counts = count_verdicts(operator, processes, 1.0, part)
    assert counts["better"] + counts["worse"] <= DEFAULT_FAMILY_LEVEL * PAIRS, counts


@pytest.mark.parametrize(("processes", "least"), [(ENOUGH, 0.6), (2 * ENOUGH, 0.95)])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_slow_down_of_a_fifth_is_found(operator: str, processes: int, least: float) -> None:
    """One process in ten of this machine is slower by 8 to 30 %; where such a one is among five, more are asked for."""
    counts = count_verdicts(operator, processes, 1.2, pairs=400)
    assert counts["worse"] >= least * 400, counts
    assert counts["worse"] + counts["not enough data"] == 400, counts


@pytest.mark.parametrize("operator", OPERATORS)
def test_one_process_per_side_calls_no_doubling_but_twenty_times(operator: str) -> None:
    counts = count_verdicts(operator, 1, 2.0, pairs=200)
    assert counts["worse"] + counts["not enough data"] == 200, counts
    assert count_verdicts(operator, 1, 20.0, pairs=200)["worse"] >= 0.97 * 200, "one process in 45 was loaded"


def test_a_family_of_cases_has_one_level_together() -> None:
    rng, families, size = random.Random(9), 150, 9
    alarmed = 0
    for _ in range(families):
        pairs = [draw_sides(rng, recorded(OPERATORS[i % 3]), 4) for i in range(size)]
        a, b = ([as_case(pair[side], i=i) for i, pair in enumerate(pairs)] for side in (0, 1))
        alarmed += any(row.verdict in ALARMS for row in compare_cases(a, b).rows)
    assert alarmed <= DEFAULT_FAMILY_LEVEL * families


@pytest.mark.parametrize("operator", OPERATORS)
def test_real_repeats_in_the_order_they_were_recorded_raise_no_alarm(operator: str) -> None:
    """As a user does it: measure, measure again at once, compare. Nothing is resampled here."""
    rows = [as_case([process]) for process in recorded(operator)]
    verdicts = [compare_cases([a], [b]).rows[0].verdict for a, b in pairwise(rows)]
    assert len(verdicts) >= 20
    assert not ALARMS & set(verdicts)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_busy_neighbour_is_never_taken_for_a_regression(operator: str) -> None:
    """Beside a busy loop the same code ran up to hundreds of times slower; the recorded load says why."""
    crowded = recorded(operator, "crowded")
    assert all((process.other_share or 0) >= NOTABLE_LOAD for process in crowded), "the recording shows its load"
    rng, quiet = random.Random(operator), recorded(operator)
    for _ in range(100):
        a, b = (as_case([redraw(rng, process) for process in rng.sample(pool, 4)]) for pool in (quiet, crowded))
        assert compare_cases([a], [b]).rows[0].verdict != "worse"
        assert compare_cases([b], [a]).rows[0].verdict != "better"


def test_two_quiet_processes_among_crowded_ones_are_enough() -> None:
    quiet, crowded = recorded("gemm"), recorded("gemm", "crowded")
    fastest = min(min(process.probes_s) for process in [*quiet, *crowded])
    unloaded = [process for process in quiet if max(process.probes_s) < 1.05 * fastest]
    a = as_case([*unloaded[:3], *crowded[:2]])
    b = as_case([*crowded[2:4], *(slow(process, 2.0) for process in unloaded[3:6])])
    row = compare_cases([a], [b]).rows[0]
    assert (row.verdict, row.disturbed_a, row.disturbed_b) == ("worse", 2, 2)
    assert row.ratio == pytest.approx(2.0, rel=0.1)
