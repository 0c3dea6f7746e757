"""One model on several ranks: every rank steps its share of the batch, and the slowest counts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from stepscope.bench.workloads.asked import SEED, Asked, count_accumulated, read_case
from stepscope.bench.workloads.control import KEPT, Control, GroupPeers, Groups, die
from stepscope.bench.workloads.facts import EnergyMeter, Peak, PeakMemory, count_flops, find_peak
from stepscope.bench.workloads.feed import Loader, count_round, make_batches
from stepscope.bench.workloads.protocol import Optimized
from stepscope.bench.workloads.sharing import SharedStep, count_share, open_share, shard
from stepscope.bench.workloads.steps import (
    InferStep,
    clear_up,
    forget_compiled,
    name_early_updates,
)
from stepscope.bench.workloads.verify import UNCHECKED, Verifier, describe_changes
from stepscope.bench.workloads.worker import (
    LOADER_STEPS,
    LOADER_TIME_S,
    WorkloadRequest,
    choose_settings,
    read_request,
    require_samples,
    require_sound,
)
from stepscope.core.errors import RankDiedError, StepscopeError
from stepscope.launch import RankSession
from stepscope.launch.join import (
    describe_place,
    describe_request,
    find_difference,
    is_echo,
    refuse_difference,
    require_backend,
)
from stepscope.launch.watchdog import read_rank_failure
from stepscope.measure import (
    DEADLY,
    DeadlyCaseError,
    Device,
    Measurement,
    MeasureSettings,
    WallClock,
    give_back_memory,
    measure,
    open_device,
)
from stepscope.measure.recorded import record_steps
from stepscope.records import (
    Case,
    CaseResult,
    Communication,
    Failure,
    RankPlace,
    RankSamples,
    Score,
    System,
    describe_exception,
)
from stepscope.records.kinds import WorkloadObserved
from stepscope.store import RANKS_FOLDER, RunWriter, StoredRun, utc_now
from stepscope.store.view import LOADER
from stepscope.system import collect_system, merge_systems

WORKER = "stepscope.bench.workloads.ranks:run"
UNUSED = {
    "ddp": "not used on several ranks: the CUDA graph",
    "sharded": "not used on several ranks: the CUDA graph",
    "fsdp": "not used on several ranks: the CUDA graph, fused optimizers, weights stored channels last",
}


class RankMeasurement(msgspec.Struct, kw_only=True):
    """What one rank hands to rank 0."""

    measurement: Measurement | None = None
    facts: WorkloadObserved = WorkloadObserved()
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


def run(session: RankSession) -> None:
    """The worker function of every rank; rank 0 writes the run."""
    context, request = session.context, session.request
    session.heartbeat.beat("joining")
    name = str(request["device"])
    require_backend(str(request["backend"]))
    device = open_device(f"cuda:{context.local_rank}" if name == "cuda" else name)
    groups = Groups(session)
    control = Control(session, groups)
    refuse_difference(find_difference(control.gather(describe_request(request))))
    folder = Path(control.broadcast(str(session.folder.resolve()) if session.folder else None))
    if session.folder is None:
        session.adopt_folder(folder)
    systems = control.gather(collect_system() if context.local_rank == 0 else None)
    places = control.gather(describe_place(context, device.name))
    if context.rank == 0:
        _lead(control, folder, device, [one for one in systems if one is not None], places)
    else:
        _follow(control, device)
    groups.close()
    session.heartbeat.beat("leaving")


def _lead(control: Control, folder: Path, device: Any, systems: list[System], places: list[RankPlace]) -> None:
    import torch

    request = control.session.request
    with RunWriter(folder) as writer:
        writer.write_system(merge_systems(systems))
        library = {"name": f"torch.distributed {request['backend']}", "version": str(torch.__version__)}
        writer.write_communication(Communication(backend=str(request["backend"]), library=library, ranks=places))
        for case in writer.remaining():
            started_at, start = utc_now(), time.monotonic()
            if writer.begin(case) >= DEADLY:
                writer.append(_fail(case, describe_exception(DeadlyCaseError())), [])
                continue
            control.broadcast(msgspec.json.encode(case))
            try:
                found = control.gather(_measure(control, case, device))
            except Exception as error:
                lost = _explain_loss(control.session, error)
                if lost is None:
                    writer.note_death()
                    raise RankDiedError("another rank went away without a word", hint=KEPT) from error
                writer.append(_fail(case, describe_exception(lost), started_at), [])
                raise lost from error
            writer.append(*_fold(case, found, started_at, time.monotonic() - start))
        control.broadcast(None)
        writer.finish()


def _follow(control: Control, device: Any) -> None:
    while (assigned := control.broadcast(None)) is not None:
        control.gather(_measure(control, msgspec.json.decode(assigned, type=Case), device))


def _fail(case: Case, failure: Failure, started_at: str | None = None, elapsed_s: float = 0.0) -> CaseResult:
    return CaseResult(
        case=case, status="failed", started_at=started_at or utc_now(), elapsed_s=elapsed_s, failure=failure
    )


def _explain_loss(session: RankSession, error: Exception) -> StepscopeError | None:
    """Why rank 0 cannot go on: what another rank has said before, else what it met with itself. None: another one went
    away without a word, and may have been killed for reasons of its own."""
    for rank in range(1, session.context.world_size):
        said = read_rank_failure(session.folder / RANKS_FOLDER, rank) if session.folder else None
        if said is not None and not is_echo(said.message):
            return die(said, rank)
    if is_echo(str(error)):
        return None
    return error if isinstance(error, StepscopeError) else die(describe_exception(error), 0)


def give_up_case(folder: Path) -> None:
    """After a rank ended by an exception: the case that it was in has failed, so that a resumed run goes on behind it.

    Where a process was killed instead, that may have had nothing to do with the case.
    """
    run = StoredRun(folder)
    failure = run.failures[-1]
    case = next((one for one in run.plan.cases if one.key == failure.case), None)
    if case is None or not failure.stack or any(one.case.key == case.key for one in run.results):
        return
    with RunWriter(folder, measures=False) as writer:
        writer.append(_fail(case, failure), [])


def _measure(control: Control, case: Case, device: Any) -> RankMeasurement:
    session = control.session
    session.heartbeat.beat("preparing", case.key)
    _forget_last_case(device)
    control.begin_case()
    asked, request = read_case(case), read_request(dict(session.request))
    parallel = str(asked.spec.parallel)
    is_first = session.context.rank == 0
    is_told = is_first and asked.workload.implementation == "optimized"
    facts = control.attempt(lambda: _verify(asked, parallel, device, request) if is_told else WorkloadObserved())
    if isinstance(facts, Failure):
        return RankMeasurement(failure=facts)
    session.heartbeat.beat("preparing", case.key)
    facts |= _describe_porting(asked, parallel, device)
    measured = _measure_step(control, asked, request, parallel, device)
    if measured.failure is not None:
        return measured
    session.heartbeat.beat("counting", case.key)
    give_back_memory(device.name)
    counted = control.attempt(lambda: _count(asked, device) if is_first else WorkloadObserved())
    if isinstance(counted, Failure):
        return RankMeasurement(failure=counted)
    measured.facts = measured.facts | facts | counted
    measured.peak = find_peak(device.name, asked.precision)
    return measured


def _forget_last_case(device: Device) -> None:
    """Models that wait for the garbage collector, as FSDP's do, would count as memory of the next case."""
    forget_compiled()
    clear_up(device.name)


