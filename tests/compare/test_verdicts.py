from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.compare import (
    CaseComparison,
    check_regression,
    compare_cases,
    compare_implementations,
    compare_systems,
    describe,
    describe_comparison,
    pair_ootb_optimized,
)
from stepscope.errors import ExitCode, UsageError
from stepscope.records import Benchmark, Case, CaseResult, Failure, RankSamples, Score
from stepscope.store import MeasuredCase

OPPOSITE = {"better": "worse", "worse": "better"}


def make_case(
    processes: list[list[float]],
    *,
    model: str = "gemm",
    implementation: str = "micro",
    size: int = 512,
    version: int = 1,
    other_share: float | None = 0.01,
    probe_s: float | None = 1e-6,
    host_share: float | None = None,
    search: str | None = None,
) -> MeasuredCase:
    benchmark = Benchmark(model=model, implementation=implementation, mode="forward", config="noise", version=version)  # type: ignore[arg-type]
    case = Case(benchmark=benchmark, parameters={"m": size} | ({"search": search} if search else {}))
    samples = [
        RankSamples(
            case=case.key,
            process=number,
            duration_s=process,
            iterations=[1] * len(process),
            warmup=[False] * len(process),
            other_share=other_share,
            host_share=host_share,
            probes_s=[] if probe_s is None else [probe_s, probe_s],
        )
        for number, process in enumerate(processes)
    ]
    score = Score(unit="TFLOP/s", work=1e9)
    return MeasuredCase(CaseResult(case=case, status="ok", started_at="", elapsed_s=1, score=score), samples)


def calm_case(time_s: float, *, processes: int = 8, seed: int = 0, size: int = 512, **identity: object) -> MeasuredCase:
    rng = random.Random(f"{time_s} {seed} {size}")
    values = [[time_s * math.exp(abs(rng.gauss(0, 0.005))) for _ in range(40)] for _ in range(processes)]
    return make_case(values, size=size, **identity)  # type: ignore[arg-type]


def failed(case: MeasuredCase, status: str = "failed") -> MeasuredCase:
    failure = Failure(kind="out_of_memory", message="the device has no memory left")
    return MeasuredCase(msgspec.structs.replace(case.result, status=status, failure=failure), [])


def only_row(a: MeasuredCase, b: MeasuredCase) -> CaseComparison:
    (row,) = compare_cases([a], [b]).rows
    return row


def test_slower_is_worse_and_ratio_is_b_over_a() -> None:
    row = only_row(calm_case(1e-3), calm_case(1.2e-3))
    assert row.verdict == "worse"
    assert row.ratio == pytest.approx(1.2, rel=0.01)
    assert row.ci_low is not None
    assert row.ci_low > 1
    assert row.score_a is not None
    assert row.score_b is not None
    assert row.score_a > row.score_b
    assert (row.n_a, row.processes_a, row.unit) == (320, 8, "TFLOP/s")


@given(st.floats(0.5, 2.0), st.integers(1, 8), st.integers(0, 5))
def test_swapping_runs_swaps_better_and_worse(factor: float, processes: int, seed: int) -> None:
    a, b = calm_case(1e-3, processes=processes, seed=seed), calm_case(1e-3 * factor, processes=processes, seed=seed + 9)
    forth, back = only_row(a, b), only_row(b, a)
    assert back.verdict == OPPOSITE.get(forth.verdict, forth.verdict)
    assert forth.ratio is not None
    assert back.ratio == pytest.approx(1 / forth.ratio)
    assert forth.ci_high is not None
    assert back.ci_low == pytest.approx(1 / forth.ci_high)


@given(st.permutations(range(5)), st.permutations(range(5)))
def test_order_of_cases_does_not_matter(order_a: list[int], order_b: list[int]) -> None:
    a = [calm_case(1e-3, size=i) for i in range(5)]
    b = [calm_case(1e-3 * (1 + i / 10), size=i) for i in range(5)]
    shuffled = compare_cases([a[i] for i in order_a], [b[i] for i in order_b])
    assert shuffled == compare_cases(a, b)


