"""One rank of a communication benchmark; rank 0 also decides and writes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from stepscope.bench.comms.clocks import ClockOffset, arrivals, compare_clocks, name_clock
from stepscope.bench.comms.group import UnsupportedCallError, World
from stepscope.bench.comms.kinds import make_trial
from stepscope.bench.comms.library import read_settings
from stepscope.bench.comms.trial import CHECKS, Check, Facts, Room, Steps, Traces, Trial
from stepscope.core.errors import first_line
from stepscope.core.units import format_bytes
from stepscope.launch import RankSession
from stepscope.launch.join import describe_place, describe_request, find_difference, refuse_difference
from stepscope.measure import (
    OF_TIMES,
    CpuUse,
    Measurement,
    MeasureSettings,
    Neighbours,
    WallClock,
    find_neighbours,
    free_memory_bytes,
    give_back_memory,
    judge_times,
    measure,
    open_device,
    read_cpu_use,
)
from stepscope.records import (
    Case,
    CaseResult,
    Communication,
    Failure,
    RankPlace,
    RankSamples,
    Reading,
    System,
    describe_exception,
)
from stepscope.records.kinds import CollectiveObserved, ExchangeObserved
from stepscope.store import MeasuredCase, RunWriter, StoredRun, utc_now
from stepscope.system import collect_system, merge_systems, open_telemetry

GROUP_EXTRA_S = 30.0
"""The group's own time-out is the last resort: the watchdogs, which know more, ring first."""
MEMORY_SHARE = 0.8
ARRIVAL = "arrival"


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others: everybody measures the same cases in the same way. No cases: it is over."""

    cases: list[Case]
    settings: MeasureSettings


class RankMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank hands to rank 0."""

    rank: int
    measurement: Measurement | None = None
    """None: it only kept step."""
    facts: Facts | None = None
    wrong: int = 0
    checked: int = 0
    further_s: dict[str, list[float]] = {}
    failure: Failure | None = None
    machine: str = ""
    """Ranks on one machine share its cores, whatever names their hosts have."""
    cpu_before: CpuUse | None = None
    cpu_after: CpuUse | None = None


def open_world(session: RankSession) -> World:
    """As the backend asked for needs it."""
    backend, limit_s = session.request["backend"], session.hang_limit_s
    if backend == "fake":
        from stepscope.bench.comms.fake_group import FakeWorld

        return FakeWorld(int(session.request["world_size"]))
    if backend == "mpi":
        from stepscope.bench.comms.mpi_group import MpiWorld

        return MpiWorld(session.context)
    from stepscope.bench.comms.torch_group import TorchWorld

    return TorchWorld(
        session.context,
        backend,
        join_limit_s=limit_s,
        timeout_s=limit_s + GROUP_EXTRA_S,
        on_wait=lambda: session.heartbeat.beat("joining"),
    )


MeasureMore = Callable[[Sequence[MeasuredCase]], list[Case]]
"""From what has been measured to what else should be; empty: enough. Only rank 0 asks."""


def run(session: RankSession, measure_more: MeasureMore | None = None) -> None:
    """The worker function of the contract. Rank 0 must know the run folder; it tells the others."""
    session.heartbeat.beat("joining")
    run_in_world(session, open_world(session), measure_more)


def run_in_world(session: RankSession, world: World, measure_more: MeasureMore | None = None) -> None:
    context, request, heartbeat = session.context, session.request, session.heartbeat
    folder = Path(world.broadcast_value(str(session.folder.resolve()) if session.folder else None))
    if session.folder is None:
        session.adopt_folder(folder)
    require_same_request(world, request)
    device_name = request["device"]
    device = open_device(device_name if device_name != "cuda" else f"cuda:{context.local_rank}")
    room = Room(world, device, heartbeat, read_check(request))
    if request.get("trace"):
        room.traces = Traces(folder, frozenset(request["trace"]))
    systems = world.gather_values(collect_system() if context.local_rank == 0 else None)
    places = world.gather_values(describe_place(context, device.name))
    if systems is not None and places is not None:
        _lead(folder, room, [system for system in systems if system is not None], places, measure_more)
    else:
        _follow(room)
    heartbeat.beat("leaving")
    world.close()


