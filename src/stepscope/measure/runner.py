"""Measure one case after the other and put each on disk before the next begins."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import msgspec

from stepscope.core.errors import StepscopeError
from stepscope.measure.clock import Clock, WallClock
from stepscope.measure.device import Device
from stepscope.measure.instability import find_held_notices
from stepscope.measure.loop import Estimate, Measurement, measure
from stepscope.measure.neighbours import find_neighbours, read_cpu_use
from stepscope.measure.probe import NoProbe, SpeedProbe, open_probe
from stepscope.measure.settings import MeasureSettings
from stepscope.records import (
    Case,
    CaseResult,
    Failure,
    KernelUse,
    LatencyTarget,
    Notice,
    Observed,
    RankSamples,
    Reading,
    Score,
    describe_exception,
)
from stepscope.records.result import ReadingMoment
from stepscope.store import RunWriter, utc_now

READINGS_REST_S = 0.25
"""A case that begins sooner than this after the last reading has none: a GPU takes 10 ms to tell of itself."""


DEADLY = 2
"""A case in which the process was killed so often is not tried again: the others come first."""


class CaseSkipped(Exception):  # noqa: N818 - a skip is a result, not an error
    """Raised while a case is prepared: it cannot run here, and that is a result with a reason."""

    def __init__(self, kind: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(kind=kind, message=message, hint=hint)


class WrongResultError(StepscopeError):
    """What the case computed is not what it should compute: its time means nothing."""

    kind = "wrong_result"


class DeadlyCaseError(StepscopeError):
    """The process was killed too often while the case was measured."""

    kind = "process_died"

    def __init__(self) -> None:
        super().__init__(
            f"the process was killed {DEADLY} times while this case was measured",
            hint="look at the kernel's log for the reason (memory, most often); measure it alone, or smaller",
        )


def _refuse_deadly(case: Case) -> Prepared:
    raise DeadlyCaseError


class Further(msgspec.Struct, kw_only=True):
    """What is learned of a case after its samples were taken."""

    extra_s: dict[str, list[float]] = {}
    kernels: list[KernelUse] = []
    observed: Observed | None = None
    notices: list[Notice] = []


class Prepared(msgspec.Struct, kw_only=True):
    """A case made ready: nothing in `body` allocates its inputs or knows the clock."""

    body: Callable[[], object]
    score: Score | None = None
    latency_target: LatencyTarget | None = None
    observed: Observed | None = None
    check: Callable[[], str | None] | None = None
    """Called after the timing; raises WrongResultError. Returns why nothing could be compared, if so."""
    scope: AbstractContextManager[object] | None = None
    """Entered around timing and check: modes that the case needs and the next one must not inherit."""
    freshen: Callable[[], object] | None = None
    """Called before each timed stretch, outside it."""
    held: bool = False
    """Whether device time is taken behind a full queue and is the case's time; see `measure`."""
    steady_memory: bool = False
    """Whether memory fetched while timing is worth a notice: single operators should run in what they have."""
    settings: MeasureSettings | None = None
    """Of this case alone, instead of the run's."""
    on_measured: Callable[[Measurement], None] | None = None
    """Told what the timing gave, at once."""
    further: Callable[[], Further] | None = None
    """Called after the timing, before the check."""


class Readings(Protocol):
    def read(self, at: ReadingMoment) -> list[Reading]: ...


class RestedReadings:
    """Readings for a case only where the last case with readings began long enough ago."""

    def __init__(self, readings: Readings, rest_s: float = READINGS_REST_S) -> None:
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
        return [] if self._resting else self._readings.read(at)


class Progress(Protocol):
    """Told what happens; draws it or not."""

    def case_started(self, case: Case, index: int, total: int) -> None: ...

    def estimate(self, estimate: Estimate) -> None: ...

    def case_done(self, result: CaseResult, samples: Sequence[RankSamples]) -> None: ...


