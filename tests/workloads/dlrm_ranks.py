"""One rank of several, run by test_dlrm_sharded: some steps, and what came of them in files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepscope.bench.workloads import find_workload
from stepscope.bench.workloads.catalogue import read_catalogue
from stepscope.bench.workloads.feed import make_batches
from stepscope.bench.workloads.models.dlrm.ootb import DlrmTask, TableSizes
from stepscope.bench.workloads.models.dlrm.optimized import DlrmOptimized
from stepscope.bench.workloads.models.dlrm.sharded import ShardedDlrm, ShardedFastDlrm, ShardedNetwork
from stepscope.bench.workloads.precision import build_module, math_of
from stepscope.bench.workloads.protocol import Optimized, Setting, Task
from stepscope.bench.workloads.request import SEED as WEIGHT_SEED
from stepscope.bench.workloads.request import ParsedCase, read_case
from stepscope.bench.workloads.shared import open_share, shard
from stepscope.bench.workloads.steps import TrainStep

RANKS = 2
BATCH, SEED = 12, 5
STEPS = 3


def start_ranks(folder: Path, names: list[str]) -> None:
    """`names`: a kind of step and what takes it, as `sharded:CONFIG`, `optimized:CONFIG` (configs of DLRM) or
    `joined:NAME` (of `name_joined`). Waits for the ranks to end."""
    running = [subprocess.Popen([sys.executable, __file__, str(rank), str(folder), *names]) for rank in range(RANKS)]
    try:
        assert [one.wait(timeout=240) for one in running] == [0] * RANKS
    finally:
        for one in running:
            one.kill()


def read_ranks(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(folder / _file(name, rank), weights_only=True) for rank in range(RANKS)]


def run_rank(rank: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=RANKS)
    makers = {"sharded": step_sharded, "optimized": step_optimized, "joined": step_joined}
    for name in names:
        kind, _, what = name.partition(":")
        torch.save(makers[kind](what), folder / _file(name, rank))
    dist.destroy_process_group()


def _file(name: str, rank: int) -> str:
    return f"{name.replace('/', '_')}.{rank}.pt"


# Tables sharded over the ranks


def join_batches(tables: TableSizes, batches: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What the ranks have, one after the other, as one batch of the plain task."""
    parts = [torch.split(one["indices"], [len(one["dense"]) * each for each in tables.lookups]) for one in batches]
    offsets, before = [], [0] * len(tables.lookups)
    for batch, own in zip(batches, parts, strict=True):
        offsets.append(batch["offsets"] + torch.tensor(before).unsqueeze(1))
        before = [length + len(part) for length, part in zip(before, own, strict=True)]
    joined = {
        "dense": torch.cat([one["dense"] for one in batches]),
        "indices": torch.cat([torch.cat(one) for one in zip(*parts, strict=True)]),
        "offsets": torch.cat(offsets, dim=1),
    }
    if "labels" in batches[0]:
        joined["labels"] = torch.cat([one["labels"] for one in batches])
    return joined


def make_task(config: str) -> DlrmTask:
    [declared] = [one for one in read_catalogue()["dlrm"].benchmark if (one.config, one.mode) == (config, "train")]
    return DlrmTask(declared.sizes_at("tiny"))


def step_sharded(config: str) -> dict[str, Any]:
    plain = make_task(config)
    task = ShardedDlrm(plain)
    torch.manual_seed(SEED)
    module: Any = task.build()
    optimizer = task.make_optimizer(module)
    batch = task.make_batch(BATCH, seed=SEED, mode="train")
    loss = task.loss(module, batch)
    loss.backward()
    gradients = {name: one.grad.to_dense() for name, one in plain_parameters(module).items() if one.grad is not None}
    optimizer.step()
    with torch.inference_mode():
        chances = task.infer(module, batch)
    weights = {name: one.detach().clone() for name, one in plain_parameters(module).items()}
    again = [batch, task.make_batch(BATCH, seed=SEED + 1, mode="train")]
    TrainStep(task, module, again, Setting("train", "fp32", "cpu"), accumulate=2, withhold=module.dense.no_sync)()
    return {
        "loss": loss.detach(), "gradients": gradients, "weights": weights, "chances": chances, "batch": batch,
        "other": again[1], "accumulated": {name: one.detach() for name, one in plain_parameters(module).items()},
    }  # fmt: skip