def _describe_porting(asked: Asked, parallel: str, device: Device) -> WorkloadObserved:
    plain = asked.workload.make_plain(asked.scale)
    ported = [one] if (one := plain.ported(device.name)) else []
    if parallel == "fsdp" and plain.dense() != plain.sizes:
        ported.append("gradients of tables are dense: FSDP takes no sparse ones")
    return WorkloadObserved(porting="; ".join(ported) or None)


def _measure_step(
    control: Control, asked: Asked, request: WorkloadRequest, parallel: str, device: Any
) -> RankMeasurement:
    """The model is given up when this returns."""
    memory, start = PeakMemory(device.name), time.perf_counter()
    opened = control.attempt(lambda: open_share(asked, parallel, device.name, request.compile_backend), exchanges=True)
    if isinstance(opened, Failure):
        return RankMeasurement(failure=opened)
    step, batches = opened
    round_steps = max(control.gather(count_round(batches, at_once=step.at_once)))
    failure = control.attempt(lambda: _step_once_round(step, round_steps, device), exchanges=True)
    if isinstance(failure, Failure):
        return RankMeasurement(failure=failure)
    facts = WorkloadObserved(setup_s=time.perf_counter() - start)
    peers = GroupPeers(control, asked.case)
    how: dict[str, Any] = {"clock": WallClock(), "device": device, "peers": peers}
    settings = choose_settings(asked, request.settings, device)
    if round_steps > 1:
        facts |= WorkloadObserved(round_steps=round_steps)
        settings = _keep_rounds(settings, step, round_steps, device, peers)
    energy = EnergyMeter(device.name)
    measured = measure(step, settings=settings, **how)
    joules = energy.read_j()
    failure = control.attempt(lambda: require_sound(step))
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
        control.session.heartbeat.beat("recording", asked.case.key)
        recorded = control.attempt(lambda: _record(control, step, asked), exchanges=True)
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
        record_steps(step, Path(elsewhere), asked.case, link=False)
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
        min_time_s=0.0, max_time_s=min(LOADER_TIME_S, settings.max_time_s), warmup_samples=None, warmup_min_samples=1,
        warmup_min_time_s=0.0, warmup_max_time_s=0.0,
    )  # fmt: skip


