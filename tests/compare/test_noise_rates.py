"""False alarms and finds on simulated runs with the recorded noise of a real, busy machine."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from noise_study import Part, count_verdicts, draw_run_pair, make_case, read_recording

from stepscope.compare import DEFAULT_FAMILY_LEVEL, compare_cases
from stepscope.stats import is_disturbed, quiet_time

OPERATORS = sorted(read_recording())
PAIRS = 1000
SLOWDOWN = 1.2
PARTS: tuple[Part, ...] = ("processes", "later_processes")


@pytest.mark.parametrize(("part", "processes"), [(p, k) for p in PARTS for k in (1, 2, 3, 6, 8)])
@pytest.mark.parametrize("operator", OPERATORS)
def test_same_against_same_raises_no_more_alarms_than_the_level_allows(
    operator: str, processes: int, part: Part
) -> None:
    counts = count_verdicts(operator, processes, slowdown=1.0, pairs=PAIRS, part=part)
    assert counts["better"] + counts["worse"] <= DEFAULT_FAMILY_LEVEL * PAIRS, counts
    if processes > 2:
        assert counts["no difference found"] >= 0.95 * PAIRS, counts


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_fifth_slower_is_found_with_several_processes(operator: str, part: Part) -> None:
    counts = count_verdicts(operator, 8, SLOWDOWN, pairs=PAIRS, part=part)
    assert counts["worse"] >= 0.95 * PAIRS, counts
    assert counts["better"] == 0


@pytest.mark.parametrize("processes", [2, 6])
def test_a_family_of_cases_has_one_level_together(processes: int) -> None:
    rng, families, size = random.Random(processes), 200, 9
    alarmed = 0
    for _ in range(families):
        drawn = [draw_run_pair(OPERATORS[i % len(OPERATORS)], processes, rng) for i in range(size)]
        sides = [[make_case(pair[side], size=i) for i, pair in enumerate(drawn)] for side in (0, 1)]
        alarmed += any(row.verdict in ("better", "worse") for row in compare_cases(*sides).rows)
    assert alarmed <= DEFAULT_FAMILY_LEVEL * families


@pytest.mark.parametrize("operator", OPERATORS)
def test_twenty_real_repeats_in_the_order_they_were_recorded_raise_no_alarm(operator: str) -> None:
    """As a user does it: measure, measure again at once, compare; forty processes in a row make twenty pairs."""
    recorded = read_recording()[operator]
    verdicts = Counter(
        compare_cases([make_case([recorded[i]])], [make_case([recorded[i + 1]])]).rows[0].verdict
        for i in range(0, 40, 2)
    )
    assert verdicts["better"] + verdicts["worse"] == 0, verdicts


@pytest.mark.parametrize("part", PARTS)
def test_one_process_a_side_accuses_nobody_and_hides_no_large_change(part: Part) -> None:
    counts = count_verdicts("gemm_512_fp32", 1, slowdown=1.35, pairs=PAIRS, part=part)
    assert counts["better"] + counts["worse"] == 0, counts
    assert counts["no difference found"] < 0.15 * PAIRS, counts


@pytest.mark.parametrize("operator", ["linear_128x256x256", "embedding_bag_10000x64_10_256"])
def test_one_process_a_side_could_not_find_a_fifth_whatever_the_threshold(operator: str) -> None:
    """Why the allowance for spells is as wide as it is: not a weakness of this test but of the evidence.

    Even a threshold chosen with knowledge of every recorded process, disturbed ones set aside, that keeps
    the alarms at 1 % misses far more than one planted slow-down in twenty.
    """
    undisturbed = [p for p in read_recording()[operator] if len(p) >= 5 and not is_disturbed([p], [[1.0] * 20])]
    logs = [math.log(quiet_time([process])) for process in undisturbed]
    differences = sorted(b - a for i, a in enumerate(logs) for j, b in enumerate(logs) if i != j)
    threshold = sorted(map(abs, differences))[math.ceil(0.99 * len(differences)) - 1]
    found = sum(difference + math.log(SLOWDOWN) > threshold for difference in differences) / len(differences)
    assert found < 0.85