def read_check(request: Any) -> Check:
    asked = request.get("check", "sample")
    return next(check for check in CHECKS if check == asked)


def require_same_request(world: World, request: Any) -> None:
    """Rank 0 compares, all say the same."""
    everybody = world.gather_values(describe_request(request))
    verdict = "" if everybody is None else find_difference(everybody)
    verdict = world.broadcast_value(verdict if world.rank == 0 else None)
    refuse_difference(verdict)


def _lead(
    folder: Path,
    room: Room,
    systems: Sequence[System],
    places: list[RankPlace],
    measure_more: MeasureMore | None,
) -> None:
    with RunWriter(folder) as writer:
        writer.write_system(merge_systems(list(systems)))
        request = writer.plan.request
        settings = msgspec.convert(request["settings"], MeasureSettings)
        library = room.world.describe_library()
        writer.write_communication(
            Communication(
                backend=room.world.backend,
                library=library,
                settings=read_settings(),
                ranks=places,
                cluster=request.get("cluster"),
            )
        )
        telemetry = open_telemetry(room.device.name)
        device_time = bool(request.get("device_time"))
        cases = writer.remaining() or _find_more(folder, measure_more)
        while cases:
            room.world.broadcast_value(msgspec.json.encode(Assignment(cases=cases, settings=settings)))
            for case in cases:
                started_at, start = utc_now(), time.monotonic()
                readings = telemetry.read("start")
                offsets = compare_clocks(room.world)
                gathered = room.world.gather_values(_measure_case(case, room, settings)) or []
                readings += telemetry.read("end")
                result, samples = fold(
                    case, gathered, started_at, time.monotonic() - start, readings, offsets=offsets or [],
                    device_time=device_time, library=library, settings=settings,
                )  # fmt: skip
                writer.append(result, samples)
            cases = _find_more(folder, measure_more)
        room.world.broadcast_value(msgspec.json.encode(Assignment(cases=[], settings=settings)))
        writer.finish()


def _find_more(folder: Path, measure_more: MeasureMore | None) -> list[Case]:
    """The run is read again only where somebody decides by it."""
    return measure_more(StoredRun(folder).cases()) if measure_more is not None else []


def _follow(room: Room) -> None:
    while (assignment := msgspec.json.decode(room.world.broadcast_value(None), type=Assignment)).cases:
        for case in assignment.cases:
            compare_clocks(room.world)
            room.world.gather_values(_measure_case(case, room, assignment.settings))


def _measure_case(case: Case, room: Room, settings: MeasureSettings) -> RankMeasurement:
    room.heartbeat.beat("preparing", case.key)
    trials: list[Trial] = []
    # Every rank must take part or none: one that cannot would leave the others waiting.
    for prepare in (_make, _open, _rehearse):
        refusal = _agree_on_refusal(room.world, _refuse(prepare, case, room, trials))
        if refusal is not None:
            for trial in trials:
                trial.close()
            give_back_memory(room.device.name)
            return RankMeasurement(rank=room.world.rank, failure=refusal)
    (trial,) = trials
    trial.forget()
    settings = msgspec.structs.replace(settings, iterations=trial.iterations)
    steps, before = Steps(trial, room, case), read_cpu_use()
    measurement = measure(trial.body, settings=settings, clock=WallClock(), device=trial.device, peers=steps)
    further = {name: values[measurement.warmups * trial.iterations :] for name, values in trial.further_s().items()}
    own_s = list(trial.own_s() or [])
    steps.verify()  # one more call, which is no sample
    if own_s and trial.active:
        measurement = msgspec.structs.replace(measurement, duration_s=own_s)
    if trial.operations > 1:
        counts = [count * trial.operations for count in measurement.iterations]
        measurement = msgspec.structs.replace(measurement, iterations=counts)
    place = _record(case, room, trial)
    done = RankMeasurement(
        rank=room.world.rank,
        measurement=measurement if trial.active else None,
        facts=_add_trace(trial.facts(), place) if room.world.rank == trial.judge or trial.active else None,
        wrong=steps.wrong,
        checked=steps.checked,
        further_s=further if trial.active else {},
        machine=name_clock(),
        cpu_before=before,
        cpu_after=read_cpu_use(),
    )
    trial.close()
    return done


