"""Choosing a form, judging it by held-out sizes, and what a cost says of a size."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from collective_examples import (
    BANDWIDTH,
    DOUBLING,
    LATENCY_S,
    Truth,
    alpha_beta,
    kinked,
    make_curve,
    measure,
    square_root,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.costs.collective import (
    CollectiveCost,
    fit_collective,
    fit_collectives,
    group_curves,
    read_published_table,
    spread_of,
)
from stepscope.costs.curves import (
    FITS,
    FOLDS,
    CurvePoint,
    HeldOutSize,
    Piecewise,
    Points,
    choose_model,
    fit_alpha_beta,
    hold_out,
    hold_out_largest,
    hold_out_models,
)

EXCERPT = Path(__file__).parent / "data" / "all_reduce_8xa100.csv"
PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "collectives" / "all_reduce_public.csv"

measured = st.dictionaries(st.integers(1, 2**36), st.floats(1e-7, 1e2), min_size=4, max_size=9).map(
    lambda found: [CurvePoint(size, found[size]) for size in sorted(found)]
)


def fit(truth: Truth, **how: float) -> CollectiveCost:
    return fit_collective(make_curve(measure(truth, **how)))  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize(("truth", "model"), [(alpha_beta, "alpha_beta"), (square_root, "sqrt"), (kinked, "piecewise")])
def test_the_form_of_the_truth_is_chosen(truth: Truth, model: str, noise: float) -> None:
    cost = fit(truth, noise=noise)
    assert cost.model == model
    errors = {name: candidate.held_out.mean for name, candidate in cost.candidates.items()}
    assert errors[cost.model] <= 1.1 * min(errors.values()) + 0.001
    assert cost.candidates[cost.model].held_out.n == len(DOUBLING) - 2


def test_a_better_form_is_never_passed_over_for_a_much_worse_one() -> None:
    for seed in range(20):
        found = hold_out_models(measure(alpha_beta, noise=0.1, seed=seed))
        errors = {name: sum(trial.error for trial in trials) / len(trials) for name, trials in found.items()}
        assert errors[choose_model(found)] <= 1.1 * min(errors.values()) + 0.001


def test_coefficients_and_where_they_were_fitted() -> None:
    cost = fit(alpha_beta, noise=0.03)
    assert cost.latency_s == pytest.approx(LATENCY_S, rel=0.05)
    assert cost.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH, rel=0.05)
    assert (cost.smallest_bytes, cost.largest_bytes, cost.sizes) == (DOUBLING[0], DOUBLING[-1], len(DOUBLING))
    assert cost.held_out.median <= cost.held_out.p90 <= cost.held_out.worst
    assert cost.held_out.worst < 0.15


def test_every_inner_size_is_held_out_once_and_the_ends_never() -> None:
    """Seen by what the fits are given."""
    points = measure(alpha_beta, sizes=[8 * 2**i for i in range(25)])
    away: list[int] = []

    def spy(kept: Points) -> Piecewise:
        missing = sorted({p.size_bytes for p in points} - {p.size_bytes for p in kept})
        assert all(b >= a * 4 for a, b in pairwise(missing)), "neighbours stay"
        away.extend(missing)
        curve = FITS["piecewise"](kept)
        assert isinstance(curve, Piecewise)
        return curve

    trials = hold_out(points, spy)
    assert sorted(away) == [p.size_bytes for p in points[1:-1]]
    assert [trial.measured_s for trial in trials] == [p.time_s for p in points[1:-1]]
    assert len(points) - 2 > FOLDS


def test_the_largest_sizes_are_judged_apart() -> None:
    points = measure(square_root)
    seen = hold_out_largest(points, FITS["sqrt"])
    assert seen is not None
    assert (seen.errors.n, seen.reach) == (5, 32)
    assert seen.errors.worst < 1e-6
    wrong_form = hold_out_largest(points, fit_alpha_beta)
    assert wrong_form is not None
    assert wrong_form.errors.worst > 0.1
    assert hold_out_largest(points[:4], fit_alpha_beta) is None


def test_the_held_out_error_is_that_of_the_whole_procedure() -> None:
    """A size has no part in choosing the form that it judges, so the error may be above the chosen form's own."""
    points = group_curves(read_published_table(EXCERPT))[0].points
    cost = fit_collective(make_curve(points))
    assert cost.held_out.mean >= min(one.held_out.mean for one in cost.candidates.values())


def test_an_interval_covers_its_share() -> None:
    """The odd sizes judge what was fitted on the even ones, over many noisy curves."""
    inside = total = 0
    for seed in range(15):
        points = measure(square_root, noise=0.08, seed=seed)
        cost = fit_collective(make_curve(points[::2]))
        for size, time in points[1::2]:
            estimate = cost.predict(size)
            assert estimate.inside_range
            inside += estimate.low_s <= time <= estimate.high_s
            total += 1
    assert total == 150
    assert inside / total > 0.8


