"""One model on several ranks: every rank steps its share of the batch, and the slowest counts."""

from __future__ import annotations

import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import msgspec

from stepscope.errors import StepscopeError
from stepscope.launch import RankSession
from stepscope.launch.join import open_store, require_backend
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
from stepscope.workloads.feed import Loader, count_round, make_batches
from stepscope.workloads.protocol import Optimized
from stepscope.workloads.recorded import record_steps
from stepscope.workloads.sharing import SharedStep, count_share, open_share, shard
from stepscope.workloads.steps import (
    InferStep,
    TrainStep,
    clear_up,
    forget_compiled,
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

T = TypeVar("T")
WORKER = "stepscope.workloads.ranks:run"
UNUSED = {
    "ddp": "not used on several ranks: the CUDA graph",
    "sharded": "not used on several ranks: the CUDA graph",
    "fsdp": "not used on several ranks: the CUDA graph, fused optimizers, weights stored channels last",
}
GROUP_EXTRA_S = 30.0
"""A collective waits longer than the watchdog, whose message says more."""
ALONE_S = 30.0
"""How long a rank that failed waits for the others: they may fail as it did, or come to where all gather."""
POLL_S = 0.1


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
    trace: str | None = None
    """Where this rank's steps were recorded."""
    failure: Failure | None = None


class Control:
    """How ranks tell each other what to do next: in a group of its own, so that a rank which gave up in the middle of
    a model's exchanges cannot be mistaken for one that takes part in them."""

    def __init__(self, session: RankSession, store: Any, limit: timedelta) -> None:
        import torch.distributed as dist

        self.session = session
        self._group = dist.new_group(backend="gloo", timeout=limit)
        self._store = store
        self._attempts = 0

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
        """What this rank made, if every rank could; else why the first that could not failed.

        Raises what this rank alone met with, if the others do not come here: they are in an exchange that it has left,
        and nothing but its end frees them.
        """
        made: T | None = None
        failure: Failure | None = None
        self._attempts += 1
        try:
            made = body()
        except (RuntimeError, ValueError, TypeError, NotImplementedError, MemoryError, StepscopeError) as error:
            failure = describe_exception(error)
            self._say_ended()
            if not self._see_all_end():
                raise
        else:
            self._say_ended()
        first = next((one for one in self.gather(failure) if one is not None), None)
        return cast("T", made) if first is None else first

    def _say_ended(self) -> None:
        self._store.set(f"attempt/{self._attempts}/{self.session.context.rank}", "1")

    def _see_all_end(self) -> bool:
        """Whether the other ranks came to the end of this attempt, in whatever way, while this one waited."""
        everybody = [f"attempt/{self._attempts}/{rank}" for rank in range(self.session.context.world_size)]
        # Before the watchdogs of the others ring: they know less.
        deadline_s = time.monotonic() + min(ALONE_S, self.session.hang_limit_s / 3)
        while not self._store.check(everybody):
            if time.monotonic() > deadline_s:
                return False
            self.session.heartbeat.tick()
            time.sleep(POLL_S)
        return True


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
    name, backend = str(request["device"]), str(request["backend"])
    device_name = f"cuda:{context.local_rank}" if name == "cuda" else name
    require_backend(backend)
    device = open_device(device_name)
    store = open_store(context, session.hang_limit_s, lambda: session.heartbeat.beat("joining"))
    dist.init_process_group(backend, store=store, rank=context.rank, world_size=context.world_size, timeout=limit)
    control = Control(session, store, limit)
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
    opened = control.attempt(lambda: open_share(asked, parallel, device.name, request.compile_backend))
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
    if request.trace:
        recorded = control.attempt(lambda: _record(control, step, asked))
        if isinstance(recorded, Failure):
            return RankMeasurement(failure=recorded)
        found.trace = recorded
    return found


def _record(control: Control, step: SharedStep, asked: Asked) -> str | None:
    """The folder of the recording, relative to the run; None on a rank that does not see the run's folder. It makes the
    same steps, as the others exchange with it."""
    folder = control.session.folder
    if folder is not None:
        return record_steps(step, folder, asked.case)
    with TemporaryDirectory() as elsewhere:
        record_steps(step, Path(elsewhere), asked.case)
    return None


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


def _keep_rounds(
    settings: MeasureSettings, step: SharedStep, round_steps: int, device: Device, peers: GroupPeers
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


def _require_training(step: SharedStep) -> None:
    fault = step.find_fault() if isinstance(step, TrainStep) else None
    if fault:
        raise WrongResultError(f"this does not train: {fault}", hint="another precision, or a smaller batch")


def _count(asked: Asked, device: Any) -> dict[str, Scalar]:
    """Of all ranks' batches; this rank's stand for the others', whose examples are as many."""
    import torch.distributed as dist

    plain = asked.workload.make_plain(asked.scale)
    batches = make_batches(plain, batch_size=count_share(asked), mode=asked.mode, seed=SEED)
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
    shared = shard(task) if parallel == "sharded" else task
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
    traced = [rank for rank, one in enumerate(found) if one.trace is not None]
    if traced:
        facts["trace"] = str(found[traced[0]].trace)
    if traced and len(traced) < len(found):
        facts["traced_ranks"] = ", ".join(str(rank) for rank in traced)
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
