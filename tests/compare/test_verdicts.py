from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import case_of
from stepscope.compare.gate import check_regression
from stepscope.compare.verdict import (
    CaseComparison,
    CasePair,
    compare_cases,
    compare_pairs,
    describe,
    describe_comparison,
)
from stepscope.compare.views import compare_implementations, pair_ootb_optimized
from stepscope.core.errors import ExitCode, UsageError
from stepscope.records import Benchmark, CaseResult, Failure, RankSamples, Score
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
    host_cores: int | None = 2,
    idle_cores: float | None = 0.0,
    probe_s: float | None = 1e-6,
    host_share: float | None = None,
    search: str | None = None,
    timing: str = "own",
) -> MeasuredCase:
    benchmark = Benchmark(model=model, implementation=implementation, mode="forward", config="noise", version=version)  # type: ignore[arg-type]
    case = case_of(benchmark, {"search": search} if search else {"m": size}, batch_size=size if search else None)
    samples = [
        RankSamples(
            case=case.key,
            process=number,
            duration_s=process,
            iterations=[1] * len(process),
            warmup=[False] * len(process),
            device_s=process if timing == "device" else None,
            other_share=other_share,
            host_cores=host_cores,
            idle_cores=idle_cores,
            host_share=host_share,
            probes_s=[] if probe_s is None else [probe_s, probe_s],
        )
        for number, process in enumerate(processes)
    ]
    score = Score(unit="TFLOP/s", work=1e9)
    result = CaseResult(case=case, status="ok", started_at="", elapsed_s=1, score=score, timing=timing)  # type: ignore[arg-type]
    return MeasuredCase(result, samples)


def unloaded_case(
    time_s: float, *, processes: int = 8, seed: int = 0, size: int = 512, **identity: object
) -> MeasuredCase:
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
    row = only_row(unloaded_case(1e-3), unloaded_case(1.2e-3))
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
    a, b = (
        unloaded_case(1e-3, processes=processes, seed=seed),
        unloaded_case(1e-3 * factor, processes=processes, seed=seed + 9),
    )
    forth, back = only_row(a, b), only_row(b, a)
    assert back.verdict == OPPOSITE.get(forth.verdict, forth.verdict)
    assert forth.ratio is not None
    assert back.ratio == pytest.approx(1 / forth.ratio)
    assert forth.ci_high is not None
    assert back.ci_low == pytest.approx(1 / forth.ci_high)


@given(st.permutations(range(5)), st.permutations(range(5)))
def test_order_of_cases_does_not_matter(order_a: list[int], order_b: list[int]) -> None:
    a = [unloaded_case(1e-3, size=i) for i in range(5)]
    b = [unloaded_case(1e-3 * (1 + i / 10), size=i) for i in range(5)]
    shuffled = compare_cases([a[i] for i in order_a], [b[i] for i in order_b])
    assert shuffled == compare_cases(a, b)


@given(st.lists(st.floats(0.8, 1.3), min_size=1, max_size=8))
def test_interval_agrees_with_the_decision_in_every_family(factors: list[float]) -> None:
    a = [unloaded_case(1e-3, size=i) for i in range(len(factors))]
    b = [unloaded_case(1e-3 * factor, size=i, seed=1) for i, factor in enumerate(factors)]
    for row in compare_cases(a, b).rows:
        assert row.ci_low is not None
        assert row.ci_high is not None
        assert row.p_adjusted is not None
        assert (row.p_adjusted <= 0.01) == (not row.ci_low <= 1 <= row.ci_high)


def test_more_cases_make_each_harder_to_call() -> None:
    pair = unloaded_case(1e-3, processes=9, size=0), unloaded_case(1.08e-3, processes=9, size=0)
    alone = compare_cases([pair[0]], [pair[1]]).rows[0]
    others = [unloaded_case(1e-3, processes=9, size=i) for i in range(1, 90)]
    among = next(row for row in compare_cases([pair[0], *others], [pair[1], *others]).rows if row.key == pair[0].key)
    assert alone.verdict == "worse"
    assert among.p_adjusted is not None
    assert alone.p_adjusted is not None
    assert among.p_adjusted > alone.p_adjusted
    assert among.statistics[0].ci_low < alone.statistics[0].ci_low