def test_the_spread_is_a_rank_of_the_errors() -> None:
    trials = [HeldOutSize(1.0, math.exp(i / 10)) for i in range(1, 20)]
    spread, level = spread_of(trials)
    assert (spread, level) == (pytest.approx(1.8), 18 / 20)
    assert spread_of(trials[:3]) == (pytest.approx(0.3), 3 / 4), "too few for 90 %: the worst, and what it covers"
    assert spread_of([HeldOutSize(2.0, 1.0), HeldOutSize(1.0, 2.0)])[0] == pytest.approx(math.log(2)), "both ways alike"


def test_beyond_the_range_it_goes_on_and_says_so() -> None:
    cost = fit(alpha_beta, noise=0.02)
    far = cost.predict(2**40)
    assert not far.inside_range
    assert far.value_s == pytest.approx(alpha_beta(2**40), rel=0.05)
    assert far.low_s < alpha_beta(2**40) < far.high_s
    tiny = cost.predict(1)
    assert not tiny.inside_range
    assert tiny.low_s < alpha_beta(1) < tiny.high_s
    assert cost.predict(0).low_s == 0
    assert cost.predict(DOUBLING[0]).inside_range
    assert cost.predict(DOUBLING[-1]).inside_range


def test_a_curve_of_latency_alone_does_not_claim_to_know_the_bandwidth() -> None:
    cost = fit_collective(make_curve([CurvePoint(size, 1.0e-5) for size in (8, 64, 512, 4096)]))
    assert cost.bandwidth_bytes_per_s is None
    estimate = cost.predict(4096 * 1000)
    assert estimate.low_s <= 1.0e-5
    assert estimate.high_s >= 1.0e-2


@pytest.mark.parametrize("size", [-1, math.nan, math.inf])
def test_sizes_that_cannot_be(size: float) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        fit(alpha_beta).predict(size)


def test_too_few_sizes_are_refused_and_the_others_go_on() -> None:
    few = make_curve(measure(alpha_beta, sizes=[8, 16, 32]), operation="broadcast")
    one = make_curve(measure(alpha_beta, sizes=[8]), operation="reduce")
    none = make_curve([], operation="barrier")
    enough = make_curve(measure(alpha_beta, sizes=[8, 64, 512, 4096]))
    fitted = fit_collectives([few, one, none, enough])
    assert [cost.operation for cost in fitted.costs] == ["all_reduce"]
    assert [refusal.label for refusal in fitted.refused] == [few.label, one.label, none.label]
    assert "3 sizes measured" in fitted.refused[0].reason
    assert "1 size measured" in fitted.refused[1].reason
    assert "none of its messages" in fitted.refused[2].reason
    with pytest.raises(ValueError, match="at least 4"):
        fit_collective(few)


def test_four_sizes_are_enough() -> None:
    cost = fit_collective(make_curve(measure(alpha_beta, sizes=[1024, 16384, 262144, 4194304])))
    assert cost.held_out.n == 2
    assert cost.level == pytest.approx(2 / 3)
    assert cost.candidates["sqrt"].extrapolation is None


@settings(max_examples=60, deadline=None)
@given(measured, st.lists(st.floats(0, 2**40), min_size=2, max_size=12))
def test_a_cost_is_monotone_and_inside_its_interval(points: list[CurvePoint], asked: list[float]) -> None:
    cost = fit_collective(make_curve(points))
    estimates = [cost.predict(size) for size in sorted(asked)]
    for size, estimate in zip(sorted(asked), estimates, strict=True):
        assert 0 <= estimate.low_s <= estimate.value_s <= estimate.high_s < math.inf
        assert estimate.inside_range == (points[0].size_bytes <= size <= points[-1].size_bytes)
    assert all(a.value_s <= b.value_s * (1 + 1e-12) for a, b in pairwise(estimates))
    assert msgspec.json.decode(msgspec.json.encode(cost), type=CollectiveCost) == cost


def test_published_figures_of_eight_a100() -> None:
    (curve,) = group_curves(read_published_table(EXCERPT))
    cost = fit_collective(curve)
    assert (curve.members, curve.hosts, curve.backend, len(curve.points)) == (8, 1, "nccl", 20)
    assert cost.model == "piecewise"
    assert cost.bandwidth_bytes_per_s == pytest.approx(134.4e9, rel=0.01)
    assert cost.candidates["alpha_beta"].held_out.mean == pytest.approx(0.162, abs=0.001)
    assert cost.candidates["sqrt"].held_out.mean == pytest.approx(0.101, abs=0.001)
    assert cost.held_out.mean < 0.06
    beyond = cost.candidates["sqrt"].extrapolation
    assert beyond is not None
    assert beyond.errors.worst < 0.05


@pytest.mark.skipif(not PUBLIC.exists(), reason="the whole public table is not beside this checkout")
def test_published_figures_of_four_systems() -> None:
    costs = fit_collectives(group_curves(read_published_table(PUBLIC))).costs
    assert [cost.sizes for cost in costs] == [31, 32, 20, 20]
    for cost in costs:
        assert cost.held_out.median < 0.08
        assert cost.candidates["sqrt"].held_out.mean < 0.7 * cost.candidates["alpha_beta"].held_out.mean
        assert cost.candidates["alpha_beta"].held_out.mean < 0.25
