"""Measure one case after the other and put each on disk before the next begins."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from stepscope.errors import StepscopeError
from stepscope.measure.clock import Clock, WallClock
from stepscope.measure.device import Device
from stepscope.measure.loop import Estimate, measure
from stepscope.measure.neighbours import find_neighbours, read_cpu_use
from stepscope.measure.probe import NoProbe, SpeedProbe, open_probe
from stepscope.measure.settings import MeasureSettings
from stepscope.records import (
    Case,
    CaseResult,
    Failure,
    LatencyTarget,
    RankSamples,
    Reading,
    Scalar,
    Score,
    describe_exception,
)
from stepscope.records.result import ReadingMoment
from stepscope.store import RunWriter, utc_now


class CaseSkipped(Exception):  # noqa: N818 - a skip is a result, not an error
    """Raised while a case is prepared: it cannot run here, and that is a result with a reason."""

    def __init__(self, kind: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(kind=kind, message=message, hint=hint)


class WrongResultError(StepscopeError):
    """What the case computed is not what it should compute: its time means nothing."""

    kind = "wrong_result"


class Prepared(msgspec.Struct, kw_only=True):
    """A case made ready: nothing in `body` allocates its inputs or knows the clock."""

    body: Callable[[], object]
    score: Score | None = None
    latency_target: LatencyTarget | None = None
    observed: dict[str, Scalar] = {}
    check: Callable[[], None] | None = None
    """Called after the timing; raises WrongResultError."""


class Readings(Protocol):
    def read(self, at: ReadingMoment) -> list[Reading]: ...


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
) -> None:
    """Measure what the writer's plan still lacks. A case that fails is recorded and the next one begins."""
    clock, probe = clock or WallClock(), open_probe(device)
    remaining, total = writer.remaining(), len(writer.plan.cases)
    for index, case in enumerate(remaining, start=total - len(remaining) + 1):
        progress.case_started(case, index, total)
        result, samples = run_case(
            case,
            prepare=prepare,
            settings=settings,
            device=device,
            telemetry=telemetry,
            clock=clock,
            probe=probe,
            watch=progress.estimate,
        )
        writer.append(result, samples)
        progress.case_done(result, samples)


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
        probed, before = probe.read(), read_cpu_use()
        measurement = measure(prepared.body, settings=settings, clock=clock, device=device, watch=watch)
        neighbours = find_neighbours(before, read_cpu_use(), os.cpu_count() or 1)
        probed += probe.read()
        readings += telemetry.read("end")
        if prepared.check is not None:
            prepared.check()
    except CaseSkipped as skip:
        return _without_samples(case, "skipped", started_at, start, skip.failure), []
    except Exception as error:  # noqa: BLE001 - the border of a case: one that fails must not end the others
        return _without_samples(case, "failed", started_at, start, describe_exception(error)), []
    samples = measurement.as_samples(
        case.key,
        other_share=neighbours.share if neighbours else None,
        probes_s=probed,
    )
    result = CaseResult(
        case=case,
        status="ok",
        started_at=started_at,
        elapsed_s=time.monotonic() - start,
        score=prepared.score,
        latency_target=prepared.latency_target,
        observed=prepared.observed,
        readings=readings,
        notices=[*measurement.notices, *([notice] if (notice := neighbours and neighbours.as_notice()) else [])],
    )
    return result, [samples]


def _without_samples(case: Case, status: str, started_at: str, start: float, failure: Failure) -> CaseResult:
    return CaseResult(
        case=case,
        status="skipped" if status == "skipped" else "failed",
        started_at=started_at,
        elapsed_s=time.monotonic() - start,
        failure=failure,
    )