@given(st.lists(st.floats(0.8, 1.3), min_size=1, max_size=8))
def test_interval_agrees_with_the_decision_in_every_family(factors: list[float]) -> None:
    a = [calm_case(1e-3, size=i) for i in range(len(factors))]
    b = [calm_case(1e-3 * factor, size=i, seed=1) for i, factor in enumerate(factors)]
    for row in compare_cases(a, b).rows:
        assert row.ci_low is not None
        assert row.ci_high is not None
        assert row.p_adjusted is not None
        assert (row.p_adjusted <= 0.01) == (not row.ci_low <= 1 <= row.ci_high)


def test_more_cases_make_each_harder_to_call() -> None:
    pair = calm_case(1e-3, processes=9, size=0), calm_case(1.08e-3, processes=9, size=0)
    alone = compare_cases([pair[0]], [pair[1]]).rows[0]
    others = [calm_case(1e-3, processes=9, size=i) for i in range(1, 90)]
    among = next(row for row in compare_cases([pair[0], *others], [pair[1], *others]).rows if row.key == pair[0].key)
    assert alone.verdict == "worse"
    assert among.verdict == "no difference found"


def test_tiny_certain_difference_is_not_called_one() -> None:
    a, b = calm_case(1e-3, processes=60), calm_case(1.03e-3, processes=60)
    (row,) = compare_cases([a], [b], min_effect=0.05).rows
    assert row.p_adjusted is not None
    assert row.p_adjusted < 0.01
    assert row.verdict == "no difference found"
    assert "smaller than 5.0 %" in row.reason


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        (failed(calm_case(1.0)), calm_case(1.0), "failed in A: the device has no memory left"),
        (calm_case(1.0), failed(calm_case(1.0), "skipped"), "was skipped in B"),
        (calm_case(1.0), make_case([[1.0, 1.0]]), "B has 2 samples and 5 are needed"),
        (make_case([]), calm_case(1.0), "A has 0 samples"),
        (calm_case(1.0), make_case([[1.0, 0.0, 1.0, 1.0, 1.0]]), "not a time above zero"),
    ],
)
def test_what_cannot_be_compared_says_why(a: MeasuredCase, b: MeasuredCase, told: str) -> None:
    row = only_row(a, b)
    assert row.verdict == "not enough data"
    assert told in row.reason
    assert row.ci_low is None
    assert describe(row).startswith(f"{row.label}: not enough data: ")


def test_a_crowded_side_may_be_the_faster_one_but_not_the_slower() -> None:
    calm, starved = (
        calm_case(1e-3, processes=1),
        make_case([[0.008 + 1e-6 * (i % 7) for i in range(60)]], other_share=0.5),
    )
    row = only_row(calm, starved)
    assert row.verdict == "not enough data"
    assert "the machine was busy or slower while B was measured" in row.reason
    assert (row.held_up_a, row.held_up_b) == (0, 1)
    slower_still = only_row(starved, calm_case(0.05, processes=1))
    assert slower_still.verdict == "worse"
    assert "larger still" in slower_still.reason
    equal = make_case([[1e-3 + 1e-6 * (i % 7) for i in range(60)]], other_share=0.5)
    assert only_row(calm, equal).verdict == "not enough data"


def one_process(time_s: float, **evidence: object) -> MeasuredCase:
    return make_case([[time_s * (1 + 0.001 * (i % 5)) for i in range(40)]], **evidence)  # type: ignore[arg-type]


def test_a_machine_that_was_slower_itself_explains_a_slower_side() -> None:
    a, b = one_process(1e-3, probe_s=4.5e-6), one_process(1.2e-3, probe_s=7.0e-6)
    row = only_row(a, b)
    assert (row.verdict, row.held_up_b) == ("not enough data", 1)
    assert only_row(one_process(1.7e-3, probe_s=4.5e-6), one_process(1e-3, probe_s=7.0e-6)).verdict == "better"
    other_machine = compare_cases([a], [b], same_system=False).rows[0]
    assert other_machine.held_up_b == 0, "a probe means nothing between two systems"


