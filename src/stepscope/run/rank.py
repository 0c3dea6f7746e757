"""The loop of one rank, whoever started it: rank 0 hands out cases, gathers, folds and writes; the others follow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import msgspec

from stepscope.core.errors import StepscopeError
from stepscope.launch.join import describe_place
from stepscope.launch.watch import as_error, describe_lost_rank
from stepscope.launch.worker import Session
from stepscope.measure import (
    OF_TIMES,
    CoRunningLoad,
    CpuUse,
    Device,
    Estimate,
    Measurement,
    WallClock,
    find_co_running_load,
    freeze_libraries,
    judge_times,
    read_cpu_use,
)
from stepscope.measure.device import Clock
from stepscope.measure.instability import find_queue_notices
from stepscope.measure.progress import BarProgress, LineProgress, SilentProgress
from stepscope.measure.surroundings import open_probe
from stepscope.records import (
    Case,
    CaseResult,
    Communication,
    Failure,
    Notice,
    Observed,
    RankPlace,
    RankSamples,
    Reading,
    System,
)
from stepscope.records.case import ReadingMoment, Timing
from stepscope.run.clocks import ClockOffset, compare_clocks, find_arrivals, name_clock
from stepscope.run.producer import Prepared, Producer, RankOutcome, find_producer
from stepscope.run.ranks import BarrierPeers, Ranks, Refusal, describe_refusal
from stepscope.store import MeasuredCase, RunWriter, StoredRun, utc_now
from stepscope.store.view import ARRIVAL
from stepscope.system import collect_system, merge_systems, open_telemetry
from stepscope.system.collect import read_communication_settings

CRASH_LIMIT = 2
"""A case in which a process was killed so often is not tried again: the others come first."""
READINGS_REST_S = 0.25
"""A case that begins sooner than this after the last reading has none: a GPU takes 10 ms to report."""
AnyProgress = LineProgress | BarProgress


class CrashLimitError(StepscopeError):
    """A process was killed too often while the case was measured."""

    kind = "process_died"

    def __init__(self) -> None:
        super().__init__(
            f"the process was killed {CRASH_LIMIT} times while this case was measured",
            hint="look at the kernel's log for the reason (memory, most often); measure it alone, or smaller",
        )


class Readings(Protocol):
    def read(self, at: ReadingMoment) -> list[Reading]: ...


class RestedReadings:
    """Readings for a case only where the last case with readings began long enough ago; None: never any."""

    def __init__(self, readings: Readings | None = None, rest_s: float = READINGS_REST_S) -> None:
        self._readings = readings
        self._rest_s = rest_s
        self._read_at_s: float | None = None
        self._resting = False

    def read(self, at: ReadingMoment) -> list[Reading]:
        if at == "start":
            now_s = time.monotonic()
            self._resting = self._read_at_s is not None and now_s - self._read_at_s < self._rest_s
            if not self._resting:
                self._read_at_s = now_s
        return [] if self._resting or self._readings is None else self._readings.read(at)


class Gathered(msgspec.Struct, kw_only=True):
    """What one rank sends to rank 0 about a case."""

    outcome: RankOutcome
    refusal: Refusal | None = None
    machine: str = ""
    """Ranks on one machine share its cores, whatever names their hosts have."""
    cpu_before: CpuUse | None = None
    cpu_after: CpuUse | None = None
    probes_s: list[float] = []
    readings: list[Reading] = []
    notices: list[Notice] = []


def run_rank(session: Session, *, progress: AnyProgress | None = None, producer: Producer | None = None) -> None:
    """Measure what the run's plan still lacks, as one of its ranks. Rank 0 must know the run folder."""
    session.heartbeat.beat("joining")
    made = producer or find_producer(session.verb)(session)
    control = made.join()
    made.ranks = ranks = Ranks(session, control)
    folder = Path(ranks.broadcast(str(session.folder.resolve()) if session.folder else None))
    if session.folder is None:
        session.use_folder(folder)
    ranks.require_same_request()
    loop = RankLoop(made, made.open())
    systems = ranks.gather(collect_system() if session.context.local_rank == 0 else None)
    places = ranks.gather(describe_place(session.context, loop.device.name))
    if systems is not None and places is not None:
        with RunWriter(folder) as writer, progress or SilentProgress() as shown:
            Lead(loop, writer, shown).run([system for system in systems if system is not None], places)
    else:
        loop.follow()
    session.heartbeat.beat("leaving")
    made.close()
    control.close()


