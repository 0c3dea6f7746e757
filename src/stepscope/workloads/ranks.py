"""One model on several ranks: every rank steps its share of the batch, and the slowest counts."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from stepscope.errors import StepscopeError, UsageError
from stepscope.launch import RankSession
from stepscope.measure import (
    Device,
    Measurement,
    MeasureSettings,
    WallClock,
    WrongResultError,
    give_back_memory,
    measure,
    open_device,
)
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
from stepscope.store.view import LOADER
from stepscope.system import collect_system, merge_systems
from stepscope.workloads.asked import SEED, Asked, read_case
from stepscope.workloads.facts import EnergyMeter, Peak, PeakMemory, count_flops, find_peak
from stepscope.workloads.feed import Loader, count_round, make_batches, to_device
from stepscope.workloads.precision import build_module
from stepscope.workloads.protocol import EAGER, Optimized, Task
from stepscope.workloads.steps import (
    InferStep,
    TrainStep,
    clear_up,
    forget_compiled,
    make_late_optimizer,
    name_early_updates,
)
from stepscope.workloads.verify import UNCHECKED, Verifier, describe_changes
from stepscope.workloads.worker import (
    LOADER_STEPS,
    LOADER_TIME_S,
    WorkloadRequest,
    choose_settings,
    count_accumulated,
    read_request,
    require_samples,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.workloads.protocol import Mode, Outputs

    Batches = list[dict[str, torch.Tensor]]

T = TypeVar("T")
Step = TrainStep | InferStep
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
    energy_j: float | None = None
    """Of this rank's device, from the first warm-up step to the last timed one."""
    peak: Peak | None = None
    """Of this rank's device."""
    loader_s: list[float] = []
    """Seconds a step with batches from a loader."""
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
    _forget_last_case(device)
    asked, request = read_case(case), read_request(dict(session.request))
    parallel = str(case.parameters["parallel"])
    is_first = session.context.rank == 0
    is_told = is_first and asked.workload.implementation == "optimized"
    facts = control.attempt(lambda: _verify(asked, parallel, device, request) if is_told else {})
    if isinstance(facts, Failure):
        return RankMeasurement(failure=facts)
    session.heartbeat.beat("preparing", case.key)
    facts |= _describe_porting(asked, parallel, device)
    measured = _measure_step(control, asked, request, parallel, device)
    if measured.failure is not None:
        return measured
    session.heartbeat.beat("counting", case.key)
    give_back_memory(device.name)
    counted = control.attempt(lambda: _count(asked, device) if is_first else {})
    if isinstance(counted, Failure):
        return RankMeasurement(failure=counted)
    measured.facts = {**measured.facts, **facts, **counted}
    measured.peak = find_peak(device.name, asked.precision)
    return measured


def _forget_last_case(device: Device) -> None:
    """Models that wait for the garbage collector, as FSDP's do, would count as memory of the next case."""
    forget_compiled()
    clear_up(device.name)


def _describe_porting(asked: Asked, parallel: str, device: Device) -> dict[str, Scalar]:
    plain = asked.workload.make_plain(asked.scale)
    ported = [one] if (one := plain.ported(device.name)) else []
    if parallel == "fsdp" and plain.dense() != plain.sizes:
        ported.append("gradients of tables are dense: FSDP takes no sparse ones")
    return {"porting": "; ".join(ported)} if ported else {}


