"""One model on several ranks: each steps its part of the batch and exchanges the rest; the slowest rank counts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.bench.workloads.facts import EnergyMeter, Peak, PeakMemory, count_flops, find_peak
from stepscope.bench.workloads.feed import Loader, count_round, make_batches, to_device
from stepscope.bench.workloads.precision import build_module
from stepscope.bench.workloads.protocol import EAGER, Optimized, Task
from stepscope.bench.workloads.request import (
    LOADER_STEPS,
    LOADER_TIME_S,
    SEED,
    ParsedCase,
    choose_settings,
    count_accumulated,
    read_case,
    require_samples,
)
from stepscope.bench.workloads.steps import (
    InferStep,
    TrainStep,
    clear_up,
    forget_compiled,
    make_late_optimizer,
    name_early_updates,
    require_sound,
)
from stepscope.bench.workloads.verify import UNCHECKED, Verifier, describe_changes
from stepscope.core.errors import UsageError
from stepscope.measure import Device, Measurement, MeasureSettings, WallClock, give_back_memory, measure
from stepscope.records import Case, Score, WorkloadRequest
from stepscope.records.kinds import WorkloadObserved, WorkloadSpec
from stepscope.run.producer import ExtraMeasurements, Folded, Prepared, RankOutcome
from stepscope.run.rank import merge_observed
from stepscope.run.ranks import BarrierPeers, Ranks
from stepscope.run.recorded import record_steps
from stepscope.store.view import LOADER

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.bench.workloads.protocol import Mode, Outputs

    Batches = list[dict[str, torch.Tensor]]


SharedStep = TrainStep | InferStep


def open_share(parsed: ParsedCase, parallel: str, device: str, backend: str) -> tuple[SharedStep, Batches]:
    """This rank's share: a step over a module that exchanges what `parallel` says, and its own batches, on the host."""
    import torch.distributed as dist

    share = count_share(parsed)
    task = parsed.workload.make_task(parsed.scale, with_dense_gradients=parallel == "fsdp")
    engine = EAGER
    if isinstance(task, Optimized):
        # What wraps a module exchanges data in the middle of it: no one graph holds the step.
        engine = task.engine(parsed.mode)._replace(graph=False, fullgraph=False)
    if parallel == "sharded":
        task = shard(task)
    # The same seed: the same weights everywhere.
    module = build_module(task, mode=parsed.mode, precision=parsed.precision, device=device, seed=SEED)
    if parallel != "sharded" and parsed.mode == "train":
        task, module = distribute(task, module, parallel, device)
    batches = make_batches(task, batch_size=share, mode=parsed.mode, seed=SEED + 1000 * dist.get_rank())
    ready = [to_device(one, device=device, precision=parsed.precision, mode=parsed.mode) for one in batches]
    how: dict[str, Any] = {"precision": parsed.precision, "device": device, "engine": engine, "backend": backend}
    if parsed.mode == "infer":
        return InferStep(task, module, ready, **how), batches
    how |= {"accumulate": count_accumulated(parsed), "withhold": _find_withholding(module)}
    return TrainStep(task, module, ready, **how), batches


def count_share(parsed: ParsedCase) -> int:
    """Examples of one rank."""
    import torch.distributed as dist

    world = dist.get_world_size()
    if parsed.batch_size % world:
        raise UsageError(
            f"a batch of {parsed.batch_size} cannot be shared evenly by {world} ranks", where="--batch-size"
        )
    return parsed.batch_size // world


def _find_withholding(module: nn.Module) -> Callable[[], AbstractContextManager[object]]:
    """How accumulated gradients are kept from being averaged batch by batch. Under FSDP they are not: a rank would have
    to hold those of all weights."""
    from torch.nn.parallel import DistributedDataParallel

    found = (one for one in module.modules() if isinstance(one, DistributedDataParallel))
    wrapped = next(found, None)
    return nullcontext if wrapped is None else wrapped.no_sync


class JoinedTask(Task):
    """A task whose whole loss is the forward of one module, so that what wraps the module sees every use of it."""

    def __init__(self, task: Task, inner: nn.Module, *, sharded: bool = False) -> None:
        """`sharded`: its weights will be, over the ranks."""
        super().__init__(task.sizes)
        self._task = task
        self._inner = inner
        self._sharded = sharded

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
        # Fused optimizers take no sharded weights: an optimized implementation then steps as the plain one does.
        task = self._task.plain if self._sharded and isinstance(self._task, Optimized) else self._task
        return make_late_optimizer(task, self._inner)


