"""Faults that a check must find whatever the model is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepscope.workloads import find_workload
from stepscope.workloads.check import CheckReport, check_optimized


def check(benchmark_id: str, *, batch_size: int = 16) -> CheckReport:
    workload = find_workload(benchmark_id)
    plain, fast = workload.make_calm("tiny")
    return check_optimized(
        plain, fast, mode=workload.declared.mode, precision="fp32", device="cpu", batch_size=batch_size,
        backend="eager",
    )  # fmt: skip


def failed(report: CheckReport) -> set[str]:
    return {one.what for one in report.failures}


@pytest.mark.parametrize(
    "benchmark_id", ["dlrm/optimized/train/A.1dev-embed32-fp32", "resnet50/optimized/train/1dev-fp32"]
)
def test_an_optimizer_that_does_nothing_is_found(benchmark_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(benchmark_id).passed
    workload = find_workload(benchmark_id)
    fast = type(workload.make_task("tiny"))
    right = fast.make_optimizer

    def idle(self: Any, module: Any) -> Any:
        optimizer = right(self, module)
        optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
        return optimizer

    monkeypatch.setattr(fast, "make_optimizer", idle)
    assert failed(check(benchmark_id)) == {"convergence"}


def test_statistics_that_are_ignored_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.workloads.models.convnets import folding

    right = folding.fold_one

    def forgetful(conv: Any, norm: Any) -> Any:
        norm.running_mean = torch.zeros_like(norm.running_mean)
        norm.running_var = torch.ones_like(norm.running_var)
        return right(conv, norm)

    assert check("resnet50/optimized/infer/1dev-fp32").passed
    monkeypatch.setattr(folding, "fold_one", forgetful)
    assert failed(check("resnet50/optimized/infer/1dev-fp32")) == {"outputs"}