def test_a_slow_host_holds_up_only_what_waits_for_it() -> None:
    def on_gpu(time_s: float, probe_s: float, host_share: float) -> MeasuredCase:
        return make_case(
            [[time_s * (1 + 0.001 * (i % 5)) for i in range(40)]] * 3, probe_s=probe_s, host_share=host_share
        )

    waiting = only_row(on_gpu(1e-5, 6e-6, 0.95), on_gpu(1.5e-5, 9e-6, 0.95))
    assert (waiting.verdict, waiting.held_up_b) == ("not enough data", 3)
    busy = only_row(on_gpu(1e-3, 6e-6, 0.1), on_gpu(1.2e-3, 9e-6, 0.1))
    assert (busy.verdict, busy.held_up_b) == ("worse", 0)


def test_one_process_a_side_cannot_tell_a_fifth_from_a_slow_spell() -> None:
    a = one_process(1.0)
    comparison = compare_cases([a], [one_process(1.2)])
    assert comparison.rows[0].verdict == "no difference found"
    assert any("use --processes 5" in note for note in comparison.notes)
    assert only_row(a, one_process(1.6)).verdict == "worse"


def test_three_probed_processes_a_side_tell_a_fifth() -> None:
    a = calm_case(1e-3, processes=3)
    comparison = compare_cases([a], [calm_case(1.2e-3, processes=3)])
    row = comparison.rows[0]
    assert (row.verdict, row.between_sd) == ("worse", pytest.approx(0.03, abs=0.005))
    assert comparison.notes == []
    assert only_row(a, calm_case(1.05e-3, processes=3)).verdict == "no difference found"


def test_without_a_probe_more_processes_are_needed() -> None:
    def blind(time_s: float, processes: int) -> MeasuredCase:
        return make_case([[time_s * (1 + 0.001 * (i % 5)) for i in range(40)]] * processes, probe_s=None)

    assert only_row(blind(1.0, 3), blind(1.2, 3)).verdict == "no difference found"
    assert only_row(blind(1.0, 5), blind(1.2, 5)).verdict == "worse"


def test_few_samples_that_vary_wildly_are_not_enough() -> None:
    rng = random.Random(5)
    wild = [make_case([[math.exp(rng.gauss(0, 0.8)) for _ in range(6)]]) for _ in range(2)]
    row = only_row(*wild)
    assert row.verdict == "not enough data"
    assert "would not have been seen" in row.reason


def test_uneven_side_is_told_by_its_median() -> None:
    calm = calm_case(1e-3)
    stalling = make_case([[1e-3 * (1 + i / 5000) if i % 3 == 0 else 3.4e-3 for i in range(60)] for _ in range(8)])
    row = only_row(calm, stalling)
    assert row.verdict == "no difference found"
    assert "the medians differ by 3.389×" in row.reason


def test_cases_of_one_side_and_other_versions_are_named() -> None:
    a = [calm_case(1.0, size=1), calm_case(1.0, size=2)]
    b = [calm_case(1.0, size=1, version=2), calm_case(1.0, size=3, version=2)]
    comparison = compare_cases(a, b)
    assert comparison.rows == []
    assert (len(comparison.only_a), len(comparison.only_b)) == (2, 2)
    assert any("version 1 in A and 2 in B" in note for note in comparison.notes)
    assert describe_comparison(comparison) == "The two runs share no case, so nothing was compared."


def gate(a: list[MeasuredCase], b: list[MeasuredCase], limit: float = 0.05) -> tuple[str, int]:
    result = check_regression(compare_cases(a, b), limit)
    return result.outcome, result.exit_code


def test_gate_outcomes() -> None:
    base = calm_case(1e-3)
    passed, regression, undecided = (
        ("pass", ExitCode.DONE),
        ("regression", ExitCode.REGRESSION),
        ("undecided", ExitCode.UNDECIDED),
    )
    assert gate([base], [calm_case(1e-3, seed=1)]) == passed
    assert gate([base], [calm_case(0.7e-3)]) == passed
    assert gate([base], [calm_case(1.2e-3)]) == regression
    assert gate([base], [calm_case(1.2e-3)], limit=0.5) == passed
    one = calm_case(1e-3, processes=1)
    assert gate([one], [calm_case(1.01e-3, processes=1)]) == passed
    assert gate([one], [calm_case(1.2e-3, processes=1)]) == undecided
    assert gate([one], [calm_case(3e-3, processes=1)]) == regression
    assert gate([one], [calm_case(0.3e-3, processes=1)]) == passed
    held_up = make_case([[3e-3] * 40], other_share=0.5)
    assert gate([one], [held_up]) == undecided
    assert gate([base], [failed(base)]) == regression
    assert gate([base], [failed(base, "skipped")]) == undecided
    assert gate([failed(base)], [base]) == passed
    assert gate([failed(base)], [failed(base)]) == passed
    assert gate([base], []) == undecided
    assert gate([], []) == undecided
    assert gate([], [base]) == undecided
    assert gate([base, calm_case(1e-3, size=2)], [calm_case(1.2e-3)]) == regression