class RankLoop:
    """How this rank measures one case."""

    def __init__(self, producer: Producer, device: Device, *, clock: Clock | None = None) -> None:
        self.producer, self.ranks, self.device = producer, producer.ranks, device
        self.clock = clock or WallClock()
        self.is_alone = self.ranks.size == 1
        freeze_libraries()
        self.probe = open_probe(device) if self.is_alone else None

    def follow(self) -> None:
        """A rank other than 0."""
        while (assigned := self.ranks.broadcast(None)) is not None:
            if self.producer.compares_arrivals:
                compare_clocks(self.ranks.control)
            self.ranks.gather(self.measure_case(msgspec.json.decode(assigned, type=Case)))

    def measure_case(
        self, case: Case, telemetry: Readings | None = None, watch: Callable[[Estimate], None] | None = None
    ) -> Gathered:
        """A case that cannot be measured is an outcome, where every rank knows it; what ends one rank alone passes."""
        self.ranks.session.heartbeat.beat("preparing", case.key)
        if self.ranks.begin_case():
            self.producer.groups_renewed()
        telemetry = telemetry or RestedReadings()
        readings = telemetry.read("start")
        prepared: Prepared | None = None
        outcome = RankOutcome(rank=self.ranks.rank)
        try:
            prepared = self.producer.prepare(case)
            gathered = self._measure_prepared(case, prepared, telemetry, watch)
        except Exception as error:
            refusal = describe_refusal(error)
            if not self.is_alone and getattr(error, "refusal", None) is None:
                raise
            return Gathered(outcome=outcome, refusal=refusal)
        finally:
            if prepared is not None and prepared.close is not None:
                prepared.close()
        gathered.readings = readings + gathered.readings
        return gathered

    def _measure_prepared(
        self, case: Case, prepared: Prepared, telemetry: Readings, watch: Callable[[Estimate], None] | None
    ) -> Gathered:
        with prepared.scope or nullcontext():
            probed, before = self._probe(), read_cpu_use()
            measurement = self._time(case, prepared, watch)
            if prepared.on_measured is not None:
                prepared.on_measured(measurement)
            after = read_cpu_use()
            probed += self._probe()
            readings = telemetry.read("end")
            outcome = RankOutcome(
                rank=self.ranks.rank, score=prepared.score, latency_target=prepared.latency_target,
                timing=self._choose_timing(prepared),
            )  # fmt: skip
            if prepared.finish is not None:
                measurement, outcome.extra = prepared.finish(measurement)
            outcome.extra.observed = merge_observed(prepared.observed, outcome.extra.observed)
            unchecked = prepared.check() if prepared.check is not None else None
        outcome.measurement = measurement if prepared.active else None
        notices = [*measurement.notices, *self._find_intruders(prepared, measurement)]
        if unchecked:
            notices.append(Notice(kind="not_checked", message=f"not compared: {unchecked}"))
        return Gathered(
            outcome=outcome, machine=name_clock(), cpu_before=before, cpu_after=after, probes_s=probed,
            readings=readings, notices=notices,
        )  # fmt: skip

    def _probe(self) -> list[float]:
        return [self.probe.read()] if self.probe is not None else []

    def _time(self, case: Case, prepared: Prepared, watch: Callable[[Estimate], None] | None) -> Measurement:
        peers = None if self.is_alone else BarrierPeers(self.ranks, case)
        return prepared.time(self.producer.settings, clock=self.clock, device=self.device, peers=peers, watch=watch)

    def _choose_timing(self, prepared: Prepared) -> Timing:
        on_device = (prepared.saturated or prepared.device_time) and self.device.has_events
        if self.ranks.session.world_size > 1:
            return "slowest_rank_device" if on_device else "slowest_rank"
        return "device" if on_device else "own"

    def _find_intruders(self, prepared: Prepared, measurement: Measurement) -> list[Notice]:
        """Every allocation by a driver is worth a notice; page faults of a host only where every iteration has them."""
        allocations = measurement.allocations if prepared.steady_memory else 0
        bearable = 0 if self.device.has_events else measurement.sampled_iterations
        return find_queue_notices(
            measurement.starved, allocations if allocations > bearable else 0, measurement.sampled_iterations
        )