def test_tiny_certain_difference_is_not_called_one() -> None:
    a, b = unloaded_case(1e-3, processes=60), unloaded_case(1.03e-3, processes=60)
    (row,) = compare_cases([a], [b], min_effect=0.05).rows
    assert row.p_adjusted is not None
    assert row.p_adjusted < 0.01
    assert row.verdict == "no difference found"
    assert "smaller than 5.0 %" in row.reason


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        (failed(unloaded_case(1.0)), unloaded_case(1.0), "failed in A: the device has no memory left"),
        (unloaded_case(1.0), failed(unloaded_case(1.0), "skipped"), "was skipped in B"),
        (unloaded_case(1.0), make_case([[1.0, 1.0]]), "B has 2 samples and 5 are needed"),
        (make_case([]), unloaded_case(1.0), "A has 0 samples"),
        (unloaded_case(1.0), make_case([[1.0, 0.0, 1.0, 1.0, 1.0]]), "not a time above zero"),
    ],
)
def test_what_cannot_be_compared_says_why(a: MeasuredCase, b: MeasuredCase, told: str) -> None:
    row = only_row(a, b)
    assert row.verdict == "not enough data"
    assert told in row.reason
    assert row.ci_low is None
    assert describe(row).startswith(f"{row.label}: not enough data: ")


def steady(time_s: float, *, processes: int = 5, **evidence: object) -> MeasuredCase:
    """Processes that differ by a few tenths of a percent."""
    values = [[time_s * (1 + 0.001 * (i % 5) + 0.001 * (n % 3)) for i in range(40)] for n in range(processes)]
    return make_case(values, **evidence)  # type: ignore[arg-type]


BUSY = {"other_share": 0.5, "idle_cores": 0.0}
"""Another program on each second core's worth of time, and no core to spare."""


def test_load_explains_why_a_side_is_slower_and_never_why_it_is_faster() -> None:
    slowed = only_row(steady(1e-3), steady(8e-3, **BUSY))
    assert slowed.verdict == "not enough data"
    assert "loaded or slower while B was measured, which could explain any difference" in slowed.reason
    assert (slowed.disturbed_a, slowed.disturbed_b, slowed.ci_low) == (0, 5, 0.0)
    both = only_row(steady(1e-3, other_share=0.2, idle_cores=0.0), steady(2e-3, **BUSY))
    assert "loaded or slower while A and B were measured, which could" in (both.reason or "")
    faster_all_the_same = only_row(steady(8e-3), steady(1e-3, **BUSY))
    assert faster_all_the_same.verdict == "better"
    assert only_row(steady(1e-3, **BUSY), steady(5e-2)).verdict == "worse"


def test_load_that_both_sides_met_alike_explains_nothing() -> None:
    assert only_row(steady(1e-3, **BUSY), steady(1.2e-3, **BUSY)).verdict == "worse"
    assert only_row(steady(1e-3, **BUSY), steady(1.001e-3, **BUSY)).verdict == "no difference found"