def distribute(task: Task, inner: nn.Module, parallel: str, device: str) -> tuple[Task, nn.Module]:
    """Gradients are averaged over the ranks (ddp), or weights, gradients and optimizer state are sharded (fsdp)."""
    joined = JoinedTask(task, inner, sharded=parallel == "fsdp")
    module = joined.build()
    if parallel == "fsdp":
        _shard_weights(module, task.blocks(inner), device)
        return joined, module
    from torch.nn.parallel import DistributedDataParallel

    ids = [int(device.partition(":")[2])] if device.startswith("cuda") else None
    return joined, DistributedDataParallel(module, device_ids=ids)


def _shard_weights(module: nn.Module, blocks: Iterable[nn.Module], device: str) -> None:
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


def shard(task: Task) -> Task:
    own = task.shard()
    if own is None:
        raise UsageError(
            "this implementation has no tables to shard over the ranks",
            hint="--parallel ddp or fsdp",
            where="--parallel",
        )
    return own


UNUSED = {
    "ddp": "not used on several ranks: the CUDA graph",
    "sharded": "not used on several ranks: the CUDA graph",
    "fsdp": "not used on several ranks: the CUDA graph, fused optimizers, weights stored channels last",
}


class RankFacts(msgspec.Struct, kw_only=True):
    """What one rank knows beside its samples."""

    peak_memory_bytes: int | None = None
    energy_j: float | None = None
    """Used by this rank's device, from the first warm-up step to the last timed one."""
    peak: Peak | None = None
    """What this rank's device can do at most."""
    loader_s: list[float] = []
    """Seconds per step with batches from a loader."""
    trace: str | None = None
    """Where this rank's steps were recorded."""


def prepare_shared(parsed: ParsedCase, ranks: Ranks, request: WorkloadRequest, device: Device) -> Prepared:
    """Every rank takes part in every step of this, or the case ends on all of them."""
    return _SharedCase(parsed, ranks, request, device).prepare()


