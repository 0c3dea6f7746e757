"""Models on several real ranks, in tiny form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from suite_runs import SMALL

from stepscope.launch import launch_local
from stepscope.measure import QUICK
from stepscope.store import StoredRun, create_run
from stepscope.workloads import find_workload
from stepscope.workloads.ranks import WORKER

pytestmark = pytest.mark.ranks

SHARDED = "dlrm/ootb/train/A.8dev-embed32-fp32"


def measure(store: Path, *asked: tuple[str, str], ranks: int = 2, **chosen: Any) -> StoredRun:
    cases = [
        find_workload(name).make_case(device="cpu", scale="tiny", parallel=parallel, world_size=ranks, **chosen)
        for name, parallel in asked
    ]
    request = {
        "device": "cpu", "backend": "gloo", "world_size": ranks, "worker": WORKER,
        "settings": msgspec.to_builtins(QUICK),
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


def test_a_batch_that_cannot_be_shared_is_a_recorded_failure(tmp_path: Path) -> None:
    (case,) = measure(tmp_path, (SMALL, "ddp"), batch_size=7).cases()
    assert case.result.failure is not None
    assert "cannot be shared evenly by 2 ranks" in case.result.failure.message
