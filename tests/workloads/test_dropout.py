"""Checks compare without dropout; that an optimized implementation drops as much as the plain one is tested here."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.bench.workloads import choose_workloads, find_workload  # noqa: E402
from stepscope.bench.workloads.precision import shape_module  # noqa: E402
from stepscope.bench.workloads.protocol import Setting, Task  # noqa: E402

DRAWS = 80
FAR = 0.3
"""Of the logarithm of two spreads: with so many draws, equal ones are 0.1 apart in the mean."""
BATCH = 4
DROPPING = [
    "xlmr/optimized/train/fb-1dev-A-fp32",
    "bert-base/optimized/train/1dev-seq128-fp32",
    "cvt/optimized/train/1dev-cvt13-fp32",
    "oscar/optimized/train/1dev-base-fp32",
    "gpt2/optimized/train/small-1dev-fp32",
    "rnnt/optimized/train/1dev-fp32",
    "vgg16/optimized/train/1dev-fp32",
    "inception-v3/optimized/train/1dev-fp32",
]


def draw_losses(task: Task, module: Any, draws: int = DRAWS) -> list[float]:
    """Of one batch and the same weights; only what is dropped differs."""
    batch = task.make_batch(BATCH, seed=1, mode="train")
    losses = []
    with torch.no_grad():
        for seed in range(draws):
            torch.manual_seed(seed)
            losses.append(float(task.loss(module, batch)))
    return losses


def build_both(benchmark_id: str) -> tuple[tuple[Task, Any], tuple[Task, Any]]:
    workload = find_workload(benchmark_id)
    plain, fast = workload.make_ootb("tiny"), workload.make_task("tiny")
    modules = []
    for task in (plain, fast):
        torch.manual_seed(0)
        modules.append(shape_module(task, plain.build(), Setting("train", "fp32", "cpu")))
    return (plain, modules[0]), (fast, modules[1])


def compare_spreads(benchmark_id: str) -> float:
    """Logarithm of the optimized implementation's spread of losses over the plain one's."""
    plain, fast = build_both(benchmark_id)
    spreads = [statistics.stdev(draw_losses(*one)) for one in (plain, fast)]
    assert spreads[0] > 0
    return float(torch.tensor(spreads[1] / spreads[0]).log())


@pytest.mark.parametrize("benchmark_id", DROPPING)
def test_a_fast_form_drops_as_much_as_the_plain_one(benchmark_id: str) -> None:
    assert abs(compare_spreads(benchmark_id)) < FAR


def test_all_models_that_drop_are_among_them() -> None:
    dropping = set()
    for workload in choose_workloads(implementations=["optimized"], modes=["train"]):
        plain = workload.make_ootb("tiny")
        torch.manual_seed(0)
        module = shape_module(plain, plain.build(), Setting("train", "fp32", "cpu"))
        if workload.declared.devices == 1 and len(set(draw_losses(plain, module, 3))) > 1:
            dropping.add(workload.benchmark.id.split("/")[0])
    assert dropping - {"bert-large"} == {one.split("/")[0] for one in DROPPING}


def test_a_fast_form_that_drops_less_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.bench.workloads.models.encoders import optimized

    monkeypatch.setattr(optimized, "drop", lambda hidden, *_: hidden)
    assert compare_spreads("xlmr/optimized/train/fb-1dev-A-fp32") < -FAR
