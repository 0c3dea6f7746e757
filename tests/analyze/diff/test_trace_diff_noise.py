"""How much steps vary is seen in them: equal traces are called equal, and a few per cent are found in steady ones."""

from __future__ import annotations

import numpy as np
import pytest
from test_trace_diff import steps_with

from stepscope.analyze.diff.compare import diff_traces
from stepscope.analyze.diff.exposure import ENOUGH_STEPS, middle_steps, noise_of_step
from stepscope.formats.timeline import Timeline

KERNELS_NS = np.array([400_000, 90_000, 7_000, 1_000_000])


def noisy(random: np.random.Generator, steps: int, *, factor: float = 1.0, together: bool = False) -> Timeline:
    """Kernels vary by 1 %, each for itself or all of a step together."""
    noise = random.normal(1, 0.01, (steps, 1 if together else len(KERNELS_NS)))
    return steps_with((noise * KERNELS_NS * factor).astype(int).tolist(), host_ns=1_000)


@pytest.mark.parametrize("steps", [4, 8])
@pytest.mark.parametrize("together", [False, True])
def test_equal_traces_are_called_equal_and_five_per_cent_are_found(steps: int, together: bool) -> None:
    random = np.random.default_rng(steps)
    chosen, pairs = list(range(steps)), 100
    alarms = found = 0
    for _ in range(pairs):
        a, b, slower = (noisy(random, steps, factor=factor, together=together) for factor in (1, 1, 1.05))
        alarms += diff_traces(a, b, chosen, chosen).verdict != "no difference found"
        found += diff_traces(a, slower, chosen, chosen).verdict == "longer"
    assert alarms <= 0.05 * pairs
    assert found >= 0.9 * pairs


@pytest.mark.parametrize("steps", [3, 4, 6, 8, 20])
def test_false_alarms_are_as_rare_as_promised(steps: int) -> None:
    random = np.random.default_rng(7)
    alarms, pairs = 0, 600
    for _ in range(pairs):
        a, b = random.normal(1, 0.05, (2, steps))
        change = abs(b[middle_steps(b)].mean() - a[middle_steps(a)].mean())
        alarms += change >= noise_of_step(a, b, 1.0).noise_s
    assert alarms <= 0.025 * pairs


def test_a_variation_is_assumed_only_where_steps_are_few() -> None:
    for steps in (1, 2):
        diff = diff_traces(steps_with([[100_000]] * steps), steps_with([[104_000]] * 5))
        assert diff.noise_assumed
        assert "that steps are assumed to differ by" in diff.sentence
        assert any(note.startswith("A has ") and note.endswith("3 % of a step is assumed") for note in diff.notes)
    diff = diff_traces(steps_with([[100_000]] * ENOUGH_STEPS), steps_with([[100_500]] * ENOUGH_STEPS))
    assert not diff.noise_assumed
    assert diff.noise_s == pytest.approx(0.01 * diff.step_a_s, rel=0.01)
    assert "that steps may differ by" in diff.sentence
    assert not any("assumed" in note for note in diff.notes)


def test_one_odd_step_hides_no_difference() -> None:
    """It makes the standard deviation large, not the median deviation."""
    random = np.random.default_rng(3)
    a, b = random.normal(1, 0.01, (2, 20))
    b = b * 1.05
    b[7] = 4.0
    change = b[middle_steps(b)].mean() - a[middle_steps(a)].mean()
    assert change > noise_of_step(a, b, 1.0).noise_s


def test_a_clear_contribution_makes_the_change_one() -> None:
    """The host's idle time varies so much that the step alone tells nothing; the kernel does."""
    idle = np.array([0, 900_000, 100_000, 800_000])
    a, b = (
        steps_with([[1_000_000 + slower, 1_000, int(rest)] for rest in idle], host_ns=1_000, communicate=True)
        for slower in (0, 200_000)
    )
    diff = diff_traces(a, b)
    assert abs(diff.change_s) < diff.noise_s
    (clear,) = [one for one in diff.contributions if one.clear]
    assert clear.share_of_change == pytest.approx(1, abs=0.05)
    assert diff.verdict == "longer"
    assert diff.sentence.startswith("B's profiled step is 200.0 µs")


def test_seconds_are_the_nearest_to_what_people_write() -> None:
    diff = diff_traces(steps_with([[899_970]]), steps_with([[899_970]]))
    assert (diff.step_a_s, diff.a.durations_s, diff.a.median_s) == (0.0009, [0.0009], 0.0009)
