"""Differences between steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from trace_samples import Sketch, timelines

from stepscope.analyze.step.variation import compare_steps
from stepscope.formats.timeline import Timeline


def run(lengths: list[int], slow_compute: dict[int, int]) -> Timeline:
    """Steps of 1000 ns with 400 of compute; some longer on the host, some with longer kernels."""
    sketch = Sketch()
    start = 0
    for number, length in enumerate(lengths):
        busy = 400 + slow_compute.get(number, 0)
        sketch.step(number, start, start + length + slow_compute.get(number, 0))
        sketch.kernel("gemm", start + 100, start + 100 + busy, call=(start + 10, start + 20))
        start += length + slow_compute.get(number, 0)
    return sketch.build()


def test_the_slow_step_is_explained() -> None:
    found = compare_steps(run([1000] * 8, {4: 300}))
    assert found.judged == 6
    assert [one.step for one in found.steps if not one.is_judged] == [0, 7]
    assert found.slow_steps == [4]
    assert found.explained_by == "compute"
    excess = {one.share: one.slow_excess_s for one in found.shares}
    assert excess["compute"] == pytest.approx(300e-9)
    assert excess["host_idle"] == pytest.approx(0)
    shares = {one.share: one.variance_share for one in found.shares}
    assert shares["compute"] == pytest.approx(1)
    assert found.median_s == pytest.approx(1000e-9)
    assert found.median_period_s == pytest.approx(1000e-9)


def test_a_slow_host_is_told_apart() -> None:
    found = compare_steps(run([1000, 1000, 1000, 1600, 1000, 1000], {}))
    assert (found.slow_steps, found.explained_by) == ([3], "host_idle")


def test_few_steps_are_all_judged() -> None:
    found = compare_steps(run([1000] * 4, {}))
    assert found.judged == 4
    assert (found.slow_steps, found.explained_by) == ([], None)
    assert found.variation == pytest.approx(0)
    assert {one.variance_share for one in found.shares} == {None}


def test_one_step_has_no_variation() -> None:
    found = compare_steps(run([1000], {}))
    assert (found.std_s, found.variation, found.median_period_s) == (None, None, None)
    assert found.note is not None


@settings(max_examples=60)
@given(timelines())
def test_parts_add_up(timeline: Timeline) -> None:
    found = compare_steps(timeline)
    if found.std_s:
        assert sum(one.variance_share or 0 for one in found.shares) == pytest.approx(1)
    if found.slow_steps:
        slow = [one.step_s for one in found.steps if one.is_slow]
        others = [one.step_s for one in found.steps if one.is_judged and not one.is_slow]
        difference = sum(slow) / len(slow) - sum(others) / len(others)
        assert sum(one.slow_excess_s or 0 for one in found.shares) == pytest.approx(difference, abs=1e-15)
