"""Real ranks for tests: cases measured by the worker, with as little time as it takes to see whether it is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from spoiled import SpoiledWorld, flip_element

from stepscope.bench.comms.cases import make_cases
from stepscope.bench.comms.fake_group import FakeWorld
from stepscope.bench.comms.group import World
from stepscope.bench.comms.producer import CommunicationProducer, CommunicationRankFacts, open_world
from stepscope.bench.comms.trial import Facts
from stepscope.launch import RankSession, launch_local
from stepscope.launch.worker import Session
from stepscope.measure import Measurement, MeasureSettings
from stepscope.records import Case, CaseResult, CommunicationRequest, RankSamples
from stepscope.run.clocks import ClockOffset
from stepscope.run.control import Alone
from stepscope.run.execute import RANK_FUNCTION
from stepscope.run.producer import ExtraMeasurements, RankOutcome
from stepscope.run.rank import Gathered, fold, run_rank
from stepscope.run.ranks import Ranks
from stepscope.store import MeasuredCase, StoredRun, create_run, run_folders

BRIEF = MeasureSettings(
    min_time_s=0.0, max_time_s=0.004, min_samples=3, few_samples=3, warmup_min_samples=2, warmup_max_time_s=0.002,
    window=1, iterations=1,
)  # fmt: skip


def cases_of(collective: str, *, ranks: int, sizes: tuple[int, ...] = (4096,), **options: Any) -> list[Case]:
    chosen = {"dtype": "float32", "backend": "gloo", "world_size": ranks, "device": "cpu", **options}
    return make_cases(collective=collective, sizes=sizes, **chosen)


def plan_run(store: Path, cases: list[Case], *, ranks: int, **request: Any) -> Path:
    asked = CommunicationRequest(**{"hang_timeout_s": 20.0, "check": "all", "settings": BRIEF, **request})
    return create_run(
        store, verb="comms", name="test", command=["test"], request=asked, cases=cases, launcher="self",
        world_size=ranks,
    )  # fmt: skip


def measure_cases(
    store: Path, cases: list[Case], *, ranks: int, target: str = RANK_FUNCTION, **request: Any
) -> tuple[StoredRun, list[MeasuredCase]]:
    folder = plan_run(store, cases, ranks=ranks, **request)
    hang_limit_s = StoredRun(folder).plan.request.hang_timeout_s
    launch_local(folder=folder, target=target, ranks=ranks, hang_limit_s=hang_limit_s)
    stored = StoredRun(folder)
    return stored, stored.cases()


class RankMeasurement(NamedTuple):
    """One case on one rank, as a test measured it."""

    measurement: Measurement
    facts: Facts
    wrong: int = 0
    checked: int = 0
    rank: int = 0
    parts_s: Mapping[str, list[float]] = MappingProxyType({})

    def as_gathered(self) -> Gathered:
        found = CommunicationRankFacts(facts=self.facts, wrong=self.wrong, checked=self.checked)
        extra = ExtraMeasurements(extra_s=dict(self.parts_s), facts=found)
        outcome = RankOutcome(rank=self.rank, measurement=self.measurement, timing="slowest_rank", extra=extra)
        return Gathered(outcome=outcome, notices=self.measurement.notices)


def fold_ranks(
    case: Case,
    ranks: Sequence[RankMeasurement | Gathered],
    *,
    offsets: Sequence[ClockOffset] = (),
    settings: MeasureSettings = BRIEF,
) -> tuple[CaseResult, list[RankSamples]]:
    session = Session(
        verb="comms", request=CommunicationRequest(settings=settings, backend="fake"), world_size=case.world_size
    )
    producer = CommunicationProducer(session, FakeWorld(case.world_size))
    producer.ranks = Ranks(session, Alone())
    producer.open()
    gathered = [one.as_gathered() if isinstance(one, RankMeasurement) else one for one in ranks]
    return fold(case, gathered, producer, started_at="2026-01-01T00:00:00Z", elapsed_s=1.0, offsets=offsets)


def run_in_world(session: RankSession, world: World) -> None:
    run_rank(session, producer=CommunicationProducer(session, world))


def measure_in_turn(folders: list[Path], *, ranks: int, target: str) -> list[list[MeasuredCase]]:
    """Several runs by the same ranks: `target` finds the others beside the first."""
    launch_local(folder=folders[0], target=target, ranks=ranks, hang_limit_s=20.0)
    return [StoredRun(folder).cases() for folder in folders]


def read_spoiled_call(session: RankSession) -> int | None:
    """The call whose result is changed, which the run's tag names; None: every call."""
    return int(session.request.tag) if session.request.tag else None


def run_spoiled(session: RankSession) -> None:
    """A worker whose backend changes one element, on one rank: of every result, or of one call's."""
    world = open_world(session)
    if world.rank == session.context.world_size - 1:
        world = SpoiledWorld(world, flip_element(3, only_call=read_spoiled_call(session)))
    run_in_world(session, world)


def run_spoiled_in_turn(session: RankSession) -> None:
    """The same for all runs of the store, one after another in one world."""
    assert session.folder is not None
    world = open_world(session)
    close, world.close = world.close, lambda: None  # type: ignore[method-assign]
    for folder in run_folders(session.folder.parent):
        session.folder, session.request = folder, StoredRun(folder).plan.request
        spoils = world.rank == session.context.world_size - 1
        harm = flip_element(3, only_call=read_spoiled_call(session))
        run_in_world(session, SpoiledWorld(world, harm) if spoils else world)
    close()


def run_with_other_arguments(session: RankSession) -> None:
    """Rank 1 was started with another timeout."""
    if session.context.rank == 1:
        session.request = msgspec.structs.replace(session.request, check="off")
    run_in_world(session, open_world(session))


def run_without_rank_1(session: RankSession) -> None:
    import time

    if session.context.rank == 1:
        for _ in range(600):  # alive, and says so, but it never joins
            session.heartbeat.beat("dreaming")
            time.sleep(0.1)
    run_in_world(session, open_world(session))


def run_with_rank_1_lost(session: RankSession) -> None:
    """Rank 1 stops in the middle of the second case."""
    import time

    from stepscope.bench.comms.trial import Steps

    if session.context.rank == 1:
        seen: set[str] = set()
        original = Steps.align

        def align(self: Steps) -> int:
            seen.add(self._case.key)
            if len(seen) == 2:
                time.sleep(120)
            return original(self)

        Steps.align = align  # type: ignore[method-assign]
    run_rank(session)