@pytest.mark.parametrize(
    ("evidence", "factor", "verdict"),
    [
        # A shared node of 64 cores: others use half of it, and there is room: at most in proportion, so up to 2×.
        ({"other_share": 0.5, "host_cores": 64, "idle_cores": 16.0}, 1.5, "not enough data"),
        ({"other_share": 0.5, "host_cores": 64, "idle_cores": 16.0}, 3.0, "worse"),
        ({"other_share": 0.1, "host_cores": 64, "idle_cores": 16.0}, 1.2, "worse"),
        # Others ran for a tenth of the time: nine of ten samples were left alone, and with them the fast end.
        ({"other_share": 0.06, "host_cores": 2, "idle_cores": 0.0}, 1.2, "worse"),
        ({"other_share": 0.5, "host_cores": 2, "idle_cores": 0.0}, 20.0, "not enough data"),
        # Older runs say neither how many cores there were nor whether one was free.
        ({"other_share": 0.06, "host_cores": None, "idle_cores": None}, 1.2, "not enough data"),
        # The device's own clock does not see the host.
        ({"other_share": 0.5, "idle_cores": 0.0, "timing": "device"}, 1.2, "worse"),
        ({"other_share": 0.5, "idle_cores": 0.0, "timing": "device"}, 20.0, "worse"),
        ({"other_share": 0.5, "idle_cores": 0.0, "host_share": 0.1}, 1.2, "worse"),
        ({"other_share": 0.5, "idle_cores": 0.0, "host_share": 0.9}, 1.2, "not enough data"),
    ],
)
def test_load_is_no_veto_against_what_it_cannot_explain(
    evidence: dict[str, object], factor: float, verdict: str
) -> None:
    unloaded = {name: value for name, value in evidence.items() if name in ("timing", "host_share")}
    assert only_row(steady(1e-3, **unloaded), steady(1e-3 * factor, **evidence)).verdict == verdict


def test_a_tail_is_touched_by_load_that_leaves_the_fast_end_alone() -> None:
    def stalling(**evidence: object) -> MeasuredCase:
        return make_case(
            [[3e-3 if i % 10 == 9 else 1e-3 * (1 + 0.001 * (i % 5 + n)) for i in range(60)] for n in range(8)],
            **evidence,  # type: ignore[arg-type]
        )

    unloaded = unloaded_case(1e-3)
    called = only_row(unloaded, stalling())
    assert (called.verdict, called.statistic) == ("worse", "p95")
    loaded = only_row(unloaded, stalling(other_share=0.06))
    assert loaded.verdict != "worse", "others ran in 12 % of the time, and that is what 10 % of the samples show"


def test_a_machine_that_was_slower_itself_explains_as_much_as_its_probe_shows() -> None:
    a, b = steady(1e-3, probe_s=4.5e-6), steady(1.2e-3, probe_s=7.0e-6)
    row = only_row(a, b)
    assert (row.verdict, row.disturbed_b) == ("not enough data", 5)
    assert only_row(a, steady(2e-3, probe_s=7.0e-6)).verdict == "worse", (
        "a probe 1.56 times slower explains no doubling"
    )
    assert only_row(steady(1.7e-3, probe_s=4.5e-6), steady(1e-3, probe_s=7.0e-6)).verdict == "better"
    other_machine = compare_cases([a], [b], same_system=False).rows[0]
    assert (other_machine.disturbed_b, other_machine.verdict) == (0, "worse"), "it means nothing between two systems"


def test_a_slow_host_slows_only_what_waits_for_it() -> None:
    waiting = only_row(steady(1e-5, probe_s=6e-6, host_share=0.95), steady(1.4e-5, probe_s=9e-6, host_share=0.95))
    assert (waiting.verdict, waiting.disturbed_b) == ("not enough data", 5)
    busy = only_row(steady(1e-5, probe_s=6e-6, host_share=0.1), steady(1.4e-5, probe_s=9e-6, host_share=0.1))
    assert (busy.verdict, busy.disturbed_b) == ("worse", 0)


def test_disturbed_processes_are_left_out_where_two_others_remain() -> None:
    quiet = steady(1e-3, processes=3)
    mixed_samples = [
        msgspec.structs.replace(samples, process=number)
        for number, samples in enumerate([*quiet.samples, *steady(5e-3, processes=2, **BUSY).samples])
    ]
    mixed = MeasuredCase(quiet.result, mixed_samples)
    row = only_row(quiet, mixed)
    assert row.ratio == pytest.approx(1.0)
    assert (row.disturbed_b, row.processes_b) == (2, 5)
    assert "left out" not in row.reason, "enough are left"
    fewer = MeasuredCase(
        quiet.result, [msgspec.structs.replace(samples, probes_s=[]) for samples in mixed_samples[1:4]]
    )
    row = only_row(fewer, steady(1e-3, processes=2, probe_s=None))
    assert (row.verdict, row.disturbed_a, (row.processes_needed or 0) > 2) == ("not enough data", 1, True)
    assert "without 1 of A's 3 processes, which ran on a loaded or slower machine, a change below" in row.reason


