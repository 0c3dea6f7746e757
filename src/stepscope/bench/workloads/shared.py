"""One model on several ranks: each steps its part of the batch and exchanges the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pkgutil import resolve_name
from typing import Any

from stepscope.bench.workloads.feed import make_batches
from stepscope.bench.workloads.precision import build_module, to_device
from stepscope.bench.workloads.protocol import EAGER, Batches, Optimized, Setting, Task
from stepscope.bench.workloads.request import SEED, ParsedCase, count_accumulated
from stepscope.bench.workloads.steps import InferStep, TrainStep, compiled
from stepscope.core.errors import UsageError
from stepscope.core.lazy_torch import torch


def open_share(parsed: ParsedCase, parallel: str, setting: Setting) -> tuple[TrainStep | InferStep, Batches]:
    """This rank's share: a step over a module that exchanges what `parallel` says, and its own batches, on the host."""
    share = count_share(parsed)
    task = parsed.workload.make_task(parsed.scale, with_dense_gradients=parallel == "fsdp")
    engine = EAGER
    if isinstance(task, Optimized):
        # What wraps a module exchanges data in the middle of it: no one graph holds the step.
        engine = task.engine(parsed.mode)._replace(graph=False, fullgraph=False)
    if parallel == "sharded":
        task = shard(task)
    # The same seed: the same weights everywhere.
    module = build_module(task, setting, seed=SEED)
    batches = make_batches(task, batch_size=share, mode=parsed.mode, seed=SEED + 1000 * torch.distributed.get_rank())
    ready = [to_device(one, setting) for one in batches]
    if parsed.mode == "infer":
        return InferStep(task, module, ready, setting, engine=engine), batches
    how: dict[str, Any] = {}
    if parallel != "sharded":
        inner, module = module, _distribute(task, module, parallel, setting.device)
        loss_of = compiled(lambda batch: module(batch), engine, setting.backend)  # noqa: PLW0108 - a module is compiled otherwise
        # Fused optimizers take no sharded weights: an optimized implementation then steps as the plain one does.
        stepped = task.plain if parallel == "fsdp" and isinstance(task, Optimized) else task
        how = {"loss_of": loss_of, "optimizer": stepped.make_late_optimizer(inner)}
    how |= {"accumulate": count_accumulated(parsed), "withhold": _find_withholding(module)}
    return TrainStep(task, module, ready, setting, engine=engine, **how), batches


def count_share(parsed: ParsedCase) -> int:
    """Examples of one rank."""
    world = torch.distributed.get_world_size()
    if parsed.batch_size % world:
        raise UsageError(
            f"a batch of {parsed.batch_size} cannot be shared evenly by {world} ranks", where="--batch-size"
        )
    return parsed.batch_size // world


def _find_withholding(module: torch.nn.Module) -> Callable[[], AbstractContextManager[object]]:
    """How accumulated gradients are kept from being averaged batch by batch. Under FSDP they are not: a rank would have
    to hold those of all weights."""
    found = (one for one in module.modules() if isinstance(one, torch.nn.parallel.DistributedDataParallel))
    wrapped = next(found, None)
    return nullcontext if wrapped is None else wrapped.no_sync


def _distribute(task: Task, inner: torch.nn.Module, parallel: str, device: str) -> torch.nn.Module:
    """A module whose forward is the task's whole loss, so that what wraps it sees every use of it. Gradients are
    averaged over the ranks (ddp), or weights, gradients and optimizer state are sharded (fsdp)."""

    class Loss(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, batch: Any) -> torch.Tensor:
            return task.loss(self.inner, batch)

    module = Loss(inner)
    if parallel == "fsdp":
        _shard_weights(module, task.blocks(inner), device)
        return module
    ids = [int(device.partition(":")[2])] if device.startswith("cuda") else None
    return torch.nn.parallel.DistributedDataParallel(module, device_ids=ids)


def _shard_weights(module: torch.nn.Module, blocks: Iterable[torch.nn.Module], device: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()  # it takes none that are stored channels last
    mesh = init_device_mesh(device.partition(":")[0], (torch.distributed.get_world_size(),))
    for block in _callable_parts(blocks):
        fully_shard(block, mesh=mesh)
        for entrance in getattr(block, "entrances", ()):
            register_fsdp_forward_method(block, entrance)
    fully_shard(module, mesh=mesh)


def _callable_parts(blocks: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Those with weights; instead of lists, which are never called, what is in them."""
    for block in blocks:
        if isinstance(block, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from _callable_parts(block.children())
        elif any(True for _ in block.parameters()):
            yield block


def shard(task: Task) -> Task:
    if not task.sharded_by:
        raise UsageError(
            "this implementation has no tables to shard over the ranks",
            hint="--parallel ddp or fsdp",
            where="--parallel",
        )
    own: Task = resolve_name(task.sharded_by)(task)
    return own


UNUSED = {
    "ddp": "not used on several ranks: the CUDA graph",
    "sharded": "not used on several ranks: the CUDA graph",
    "fsdp": "not used on several ranks: the CUDA graph, fused optimizers, weights stored channels last",
}


def name_unused(task: Optimized, parsed: ParsedCase) -> str | None:
    """Changes of an optimized implementation that are not made where ranks share the model, or add gradients up."""
    parallel = parsed.spec.parallel
    made = {one.name for one in task.changes(mode=parsed.mode, precision=parsed.precision)}
    early = task.early_change if task.early_change in made and adds_up(parsed) else None
    if parallel is None:
        return f"not used with accumulated gradients: {early}" if early else None
    return f"{UNUSED[parallel]}, {early}" if early else UNUSED[parallel]


def adds_up(parsed: ParsedCase) -> bool:
    """Whether updates wait until gradients of several batches or ranks are added up. The owner of a table has those of
    all ranks, and waits for those of other batches alone."""
    return parsed.spec.parallel in {"ddp", "fsdp"} or count_accumulated(parsed) > 1