def _count(asked: Asked, device: Any) -> WorkloadObserved:
    """Of all ranks' batches; this rank's stand for the others', whose examples are as many."""
    import torch.distributed as dist

    plain = asked.workload.make_plain(asked.scale)
    batches = make_batches(plain, batch_size=count_share(asked), mode=asked.mode, seed=SEED)
    flops = count_flops(plain, batches, mode=asked.mode, device=device.name)
    total = None if flops is None else flops * count_accumulated(asked) * dist.get_world_size()
    return WorkloadObserved(model_flops=total)


def _verify(asked: Asked, parallel: str, device: Any, request: WorkloadRequest) -> WorkloadObserved:
    """Of one rank alone, on a GPU on its share of the batch: the whole may not fit. What sharing takes away from the
    form is told with its changes."""
    import torch.distributed as dist

    task = asked.workload.make_task(asked.scale)
    assert isinstance(task, Optimized)
    facts = WorkloadObserved(check=UNCHECKED)
    if request.check:
        size = max(1, asked.batch_size // dist.get_world_size()) if device.has_events else asked.batch_size
        start = time.perf_counter()
        facts = Verifier(device, request.compile_backend).check(
            asked._replace(batch_size=size), adds_up=_adds_up(asked, parallel)
        )
        facts |= WorkloadObserved(check_s=time.perf_counter() - start)
    shared = shard(task) if parallel == "sharded" else task
    assert isinstance(shared, Optimized)
    facts |= describe_changes(shared, asked, device, request.compile_backend)
    _forget_last_case(device)
    return facts | WorkloadObserved(changes=f"{facts.changes}; {_name_unused(shared, asked, parallel)}")


def _name_unused(task: Optimized, asked: Asked, parallel: str) -> str:
    early = name_early_updates(task, mode=asked.mode, precision=asked.precision)
    return f"{UNUSED[parallel]}, {early}" if early and _adds_up(asked, parallel) else UNUSED[parallel]


def _adds_up(asked: Asked, parallel: str) -> bool:
    """Whether updates wait until gradients are added up. The owner of a table has those of all ranks, and waits for
    those of other batches alone."""
    return parallel != "sharded" or count_accumulated(asked) > 1


def _fold(
    case: Case, found: list[RankMeasurement], started_at: str, elapsed_s: float
) -> tuple[CaseResult, list[RankSamples]]:
    failure = next((one.failure for one in found if one.failure is not None), None)
    if failure is not None:
        return _fail(case, failure, started_at, elapsed_s), []
    loader = [max(row) for row in zip(*(one.loader_s for one in found), strict=True)]
    samples = [
        one.measurement.as_samples(case.key, rank=rank, extra_s={LOADER: loader} if loader and rank == 0 else None)
        for rank, one in enumerate(found)
        if one.measurement is not None
    ]
    asked = read_case(case)
    examples = asked.batch_size * count_accumulated(asked)
    is_unchecked = found[0].facts.check == UNCHECKED
    result = CaseResult(
        case=case,
        status="ok",
        started_at=started_at,
        elapsed_s=elapsed_s,
        score=None if is_unchecked else Score(unit="ex/s", work=float(examples)),
        latency_target=asked.workload.declared.latency_target,
        timing="slowest_rank",
        observed=found[0].facts | _fold_facts(found, examples),
    )
    return result, samples


def _fold_facts(found: list[RankMeasurement], examples: int) -> WorkloadObserved:
    """Memory of the rank that needs most; energy and peaks of all devices together, where each tells."""
    traced = [rank for rank, one in enumerate(found) if one.trace is not None]
    held = [one.peak_memory_bytes for one in found if one.peak_memory_bytes is not None]
    joules = [one.energy_j for one in found if one.energy_j is not None]
    steps = sum(found[0].measurement.iterations) if found[0].measurement is not None else 0
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
