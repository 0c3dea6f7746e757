"""Tries of a search for a batch size are told nothing about when two runs are compared."""

from __future__ import annotations

from typing import Any

from builders import case_of, make_result, make_samples
from stepscope.compare.gate import check_regression
from stepscope.compare.verdict import compare_cases, describe_comparison
from stepscope.records import Benchmark
from stepscope.store import MeasuredCase


def measured(step_s: float, *, batch: int, version: int = 1, **parameters: Any) -> MeasuredCase:
    benchmark = Benchmark(model="dlrm", implementation="optimized", mode="train", config="A", version=version)
    case = case_of(benchmark, parameters, batch_size=batch)
    # Eight processes with a little spread: enough for a verdict.
    spread = [step_s * (1 + 0.001 * (i % 5)) for i in range(40)]
    return MeasuredCase(make_result(case), [make_samples(case, spread, process=n) for n in range(8)])


def tries(step_s: float, *batches: int) -> list[MeasuredCase]:
    return [measured(step_s, batch=batch, search="throughput") for batch in batches]


def test_tries_have_no_verdict_and_no_share_of_the_level() -> None:
    before, after = measured(0.1, batch=8), measured(0.2, batch=8)
    among_tries = compare_cases([*tries(0.1, 1, 2, 4, 8), before], [*tries(0.4, 1, 2, 4, 8), after])
    assert among_tries == compare_cases([before], [after])
    (row,) = among_tries.rows
    assert (row.label, row.verdict) == ("dlrm/optimized/train/A", "worse")


def test_tries_of_one_side_alone_are_not_missed() -> None:
    same = [measured(0.1, batch=8)]
    comparison = compare_cases([*tries(0.1, 1, 2), *same], [*tries(0.1, 16), *same])
    assert comparison.only_a == comparison.only_b == []
    assert check_regression(comparison, 0.05).outcome == "pass"


def test_tries_of_another_version_are_no_news() -> None:
    other_tries = [measured(0.1, batch=1, version=2, search="throughput")]
    comparison = compare_cases(other_tries, [measured(0.1, batch=8)])
    assert not [note for note in comparison.notes if "version" in note]
    assert describe_comparison(comparison).startswith("The two runs share no case")