class Lead:
    """Rank 0: decides, gathers and writes, one case on disk before the next begins."""

    def __init__(
        self, loop: RankLoop, writer: RunWriter, progress: AnyProgress, telemetry: Readings | None = None
    ) -> None:
        self._loop, self._writer, self._progress = loop, writer, progress
        self._ranks, self._producer = loop.ranks, loop.producer
        self._telemetry = RestedReadings(telemetry or open_telemetry(loop.device.name))

    def run(self, systems: Sequence[System], places: list[RankPlace]) -> None:
        writer, producer = self._writer, self._producer
        writer.write_system(merge_systems(list(systems)))
        library = producer.library()
        if library is not None:
            request = self._ranks.session.request
            writer.write_communication(
                Communication(
                    backend=str(request.backend), library=library, settings=read_communication_settings(),
                    ranks=places, cluster=request.cluster,
                )
            )  # fmt: skip
        self.measure_all()
        self._ranks.broadcast(None)
        writer.finish()

    def measure_all(self) -> None:
        total = len(self._writer.plan.cases)
        done = total - len(self._writer.remaining())
        for index, case in enumerate(self._list_cases(), start=done + 1):
            self._progress.case_started(case, index, max(index, total))
            result, samples = self._measure(case)
            self._writer.append(result, samples)
            self._progress.case_done(result, samples)

    def _list_cases(self) -> Iterator[Case]:
        """Those of the plan, then what the producer asks for: what was measured may decide."""
        yield from self._writer.remaining()
        while further := self._producer.next_cases(lambda: StoredRun(self._writer.folder).cases()):
            yield from further

    def _measure(self, case: Case) -> tuple[CaseResult, list[RankSamples]]:
        started_at, start = utc_now(), time.monotonic()
        if self._writer.begin(case) >= CRASH_LIMIT:
            return refuse(case, describe_refusal(CrashLimitError()), started_at, 0.0), []
        try:
            self._ranks.broadcast(msgspec.json.encode(case))
            offsets = compare_clocks(self._ranks.control) if self._producer.compares_arrivals else None
            mine = self._loop.measure_case(case, self._telemetry, self._progress.estimate)
            gathered = self._ranks.gather(mine) or []
        except Exception as error:
            if self._loop.is_alone:
                raise
            self._give_up(case, error, started_at)
            raise AssertionError("unreachable") from error
        return fold(
            case, gathered, self._producer, started_at=started_at, elapsed_s=time.monotonic() - start,
            offsets=offsets or [],
        )  # fmt: skip

    def _give_up(self, case: Case, error: Exception, started_at: str) -> None:
        """The run cannot go on without all its ranks; the case has failed where it is known why."""
        lost = self._ranks.explain_loss(error)
        if lost is None:
            self._writer.note_death()
            raise as_error(describe_lost_rank(self._writer.folder, self._ranks.size)) from error
        self._writer.append(refuse(case, describe_refusal(lost), started_at, 0.0), [])
        raise lost from error


def refuse(case: Case, refusal: Refusal, started_at: str, elapsed_s: float) -> CaseResult:
    return CaseResult(
        case=case, status=refusal.status, started_at=started_at, elapsed_s=elapsed_s, failure=refusal.failure
    )