def test_one_process_per_side_calls_only_what_no_noise_of_the_grid_explains() -> None:
    a = steady(1.0, processes=1)
    comparison = compare_cases([a], [steady(1.2, processes=1)])
    (row,) = comparison.rows
    assert (row.verdict, row.processes_needed) == ("not enough data", 5)
    assert any("measure with --processes 5" in note for note in comparison.notes)
    assert only_row(a, steady(2.0, processes=1)).verdict == "not enough data"
    assert only_row(a, steady(20.0, processes=1)).verdict == "worse"


def test_three_processes_of_a_quiet_machine_tell_five_percent() -> None:
    assert only_row(steady(1e-3, processes=3), steady(1.05e-3, processes=3)).verdict == "worse"
    blind = [steady(time_s, processes=2, probe_s=None) for time_s in (1.0, 1.2)]
    assert only_row(*blind).verdict == "not enough data", "without a probe both of two may have met a slow phase"


def test_a_noisy_comparison_says_how_many_processes_would_decide_and_they_do() -> None:
    def noisy(count: int, factor: float, seed: int) -> MeasuredCase:
        rng = random.Random(seed)
        return make_case([[factor * math.exp(rng.gauss(0, 0.03))] * 9 for _ in range(count)])

    row = only_row(noisy(4, 1.0, 1), noisy(4, 1.0, 2))
    assert row.verdict == "not enough data"
    assert row.processes_needed is not None
    assert 5 <= row.processes_needed <= 40
    assert f"--processes {row.processes_needed}" in row.reason
    decided = [
        only_row(noisy(row.processes_needed, 1.0, 3 + i), noisy(row.processes_needed, 1.05, 99 + i)).verdict
        for i in range(30)
    ]
    assert decided.count("worse") >= 20
    assert decided.count("better") == 0
    measured = noisy(4, 1.0, 1), noisy(4, 1.0, 2)
    (in_turn,) = compare_pairs([CasePair(*measured, "one")], paired=True).rows
    assert (
        f"{in_turn.processes_needed} pairs would show one of 5.0 % (--pairs {in_turn.processes_needed})"
        in in_turn.reason
    )


def test_the_processes_that_are_asked_for_are_enough_at_once() -> None:
    """Four processes show too little of the spread half of the time: plans allow for that."""
    rng = random.Random(11)

    def noisy(count: int, factor: float) -> MeasuredCase:
        return make_case([[factor * math.exp(rng.gauss(0, 0.03))] * 9 for _ in range(count)])

    found = 0
    for _ in range(100):
        row = only_row(noisy(4, 1.0), noisy(4, 1.0))
        assert row.between_sd is not None
        assert row.between_bound is not None
        assert row.between_bound > 1.3 * row.between_sd
        needed = row.processes_needed or 4
        found += only_row(noisy(needed, 1.0), noisy(needed, 1.05)).verdict == "worse"
    assert found >= 90


@pytest.mark.parametrize("paired", [False, True])
def test_as_many_processes_as_were_too_few_are_never_asked_for(paired: bool) -> None:
    """One side varies and the other hardly does: a plan expects both to vary alike, which shows smaller changes."""
    for spread in (0.0005, 0.0007, 0.001, 0.003, 0.00599, 0.01, 0.03):
        for count in (2, 3, 4, 6):
            quiet, loud = (
                make_case([[math.exp(size * (-1) ** i)] * 9 for i in range(count)]) for size in (1e-5, spread)
            )
            (row,) = compare_pairs([CasePair(quiet, loud, "one")], paired=paired).rows
            if row.verdict == "not enough data":
                assert row.processes_needed is None or row.processes_needed > count, (spread, count, row.reason)