def _measure_step(
    control: Control, asked: Asked, request: WorkloadRequest, parallel: str, device: Any
) -> RankMeasurement:
    """The model is given up when this returns."""
    memory, start = PeakMemory(device.name), time.perf_counter()
    opened = control.attempt(lambda: _open(asked, parallel, device.name, request.compile_backend))
    if isinstance(opened, Failure):
        return RankMeasurement(failure=opened)
    step, batches = opened
    round_steps = max(control.gather(count_round(batches, at_once=step.at_once)))
    failure = control.attempt(lambda: _step_once_round(step, round_steps, device))
    if isinstance(failure, Failure):
        return RankMeasurement(failure=failure)
    facts: dict[str, Scalar] = {"setup_s": time.perf_counter() - start}
    peers = GroupPeers(control, asked.case)
    how: dict[str, Any] = {"clock": WallClock(), "device": device, "peers": peers}
    settings = choose_settings(asked, request.settings, device)
    if round_steps > 1:
        facts["round_steps"] = round_steps
        settings = _keep_rounds(settings, step, round_steps, device, peers)
    energy = EnergyMeter(device.name)
    measured = measure(step, settings=settings, **how)
    joules = energy.read_j()
    failure = control.attempt(lambda: _require_training(step))
    if isinstance(failure, Failure):
        return RankMeasurement(failure=failure)
    found = RankMeasurement(measurement=measured, facts=facts, peak_memory_bytes=memory.read_bytes(), energy_j=joules)
    if request.loader_workers is not None:
        loader = Loader(
            batches, device=device.name, precision=asked.precision, mode=asked.mode, workers=request.loader_workers
        )
        brief = _shorten(settings, math.lcm(measured.iterations[-1], round_steps))
        with step.feed.of(loader):
            fed = measure(_wait_after(step, device) if asked.mode == "infer" else step, settings=brief, **how)
        found.loader_s = fed.as_samples(asked.case.key).seconds()
    return found


def _wait_after(step: Step, device: Device) -> Callable[[], None]:
    """A latency is that of one batch, also where several make one sample."""

    def step_and_wait() -> None:
        step()
        device.synchronize()

    return step_and_wait


def _step_once_round(step: Step, round_steps: int, device: Device) -> None:
    """What a way of sharing cannot do shows in the first step, and is one case's failure."""
    for _ in range(round_steps):
        step()
    device.synchronize()


def _keep_rounds(
    settings: MeasureSettings, step: Step, round_steps: int, device: Device, peers: GroupPeers
) -> MeasureSettings:
    """Batches of a rank differ in shape: a sample of training is whole rounds of them on every rank; of latencies there
    is at least one round."""
    if isinstance(step, InferStep):
        return require_samples(settings, round_steps)
    peers.align()
    start = time.perf_counter()
    _step_once_round(step, round_steps, device)
    rounds = peers.agree(max(1, math.ceil(settings.min_sample_s / (time.perf_counter() - start))))
    return msgspec.structs.replace(settings, iterations=rounds * round_steps)


def _shorten(settings: MeasureSettings, iterations: int) -> MeasureSettings:
    """As long as one device is timed with a loader."""
    return msgspec.structs.replace(
        settings, iterations=iterations, few_samples=2, min_samples=LOADER_STEPS, max_samples=LOADER_STEPS,
        min_time_s=0.0, max_time_s=min(LOADER_TIME_S, settings.max_time_s), warmup_min_samples=1,
        warmup_min_time_s=0.0, warmup_max_time_s=0.0,
    )  # fmt: skip


def _require_training(step: Step) -> None:
    fault = step.find_fault() if isinstance(step, TrainStep) else None
    if fault:
        raise WrongResultError(f"this does not train: {fault}", hint="another precision, or a smaller batch")


def _count(asked: Asked, device: Any) -> dict[str, Scalar]:
    """Of all ranks' batches; this rank's stand for the others', whose examples are as many."""
    import torch.distributed as dist

    plain = asked.workload.make_plain(asked.scale)
    batches = make_batches(plain, batch_size=_share(asked), mode=asked.mode, seed=SEED)
    flops = count_flops(plain, batches, mode=asked.mode, device=device.name)
    return {} if flops is None else {"model_flops": flops * count_accumulated(asked) * dist.get_world_size()}


