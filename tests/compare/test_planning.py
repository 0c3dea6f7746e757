"""How many processes a candidate is given: by the noise alone."""

from __future__ import annotations

import math
import random

import pytest
from noise import Process, as_case

from stepscope.compare.gate import plan_candidate
from stepscope.compare.verdict import compare_cases
from stepscope.store import MeasuredCase


def noisy(count: int, spread: float, *, factor: float = 1.0, seed: int = 0, **parameters: int) -> MeasuredCase:
    rng = random.Random(seed)
    speeds = [factor * math.exp(rng.gauss(0, spread)) for _ in range(count)]
    processes = [Process([speed * (1 + 0.0001 * i) for i in range(10)], 0.0, [1e-6]) for speed in speeds]
    return as_case(processes, **parameters)


def planned(baseline: MeasuredCase, candidate: MeasuredCase, resolution: float = 0.05) -> int | None:
    (count,) = plan_candidate([baseline], [candidate], resolution=resolution).values()
    return count


def test_quiet_machines_need_few_and_noisy_ones_many() -> None:
    counts = [planned(noisy(20, spread), noisy(3, spread, seed=1)) for spread in (0.003, 0.02, 0.04)]
    assert None not in counts
    assert counts == sorted(counts, key=lambda count: count or 0)
    assert (counts[0] or 0) <= 4
    assert (counts[-1] or 0) >= 8


@pytest.mark.parametrize("factor", [0.5, 0.97, 1.05, 3.0])
def test_the_difference_has_no_say(factor: float) -> None:
    baseline = noisy(10, 0.02)
    same, changed = noisy(3, 0.02, seed=1), noisy(3, 0.02, seed=1, factor=factor)
    assert planned(baseline, same) == planned(baseline, changed)


def test_a_baseline_of_few_processes_cannot_be_helped() -> None:
    assert planned(noisy(1, 0.02), noisy(3, 0.02, seed=1)) is None
    assert planned(noisy(2, 0.05), noisy(3, 0.05, seed=1)) is None


def test_more_cases_ask_for_more_and_unknown_ones_for_nothing() -> None:
    def many(count: int, k: int, seed: int) -> list[MeasuredCase]:
        return [noisy(k, 0.02, seed=seed, m=i) for i in range(count)]

    one = plan_candidate(many(1, 12, 0), many(1, 3, 9), resolution=0.05)
    fifty = plan_candidate(many(50, 12, 0), many(50, 3, 9), resolution=0.05)
    label = next(iter(one))
    assert (fifty[label] or math.inf) > (one[label] or 0)
    assert plan_candidate(many(1, 12, 0), [noisy(3, 0.02, m=77)], resolution=0.05) == {}


def test_stopping_by_the_noise_keeps_the_level_and_finds_the_change() -> None:
    """The whole procedure: three processes, as many as planned, one verdict."""
    rng = random.Random(5)
    alarms = found = 0
    trials = 150
    for _ in range(trials):
        spread = rng.choice([0.005, 0.01, 0.02])
        baseline = noisy(12, spread, seed=rng.randrange(10**9))
        seed = rng.randrange(10**9)
        count = min(planned(baseline, noisy(3, spread, seed=seed)) or 30, 30)
        (same,) = compare_cases([baseline], [noisy(max(count, 3), spread, seed=seed)]).rows
        (slower,) = compare_cases([baseline], [noisy(max(count, 3), spread, seed=seed, factor=1.05)]).rows
        alarms += same.verdict in {"better", "worse"}
        found += slower.verdict == "worse"
    assert alarms <= 0.01 * trials + 3 * math.sqrt(0.01 * trials)
    assert found >= 0.7 * trials
