"""One model on several ranks: every rank steps its share of the batch, and the slowest counts."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from stepscope.errors import StepscopeError, UsageError
from stepscope.launch import RankSession
from stepscope.measure import Measurement, MeasureSettings, WallClock, measure, open_device
from stepscope.records import (
    Case,
    CaseResult,
    Communication,
    Failure,
    RankPlace,
    RankSamples,
    Scalar,
    Score,
    System,
    describe_exception,
)
from stepscope.store import RunWriter, utc_now
from stepscope.system import collect_system, merge_systems
from stepscope.workloads.asked import SEED, Asked, read_case
from stepscope.workloads.facts import PeakMemory
from stepscope.workloads.feed import make_batches, to_device
from stepscope.workloads.precision import build_module
from stepscope.workloads.protocol import EAGER, Optimized, Task
from stepscope.workloads.steps import InferStep, TrainStep, forget_compiled, reset_modes
from stepscope.workloads.verify import Verifier, describe_changes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.workloads.protocol import Mode, Outputs

T = TypeVar("T")
WORKER = "stepscope.workloads.ranks:run"
PARALLEL = ("ddp", "fsdp", "sharded")
UNUSED = {
    "ddp": "not used on several ranks: the CUDA graph",
    "sharded": "not used on several ranks: the CUDA graph",
    "fsdp": "not used on several ranks: the CUDA graph, fused optimizers, weights stored channels last",
}
GROUP_EXTRA_S = 30.0
"""A collective waits longer than the watchdog, whose message says more."""


class RankMeasurement(msgspec.Struct, kw_only=True):
    """What one rank hands to rank 0."""

    measurement: Measurement | None = None
    facts: dict[str, Scalar] = {}
    """Beside the score; rank 0's are those of the case."""
    peak_memory_bytes: int | None = None
    failure: Failure | None = None


class Control:
    """How ranks tell each other what to do next: in a group of its own, so that a rank which gave up in the middle of
    a model's exchanges cannot be mistaken for one that takes part in them."""

    def __init__(self, session: RankSession, limit: timedelta) -> None:
        import torch.distributed as dist

        self.session = session
        self._group = dist.new_group(backend="gloo", timeout=limit)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's, on every rank."""
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value, group=self._group)
        return found

    def attempt(self, body: Callable[[], T]) -> T | Failure:
        """What this rank made, if every rank could: one that cannot must not leave the others waiting."""
        made: T | None = None
        failure: Failure | None = None
        try:
            made = body()
        except (RuntimeError, ValueError, TypeError, NotImplementedError, MemoryError, StepscopeError) as error:
            failure = describe_exception(error)
            # If the others are in the midst of an exchange, this is the only word of what happened.
            sys.stderr.write(f"stepscope, rank {self.session.context.rank}: {failure.message}\n")
        first = next((one for one in self.gather(failure) if one is not None), None)
        return cast("T", made) if first is None else first


class GroupPeers:
    """Ranks that walk through the measuring loop in step."""

    def __init__(self, control: Control, case: Case) -> None:
        self._control = control
        self._case = case

    def agree(self, value: int) -> int:
        return int(self._control.broadcast(value))

    def align(self) -> int:
        import torch.distributed as dist

        self._control.session.heartbeat.beat("measuring", self._case.key)
        dist.barrier()
        return 1


def run(session: RankSession) -> None:
    """The worker function of every rank; rank 0 writes the run."""
    import torch.distributed as dist

    context, request = session.context, session.request
    session.heartbeat.beat("joining")
    limit = timedelta(seconds=session.hang_limit_s + GROUP_EXTRA_S)
    name = str(request["device"])
    device_name = f"cuda:{context.local_rank}" if name == "cuda" else name
    device = open_device(device_name)
    dist.init_process_group(str(request["backend"]), rank=context.rank, world_size=context.world_size, timeout=limit)
    try:
        control = Control(session, limit)
        folder = Path(control.broadcast(str(session.folder.resolve()) if session.folder else None))
        if session.folder is None:
            session.adopt_folder(folder)
        systems = control.gather(collect_system() if context.local_rank == 0 else None)
        place = RankPlace(
            rank=context.rank, host=socket.gethostname(), pid=os.getpid(), device=device.name, name=None,
            local_rank=context.local_rank,
        )  # fmt: skip
        places = control.gather(place)
        if context.rank == 0:
            _lead(control, folder, device, [one for one in systems if one is not None], places)
        else:
            _follow(control, device)
    finally:
        dist.destroy_process_group()
    session.heartbeat.beat("leaving")