def _record(case: Case, room: Room, trial: Trial) -> str | None:
    """The folder of the recording, relative to that of the run; None where the case is not to be recorded.

    Every rank that takes part makes the same calls, since the others exchange with it.
    """
    if room.traces is None or not room.traces.take(case):
        return None
    from stepscope.measure.recorded import record_steps

    room.heartbeat.beat("recording", case.key)
    room.world.barrier()
    place = None
    if trial.active:

        def call() -> None:
            for _ in range(trial.iterations):
                trial.body()
            trial.device.synchronize()

        if room.traces.folder.is_dir():
            place = record_steps(call, room.traces.folder, case, link=False)
        else:
            with TemporaryDirectory() as elsewhere:
                record_steps(call, Path(elsewhere), case, link=False)
    room.world.barrier()
    return place


def _add_trace(facts: Facts, place: str | None) -> Facts:
    return msgspec.structs.replace(facts, observed=facts.observed | ExchangeObserved(trace=place))


Prepare = Callable[[Case, Room, list[Trial]], None]
"""One step from a case to a trial that can be timed; the trial is put into the list."""


def _refuse(prepare: Prepare, case: Case, room: Room, trials: list[Trial]) -> Failure | None:
    """Why this rank cannot take part; None: it can. What a lost peer causes passes through."""
    rank = room.world.rank
    try:
        prepare(case, room, trials)
    except UnsupportedCallError as error:
        return Failure(kind=error.kind, message=error.message, hint=error.hint, rank=rank)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, MemoryError) as error:
        if is_connection_error(error):
            raise
        failure = describe_exception(error)
        if failure.kind == "out_of_memory":
            return Failure(kind="does_not_fit", message=failure.message, hint="use smaller sizes", rank=rank)
        message = f"{room.world.backend} refuses: {first_line(error)}"
        return Failure(kind="unsupported", message=message, rank=rank, stack=failure.stack)
    return None


def _make(case: Case, room: Room, trials: list[Trial]) -> None:
    """Nothing is allocated yet: all ranks of a host look at the same free memory."""
    trial = make_trial(case, room)
    trials.append(trial)
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if not room.device.has_events else 1
    needed, name = trial.needed_bytes(), room.device.name
    if needed * sharing > MEMORY_SHARE * free_memory_bytes(name):
        give_back_memory(name)
    free = free_memory_bytes(name)
    if needed * sharing > MEMORY_SHARE * free:
        raise DoesNotFitError(
            f"needs {format_bytes(needed)} on each of {sharing} ranks, {format_bytes(free)} are free on {name}",
            hint="use smaller sizes",
        )


class DoesNotFitError(UnsupportedCallError):
    kind = "does_not_fit"


def _open(case: Case, room: Room, trials: list[Trial]) -> None:
    trials[0].open()


def _rehearse(case: Case, room: Room, trials: list[Trial]) -> None:
    """One call that is not timed: what the backend refuses shows now, on all ranks alike."""
    (trial,) = trials
    if trial.active:
        trial.refresh()
        room.device.synchronize()
        for _ in range(trial.iterations):
            trial.body()
        trial.device.synchronize()


def is_connection_error(error: BaseException) -> bool:
    """A peer is gone or silent: no property of the operation."""
    text = str(error).lower()
    return any(sign in text for sign in ("connection", "timed out", "timeout", "socket", "broken pipe", "rank 0 said"))


def _agree_on_refusal(world: World, mine: Failure | None) -> Failure | None:
    refusals = world.gather_values(mine)
    first = next((refusal for refusal in refusals or [] if refusal is not None), None)
    agreed = world.broadcast_value(first or Failure(kind="none", message="") if refusals is not None else None)
    return agreed if agreed.kind != "none" else None