def plain_parameters(module: ShardedNetwork) -> dict[str, torch.nn.Parameter]:
    return {name.removeprefix("dense.module.plain."): one for name, one in module.named_parameters()}


def make_fast(config: str) -> DlrmOptimized:
    task = find_workload(f"dlrm/optimized/train/{config}").make_task("tiny")
    assert isinstance(task, DlrmOptimized)
    return task


def step_optimized(config: str) -> dict[str, Any]:
    task = shard(make_fast(config))
    assert isinstance(task, ShardedFastDlrm)
    module: Any = build_module(task, Setting("train", "fp32", "cpu"), seed=SEED)
    batches = [task.make_batch(BATCH, seed=SEED + number, mode="train") for number in range(STEPS)]
    step = TrainStep(task, module, batches, Setting("train", "fp32", "cpu"))
    for _ in range(STEPS):
        step()
    module.eval()
    with torch.inference_mode():
        chances = task.infer(module, batches[0])
    # Weights lie as their gradients do, which have the ootb implementation's names.
    for parameter in module.fast.parameters():
        parameter.grad = parameter.detach().clone()
    own = {f"tables.{place}.": f"tables.{table}." for place, table in enumerate(module.fast.lookup.exchange.own)}
    weights = module.fast.plain_gradients()
    for name, weight in module.fast.lookup.own.plain_gradients():
        local = next(one for one in own if name.startswith(one))
        weights[own[local] + name.removeprefix(local)] = weight
    plain = [task.sharded.make_batch(BATCH, seed=SEED + number, mode="train") for number in range(STEPS)]
    return {"weights": weights, "batches": plain, "chances": chances}


# Gradients averaged over the ranks


def name_joined(benchmark_id: str, precision: str = "fp32", accumulate: int = 1) -> str:
    return f"{benchmark_id},{precision},{accumulate}"


def read_joined(name: str) -> tuple[ParsedCase, int]:
    """What was asked of the ranks, and how many batches each adds up."""
    benchmark_id, precision, accumulate = name.split(",")
    case = find_workload(benchmark_id).make_case(
        device="cpu", scale="tiny", precision=precision, world_size=RANKS, parallel="ddp", accumulate=int(accumulate)
    )
    return read_case(case), int(accumulate)


def step_joined(name: str) -> dict[str, Any]:
    asked, _ = read_joined(name)
    step = open_share(asked, "ddp", Setting(asked.mode, asked.precision, "cpu", "eager"))[0]
    assert isinstance(step, TrainStep)
    for _ in range(STEPS):
        step()
    return {str(place): one.detach() for place, one in enumerate(step._weights)}


def step_whole(name: str) -> dict[str, torch.Tensor]:
    """What one process makes of all ranks' batches: the update is that of the mean loss, written out."""
    asked, accumulate = read_joined(name)
    task = asked.workload.make_task("tiny")
    module = build_module(task, Setting("train", asked.precision, "cpu"), seed=WEIGHT_SEED)
    optimizer = _make_plain_optimizer(task, module)
    share = asked.batch_size // RANKS
    of_ranks = [
        make_batches(task, batch_size=share, mode="train", seed=WEIGHT_SEED + 1000 * rank) for rank in range(RANKS)
    ]
    for first in range(0, STEPS * accumulate, accumulate):
        batches = [own[(first + number) % len(own)] for own in of_ranks for number in range(accumulate)]
        optimizer.zero_grad()
        with math_of(Setting("train", asked.precision, "cpu")):
            torch.stack([task.loss(module, batch) for batch in batches]).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {str(place): one.detach() for place, one in enumerate(module.parameters())}


def _make_plain_optimizer(task: Task, module: torch.nn.Module) -> torch.optim.Optimizer:
    plain = task.plain if isinstance(task, Optimized) else task
    return plain.make_optimizer(module)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
