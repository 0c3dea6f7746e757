"""The whole table in tiny form, end to end, and one model compiled for real."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from suite_runs import measure

from stepscope.bench.workloads import find_workload
from stepscope.bench.workloads.catalogue import SUITE
from stepscope.bench.workloads.protocol import EAGER
from stepscope.bench.workloads.registry import choose_suite, make_suite_cases, suite_precisions
from stepscope.compare.views import compare_implementations
from stepscope.core.errors import UsageError
from stepscope.records import Case, Failure

EMULATED = ("cvt", "resnext3d", "regnety")
"""Convolutions in bf16 are slow on a CPU without such units, and so is compiling these: their own tests do both."""


@pytest.mark.parametrize("model", SUITE)
def test_a_model_of_the_suite(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both implementations in both modes; checks passed. Of the two precisions in which optimized implementations are
    measured each model has one in training and the other in inference; a check in any of them is in fp32, too."""
    chosen = choose_suite(models=[model], everything=False)
    cases = make_suite_cases(chosen, device="cpu", scale="tiny")
    trained_at = SUITE.index(model) % 2
    for mode in ("train", "infer"):
        both = [one for one in cases if (one.benchmark.implementation, one.benchmark.mode) == ("optimized", mode)]
        assert 1 <= len(both) <= 2
        if len(both) == 2:
            cases.remove(both[trained_at if mode == "train" else 1 - trained_at])
    if model in EMULATED:
        for one in chosen:
            if one.implementation == "optimized":
                monkeypatch.setattr(type(one.make_task("tiny")), "engine", lambda self, mode: EAGER)
        cases = [one if one.spec.precision != "bf16" else with_precision(one, "fp32") for one in cases]
    assert len(cases) == 4
    found = [one for one in measure(tmp_path, *cases).cases() if not _is_beyond_this_machine(one.result.failure)]
    assert [one.result.failure for one in found if one.result.failure is not None] == []
    assert {(one.result.case.benchmark.implementation, one.result.case.benchmark.mode) for one in found} == {
        (implementation, mode) for implementation in ("ootb", "optimized") for mode in ("train", "infer")
    }
    for one in found:
        assert one.score() is not None
        if one.result.case.benchmark.implementation == "optimized":
            assert one.result.facts["check"] == "passed"
            assert one.result.facts["changes"]
    table = compare_implementations(found)
    assert {row.benchmark for row in table.comparison.rows} == {
        one.result.case.benchmark.id for one in found if one.result.case.benchmark.implementation == "ootb"
    }
    assert table.unpaired == table.without_score == []


def with_precision(case: Case, precision: str) -> Case:
    return msgspec.structs.replace(case, spec=msgspec.structs.replace(case.spec, precision=precision))


def _is_beyond_this_machine(failure: Failure | None) -> bool:
    """fp8 needs a device that has it. A form that computes something wrong is refused in whatever precision."""
    return failure is not None and failure.kind != "wrong_result" and "scaled_mm" in str(failure)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler uses what torch itself calls deprecated
def test_one_model_compiled_for_real(tmp_path: Path) -> None:
    case = find_workload("xlmr/optimized/infer/fb-1dev-A").make_case(device="cpu", scale="tiny", precision="bf16")
    (found,) = measure(tmp_path, case, compile_backend="inductor").cases()
    assert found.result.failure is None
    assert found.result.facts["check"] == "passed"


def test_the_suite_is_the_first_configuration_of_each_model_and_mode() -> None:
    chosen = choose_suite(everything=False)
    assert {one.model.model for one in chosen} == set(SUITE)
    assert len(chosen) == 2 * 2 * len(SUITE)
    everything = choose_suite(everything=True)
    assert {one.model.model for one in everything} > set(SUITE)
    assert all(one.declared.devices == 1 for one in everything)
    with pytest.raises(UsageError, match="no model"):
        choose_suite(models=["alexnet"], everything=False)


def test_optimized_forms_are_measured_in_two_precisions() -> None:
    assert suite_precisions(find_workload("resnet50/ootb/train/1dev-fp32")) == ["fp32"]
    assert suite_precisions(find_workload("resnet50/optimized/train/1dev-fp32")) == ["fp32", "bf16"]
