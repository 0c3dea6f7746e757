"""One rank of sharded models, run by test_dlrm_sharded: a step of each, and what came of it in a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepscope.workloads.catalogue import read_catalogue
from stepscope.workloads.models.dlrm.ootb import DlrmTask
from stepscope.workloads.models.dlrm.sharded import ShardedDlrm
from stepscope.workloads.models.dlrm.sharded_network import ShardedNetwork

BATCH, SEED = 12, 5


def make_task(config: str) -> DlrmTask:
    [declared] = [one for one in read_catalogue()["dlrm"].benchmark if (one.config, one.mode) == (config, "train")]
    return DlrmTask(declared.sizes_at("tiny"))


def run_rank(rank: int, ranks: int, folder: Path, configs: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks)
    for config in configs:
        torch.save(make_step(config), folder / f"{config}.{rank}.pt")
    dist.destroy_process_group()


def make_step(config: str) -> dict[str, Any]:
    plain = make_task(config)
    task = ShardedDlrm(plain)
    torch.manual_seed(SEED)
    module = task.keep_own(plain.build())
    optimizer = task.make_optimizer(module)
    batch = task.make_batch(BATCH, seed=SEED, mode="train")
    loss = task.loss(module, batch)
    loss.backward()
    gradients = {name: one.grad.to_dense() for name, one in plain_parameters(module).items() if one.grad is not None}
    optimizer.step()
    with torch.inference_mode():
        chances = task.infer(module, batch)
    weights = {name: one.detach() for name, one in plain_parameters(module).items()}
    return {"loss": loss.detach(), "gradients": gradients, "weights": weights, "chances": chances, "batch": batch}


def plain_parameters(module: ShardedNetwork) -> dict[str, torch.nn.Parameter]:
    return {name.removeprefix("dense.module.plain."): one for name, one in module.named_parameters()}


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