class _SharedCase:
    def __init__(self, parsed: ParsedCase, ranks: Ranks, request: WorkloadRequest, device: Device) -> None:
        self._asked, self._ranks, self._request, self._device = parsed, ranks, request, device
        self._parallel = str(parsed.spec.parallel)
        self._peers = BarrierPeers(ranks, parsed.case)
        self._step: SharedStep | None = None

    def prepare(self) -> Prepared:
        parsed, ranks, device = self._asked, self._ranks, self._device
        _forget_last_case(device)
        is_checked = ranks.rank == 0 and parsed.workload.implementation == "optimized"
        facts = ranks.together(
            lambda: _verify(parsed, self._parallel, device, self._request) if is_checked else WorkloadObserved()
        )
        ranks.session.heartbeat.beat("preparing", parsed.case.key)
        facts |= _describe_porting(parsed, self._parallel, device)
        self._memory, start = PeakMemory(device.name), time.perf_counter()
        step, self._batches = ranks.together(
            lambda: open_share(parsed, self._parallel, device.name, self._request.compile_backend), exchanges=True
        )
        self._step = step
        self._round_steps = max(ranks.share(count_round(self._batches, at_once=step.at_once)))
        ranks.together(lambda: _step_once_round(step, self._round_steps, device), exchanges=True)
        facts |= WorkloadObserved(setup_s=time.perf_counter() - start)
        self._settings = choose_settings(parsed, self._request.settings, device)
        if self._round_steps > 1:
            facts |= WorkloadObserved(round_steps=self._round_steps)
            self._settings = self._keep_rounds(step)
        self._energy = EnergyMeter(device.name)
        return Prepared(
            body=self._call,
            score=None if facts.check == UNCHECKED else Score(unit="ex/s", work=float(_count_examples(parsed))),
            latency_target=parsed.workload.declared.latency_target,
            observed=facts,
            settings=self._settings,
            peers=self._peers,
            on_measured=lambda measurement: self._note_energy(),
            finish=self._finish,
            close=self._release,
        )

    def _call(self) -> None:
        """Through here, so that the model can be given up while the case still has its body."""
        assert self._step is not None
        self._step()

    def _note_energy(self) -> None:
        self._joules = self._energy.read_j()

    def _release(self) -> None:
        self._step = None

    def _keep_rounds(self, step: SharedStep) -> MeasureSettings:
        """Batches of a rank differ in shape: a sample of training is whole rounds of them on every rank; of latencies
        there is at least one round."""
        if isinstance(step, InferStep):
            return require_samples(self._settings, self._round_steps)
        self._peers.align()
        start = time.perf_counter()
        _step_once_round(step, self._round_steps, self._device)
        rounds = self._peers.agree(max(1, math.ceil(self._settings.min_sample_s / (time.perf_counter() - start))))
        return msgspec.structs.replace(self._settings, iterations=rounds * self._round_steps)

    def _finish(self, measurement: Measurement) -> tuple[Measurement, ExtraMeasurements]:
        """The model is given up before the operations are counted: both may not fit."""
        parsed, ranks, device = self._asked, self._ranks, self._device
        ranks.together(lambda: require_sound(self._step))
        found = RankFacts(peak_memory_bytes=self._memory.read_bytes(), energy_j=self._joules)
        if self._request.loader_workers is not None:
            found.loader_s = self._time_with_loader(measurement)
        if self._request.trace:
            ranks.session.heartbeat.beat("recording", parsed.case.key)
            found.trace = ranks.together(self._record, exchanges=True)
        ranks.session.heartbeat.beat("counting", parsed.case.key)
        self._release()
        give_back_memory(device.name)
        counted = ranks.together(lambda: _count(parsed, device) if ranks.rank == 0 else WorkloadObserved())
        found.peak = find_peak(device.name, parsed.precision)
        return measurement, ExtraMeasurements(observed=counted, facts=found)

    def _time_with_loader(self, measurement: Measurement) -> list[float]:
        parsed, device, step = self._asked, self._device, self._step
        assert step is not None
        assert self._request.loader_workers is not None
        loader = Loader(
            self._batches, device=device.name, precision=parsed.precision, mode=parsed.mode,
            workers=self._request.loader_workers,
        )  # fmt: skip
        brief = _shorten(self._settings, math.lcm(measurement.iterations[-1], self._round_steps))
        with step.feed.of(loader):
            fed = measure(
                _wait_after(step, device) if parsed.mode == "infer" else step,
                settings=brief, clock=WallClock(), device=device, peers=self._peers,
            )  # fmt: skip
        return fed.as_samples(parsed.case.key).seconds()

    def _record(self) -> str | None:
        """The folder of the recording, relative to the run; None on a rank that does not see the run's folder. It makes
        the same steps, as the others exchange with it."""
        folder = self._ranks.session.folder
        if folder is not None:
            return record_steps(self._call, folder, self._asked.case)
        with TemporaryDirectory() as elsewhere:
            record_steps(self._call, Path(elsewhere), self._asked.case, link=False)
        return None


def _forget_last_case(device: Device) -> None:
    """Models that wait for the garbage collector, as FSDP's do, would count as memory of the next case."""
    forget_compiled()
    clear_up(device.name)


def _describe_porting(parsed: ParsedCase, parallel: str, device: Device) -> WorkloadObserved:
    plain = parsed.workload.make_ootb(parsed.scale)
    ported = [one] if (one := plain.ported(device.name)) else []
    if parallel == "fsdp" and plain.dense() != plain.sizes:
        ported.append("gradients of tables are dense: FSDP takes no sparse ones")
    return WorkloadObserved(porting="; ".join(ported) or None)


def _wait_after(step: SharedStep, device: Device) -> Callable[[], None]:
    """A latency is that of one batch, also where several make one sample."""

    def step_and_wait() -> None:
        step()
        device.synchronize()

    return step_and_wait


def _step_once_round(step: SharedStep, round_steps: int, device: Device) -> None:
    """What a way of sharing cannot do shows in the first step, and is one case's failure."""
    for _ in range(round_steps):
        step()
    device.synchronize()


def _shorten(settings: MeasureSettings, iterations: int) -> MeasureSettings:
    """As long as one device is timed with a loader."""
    return msgspec.structs.replace(
        settings, iterations=iterations, few_samples=2, min_samples=LOADER_STEPS, max_samples=LOADER_STEPS,
        min_time_s=0.0, max_time_s=min(LOADER_TIME_S, settings.max_time_s), warmup_samples=None, warmup_min_samples=1,
        warmup_min_time_s=0.0, warmup_max_time_s=0.0,
    )  # fmt: skip