def fold(
    case: Case,
    ranks: Sequence[RankMeasurement],
    started_at: str,
    elapsed_s: float,
    readings: list[Reading],
    *,
    offsets: Sequence[ClockOffset] = (),
    device_time: bool = False,
    library: dict[str, str] | None = None,
    settings: MeasureSettings | None = None,
) -> tuple[CaseResult, list[RankSamples]]:
    """All ranks' samples and one result; the time of a sample is that of its slowest rank."""
    refusal = next((rank.failure for rank in ranks if rank.failure is not None), None)
    if refusal is not None:
        return CaseResult(case=case, status="skipped", started_at=started_at, elapsed_s=elapsed_s, failure=refusal), []
    measured = [(rank, rank.measurement) for rank in ranks if rank.measurement is not None]
    facts = _merge_facts([rank.facts for rank in ranks if rank.facts is not None])
    wrong, checked = sum(rank.wrong for rank in ranks), max(rank.checked for rank in ranks)
    neighbours = _find_neighbours(ranks)
    crowded = next((notice for one in neighbours.values() if one and (notice := one.as_notice())), None)
    failure = None
    if wrong:
        failure = Failure(
            kind="wrong_result",
            message=f"{wrong} elements are not what {case.benchmark.model} must give, on {_name_wrong_ranks(ranks)}",
            hint="the communication library or the network corrupts data: repeat with another backend",
        )
    clock_error_ns = max((offsets[rank.rank].error_ns for rank, _ in measured), default=0) if offsets else 0
    observed = facts.observed | ExchangeObserved(
        clock_error_s=clock_error_ns * 1e-9 if clock_error_ns else None,
        wrong=wrong if checked else None,
        checked=checked or None,
        library=" ".join(library.get(part, "") for part in ("name", "version")).strip() if library else None,
    )
    result = CaseResult(
        case=case,
        status="failed" if failure else "ok",
        failure=failure,
        started_at=started_at,
        elapsed_s=elapsed_s,
        score=facts.score,
        timing="slowest_rank_device" if device_time else "slowest_rank",
        observed=observed,
        readings=readings,
        notices=[*facts.notices, *measured[0][1].notices, *([crowded] if crowded else [])],
    )
    starts = [measurement.start_ns[measurement.warmups :] for _, measurement in measured]
    came = arrivals(starts, [offsets[rank.rank] for rank, _ in measured]) if offsets else []
    samples = []
    for number, (rank, measurement) in enumerate(measured):
        around = neighbours.get(rank.machine)
        extra = {**rank.further_s, **({ARRIVAL: came[number]} if came else {})}
        samples.append(measurement.as_samples(case.key, rank=rank.rank, neighbours=around, extra_s=extra))
    if settings is not None:
        # One rank's own times have another interval than the case, whose times are those of the slowest rank.
        kept = [notice for notice in result.notices if notice.kind not in OF_TIMES]
        found = judge_times(MeasuredCase(result, samples).seconds(), settings)
        result = msgspec.structs.replace(result, notices=[*found, *kept])
    return result, samples


def _merge_facts(everybody: Sequence[Facts]) -> Facts:
    """The first rank's, with what only others know (how a call was composed), and everybody's largest error."""
    observed = reduce(or_, [facts.observed for facts in reversed(everybody)])
    if isinstance(observed, CollectiveObserved):
        said = [facts.observed for facts in everybody if isinstance(facts.observed, CollectiveObserved)]
        largest = {
            name: max((error for one in said if (error := getattr(one, name)) is not None), default=None)
            for name in ("error_max", "error_l2", "error_bound")
        }
        observed = msgspec.structs.replace(observed, **largest)
    return msgspec.structs.replace(everybody[0], observed=observed)


def _name_wrong_ranks(ranks: Sequence[RankMeasurement]) -> str:
    numbers = [str(rank.rank) for rank in ranks if rank.wrong]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"


def _find_neighbours(ranks: Sequence[RankMeasurement]) -> dict[str, Neighbours | None]:
    """By machine: what others took there; the ranks of this run are not others."""
    found: dict[str, Neighbours | None] = {}
    for machine in {rank.machine for rank in ranks}:
        uses = [(r.cpu_before, r.cpu_after) for r in ranks if r.machine == machine and r.cpu_before and r.cpu_after]
        if uses:
            own_s = sum(after.own_s - before.own_s for before, after in uses)
            found[machine] = find_neighbours(*uses[0], os.cpu_count() or 1, own_s=own_s)
    return found