@pytest.mark.parametrize(("quantile", "statistic"), [(0.3, "median"), (0.85, "p95")])
def test_a_change_of_slow_iterations_alone_is_found(quantile: float, statistic: str) -> None:
    unloaded = unloaded_case(1e-3)
    rng = random.Random(3)
    changed = make_case(
        [
            [1e-3 * math.exp(abs(rng.gauss(0, 0.005))) * (2 if i >= 40 * quantile else 1) for i in range(40)]
            for _ in range(8)
        ]
    )
    row = only_row(unloaded, changed)
    assert (row.verdict, row.statistic) == ("worse", statistic)
    assert row.ratio == pytest.approx(2, rel=0.05)
    assert row.statistics[0].ratio == pytest.approx(1, rel=0.02)
    assert row.time_b_s == pytest.approx((row.time_a_s or 0) * row.ratio), "the ratio is that of the times beside it"


def test_statistics_that_disagree_are_both_told() -> None:
    before = unloaded_case(1e-3)
    rng = random.Random(5)
    after = make_case(
        [[(0.7e-3 if i % 3 else 2e-3) * math.exp(abs(rng.gauss(0, 0.005))) for i in range(60)] for _ in range(8)]
    )
    row = only_row(before, after)
    assert row.verdict in ("better", "worse")
    assert "differ the other way" in row.reason
    assert gate([before], [after]) == ("regression", ExitCode.REGRESSION)


def test_few_samples_that_vary_wildly_are_not_enough() -> None:
    rng = random.Random(5)
    wild = [make_case([[math.exp(rng.gauss(0, 0.8)) for _ in range(6)] for _ in range(3)]) for _ in range(2)]
    row = only_row(*wild)
    assert row.verdict == "not enough data"
    assert "would not have been seen" in row.reason


def test_cases_of_one_side_and_other_versions_are_named() -> None:
    a = [unloaded_case(1.0, size=1), unloaded_case(1.0, size=2)]
    b = [unloaded_case(1.0, size=1, version=2), unloaded_case(1.0, size=3, version=2)]
    comparison = compare_cases(a, b)
    assert comparison.rows == []
    assert (len(comparison.only_a), len(comparison.only_b)) == (2, 2)
    assert any("version 1 in A and 2 in B" in note for note in comparison.notes)
    assert describe_comparison(comparison) == "The two runs share no case, so nothing was compared."


def gate(a: list[MeasuredCase], b: list[MeasuredCase], limit: float = 0.05) -> tuple[str, int]:
    result = check_regression(compare_cases(a, b), limit)
    return result.outcome, result.exit_code


def test_gate_outcomes() -> None:
    base = unloaded_case(1e-3)
    passed, regression, undecided = (
        ("pass", ExitCode.DONE),
        ("regression", ExitCode.REGRESSION),
        ("undecided", ExitCode.UNDECIDED),
    )
    assert gate([base], [unloaded_case(1e-3, seed=1)]) == passed
    assert gate([base], [unloaded_case(0.7e-3)]) == passed
    assert gate([base], [unloaded_case(1.2e-3)]) == regression
    assert gate([base], [unloaded_case(1.2e-3)], limit=0.5) == passed
    assert gate([base], [unloaded_case(1.02e-3)]) == passed
    one = unloaded_case(1e-3, processes=1)
    for factor in (0.99, 1.0, 1.01, 1.2):
        assert gate([one], [unloaded_case(factor * 1e-3, processes=1)]) == undecided, "one process proves nothing"
    assert gate([one], [unloaded_case(20e-3, processes=1)]) == regression
    assert gate([one], [unloaded_case(0.1e-3, processes=1)]) == passed
    assert gate([steady(1e-3)], [steady(3e-3, **BUSY)]) == undecided
    assert gate([steady(1e-3, **BUSY)], [steady(1e-3, **BUSY)]) == passed, "a shared node can be checked"
    assert gate([base], [failed(base)]) == regression
    assert gate([base], [failed(base, "skipped")]) == undecided
    assert gate([failed(base)], [base]) == passed
    assert gate([failed(base)], [failed(base)]) == passed
    assert gate([base], []) == undecided
    assert gate([], []) == undecided
    assert gate([], [base]) == undecided
    assert gate([base, unloaded_case(1e-3, size=2)], [unloaded_case(1.2e-3)]) == regression