def test_gate_refuses_a_negative_limit() -> None:
    with pytest.raises(UsageError, match="below zero"):
        check_regression(compare_cases([], []), -0.1)


def test_ootb_and_optimized_are_paired_by_everything_else() -> None:
    cases = [
        calm_case(2e-3, model="dlrm", implementation="ootb", size=1),
        calm_case(1e-3, model="dlrm", implementation="optimized", size=1),
        calm_case(2e-3, model="dlrm", implementation="ootb", size=2),
        calm_case(2e-3, model="dlrm", implementation="optimized", size=3, version=2),
        calm_case(2e-3, model="gemm", implementation="micro", size=1),
    ]
    pairs, unpaired = pair_ootb_optimized(cases)
    assert [pair.label for pair in pairs] == ["dlrm/ootb→optimized/forward/noise[m=1]"]
    assert unpaired == ["dlrm/ootb/forward/noise[m=2]", "dlrm/optimized/forward/noise[m=3]"]
    table = compare_implementations(cases)
    assert [row.verdict for row in table.comparison.rows] == ["better"]
    assert table.comparison.rows[0].ratio == pytest.approx(0.5, rel=0.02)


def test_tries_of_a_search_are_in_no_view() -> None:
    """They are timed, never checked; what a search ended with is a case of its own."""
    chosen = [calm_case(1e-3, model="dlrm", implementation=kind) for kind in ("ootb", "optimized")]
    tries = [
        calm_case(time_s, model="dlrm", implementation=kind, search="throughput", size=size)
        for kind, time_s in (("ootb", 9e-3), ("optimized", 1e-3))
        for size in (1, 512)
    ]
    table = compare_implementations([*tries, *chosen, *tries])
    assert [row.label for row in table.comparison.rows] == ["dlrm/ootb→optimized/forward/noise[m=512]"]
    assert table.any_precision is not None
    assert table.any_precision.geometric_mean == pytest.approx(1, rel=0.02)
    assert table.unpaired == table.without_score == []
    side = [*tries, *chosen]
    systems = compare_systems(side, side[1:], system_a=("old", "f1"), system_b=("new", "f2")).comparison
    assert len(systems.rows) == 2
    assert systems.only_a == systems.only_b == []


def test_two_systems_side_by_side() -> None:
    table = compare_systems([calm_case(1e-3)], [calm_case(0.5e-3)], system_a=("old", "f1"), system_b=("new", "f2"))
    assert (table.system_a, table.system_b, table.same_system) == ("old", "new", False)
    assert table.comparison.rows[0].verdict == "better"
    slower_host = one_process(2.0, probe_s=9e-6)
    across = compare_systems([one_process(1.0)], [slower_host], system_a=("old", "f1"), system_b=("new", "f2"))
    assert across.comparison.rows[0].held_up_b == 0, "a probe means nothing between two systems"


def test_sentences() -> None:
    slower = only_row(calm_case(1e-3), calm_case(2e-3))
    assert "A ran 2.0" in describe(slower)
    assert "times faster than B" in describe(slower)
    assert "n = 320 and 320 in 8 and 8 processes" in describe(slower)
    faster = only_row(calm_case(2e-3), calm_case(1e-3))
    assert "after ran 2.0" in describe(faster, "before", "after")
    same = only_row(calm_case(1e-3), calm_case(1e-3, seed=3))
    assert "no difference found: B took 1.00" in describe(same)
    whole = compare_cases([calm_case(1e-3), calm_case(1e-3, size=7)], [calm_case(2e-3)])
    assert describe_comparison(whole) == (
        "Of 1 case: 1 worse; the chance of even one false alarm among them is at most 1.0 %; "
        "1 case is on one side only."
    )
