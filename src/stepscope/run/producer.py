"""What a kind of benchmark must know, so that one executor measures it: in one process or on any number of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, ClassVar

import msgspec

from stepscope.core.errors import StepscopeError
from stepscope.launch.worker import Session
from stepscope.measure import Clock, Device, Estimate, Measurement, MeasureSettings, Peers, measure
from stepscope.records import Case, Failure, KernelUse, LatencyTarget, Notice, Observed, Score
from stepscope.records.case import Timing
from stepscope.run.control import Alone, Control, TorchControl
from stepscope.run.ranks import Ranks
from stepscope.store import MeasuredCase
from stepscope.system.collect import describe_torch_library

PRODUCERS = {
    "ops": "stepscope.bench.ops.producer:OperatorProducer",
    "comms": "stepscope.bench.comms.producer:CommunicationProducer",
    "workload": "stepscope.bench.workloads.producer:WorkloadProducer",
    "suite": "stepscope.bench.workloads.producer:WorkloadProducer",
}
"""By the verb of the plan. Never read from a run: a run folder is data."""


class WrongResultError(StepscopeError):
    """What the case computed is not what it should compute: its time means nothing."""

    kind = "wrong_result"


class ExtraMeasurements(msgspec.Struct, kw_only=True):
    """What is learned of a case on one rank, beside its samples."""

    extra_s: dict[str, list[float]] = {}
    kernels: list[KernelUse] = []
    observed: Observed | None = None
    notices: list[Notice] = []
    facts: Any = None
    """What only the producer understands; `fold` gets it from every rank."""


class Prepared(msgspec.Struct, kw_only=True):
    """A case made ready on this rank: nothing in `body` allocates its inputs or knows the clock."""

    body: Callable[[], object]
    score: Score | None = None
    latency_target: LatencyTarget | None = None
    observed: Observed | None = None
    check: Callable[[], str | None] | None = None
    """Called after the timing; raises WrongResultError. Returns why nothing could be compared, if so."""
    scope: AbstractContextManager[object] | None = None
    """Entered around timing and check: modes that the case needs and the next one must not inherit."""
    before_sample: Callable[[], object] | None = None
    """Called before each timed region, outside it."""
    saturated: bool = False
    """Whether device time is taken behind a full queue and is the case's time; see `measure`."""
    device_time: bool = False
    """Whether the case's time is that of the device's own clock, in samples taken as usual."""
    steady_memory: bool = False
    """Whether memory fetched while timing is worth a notice: single operators should run in what they have."""
    settings: MeasureSettings | None = None
    """For this case, instead of the run's."""
    device: Device | None = None
    """That is done when the body's work is, where that is not the rank's own device."""
    peers: Peers | None = None
    """How ranks keep in step, where a barrier before each sample is not what the case needs."""
    active: bool = True
    """Whether this rank's times count; the others only keep in step."""
    on_measured: Callable[[Measurement], object] | None = None
    """Called as soon as the last sample is taken."""
    finish: Callable[[Measurement], tuple[Measurement, ExtraMeasurements]] | None = None
    """Called after the timing, before the check; may correct the measurement."""
    close: Callable[[], object] | None = None

    def time(
        self,
        settings: MeasureSettings,
        *,
        clock: Clock,
        device: Device,
        peers: Peers | None = None,
        watch: Callable[[Estimate], None] | None = None,
    ) -> Measurement:
        """The timing alone, within the scope, which the caller enters; what the case itself says comes first."""
        return measure(
            self.body,
            settings=self.settings or settings,
            clock=clock,
            device=self.device or device,
            peers=self.peers or peers,
            watch=watch,
            before_sample=self.before_sample,
            saturated=self.saturated,
        )


class RankOutcome(msgspec.Struct, kw_only=True):
    """One case on one rank, as rank 0 gets it."""

    rank: int
    measurement: Measurement | None = None
    """None: this rank only kept in step."""
    score: Score | None = None
    latency_target: LatencyTarget | None = None
    timing: Timing = "own"
    extra: ExtraMeasurements = msgspec.field(default_factory=ExtraMeasurements)


class Folded(msgspec.Struct, kw_only=True):
    """What all ranks together say of a case."""

    score: Score | None = None
    latency_target: LatencyTarget | None = None
    observed: Observed | None = None
    notices: list[Notice] = []
    failure: Failure | None = None
    """Why the case has failed although every rank measured it."""


class Producer(ABC):
    """One kind of benchmark in one process: `join` → `open` → `prepare` each case → `fold` → `close`.

    A kind that runs on several ranks writes no rank loop: in `prepare` and `finish` it does what every rank must
    manage or none through `ranks.together`.
    """

    compares_arrivals: ClassVar[bool] = False
    """Whether it matters when each rank began a sample: clocks of different hosts are compared before each case."""
    ranks: Ranks
    """All ranks of the run; set before `open`."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @property
    @abstractmethod
    def settings(self) -> MeasureSettings:
        """Limits of the measuring loop, for cases that have none of their own."""

    def join(self) -> Control:
        """Meet the other ranks. The default is a single process."""
        return Alone()

    @abstractmethod
    def open(self) -> Device:
        """Make this rank ready; the device it measures on."""

    @abstractmethod
    def prepare(self, case: Case) -> Prepared:
        """Raises CaseSkipped for what cannot run here, and anything else for a case that fails."""

    def fold(self, case: Case, ranks: Sequence[RankOutcome], clock_error_s: float | None) -> Folded:
        """What the case's result says, from every rank's outcome; the default is rank 0's.

        `clock_error_s`: how far off the comparison of the ranks' clocks may be, where they have different ones.
        """
        first = ranks[0]
        return Folded(
            score=first.score,
            latency_target=first.latency_target,
            observed=first.extra.observed,
            notices=first.extra.notices,
        )

    def next_cases(self, measured: Callable[[], list[MeasuredCase]]) -> list[Case]:
        """Further cases, from what was measured so far; asked on rank 0 until there are none."""
        return []

    def library(self) -> dict[str, str] | None:
        """What carries data between the ranks, as loaded: name, version, file. None: nothing does."""
        control = self.ranks.control
        return describe_torch_library(control.backend) if isinstance(control, TorchControl) else None

    def groups_renewed(self) -> None:
        """The control's groups were made anew; those derived from them are gone."""
        return

    def close(self) -> None:
        return


def find_producer(verb: str) -> type[Producer]:
    module, _, name = PRODUCERS[verb].partition(":")
    found: type[Producer] = getattr(import_module(module), name)
    return found
