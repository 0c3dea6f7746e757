"""Measures collectives, messages, overlaps, patterns and process groups on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec

from stepscope.bench.comms.bisection import next_round
from stepscope.bench.comms.exchange import CollectiveTrial
from stepscope.bench.comms.fake_group import FakeWorld
from stepscope.bench.comms.group import UnsupportedCollectiveError, World
from stepscope.bench.comms.mpi_group import MpiGroups
from stepscope.bench.comms.objects import ObjectTrial
from stepscope.bench.comms.operations import find_operation
from stepscope.bench.comms.overlap import OverlapTrial
from stepscope.bench.comms.pairs import PairTrial
from stepscope.bench.comms.patterns.trial import PatternTrial
from stepscope.bench.comms.process_group import FakeForming, ProcessGroupTrial, TorchForming
from stepscope.bench.comms.torch_group import TorchWorld
from stepscope.bench.comms.trial import Facts, Room, Steps, Traces, Trial
from stepscope.bench.comms.wire import WireTrial
from stepscope.core.errors import UsageError, first_line
from stepscope.core.units import format_bytes
from stepscope.launch.join import is_peer_disconnect
from stepscope.launch.worker import Session
from stepscope.measure import Device, Measurement, MeasureSettings, free_memory_bytes, give_back_memory, open_device
from stepscope.records import Case, CommunicationRequest, Failure, describe_exception
from stepscope.records.kinds import (
    CollectiveObserved,
    CollectiveSpec,
    ExchangeObserved,
    OverlapSpec,
    PairSpec,
    PatternSpec,
    PointToPointSpec,
    ProcessGroupObserved,
    ProcessGroupSpec,
    Spec,
)
from stepscope.run.control import Alone, Control
from stepscope.run.producer import ExtraMeasurements, Folded, Prepared, Producer, RankOutcome
from stepscope.run.ranks import CaseSkipped
from stepscope.run.recorded import record_steps
from stepscope.store import MeasuredCase

TRIALS: dict[type[Spec], Callable[[Case, Room], Trial]] = {
    CollectiveSpec: CollectiveTrial,
    PointToPointSpec: CollectiveTrial,
    PairSpec: PairTrial,
    OverlapSpec: OverlapTrial,
    PatternSpec: PatternTrial,
    ProcessGroupSpec: ProcessGroupTrial,
}


def make_trial(case: Case, room: Room) -> Trial:
    spec = case.spec
    if isinstance(spec, CollectiveSpec) and spec.wire is not None:
        return WireTrial(case, room)
    if isinstance(spec, CollectiveSpec) and find_operation(spec.operation).objects:
        return ObjectTrial(case, room)
    if type(spec) not in TRIALS:
        raise UsageError(f"{case.label} is no case of communication", hint="stepscope bench comms --list")
    return TRIALS[type(spec)](case, room)


MEMORY_SHARE = 0.8
T = TypeVar("T")


class CommunicationRankFacts(msgspec.Struct, kw_only=True):
    """What one rank knows beside its samples."""

    facts: Facts | None = None
    wrong: int = 0
    checked: int = 0


def read_request(session: Session) -> CommunicationRequest:
    assert isinstance(session.request, CommunicationRequest)
    return session.request


def open_world(session: Session) -> World:
    """As the backend asked for needs it."""
    request = read_request(session)
    if request.backend == "fake":
        return (FakeForming if request.init_only else FakeWorld)(session.world_size)
    if request.backend == "mpi" and not request.init_only:
        return MpiGroups(session.context)
    return (TorchForming if request.init_only else TorchWorld)(session, request.backend)


class CommunicationProducer(Producer):
    compares_arrivals = True
    room: Room

    def __init__(self, session: Session, world: World | None = None) -> None:
        """`world`: one that is open already, for tests."""
        super().__init__(session)
        self._request = read_request(session)
        self._world = world

    @property
    def settings(self) -> MeasureSettings:
        return self._request.settings

    def join(self) -> Control:
        self._world = self._world or open_world(self.session)
        return Alone() if self._world.backend == "fake" else self._world

    def open(self) -> Device:
        assert self._world is not None
        name, request = self._request.device, self._request
        device = open_device(name if name != "cuda" else f"cuda:{self.session.context.local_rank}")
        self.room = Room(self._world, device, self.session.heartbeat, request.check)
        if request.trace:
            assert self.session.folder is not None
            self.room.traces = Traces(self.session.folder, frozenset(request.trace))
        return device

    def library(self) -> dict[str, str]:
        return self.room.world.describe_library()

    def groups_renewed(self) -> None:
        self.room.forget_groups()

    def next_cases(self, measured: Callable[[], list[MeasuredCase]]) -> list[Case]:
        request = self._request
        if request.bisect is None:
            return []
        return next_round(
            request.bisect,
            measured(),
            backend=request.backend,
            device=request.device,
            world_size=self.session.world_size,
        )

    def prepare(self, case: Case) -> Prepared:
        """Every rank takes part or none: one that cannot would leave the others waiting."""
        ranks, room = self.ranks, self.room
        trial = ranks.together(lambda: self._refusing(lambda: make_trial(case, room)), exchanges=True)
        try:
            # Nothing is allocated yet: all ranks of a host look at the same free memory.
            ranks.together(lambda: self._refusing(lambda: self._require_memory(trial)))
            ranks.together(lambda: self._refusing(trial.open))
            ranks.together(lambda: self._refusing(lambda: self._rehearse(trial)), exchanges=True)
        except BaseException:
            trial.close()
            give_back_memory(room.device.name)
            raise
        trial.forget()
        steps = Steps(trial, room, case)
        return Prepared(
            body=trial.body,
            settings=msgspec.structs.replace(self.settings, iterations=trial.iterations),
            device=trial.device,
            device_time=self._request.device_time,
            peers=steps,
            active=trial.active,
            finish=lambda measurement: self._finish(case, trial, steps, measurement),
            close=trial.close,
        )

    def _refusing(self, body: Callable[[], T]) -> T:
        """Raises CaseSkipped with why this rank cannot take part. What a lost peer causes passes through."""
        room = self.room
        try:
            return body()
        except UnsupportedCollectiveError as error:
            raise CaseSkipped(error.kind, error.message, error.hint, rank=room.world.rank) from error
        except (RuntimeError, ValueError, TypeError, NotImplementedError, MemoryError) as error:
            if is_peer_disconnect(str(error)):
                raise
            failure = describe_exception(error)
            if failure.kind == "out_of_memory":
                raise CaseSkipped("does_not_fit", failure.message, "use smaller sizes", rank=room.world.rank) from error
            message = f"{room.world.backend} refuses: {first_line(error)}"
            raise CaseSkipped("unsupported", message, rank=room.world.rank, stack=failure.stack) from error

    def _require_memory(self, trial: Trial) -> None:
        device = self.room.device
        sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if not device.has_events else 1
        needed, name = trial.needed_bytes(), device.name
        if needed * sharing > MEMORY_SHARE * free_memory_bytes(name):
            give_back_memory(name)
        free = free_memory_bytes(name)
        if needed * sharing > MEMORY_SHARE * free:
            raise CaseSkipped(
                "does_not_fit",
                f"needs {format_bytes(needed)} on each of {sharing} ranks, {format_bytes(free)} are free on {name}",
                "use smaller sizes",
                rank=self.room.world.rank,
            )

    def _rehearse(self, trial: Trial) -> None:
        """One call that is not timed: what the backend refuses shows now, on all ranks alike."""
        if trial.active:
            trial.refresh()
            self.room.device.synchronize()
            for _ in range(trial.iterations):
                trial.body()
            trial.device.synchronize()

    def _finish(
        self, case: Case, trial: Trial, steps: Steps, measurement: Measurement
    ) -> tuple[Measurement, ExtraMeasurements]:
        parts_s = {name: values[measurement.warmups * trial.iterations :] for name, values in trial.further_s().items()}
        own_s = list(trial.own_s() or [])
        steps.verify()  # one more call, which is no sample
        if own_s and trial.active:
            measurement = msgspec.structs.replace(measurement, duration_s=own_s)
        if trial.operations > 1:
            counts = [count * trial.operations for count in measurement.iterations]
            measurement = msgspec.structs.replace(measurement, iterations=counts)
        place = self._record(case, trial)
        facts = trial.facts() if self.room.world.rank == trial.judge or trial.active else None
        if facts is not None:
            facts = msgspec.structs.replace(facts, observed=facts.observed | ExchangeObserved(trace=place))
        found = CommunicationRankFacts(facts=facts, wrong=steps.wrong, checked=steps.checked)
        return measurement, ExtraMeasurements(extra_s=parts_s if trial.active else {}, facts=found)

    def _record(self, case: Case, trial: Trial) -> str | None:
        """The folder of the recording, relative to that of the run; None where the case is not to be recorded.

        Every rank that takes part makes the same calls, since the others exchange with it.
        """
        room = self.room
        if room.traces is None or not room.traces.take(case):
            return None
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

    def fold(self, case: Case, ranks: Sequence[RankOutcome], clock_error_s: float | None) -> Folded:
        """The first rank's facts, with what only others know, and what the checks of all ranks found."""
        found: list[CommunicationRankFacts] = [one.extra.facts for one in ranks]
        facts = _merge_facts([one.facts for one in found if one.facts is not None])
        wrong, checked = sum(one.wrong for one in found), max(one.checked for one in found)
        failure = None
        if wrong:
            numbers = [str(one.rank) for one in ranks if one.extra.facts.wrong]
            where = f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
            failure = Failure(
                kind="wrong_result",
                message=f"{wrong} elements are not what {case.benchmark.model} must give, on {where}",
                hint="the communication library or the network corrupts data: repeat with another backend",
            )
        name = " ".join(self.library().get(part, "") for part in ("name", "version")).strip()
        exchange = ExchangeObserved(
            wrong=wrong if checked else None, checked=checked or None, library=name or None, clock_error_s=clock_error_s
        )
        return Folded(score=facts.score, observed=facts.observed | exchange, notices=facts.notices, failure=failure)


def _merge_facts(everybody: Sequence[Facts]) -> Facts:
    """The first rank's, with what only others know (how a call was composed), and everybody's largest error."""
    observed = reduce(or_, [facts.observed for facts in reversed(everybody)])
    if isinstance(observed, CollectiveObserved):
        found = [facts.observed for facts in everybody if isinstance(facts.observed, CollectiveObserved)]
        largest = {
            name: max((error for one in found if (error := getattr(one, name)) is not None), default=None)
            for name in ("error_max", "error_l2", "error_bound")
        }
        observed = msgspec.structs.replace(observed, **largest)
    if isinstance(observed, ProcessGroupObserved):
        cold = [facts.observed.cold for facts in everybody if isinstance(facts.observed, ProcessGroupObserved)]
        observed = msgspec.structs.replace(observed, cold={name: max(one[name] for one in cold) for name in cold[0]})
    return msgspec.structs.replace(everybody[0], observed=observed)
