"""Models on several real ranks, in tiny form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from suite_runs import SMALL

from stepscope.launch import launch_local
from stepscope.measure import QUICK
from stepscope.records import Case
from stepscope.store import StoredRun, create_run
from stepscope.workloads import choose_workloads, find_workload
from stepscope.workloads.catalogue import read_catalogue
from stepscope.workloads.ranks import WORKER

pytestmark = pytest.mark.ranks

SHARDED = "dlrm/ootb/train/A.8dev-embed32-fp32"
BRIEF = msgspec.structs.replace(QUICK, min_time_s=0.0, max_time_s=0.02, min_samples=2, few_samples=2)


def find_training(model: str, implementation: str) -> str:
    found = choose_workloads(models=[model], modes=["train"], implementations=[implementation])
    return next(one.benchmark.id for one in found if one.declared.devices == 1)


def measure(store: Path, *asked: tuple[str, str], ranks: int = 2, **chosen: Any) -> StoredRun:
    cases = [
        find_workload(name).make_case(device="cpu", scale="tiny", parallel=parallel, world_size=ranks, **chosen)
        for name, parallel in asked
    ]
    return run_cases(store, cases, ranks=ranks)


def run_cases(store: Path, cases: list[Case], *, ranks: int) -> StoredRun:
    request = {
        "device": "cpu", "backend": "gloo", "world_size": ranks, "worker": WORKER,
        "settings": msgspec.to_builtins(BRIEF), "compile_backend": "eager",
    }  # fmt: skip
    folder = create_run(
        store, verb="workload", name="test", command=["test"], request=request, cases=cases, launcher="self",
        world_size=ranks,
    )  # fmt: skip
    launch_local(folder=folder, target=WORKER, ranks=ranks, hang_limit_s=60.0)
    return StoredRun(folder)


def test_two_ranks_share_a_batch(tmp_path: Path) -> None:
    run = measure(tmp_path, (SMALL, "ddp"), ("resnet50/ootb/train/1dev-fp32", "fsdp"), (SHARDED, "sharded"))
    for case in run.cases():
        assert case.result.failure is None, case.result.failure
        assert len(case.samples) == 2
        assert case.result.timing == "slowest_rank"
        score, summary = case.score(), case.summary()
        assert score is not None
        assert summary is not None
        assert score == pytest.approx((case.result.case.batch_size or 0) / summary.median_s)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_every_model_is_shared_in_both_ways(tmp_path: Path, parallel: str) -> None:
    run = measure(tmp_path, *((find_training(model, "ootb"), parallel) for model in read_catalogue()))
    assert len(run.cases()) == 14
    for case in run.cases():
        assert case.result.failure is None, (case.result.case.benchmark.id, case.result.failure)
        assert len(case.samples) == 2
    tables = next(case for case in run.cases() if case.result.case.benchmark.model == "dlrm")
    assert ("porting" in tables.result.observed) == (parallel == "fsdp")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_fast_forms_are_shared_in_both_ways(tmp_path: Path, parallel: str) -> None:
    """One of each family: joined weights, weights stored channels last, kernels, tables, blocks of a decoder."""
    models = ("xlmr", "oscar", "cvt", "rnnt", "dlrm", "gpt2")
    run = measure(tmp_path, *((find_training(model, "optimized"), parallel) for model in models))
    for case in run.cases():
        assert case.result.failure is None, (case.result.case.benchmark.id, case.result.failure)
        assert case.result.observed["check"] == "passed"


def test_what_fails_on_a_rank_is_one_failure_among_others(tmp_path: Path) -> None:
    broken = ("resnet50/ootb/train/1dev-fp32", "sharded")
    first, second = measure(tmp_path, broken, (SMALL, "ddp")).cases()
    assert first.result.failure is not None
    assert "no tables to spread" in first.result.failure.message
    assert second.result.status == "ok"


def test_a_check_that_fails_on_the_first_rank_alone_leaves_no_rank_behind(tmp_path: Path) -> None:
    """Tiny Inception's gradients in bf16 are nothing but rounding, so that it has no score."""
    unchecked = find_workload("inception-v3/optimized/train/1dev-fp32")
    cases = [
        unchecked.make_case(device="cpu", scale="tiny", parallel="ddp", world_size=2, precision="bf16"),
        find_workload(SMALL).make_case(device="cpu", scale="tiny", parallel="ddp", world_size=2),
    ]
    failed, good = run_cases(tmp_path, cases, ranks=2).cases()
    assert failed.result.failure is not None
    assert failed.result.failure.kind == "wrong_result"
    assert good.result.status == "ok"


def test_a_batch_that_cannot_be_shared_is_a_recorded_failure(tmp_path: Path) -> None:
    (case,) = measure(tmp_path, (SMALL, "ddp"), batch_size=7).cases()
    assert case.result.failure is not None
    assert "cannot be shared evenly by 2 ranks" in case.result.failure.message
