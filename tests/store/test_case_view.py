"""What is derived from the samples of one case."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import make_case, make_result
from stepscope.metrics import CaseInput
from stepscope.metrics.cases import input_share, mfu
from stepscope.records import RankSamples
from stepscope.records.kinds import WorkloadObserved
from stepscope.store import MeasuredCase

CASE = make_case(size_bytes=1024)


def arrived(arrivals: list[list[float]], *, process: int = 0) -> list[RankSamples]:
    """One list a rank; what a sample took does not matter here."""
    return [
        RankSamples(
            case=CASE.key,
            rank=rank,
            process=process,
            duration_s=[1e-3] * len(values),
            iterations=[1] * len(values),
            warmup=[False] * len(values),
            extra_s={"arrival": values},
        )
        for rank, values in enumerate(arrivals)
    ]


def measured(samples: list[RankSamples]) -> MeasuredCase:
    return MeasuredCase(make_result(CASE, timing="slowest_rank"), samples)


def timed(seconds: list[list[float]]) -> MeasuredCase:
    samples = [
        RankSamples(
            case=CASE.key, rank=rank, duration_s=values, iterations=[1] * len(values), warmup=[False] * len(values)
        )
        for rank, values in enumerate(seconds)
    ]
    return measured(samples)


def test_latency_is_that_of_the_slowest_rank() -> None:
    case = timed([[1.0, 5.0, 3.0], [2.0, 4.0, 3.5]])
    latency = case.latency_s()
    assert latency == {
        "p50": 3.5, "p75": 4.25, "p95": pytest.approx(4.85), "p99": pytest.approx(4.97), "min": 2.0, "max": 5.0,
        "mean": pytest.approx(3.5),
    }  # fmt: skip
    summary = case.summary()
    assert summary is not None
    assert (latency["p50"], latency["p95"], latency["p99"]) == (summary.median_s, summary.p95_s, summary.p99_s)


def test_nothing_measured_has_no_latency() -> None:
    assert measured([]).latency_s() == {}


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=50))
def test_latencies_are_in_order(values: list[float]) -> None:
    latency = timed([values]).latency_s()
    ordered = [latency[name] for name in ("min", "p50", "p75", "p95", "p99", "max")]
    assert ordered == sorted(ordered)
    assert latency["min"] <= latency["mean"] * (1 + 1e-12)
    assert latency["mean"] <= latency["max"] * (1 + 1e-12)


def test_skew_is_the_median_of_the_latest_arrivals() -> None:
    case = measured(arrived([[0.0, 0.0, 0.3], [0.1, 0.2, 0.0]]))
    assert case.skew_s() == 0.2
    assert case.straggler() == (1, pytest.approx(2 / 3))
    assert case.straggler_rank() == 1


def test_without_arrivals_there_is_no_skew_and_no_straggler() -> None:
    case = timed([[1.0], [2.0]])
    assert (case.skew_s(), case.straggler(), case.straggler_rank()) == (None, None, None)


def test_ranks_that_begin_together_have_no_last() -> None:
    case = measured(arrived([[0.0, 0.0], [0.0, 0.0]]))
    assert (case.skew_s(), case.straggler()) == (0.0, None)


def test_a_tie_goes_to_the_lower_rank() -> None:
    assert measured(arrived([[0.0, 0.1], [0.1, 0.0]])).straggler() == (0, 0.5)
    assert measured(arrived([[0.0], [0.2], [0.2]])).straggler_rank() == 1


def test_processes_are_taken_one_by_one() -> None:
    """Iteration i of one process has nothing to do with iteration i of another."""
    first, second = arrived([[0.0], [0.4]]), arrived([[0.1, 0.2, 0.3], [0.0, 0.0, 0.0]], process=1)
    case = measured([*first, *second])
    assert case.skew_s() == pytest.approx(0.25)
    assert case.straggler() == (0, 0.75)


def test_ranks_that_only_kept_step_have_no_arrival() -> None:
    samples = arrived([[0.0, 0.1], [0.2, 0.0], []])
    assert measured(samples).straggler_rank() in {0, 1}


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_straggler_is_last_at_least_as_often_as_by_chance(arrivals: list[list[float]]) -> None:
    case = measured(arrived(arrivals))
    found = case.straggler()
    latest = [max(row) for row in zip(*arrivals, strict=True)]
    assert case.skew_s() == sorted(latest)[1]
    if found is None:
        assert max(latest) == 0
    else:
        assert found[1] >= 1 / len(arrivals) - 1e-12


def in_rounds(*processes: list[float], iterations: int = 1, warmups: int = 0, loader: list[float]) -> MeasuredCase:
    """Of three iterations each; samples are seconds an iteration."""
    samples = [
        RankSamples(
            case=CASE.key,
            process=number,
            duration_s=[value * iterations for value in values],
            iterations=[iterations] * len(values),
            warmup=[place < warmups for place in range(len(values))],
            extra_s={"loader": loader},
        )
        for number, values in enumerate(processes)
    ]
    facts = WorkloadObserved(round_steps=3, model_flops=12, peak_flops=8.0)
    return MeasuredCase(make_result(CASE, work=6.0, observed=facts), samples)


def test_iterations_that_differ_are_scored_by_the_mean_over_whole_rounds() -> None:
    case = in_rounds([1.0, 1.0, 4.0, 1.0], [4.0, 1.0, 1.0, 4.0, 1.0, 1.0, 4.0], loader=[4.0, 3.0, 5.0])
    assert case.typical_s() == 2.0
    assert case.score() == 3.0
    assert case.loader_score() == 1.5
    assert input_share(CaseInput(case)) == 0.5
    assert mfu(CaseInput(case)) == 0.75
    late = in_rounds([99.0, 99.0, 1.0, 1.0, 4.0, 1.0], warmups=2, loader=[])
    assert late.typical_s() == 2.0
    assert late.loader_score() is None


def test_a_sample_may_be_whole_rounds() -> None:
    assert in_rounds([2.0, 3.0, 1.0], iterations=6, loader=[]).typical_s() == 2.0
    assert in_rounds([1.0, 4.0], loader=[]).typical_s() == 2.5, "less than a round is all there is"


def test_iterations_that_are_alike_are_scored_by_the_median() -> None:
    case = MeasuredCase(make_result(CASE, work=6.0), in_rounds([1.0, 2.0, 9.0], loader=[3.0, 4.0, 9.0]).samples)
    assert (case.score(), case.loader_score(), input_share(CaseInput(case))) == (3.0, 1.5, 0.5)