def _lead(control: Control, folder: Path, device: Any, systems: list[System], places: list[RankPlace]) -> None:
    import torch

    request = control.session.request
    with RunWriter(folder) as writer:
        writer.write_system(merge_systems(systems))
        library = {"name": f"torch.distributed {request['backend']}", "version": str(torch.__version__)}
        writer.write_communication(Communication(backend=str(request["backend"]), library=library, ranks=places))
        for case in writer.remaining():
            control.broadcast(msgspec.json.encode(case))
            started_at, start = utc_now(), time.monotonic()
            found = control.gather(_measure(control, case, device))
            writer.append(*_fold(case, found, started_at, time.monotonic() - start))
        control.broadcast(None)
        writer.finish()


def _follow(control: Control, device: Any) -> None:
    while (assigned := control.broadcast(None)) is not None:
        control.gather(_measure(control, msgspec.json.decode(assigned, type=Case), device))


def _measure(control: Control, case: Case, device: Any) -> RankMeasurement:
    session = control.session
    session.heartbeat.beat("preparing", case.key)
    asked = read_case(case)
    parallel = str(case.parameters["parallel"])
    backend = str(session.request.get("compile_backend", "inductor"))
    is_checked = session.context.rank == 0 and asked.workload.implementation == "optimized"
    facts = control.attempt(lambda: _verify(asked, parallel, device, backend) if is_checked else {})
    if isinstance(facts, Failure):
        return RankMeasurement(failure=facts)
    session.heartbeat.beat("preparing", case.key)
    plain = asked.workload.make_plain(asked.scale)
    if parallel == "fsdp" and plain.dense() != plain.sizes:
        facts["porting"] = "gradients of tables are dense: FSDP takes no sparse ones"
    memory = PeakMemory(device.name)
    step = control.attempt(lambda: _open_stepped(asked, parallel, device.name, backend))
    if isinstance(step, Failure):
        return RankMeasurement(failure=step)
    settings = msgspec.convert(session.request["settings"], MeasureSettings)
    if asked.mode == "infer":
        settings = msgspec.structs.replace(settings, iterations=1)
    measured = measure(step, settings=settings, clock=WallClock(), device=device, peers=GroupPeers(control, case))
    fault = step.find_fault() if isinstance(step, TrainStep) else None
    if fault:
        return RankMeasurement(failure=Failure(kind="wrong_result", message=f"this does not train: {fault}"))
    return RankMeasurement(measurement=measured, facts=facts, peak_memory_bytes=memory.read_bytes())


