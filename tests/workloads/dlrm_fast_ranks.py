"""One rank of two that train the optimized DLRM with its tables spread, run by test_dlrm_sharded_fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepscope.bench.workloads import find_workload
from stepscope.bench.workloads.models.dlrm.optimized import DlrmOptimized
from stepscope.bench.workloads.models.dlrm.sharded import ShardedFastDlrm
from stepscope.bench.workloads.precision import build_module
from stepscope.bench.workloads.steps import TrainStep

RANKS, BATCH, SEED = 2, 12, 5
STEPS = 3


def make_fast(config: str) -> DlrmOptimized:
    task = find_workload(f"dlrm/optimized/train/{config}").make_task("tiny")
    assert isinstance(task, DlrmOptimized)
    return task


def train(config: str) -> dict[str, Any]:
    task = make_fast(config).shard()
    assert isinstance(task, ShardedFastDlrm)
    module: Any = build_module(task, mode="train", precision="fp32", device="cpu", seed=SEED)
    batches = [task.make_batch(BATCH, seed=SEED + number, mode="train") for number in range(STEPS)]
    step = TrainStep(task, module, batches, precision="fp32", device="cpu")
    for _ in range(STEPS):
        step()
    module.eval()
    with torch.inference_mode():
        chances = task.infer(module, batches[0])
    # Weights lie as their gradients do, which have the ootb implementation's names.
    for parameter in module.fast.parameters():
        parameter.grad = parameter.detach().clone()
    own = {f"tables.{place}.": f"tables.{table}." for place, table in enumerate(module.fast.lookup.spread.own)}
    weights = module.fast.plain_gradients()
    for name, weight in module.fast.lookup.own.plain_gradients():
        local = next(one for one in own if name.startswith(one))
        weights[own[local] + name.removeprefix(local)] = weight
    plain = [task.sharded.make_batch(BATCH, seed=SEED + number, mode="train") for number in range(STEPS)]
    return {"weights": weights, "batches": plain, "chances": chances}


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, folder, configs = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=RANKS)
    for config in configs:
        torch.save(train(config), folder / f"{config}.{rank}.pt")
    dist.destroy_process_group()
