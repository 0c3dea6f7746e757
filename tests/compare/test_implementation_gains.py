"""The means of `--view ootb-optimized`: what counts as one gain, and against what it is measured."""

from __future__ import annotations

from typing import Any

import pytest

from builders import case_of, make_result, make_samples
from stepscope.compare.views import Gains, compare_implementations
from stepscope.records import Benchmark, Failure
from stepscope.store import MeasuredCase


def measured(
    implementation: Any, step_s: float, *, precision: str = "fp32", world_size: int = 1, batch: int = 8, **more: Any
) -> MeasuredCase:
    benchmark = Benchmark(model="dlrm", implementation=implementation, mode="train", config="A")
    parameters = {"device": "cuda", "precision": precision, "scale": "full", **more}
    case = case_of(benchmark, parameters, batch_size=batch, world_size=world_size)
    return MeasuredCase(make_result(case), [make_samples(case, [step_s] * 40, process=n) for n in range(3)])


def failed(case: MeasuredCase) -> MeasuredCase:
    failure = Failure(kind="out_of_memory", message="the device has no memory left")
    return MeasuredCase(make_result(case.result.case, failure=failure), [])


def both(ootb_s: float, optimized_s: float, **more: Any) -> list[MeasuredCase]:
    return [measured("ootb", ootb_s, **more), measured("optimized", optimized_s, **more)]


def gains_of(cases: list[MeasuredCase]) -> tuple[Gains, Gains]:
    table = compare_implementations(cases)
    assert table.same_precision is not None
    assert table.any_precision is not None
    return table.same_precision, table.any_precision


@pytest.mark.parametrize(
    ("larger", "smaller", "told"),
    [
        ({"world_size": 2}, {"world_size": 4}, " on 4 ranks"),
        (
            {"world_size": 2, "parallel": "ddp"},
            {"world_size": 2, "parallel": "fsdp"},
            "parallel=fsdp] batch 8 on 2 ranks",
        ),
        ({}, {"accumulate": 4}, "accumulate=4] batch 8"),
        ({}, {"scale": "tiny"}, "scale=tiny] batch 8"),
        ({"data": "1f"}, {"data": "2e"}, "data=2e] batch 8"),
        ({"batch": 8}, {"batch": 16}, " batch 16"),
    ],
)
def test_whatever_tells_two_cases_apart_gives_two_gains(
    larger: dict[str, Any], smaller: dict[str, Any], told: str
) -> None:
    for gains in gains_of([*both(0.8, 0.1, **larger), *both(0.4, 0.2, **smaller)]):
        assert gains.benchmarks == 2
        assert gains.least == pytest.approx(2)
        assert gains.least_label.startswith("dlrm/ootb→optimized/train/A[")
        assert gains.least_label.endswith(told)
        assert gains.geometric_mean == pytest.approx(4)


def test_each_precision_has_its_own_gain_in_the_mean_of_the_same_one() -> None:
    same, any_one = gains_of([*both(0.8, 0.2), *both(0.3, 0.1, precision="tf32")])
    assert (same.benchmarks, same.least, same.geometric_mean) == (2, pytest.approx(3), pytest.approx(12**0.5))
    assert "precision=tf32" in same.least_label
    assert (any_one.benchmarks, any_one.least) == (1, pytest.approx(8))
    assert any_one.least_label.endswith(" (fp32→tf32) batch 8")


@pytest.mark.parametrize("optimized_s", [{"fp32": 0.5, "bf16": 0.1}, {"bf16": 0.1}])
def test_a_coarse_form_out_of_the_box_does_not_move_the_gain_in_any_precision(optimized_s: dict[str, float]) -> None:
    cases = [
        measured("ootb", 0.8),
        *(measured("optimized", step_s, precision=name) for name, step_s in optimized_s.items()),
    ]
    before = compare_implementations(cases)
    after = compare_implementations([*cases, measured("ootb", 0.15, precision="bf16")])
    assert after.any_precision == before.any_precision
    assert after.any_precision is not None
    assert after.any_precision.geometric_mean == pytest.approx(8)
    assert after.same_precision is not None
    assert after.same_precision.least == pytest.approx(1.5)
    assert [row.label.endswith("(fp32→bf16)") for row in after.comparison.rows].count(True) == 1
    assert after.unpaired == after.without_score == after.undecided == []


def test_the_fastest_form_may_be_in_the_finest_precision() -> None:
    _, any_one = gains_of([*both(0.8, 0.1), *both(0.4, 0.2, precision="bf16")])
    assert any_one.geometric_mean == pytest.approx(8)


def test_what_lacks_data_is_in_no_mean_and_named() -> None:
    """Two samples decide nothing, however large the gain that they seem to show."""
    hasty = measured("optimized", 0.001, batch=16)
    [samples, *_] = hasty.samples
    hasty = MeasuredCase(hasty.result, [make_samples(hasty.result.case, samples.duration_s[:2])])
    table = compare_implementations([*both(0.8, 0.2), measured("ootb", 0.8, batch=16), hasty])
    assert sorted(row.verdict for row in table.comparison.rows) == ["better", "not enough data"]
    for gains in (table.same_precision, table.any_precision):
        assert gains is not None
        assert (gains.benchmarks, gains.geometric_mean) == (1, pytest.approx(4))
    assert len(table.undecided) == 1
    assert table.without_score == table.unpaired == []
    alone = compare_implementations([measured("ootb", 0.8, batch=16), hasty])
    assert (alone.same_precision, alone.any_precision) == (None, None)


def test_a_reference_that_failed_is_replaced_by_no_other_and_named() -> None:
    table = compare_implementations([failed(measured("ootb", 0.8)), *both(0.15, 0.1, precision="bf16")])
    assert table.any_precision is None
    assert table.same_precision is not None
    assert table.same_precision.geometric_mean == pytest.approx(1.5)
    (label,) = table.without_score
    assert label.endswith("(fp32→bf16)")
    assert table.unpaired == []


def test_a_coarse_form_that_nobody_is_held_against_is_left_over() -> None:
    table = compare_implementations([*both(0.8, 0.1), measured("ootb", 0.3, precision="tf32")])
    (label,) = table.unpaired
    assert "precision=tf32" in label