def _verify(asked: Asked, parallel: str, device: Any, backend: str) -> dict[str, Scalar]:
    """Of one rank alone, on a GPU on its share of the batch: the whole may not fit. What sharing takes away from the
    form is told with its changes."""
    import torch.distributed as dist

    task = asked.workload.make_task(asked.scale)
    assert isinstance(task, Optimized)
    size = max(1, asked.batch_size // dist.get_world_size()) if device.has_events else asked.batch_size
    facts = Verifier(device, backend).check(asked._replace(batch_size=size))
    facts |= describe_changes(task, asked, device, backend)
    reset_modes()
    forget_compiled()
    facts["changes"] = f"{facts['changes']}; {UNUSED[parallel]}"
    return facts


def _open_stepped(asked: Asked, parallel: str, device: str, backend: str) -> TrainStep | InferStep:
    """What a way of sharing cannot do shows in the first step, and is one case's failure."""
    step = open_rank_step(asked, parallel, device, backend)
    step()
    return step


def open_rank_step(asked: Asked, parallel: str, device: str, backend: str = "inductor") -> TrainStep | InferStep:
    """This rank's share: its own batches, and a module that exchanges what `parallel` says."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    if asked.batch_size % world:
        raise UsageError(
            f"a batch of {asked.batch_size} cannot be shared evenly by {world} ranks", where="--batch-size"
        )
    task = asked.workload.make_task(asked.scale, with_dense_gradients=parallel == "fsdp")
    engine = EAGER
    if isinstance(task, Optimized):
        # What wraps a module exchanges data in the middle of it: no one graph holds the step.
        engine = task.engine(asked.mode)._replace(graph=False, fullgraph=False)
    if parallel == "sharded":
        task = _shard(task)
    # The same seed: the same weights everywhere.
    module = build_module(task, mode=asked.mode, precision=asked.precision, device=device, seed=SEED)
    if parallel != "sharded" and asked.mode == "train":
        task, module = distribute(task, module, parallel, device)
    share = asked.batch_size // world
    batches = make_batches(task, batch_size=share, mode=asked.mode, seed=SEED + 1000 * rank)
    ready = [to_device(one, device=device, precision=asked.precision, mode=asked.mode) for one in batches]
    how: dict[str, Any] = {"precision": asked.precision, "device": device, "engine": engine, "backend": backend}
    return TrainStep(task, module, ready, **how) if asked.mode == "train" else InferStep(task, module, ready, **how)


class JoinedTask(Task):
    """A task whose whole loss is the forward of one module, so that what wraps the module sees every use of it."""

    def __init__(self, task: Task, inner: nn.Module, *, spread: bool = False) -> None:
        """`spread`: its weights will be, over the ranks."""
        super().__init__(task.sizes)
        self._task = task
        self._inner = inner
        self._spread = spread

    def build(self) -> nn.Module:
        from torch import nn

        task = self._task

        class Loss(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, batch: Any) -> torch.Tensor:
                return task.loss(self.inner, batch)

        return Loss(self._inner)

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        return self._task.make_batch(count, seed=seed, mode=mode)

    def loss(self, module: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = module(batch)
        return loss

    def infer(self, module: nn.Module, batch: Any) -> Outputs:
        return self._task.infer(self._inner, batch)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        # Fused optimizers do not take weights that are spread; a fast form then steps as the plain one does.
        task = self._task.plain if self._spread and isinstance(self._task, Optimized) else self._task
        return task.make_optimizer(self._inner)


def distribute(task: Task, inner: nn.Module, parallel: str, device: str) -> tuple[Task, nn.Module]:
    """Gradients are averaged over the ranks (ddp), or weights, gradients and optimizer state are spread (fsdp)."""
    joined = JoinedTask(task, inner, spread=parallel == "fsdp")
    module = joined.build()
    if parallel == "fsdp":
        _spread_weights(module, task.blocks(inner), device)
        return joined, module
    from torch.nn.parallel import DistributedDataParallel

    ids = [int(device.partition(":")[2])] if device.startswith("cuda") else None
    return joined, DistributedDataParallel(module, device_ids=ids)


def _spread_weights(module: nn.Module, blocks: Iterable[nn.Module], device: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()  # it takes none that are stored channels last
    mesh = init_device_mesh(device.partition(":")[0], (dist.get_world_size(),))
    for block in _callable_parts(blocks):
        fully_shard(block, mesh=mesh)
        for entrance in getattr(block, "entrances", ()):
            register_fsdp_forward_method(block, entrance)
    fully_shard(module, mesh=mesh)


def _callable_parts(blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Those with weights; instead of lists, which are never called, what is in them."""
    from torch import nn

    for block in blocks:
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            yield from _callable_parts(block.children())
        elif any(True for _ in block.parameters()):
            yield block


def _shard(task: Task) -> Task:
    spread = task.shard()
    if spread is None:
        raise UsageError(
            "this form has no tables to spread over the ranks", hint="--parallel ddp or fsdp", where="--parallel"
        )
    return spread


def _fold(
    case: Case, found: list[RankMeasurement], started_at: str, elapsed_s: float
) -> tuple[CaseResult, list[RankSamples]]:
    failure = next((one.failure for one in found if one.failure is not None), None)
    if failure is not None:
        return CaseResult(case=case, status="failed", started_at=started_at, elapsed_s=elapsed_s, failure=failure), []
    samples = [
        one.measurement.as_samples(case.key, rank=rank) for rank, one in enumerate(found) if one.measurement is not None
    ]
    asked = read_case(case)
    peaks = [one.peak_memory_bytes for one in found if one.peak_memory_bytes is not None]
    result = CaseResult(
        case=case,
        status="ok",
        started_at=started_at,
        elapsed_s=elapsed_s,
        score=Score(unit="ex/s", work=float(asked.batch_size)),
        latency_target=asked.workload.declared.latency_target,
        timing="slowest_rank",
        observed={**found[0].facts, **({"peak_memory_bytes": max(peaks)} if peaks else {})},
    )
    return result, samples