def fold(
    case: Case,
    gathered: Sequence[Gathered],
    producer: Producer,
    *,
    started_at: str,
    elapsed_s: float,
    offsets: Sequence[ClockOffset] = (),
) -> tuple[CaseResult, list[RankSamples]]:
    """One result and all ranks' samples; with several ranks the time of a sample is that of its slowest one."""
    refusal = next((one.refusal for one in gathered if one.refusal is not None), None)
    if refusal is not None:
        return refuse(case, refusal, started_at, elapsed_s), []
    measured = [(one, one.outcome.measurement) for one in gathered if one.outcome.measurement is not None]
    folded = producer.fold(case, [one.outcome for one in gathered], _find_clock_error_s(measured, offsets))
    first, loads = measured[0][0], find_load_by_machine(gathered)
    crowded = next((notice for one in loads.values() if one and (notice := one.as_notice())), None)
    samples = collect_samples(case, measured, loads, offsets)
    result = CaseResult(
        case=case,
        status="failed" if folded.failure else "ok",
        failure=folded.failure,
        started_at=started_at,
        elapsed_s=elapsed_s,
        score=folded.score,
        latency_target=folded.latency_target,
        timing=first.outcome.timing,
        observed=folded.observed,
        kernels=first.outcome.extra.kernels,
        readings=gathered[0].readings,
    )
    notices = first.notices
    if len(measured) > 1:
        # One rank's own times have another interval than the case, whose times are those of the slowest rank.
        others = [notice for notice in notices if notice.kind not in OF_TIMES]
        notices = [*judge_times(MeasuredCase(result, samples).seconds(), producer.settings), *others]
    notices = [*notices, *folded.notices, *([crowded] if crowded else [])]
    return msgspec.structs.replace(result, notices=notices), samples


def collect_samples(
    case: Case,
    measured: Sequence[tuple[Gathered, Measurement]],
    loads: dict[str, CoRunningLoad | None],
    offsets: Sequence[ClockOffset],
) -> list[RankSamples]:
    starts = [measurement.start_ns[measurement.warmups :] for _, measurement in measured]
    came = find_arrivals(starts, [offsets[one.outcome.rank] for one, _ in measured]) if offsets else []
    return [
        measurement.as_samples(
            case.key,
            rank=one.outcome.rank,
            load=loads.get(one.machine),
            probes_s=one.probes_s,
            extra_s={**one.outcome.extra.extra_s, **({ARRIVAL: came[number]} if came else {})},
        )
        for number, (one, measurement) in enumerate(measured)
    ]


def _find_clock_error_s(
    measured: Sequence[tuple[Gathered, Measurement]], offsets: Sequence[ClockOffset]
) -> float | None:
    """None where all ranks read the same clock."""
    error_ns = max((offsets[one.outcome.rank].error_ns for one, _ in measured), default=0) if offsets else 0
    return error_ns * 1e-9 if error_ns else None


def merge_observed(before: Observed | None, after: Observed | None) -> Observed | None:
    """What is known before the timing, and what after it."""
    return after if before is None else before if after is None else before | after


def find_load_by_machine(gathered: Sequence[Gathered]) -> dict[str, CoRunningLoad | None]:
    """What others took on each machine; the ranks of this run are not others."""
    found: dict[str, CoRunningLoad | None] = {}
    for machine in {one.machine for one in gathered}:
        here = [one for one in gathered if one.machine == machine]
        uses = [(one.cpu_before, one.cpu_after) for one in here if one.cpu_before and one.cpu_after]
        if uses:
            own_s = sum(after.own_s - before.own_s for before, after in uses)
            found[machine] = find_co_running_load(*uses[0], os.cpu_count() or 1, own_s=own_s)
    return found


def give_up_case(folder: Path) -> None:
    """After a rank ended by an exception: the case that it was in has failed, so that a resumed run goes on behind it.

    Where a process was killed instead, that may have had nothing to do with the case.
    """
    run = StoredRun(folder)
    failure: Failure = run.failures[-1]
    case = next((one for one in run.plan.cases if one.key == failure.case), None)
    if case is None or not failure.stack or any(one.case.key == case.key for one in run.results):
        return
    with RunWriter(folder, measures=False) as writer:
        writer.append(refuse(case, Refusal(status="failed", failure=failure), utc_now(), 0.0), [])
