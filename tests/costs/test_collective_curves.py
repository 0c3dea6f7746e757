"""The three forms: recovered from noise, monotone, never negative."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from collective_examples import BANDWIDTH, LATENCY_S, ROOT_S, alpha_beta, kinked, measure, square_root
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.costs.curves import (
    FITS,
    AlphaBeta,
    Curve,
    CurvePoint,
    Piecewise,
    SquareRoot,
    bandwidth_of,
    fit_alpha_beta,
    fit_piecewise,
    fit_square_root,
    fit_terms,
    model_of,
    rising,
    steepness,
)

sizes = st.integers(1, 2**40)
times = st.floats(1e-7, 1e3)
measured = st.dictionaries(sizes, times, min_size=4, max_size=12).map(
    lambda found: [CurvePoint(size, found[size]) for size in sorted(found)]
)


def test_alpha_beta_is_recovered() -> None:
    exact = fit_alpha_beta(measure(alpha_beta))
    assert exact.latency_s == pytest.approx(LATENCY_S)
    assert bandwidth_of(exact) == pytest.approx(BANDWIDTH)
    noisy = fit_alpha_beta(measure(alpha_beta, noise=0.05))
    assert noisy.latency_s == pytest.approx(LATENCY_S, rel=0.05)
    assert bandwidth_of(noisy) == pytest.approx(BANDWIDTH, rel=0.05)


def test_the_square_root_is_recovered() -> None:
    exact = fit_square_root(measure(square_root))
    assert (exact.latency_s, exact.s_per_sqrt_byte, 1 / exact.s_per_byte) == pytest.approx(
        (LATENCY_S, ROOT_S, BANDWIDTH)
    )
    noisy = fit_square_root(measure(square_root, noise=0.05))
    assert noisy.latency_s == pytest.approx(LATENCY_S, rel=0.05)
    assert noisy.s_per_sqrt_byte == pytest.approx(ROOT_S, rel=0.3)
    assert bandwidth_of(noisy) == pytest.approx(BANDWIDTH, rel=0.05)


def test_a_term_that_is_not_there_is_zero() -> None:
    assert fit_square_root(measure(alpha_beta)).s_per_sqrt_byte == 0
    flat = fit_alpha_beta([CurvePoint(size, 1e-5) for size in (8, 64, 512, 4096)])
    assert (flat.latency_s, flat.s_per_byte) == (pytest.approx(1e-5), 0)
    assert bandwidth_of(flat) is None


def test_coefficients_are_never_negative_and_as_good_as_any_on_a_grid() -> None:
    """Falling times would ask for a negative bandwidth."""
    points = [CurvePoint(10, 3.0), CurvePoint(20, 2.0), CurvePoint(40, 2.5), CurvePoint(80, 1.5)]
    found = fit_terms(points, [lambda size: 1.0, float])
    assert min(found) >= 0

    def loss(a: float, b: float) -> float:
        return sum((((a + b * size) - time) / time) ** 2 for size, time in points)

    assert all(loss(*found) <= loss(a / 100, b / 1000) + 1e-12 for a in range(0, 300, 3) for b in range(0, 100, 3))


def test_small_messages_count_as_much_as_large_ones() -> None:
    """By absolute error the three large points would decide alone."""
    points = [CurvePoint(size, 1e-5) for size in (8, 16, 32)]
    points += [CurvePoint(size, size * 1.3e-9) for size in (2**28, 2**29, 2**30)]
    assert fit_alpha_beta(points).predict(8) == pytest.approx(1e-5, rel=0.01)


def test_piecewise_goes_through_its_points_and_straight_between_them() -> None:
    curve = fit_piecewise(measure(kinked))
    for size, time in measure(kinked):
        assert curve.predict(size) == pytest.approx(time)
    assert Piecewise(sizes_bytes=[100, 10_000], times_s=[1.0, 100.0]).predict(1000) == pytest.approx(10.0)


def test_piecewise_goes_on_with_the_slopes_of_its_ends() -> None:
    curve = fit_piecewise(measure(alpha_beta))
    assert curve.predict(2**40) == pytest.approx(alpha_beta(2**40))
    assert curve.predict(0) == curve.latency_s == pytest.approx(LATENCY_S)
    assert bandwidth_of(curve) == pytest.approx(BANDWIDTH)
    steep = Piecewise(sizes_bytes=[1, 2], times_s=[1.0, 9.0])
    assert steep.predict(4) == 18.0, "twice the size, at most twice the time"
    assert steep.predict(0) == steep.latency_s == 0.0


def test_falling_times_are_levelled() -> None:
    assert rising([1.0, 3.0, 2.0, 2.5, 4.0]) == [1.0, 2.5, 2.5, 2.5, 4.0]
    assert rising([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    assert rising([]) == []


def test_steepness_goes_from_latency_to_bandwidth() -> None:
    curve = AlphaBeta(latency_s=1e-5, s_per_byte=1e-10)
    assert steepness(curve, 8) == pytest.approx(0, abs=1e-3)
    assert steepness(curve, 1e5) == pytest.approx(0.5, abs=1e-3)
    assert steepness(curve, 1e12) == pytest.approx(1, abs=1e-3)
    assert steepness(SquareRoot(latency_s=0, s_per_sqrt_byte=1e-8, s_per_byte=0), 1e6) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    "broken",
    [
        lambda: AlphaBeta(latency_s=-1e-6, s_per_byte=1e-9),
        lambda: AlphaBeta(latency_s=0, s_per_byte=0),
        lambda: SquareRoot(latency_s=1e-6, s_per_sqrt_byte=math.nan, s_per_byte=0),
        lambda: Piecewise(sizes_bytes=[8], times_s=[1e-6]),
        lambda: Piecewise(sizes_bytes=[8, 16], times_s=[1e-6]),
        lambda: Piecewise(sizes_bytes=[16, 8], times_s=[1e-6, 2e-6]),
        lambda: Piecewise(sizes_bytes=[0, 8], times_s=[1e-6, 2e-6]),
        lambda: Piecewise(sizes_bytes=[8, 16], times_s=[2e-6, 1e-6]),
        lambda: Piecewise(sizes_bytes=[8, 16], times_s=[1e-6, math.inf]),
        lambda: Piecewise(sizes_bytes=[8, 16], times_s=[0, 1e-6]),
    ],
)
def test_curves_that_cannot_be_are_refused(broken: object) -> None:
    assert callable(broken)
    with pytest.raises(ValueError, match=r"curve|coefficients"):
        broken()


@settings(max_examples=100, deadline=None)
@given(measured, st.lists(st.floats(0, 2**44), min_size=2, max_size=20), st.sampled_from(sorted(FITS)))
def test_every_fit_is_monotone_and_not_negative(points: list[CurvePoint], asked: list[float], name: str) -> None:
    curve: Curve = FITS[name](points)  # type: ignore[index]
    assert model_of(curve) == name
    everywhere = sorted([*asked, *(float(point.size_bytes) for point in points)])
    predicted = [curve.predict(size) for size in everywhere]
    assert all(0 <= value < math.inf for value in predicted)
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(predicted))
    assert curve.latency_s >= 0
    assert curve.latency_s == pytest.approx(curve.predict(0), rel=1e-9, abs=1e-18)
    assert 0 <= steepness(curve, points[-1].size_bytes) <= 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-50, 50), max_size=15))
def test_levelling_never_falls_and_keeps_the_mean(values: list[float]) -> None:
    levelled = rising(values)
    assert all(a <= b for a, b in pairwise(levelled))
    assert math.fsum(levelled) == pytest.approx(math.fsum(values), abs=1e-9)
    assert rising(levelled) == pytest.approx(levelled)
