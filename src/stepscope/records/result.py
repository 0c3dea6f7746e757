"""One finished case as the journal keeps it: what was measured, where its samples lie, how to score it."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from stepscope.core.units import SCORE_SCALES
from stepscope.records.benchmark import Case
from stepscope.records.failure import Failure, Notice
from stepscope.records.kinds import Number, Observed, Scalar
from stepscope.records.seal import SCHEMA_VERSION

_SAMPLES_NAME = re.compile(r"samples/rank-\d+\.jsonl")
"""A path of any other kind could lead out of the run."""

Status = Literal["ok", "failed", "skipped"]
ReadingMoment = Literal["start", "during", "end"]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How time becomes a score: work of one iteration over the median time, in `unit`; more is better.

    Where iterations differ in what they do (`round_steps` of what was observed), over the mean of whole rounds.
    """

    unit: str
    """One of `stepscope.core.units.SCORE_SCALES`."""
    work: float
    """Per iteration and over all ranks that take part, in the base unit: flop, bytes, examples."""

    def __post_init__(self) -> None:
        if self.unit not in SCORE_SCALES:
            raise ValueError(f"there is no unit {self.unit!r} for scores; there are {', '.join(SCORE_SCALES)}")


class LatencyTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A limit that the given percentile of the latency must keep; a row that misses it is marked with `*`."""

    limit_s: float
    percentile: float = 95.0


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What a device told of itself at one moment of a case; a field is None where it does not tell."""

    device: str
    at: ReadingMoment
    clock_hz: float | None = None
    memory_clock_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: list[str] = []
    """Reasons the device gives for running slower than it could."""
    load_1m: float | None = None
    """Runnable processes on the host, averaged over a minute."""


class KernelUse(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel that ran in an iteration, as the profiler names it."""

    name: str
    count: float
    """Launches an iteration."""
    duration_s: float
    """Of all its launches in one iteration."""


class SampleSlice(msgspec.Struct, frozen=True, kw_only=True):
    """Where one line of samples stands, so that what a crash left behind is never read as evidence."""

    file: str
    """Relative to the run folder."""
    offset: int
    length: int
    sha256: str

    def __post_init__(self) -> None:
        if not _SAMPLES_NAME.fullmatch(self.file):
            raise ValueError(f"samples lie in samples/rank-N.jsonl, not in {self.file!r}")
        if self.offset < 0 or self.length < 0:
            raise ValueError(f"a slice of {self.length} bytes at byte {self.offset} cannot be")


class CaseResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="case_result"):
    """One line of the journal."""

    schema_version: int = SCHEMA_VERSION
    case: Case
    status: Status
    started_at: str
    """UTC, ISO 8601."""
    elapsed_s: float
    score: Score | None = None
    latency_target: LatencyTarget | None = None
    samples: list[SampleSlice] = []
    timing: Literal["own", "slowest_rank", "device", "slowest_rank_device"] = "own"
    """Which times are the case's: a process's own wall times, those of the slowest rank of each sample, device
    times, or device times of the slowest rank."""
    observed: Observed | None = None
    """What was found beside the samples, by the kind of the case; None: nothing."""
    kernels: list[KernelUse] = []
    """What ran, where the profiler was asked; empty: not asked."""
    readings: list[Reading] = []
    notices: list[Notice] = []
    failure: Failure | None = None

    @property
    def size_bytes(self) -> Number | None:
        """Message size: what was really moved where that was observed, else what was asked for."""
        moved = self.observed.size_bytes if self.observed is not None else None
        return self.case.spec.size_bytes if moved is None else moved

    @property
    def wrong(self) -> int | None:
        """Elements that are not what they must be; None: not compared."""
        return self.observed.wrong if self.observed is not None else None

    @property
    def facts(self) -> dict[str, Scalar]:
        """What was observed by name, as JSON, SQL, CSV and lists of facts show it."""
        return self.observed.facts() if self.observed is not None else {}

    def __post_init__(self) -> None:
        if (self.status == "ok") == (self.failure is not None):
            raise ValueError(f"a case with status {self.status!r} {'has a' if self.failure else 'needs a'} failure")