def run_cases(
    writer: RunWriter,
    *,
    prepare: Callable[[Case], Prepared],
    settings: MeasureSettings,
    device: Device,
    telemetry: Readings,
    progress: Progress,
    clock: Clock | None = None,
    measure_more: Callable[[], list[Case]] | None = None,
) -> None:
    """Measure what the writer's plan still lacks. A case that fails is recorded and the next one begins.

    Then `measure_more` is asked for further cases, again and again until it has none: what was measured may decide.
    """
    clock, probe, readings = clock or WallClock(), open_probe(device), RestedReadings(telemetry)
    remaining, total = writer.remaining(), len(writer.plan.cases)
    for index, case in enumerate(_with_more(remaining, measure_more), start=total - len(remaining) + 1):
        progress.case_started(case, index, max(index, total))
        deadly = writer.begin(case) >= DEADLY
        result, samples = run_case(
            case,
            prepare=_refuse_deadly if deadly else prepare,
            settings=settings,
            device=device,
            telemetry=readings,
            clock=clock,
            probe=probe,
            watch=progress.estimate,
        )
        writer.append(result, samples)
        progress.case_done(result, samples)


def _with_more(cases: Iterable[Case], measure_more: Callable[[], list[Case]] | None) -> Iterator[Case]:
    yield from cases
    while measure_more is not None and (further := measure_more()):
        yield from further


def run_case(
    case: Case,
    *,
    prepare: Callable[[Case], Prepared],
    settings: MeasureSettings,
    device: Device,
    telemetry: Readings,
    clock: Clock,
    probe: SpeedProbe | NoProbe,
    watch: Callable[[Estimate], None],
) -> tuple[CaseResult, list[RankSamples]]:
    started_at, start = utc_now(), time.monotonic()
    readings = telemetry.read("start")
    try:
        prepared = prepare(case)
        with prepared.scope or nullcontext():
            probed, before = probe.read(), read_cpu_use()
            measurement = measure_prepared(prepared, settings, clock=clock, device=device, watch=watch)
            if prepared.on_measured is not None:
                prepared.on_measured(measurement)
            neighbours = find_neighbours(before, read_cpu_use(), os.cpu_count() or 1)
            probed += probe.read()
            readings += telemetry.read("end")
            further = prepared.further() if prepared.further is not None else Further()
            unchecked = prepared.check() if prepared.check is not None else None
    except CaseSkipped as skip:
        return _without_samples(case, "skipped", started_at, start, skip.failure), []
    except Exception as error:  # noqa: BLE001 - the border of a case: one that fails must not end the others
        return _without_samples(case, "failed", started_at, start, describe_exception(error)), []
    samples = measurement.as_samples(
        case.key,
        neighbours=neighbours,
        probes_s=probed,
        extra_s=further.extra_s,
    )
    result = CaseResult(
        case=case,
        status="ok",
        started_at=started_at,
        elapsed_s=time.monotonic() - start,
        score=prepared.score,
        latency_target=prepared.latency_target,
        timing="device" if prepared.held and device.has_events else "own",
        observed=further.observed if prepared.observed is None else prepared.observed | further.observed,
        kernels=further.kernels,
        readings=readings,
        notices=[
            *measurement.notices,
            *_find_intruders(prepared, measurement, device),
            *further.notices,
            *_as_list(Notice(kind="not_checked", message=f"not compared: {unchecked}") if unchecked else None),
            *_as_list(neighbours.as_notice() if neighbours else None),
        ],
    )
    return result, [samples]


def _find_intruders(prepared: Prepared, measurement: Measurement, device: Device) -> list[Notice]:
    """A driver's allocation is worth a word each; page faults of a host only where every iteration has them."""
    allocations = measurement.allocations if prepared.steady_memory else 0
    bearable = 0 if device.has_events else measurement.sampled_iterations
    return find_held_notices(
        measurement.dry, allocations if allocations > bearable else 0, measurement.sampled_iterations
    )


def _as_list(notice: Notice | None) -> list[Notice]:
    return [notice] if notice is not None else []


def measure_prepared(
    prepared: Prepared,
    settings: MeasureSettings,
    *,
    clock: Clock,
    device: Device,
    watch: Callable[[Estimate], None] | None = None,
) -> Measurement:
    """The timing of one case alone, within its scope; the caller enters that."""
    return measure(
        prepared.body,
        settings=prepared.settings or settings,
        clock=clock,
        device=device,
        watch=watch,
        freshen=prepared.freshen,
        held=prepared.held,
    )


def _without_samples(case: Case, status: str, started_at: str, start: float, failure: Failure) -> CaseResult:
    return CaseResult(
        case=case,
        status="skipped" if status == "skipped" else "failed",
        started_at=started_at,
        elapsed_s=time.monotonic() - start,
        failure=failure,
    )