def _count(parsed: ParsedCase, device: Any) -> WorkloadObserved:
    """Operations of all ranks' batches; this rank's stand for the others', whose examples are as many."""
    import torch.distributed as dist

    plain = parsed.workload.make_ootb(parsed.scale)
    batches = make_batches(plain, batch_size=count_share(parsed), mode=parsed.mode, seed=SEED)
    flops = count_flops(plain, batches, mode=parsed.mode, device=device.name)
    total = None if flops is None else flops * count_accumulated(parsed) * dist.get_world_size()
    return WorkloadObserved(model_flops=total)


def _verify(parsed: ParsedCase, parallel: str, device: Any, request: WorkloadRequest) -> WorkloadObserved:
    """Check on one rank alone, on a GPU on its part of the batch: the whole may not fit. What sharing takes away from
    the form is told with its changes."""
    import torch.distributed as dist

    task = parsed.workload.make_task(parsed.scale)
    assert isinstance(task, Optimized)
    facts = WorkloadObserved(check=UNCHECKED)
    if request.check:
        size = max(1, parsed.batch_size // dist.get_world_size()) if device.has_events else parsed.batch_size
        start = time.perf_counter()
        facts = Verifier(device, request.compile_backend).check(
            parsed._replace(batch_size=size), adds_up=_adds_up(parsed, parallel)
        )
        facts |= WorkloadObserved(check_s=time.perf_counter() - start)
    shared = shard(task) if parallel == "sharded" else task
    assert isinstance(shared, Optimized)
    facts |= describe_changes(shared, parsed, device, request.compile_backend)
    _forget_last_case(device)
    return facts | WorkloadObserved(changes=f"{facts.changes}; {_name_unused(shared, parsed, parallel)}")


def _name_unused(task: Optimized, parsed: ParsedCase, parallel: str) -> str:
    early = name_early_updates(task, mode=parsed.mode, precision=parsed.precision)
    return f"{UNUSED[parallel]}, {early}" if early and _adds_up(parsed, parallel) else UNUSED[parallel]


def _adds_up(parsed: ParsedCase, parallel: str) -> bool:
    """Whether updates wait until gradients are added up. The owner of a table has those of all ranks, and waits for
    those of other batches alone."""
    return parallel != "sharded" or count_accumulated(parsed) > 1


def fold_shared(case: Case, ranks: Sequence[RankOutcome]) -> Folded:
    """Rank 0's facts are those of the case; memory of the rank that needs most; energy and peaks of all devices
    together, where each reports them."""
    found = [one.extra.facts for one in ranks]
    first = ranks[0]
    loader = [max(row) for row in zip(*(one.loader_s for one in found), strict=True)]
    if loader:
        first.extra.extra_s[LOADER] = loader
    steps = sum(first.measurement.iterations) if first.measurement is not None else 0
    parsed = read_case(case)
    return Folded(
        score=first.score,
        latency_target=first.latency_target,
        observed=merge_observed(first.extra.observed, _fold_facts(found, steps, _count_examples(parsed))),
    )


def _count_examples(parsed: ParsedCase) -> int:
    """Examples per step, over all ranks."""
    return parsed.batch_size * count_accumulated(parsed)


def _fold_facts(found: list[RankFacts], steps: int, examples: int) -> WorkloadObserved:
    traced = [rank for rank, one in enumerate(found) if one.trace is not None]
    held = [one.peak_memory_bytes for one in found if one.peak_memory_bytes is not None]
    joules = [one.energy_j for one in found if one.energy_j is not None]
    peaks = [one.peak for one in found if one.peak is not None]
    sources = Counter(one.source for one in peaks) if len(peaks) == len(found) else Counter()
    return WorkloadObserved(
        trace=found[traced[0]].trace if traced else None,
        traced_ranks=", ".join(str(rank) for rank in traced) if traced and len(traced) < len(found) else None,
        peak_memory_bytes=max(held, default=None),
        energy_j_per_example=sum(joules) / (steps * examples) if len(joules) == len(found) and steps else None,
        peak_flops=sum(one.flops for one in peaks) if sources else None,
        peak_source="; ".join(f"{count} × {source}" for source, count in sources.items()) or None,
    )


def is_shared(case: Case) -> bool:
    """Whether the ranks share the model."""
    return isinstance(case.spec, WorkloadSpec) and case.spec.parallel is not None
