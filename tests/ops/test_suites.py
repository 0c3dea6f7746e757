from __future__ import annotations

from typing import Any

import msgspec
import pytest

from builders import make_result, make_samples
from stepscope.bench.ops.suites import MICRO, find_rows, format_rows, score_rows
from stepscope.core.errors import UsageError
from stepscope.records import Case, Failure
from stepscope.report.labels import label_cases
from stepscope.store import MeasuredCase


def measured(case: Case, seconds: float | None) -> MeasuredCase:
    if seconds is None:
        return MeasuredCase(make_result(case, failure=Failure(kind="x", message="no room")), [])
    return MeasuredCase(make_result(case), [make_samples(case, [seconds] * 3)])


def cases_of(identity: str, **more: Any) -> list[Case]:
    (row,) = find_rows([identity])
    return row.cases(dtype="float32", device="cpu", **more)


def test_the_published_rows_are_those_of_param() -> None:
    assert [row.id for row in find_rows([])] == [
        "dlrm/micro/linear/linear_A.1dev", "dlrm/micro/embedding_bag/emb_A.1dev",
    ]  # fmt: skip
    linear = cases_of("dlrm/micro/linear/linear_A.1dev")
    assert len(linear) == 12
    assert linear[0].parameters["widths"] == "-".join(["1024"] * 20)
    assert [case.batch_size for case in linear][-1] == 4096
    bags = cases_of("dlrm/micro/embedding_bag/emb_A.1dev")
    assert len(bags) == 16
    assert {case.parameters["rows"] for case in bags} == {14_000_000, 26_000_000}
    assert bags[-1].batch_size == 65_536


def test_a_row_is_all_work_over_all_time() -> None:
    cases = cases_of("dlrm/micro/linear/linear_small.1dev")
    seconds = [0.5, 0.25]
    (score,) = score_rows([measured(case, one) for case, one in zip(cases, seconds, strict=True)])
    # 19 matrices of 1024 × 1024, six flop a weight and row, batches of 128 and 256
    flops = 6 * (128 + 256) * 19 * 1024 * 1024
    assert score.score == pytest.approx(flops / 0.75 / 1e12)
    assert (score.batch_size, score.shapes, score.measured) == (256, 2, 2)
    assert score.batch_sizes == [128, 256]
    assert "batch 128 + 256: " in format_rows([score])
    assert "TFLOP/s" in format_rows([score])


def test_a_case_is_told_apart_by_its_batch_once() -> None:
    """The batch has a column of its own; a parameter that says the same says nothing more."""
    cases = cases_of("dlrm/micro/linear/linear_small.1dev")
    assert set(label_cases(cases).differences.values()) == {""}
    other = msgspec.structs.replace(cases[0], batch_size=7)
    assert "batch=128" in label_cases([other, cases[1]]).differences[other.key]


def test_embedding_rows_count_what_is_gathered() -> None:
    (case,) = cases_of("dlrm/micro/embedding_bag/emb_small.1dev")
    (score,) = score_rows([measured(case, 1e-3)])
    assert score.score == pytest.approx(2048 * 34 * 56 * 4 / 1e-3 / 1e9)


def test_a_row_with_a_shape_missing_says_so() -> None:
    cases = cases_of("dlrm/micro/linear/linear_small.1dev")
    (score,) = score_rows([measured(cases[0], 0.5), measured(cases[1], None)])
    assert (score.shapes, score.measured) == (2, 1)
    assert "only 1 of its 2" in format_rows([score])
    (none,) = score_rows([measured(case, None) for case in cases])
    assert none.score is None
    assert format_rows([]) == ""


def test_dtypes_are_scored_apart_and_other_cases_left_out() -> None:
    (row,) = find_rows(["dlrm/micro/linear/linear_tiny.1dev"])
    cases = [*row.cases(dtype="float32", device="cpu"), *row.cases(dtype="float64", device="cpu", compiled=True)]
    assert cases[-1].parameters["compile"] is True
    assert [score.dtype for score in score_rows([measured(case, 1.0) for case in cases])] == ["float32", "float64"]


def test_rows_are_found_by_name_once() -> None:
    name = MICRO[0].id
    assert len(find_rows([name, name])) == 1
    with pytest.raises(UsageError) as caught:
        find_rows(["dlrm/micro/linear/linear_Q.1dev"])
    assert caught.value.where == "--benchmark"