@given(st.floats(0.9, 1.15), st.integers(2, 12), st.floats(0.001, 0.08), st.integers(0, 50))
def test_a_gate_passes_only_what_its_upper_bound_allows(factor: float, k: int, spread: float, seed: int) -> None:
    rng = random.Random(seed)
    a, b = (make_case([[m * math.exp(rng.gauss(0, spread))] * 9 for _ in range(k)]) for m in (1.0, factor))
    comparison = compare_cases([a], [b], resolution=0.05)
    (found,) = check_regression(comparison, 0.05).rows
    (row,) = comparison.rows
    assert row.upper_bound is not None
    if found.outcome == "pass":
        assert row.upper_bound <= 1.05
    elif found.outcome == "regression":
        assert row.verdict == "worse"
    else:
        assert row.upper_bound > 1.05
        assert "--processes" in found.reason or "noise" in found.reason


def test_gate_refuses_a_negative_limit() -> None:
    with pytest.raises(UsageError, match="below zero"):
        check_regression(compare_cases([], []), -0.1)


def test_ootb_and_optimized_are_paired_by_everything_else() -> None:
    cases = [
        unloaded_case(2e-3, model="dlrm", implementation="ootb", size=1),
        unloaded_case(1e-3, model="dlrm", implementation="optimized", size=1),
        unloaded_case(2e-3, model="dlrm", implementation="ootb", size=2),
        unloaded_case(2e-3, model="dlrm", implementation="optimized", size=3, version=2),
        unloaded_case(2e-3, model="gemm", implementation="micro", size=1),
    ]
    pairs, unpaired = pair_ootb_optimized(cases)
    assert [pair.label for pair in pairs] == ["dlrm/ootb→optimized/forward/noise[m=1]"]
    assert unpaired == ["dlrm/ootb/forward/noise[m=2]", "dlrm/optimized/forward/noise[m=3]"]
    table = compare_implementations(cases)
    assert [row.verdict for row in table.comparison.rows] == ["better"]
    assert table.comparison.rows[0].ratio == pytest.approx(0.5, rel=0.02)


def test_tries_of_a_search_are_in_no_view() -> None:
    """They are timed, never checked; what a search ended with is a case of its own."""
    chosen = [unloaded_case(1e-3, model="dlrm", implementation=kind) for kind in ("ootb", "optimized")]
    tries = [
        unloaded_case(time_s, model="dlrm", implementation=kind, search="throughput", size=size)
        for kind, time_s in (("ootb", 9e-3), ("optimized", 1e-3))
        for size in (1, 512)
    ]
    table = compare_implementations([*tries, *chosen, *tries])
    assert [row.label for row in table.comparison.rows] == ["dlrm/ootb→optimized/forward/noise[m=512]"]
    assert table.any_precision is not None
    assert table.any_precision.geometric_mean == pytest.approx(1, rel=0.02)
    assert table.unpaired == table.without_score == []
    side = [*tries, *chosen]
    systems = compare_cases(side, side[1:], same_system=False)
    assert len(systems.rows) == 2
    assert systems.only_a == systems.only_b == []


def test_sentences() -> None:
    slower = only_row(unloaded_case(1e-3), unloaded_case(2e-3))
    assert "A ran 2.0" in describe(slower)
    assert "times faster than B" in describe(slower)
    assert "n = 320 and 320 in 8 and 8 processes" in describe(slower)
    faster = only_row(unloaded_case(2e-3), unloaded_case(1e-3))
    assert "after ran 2.0" in describe(faster, "before", "after")
    same = only_row(unloaded_case(1e-3), unloaded_case(1e-3, seed=3))
    assert "no difference found: B took " in describe(same)
    assert "the p10 time of A" in describe(same)
    whole = compare_cases([unloaded_case(1e-3), unloaded_case(1e-3, size=7)], [unloaded_case(2e-3)])
    assert describe_comparison(whole) == (
        "Of 1 case: 1 worse; the chance of even one false alarm among them is at most 1.0 %; "
        "1 case is on one side only."
    )