def _verify(asked: Asked, parallel: str, device: Any, request: WorkloadRequest) -> dict[str, Scalar]:
    """Of one rank alone, on a GPU on its share of the batch: the whole may not fit. What sharing takes away from the
    form is told with its changes."""
    import torch.distributed as dist

    task = asked.workload.make_task(asked.scale)
    assert isinstance(task, Optimized)
    facts: dict[str, Scalar] = {"check": UNCHECKED}
    if request.check:
        size = max(1, asked.batch_size // dist.get_world_size()) if device.has_events else asked.batch_size
        start = time.perf_counter()
        facts = Verifier(device, request.compile_backend).check(asked._replace(batch_size=size))
        facts["check_s"] = time.perf_counter() - start
    shared = _shard(task) if parallel == "sharded" else task
    assert isinstance(shared, Optimized)
    facts |= describe_changes(shared, asked, device, request.compile_backend)
    _forget_last_case(device)
    facts["changes"] = f"{facts['changes']}; {_name_unused(shared, asked, parallel)}"
    return facts


def _name_unused(task: Optimized, asked: Asked, parallel: str) -> str:
    early = name_early_updates(task, mode=asked.mode, precision=asked.precision)
    # The owner of a table has the gradients of all ranks: only those of other batches are not there yet.
    is_late = parallel != "sharded" or count_accumulated(asked) > 1
    return f"{UNUSED[parallel]}, {early}" if early and is_late else UNUSED[parallel]


def open_rank_step(asked: Asked, parallel: str, device: str, backend: str = "inductor") -> Step:
    """This rank's share: its own batches, and a module that exchanges what `parallel` says."""
    return _open(asked, parallel, device, backend)[0]


def _open(asked: Asked, parallel: str, device: str, backend: str) -> tuple[Step, Batches]:
    """With this rank's batches on the host."""
    import torch.distributed as dist

    share = _share(asked)
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
    batches = make_batches(task, batch_size=share, mode=asked.mode, seed=SEED + 1000 * dist.get_rank())
    ready = [to_device(one, device=device, precision=asked.precision, mode=asked.mode) for one in batches]
    how: dict[str, Any] = {"precision": asked.precision, "device": device, "engine": engine, "backend": backend}
    if asked.mode == "infer":
        return InferStep(task, module, ready, **how), batches
    how |= {"accumulate": count_accumulated(asked), "withhold": _find_withholding(module)}
    return TrainStep(task, module, ready, **how), batches


def _share(asked: Asked) -> int:
    """Examples of one rank."""
    import torch.distributed as dist

    world = dist.get_world_size()
    if asked.batch_size % world:
        raise UsageError(
            f"a batch of {asked.batch_size} cannot be shared evenly by {world} ranks", where="--batch-size"
        )
    return asked.batch_size // world


def _find_withholding(module: nn.Module) -> Callable[[], AbstractContextManager[object]]:
    """How accumulated gradients are kept from being averaged batch by batch. Under FSDP they are not: a rank would have
    to hold those of all weights."""
    from torch.nn.parallel import DistributedDataParallel

    found = (one for one in module.modules() if isinstance(one, DistributedDataParallel))
    wrapped = next(found, None)
    return nullcontext if wrapped is None else wrapped.no_sync


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
        return make_late_optimizer(task, self._inner)


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
    loader = [max(row) for row in zip(*(one.loader_s for one in found), strict=True)]
    samples = [
        one.measurement.as_samples(case.key, rank=rank, extra_s={LOADER: loader} if loader and rank == 0 else None)
        for rank, one in enumerate(found)
        if one.measurement is not None
    ]
    asked = read_case(case)
    examples = asked.batch_size * count_accumulated(asked)
    is_unchecked = found[0].facts.get("check") == UNCHECKED
    result = CaseResult(
        case=case,
        status="ok",
        started_at=started_at,
        elapsed_s=elapsed_s,
        score=None if is_unchecked else Score(unit="ex/s", work=float(examples)),
        latency_target=asked.workload.declared.latency_target,
        timing="slowest_rank",
        observed={**found[0].facts, **_fold_facts(found, examples)},
    )
    return result, samples


def _fold_facts(found: list[RankMeasurement], examples: int) -> dict[str, Scalar]:
    """Memory of the rank that needs most; energy and peaks of all devices together, where each tells."""
    facts: dict[str, Scalar] = {}
    held = [one.peak_memory_bytes for one in found if one.peak_memory_bytes is not None]
    if held:
        facts["peak_memory_bytes"] = max(held)
    joules = [one.energy_j for one in found if one.energy_j is not None]
    steps = sum(found[0].measurement.iterations) if found[0].measurement is not None else 0
    if len(joules) == len(found) and steps:
        facts["energy_j_per_example"] = sum(joules) / (steps * examples)
    peaks = [one.peak for one in found if one.peak is not None]
    if len(peaks) == len(found):
        sources = Counter(one.source for one in peaks)
        facts["peak_flops"] = sum(one.flops for one in peaks)
        facts["peak_source"] = "; ".join(f"{count} × {source}" for source, count in sources.items())
    return facts
