"""A benchmark, one case of it, the raw values that were measured, and what came of it: a result or a failure.

Statistics are derived from the samples on reading and never stored in their place.
"""

import hashlib
import re
import traceback
from typing import Literal

import msgspec

from stepscope.core.errors import StepscopeError
from stepscope.core.units import SCORE_SCALES, escape_line
from stepscope.records.kinds import Number, Observed, Parameter, Scalar, Spec
from stepscope.records.seal import SCHEMA_VERSION

Implementation = Literal["ootb", "optimized", "micro"]

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=:-]*")


class Benchmark(msgspec.Struct, frozen=True, kw_only=True):
    """`model/implementation/mode/config` with the version of what it computes and the role that answers for it."""

    model: str
    implementation: Implementation
    mode: str
    config: str
    version: int = 1
    """Raised whenever the benchmark computes something else; results of two versions are never compared."""
    owner: str = "operators"
    """A role, never a person."""
    description: str = ""

    def __post_init__(self) -> None:
        for name in ("model", "implementation", "mode", "config"):
            value = getattr(self, name)
            if not _PART.fullmatch(value):
                raise ValueError(f"benchmark {name} {value!r} must be letters, digits and . _ + = : - only")
        if self.version < 1:
            raise ValueError(f"benchmark version {self.version} must be 1 or more")
        if "@" in self.owner or not self.owner:
            raise ValueError(f"benchmark owner {self.owner!r} must be a role")

    @property
    def id(self) -> str:
        return f"{self.model}/{self.implementation}/{self.mode}/{self.config}"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a benchmark: a batch size, a message size, one set of shapes."""

    benchmark: Benchmark
    spec: Spec
    """What was asked for, by its kind."""
    batch_size: int | None = None
    world_size: int = 1
    """Ranks that take part; part of what is measured, so part of the key."""

    @property
    def parameters(self) -> dict[str, Parameter]:
        """What the spec states, by name and in the order of labels; changing it changes nothing."""
        return self.spec.list_parameters(self.benchmark.model, self.benchmark.mode)

    @property
    def key(self) -> str:
        """The same content has the same key on every machine: resume and comparison pair cases by it."""
        content = {
            "benchmark": self.benchmark.id,
            "version": self.benchmark.version,
            "parameters": dict(sorted(self.parameters.items())),
            "batch_size": self.batch_size,
            "world_size": self.world_size,
        }
        return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:16]

    @property
    def label(self) -> str:
        """What a person sees: the benchmark and the parameters that set this case apart."""
        parameters = ",".join(f"{name}={join_list(value)}" for name, value in self.parameters.items())
        return escape_line(f"{self.benchmark.id}[{parameters}]") if parameters else self.benchmark.id


def join_list(value: Parameter) -> Scalar:
    """A list as people write it: `8x16`; any other value as it is."""
    return "x".join(str(item) for item in value) if isinstance(value, list) else value


class RankSamples(msgspec.Struct, frozen=True, kw_only=True):
    """All samples of one case on one rank in one process, in the order they were taken, column by column."""

    case: str
    """Key of the case."""
    rank: int = 0
    process: int = 0
    """Which fresh process took them, where a case is measured in several; noise between processes is seen so."""
    duration_s: list[float]
    """Wall time of all the iterations of a sample together."""
    iterations: list[int]
    warmup: list[bool]
    """Kept as evidence, left out of statistics."""
    device_s: list[float] | None = None
    """Time between two device events around the same iterations, where the device has them; of as many iterations
    behind a full queue, where the queue was saturated."""
    other_share: float | None = None
    """Share of the host's core time that others took (processes, other machines) meanwhile; None: unknown."""
    host_cores: int | None = None
    """Logical cores of the host; with it `other_share` gives the fraction of the time in which others ran at all."""
    idle_cores: float | None = None
    """Cores' worth of time that were unused meanwhile."""
    host_share: float | None = None
    """On a device with a queue: the share of a sample's time the host needed to issue it, in the median. Near 1 the
    device waits for the host; None where work is done when the call returns."""
    extra_s: dict[str, list[float]] = {}
    """Further times by their name, seconds per iteration: `graph` (replayed without launches), `kernel` (the kernels
    alone, by the profiler)."""
    probes_s: list[float] = []
    """Times of a fixed reference operation just before and just after these samples; empty: not taken."""

    def __post_init__(self) -> None:
        lengths = {len(self.duration_s), len(self.iterations), len(self.warmup)}
        lengths |= {len(self.device_s)} if self.device_s is not None else set()
        if len(lengths) != 1:
            raise ValueError(f"the columns of samples differ in length: {sorted(lengths)}")
        if min(self.iterations, default=1) < 1:
            raise ValueError("a sample must cover at least one iteration")

    def __len__(self) -> int:
        return len(self.duration_s)

    def seconds(self) -> list[float]:
        """Wall seconds per iteration, one value per sample, warm-ups left out."""
        return self._divide(self.duration_s)

    def device_seconds(self) -> list[float] | None:
        """Device seconds per iteration, where the device told them."""
        return None if self.device_s is None else self._divide(self.device_s)

    def counted_iterations(self) -> list[int]:
        """Iterations of each sample, warm-ups left out."""
        return [count for count, warmup in zip(self.iterations, self.warmup, strict=True) if not warmup]

    def _divide(self, durations_s: list[float]) -> list[float]:
        columns = zip(durations_s, self.iterations, self.warmup, strict=True)
        return [duration / count for duration, count, warmup in columns if not warmup]


def slowest_rank_seconds(ranks: list[RankSamples], *, device: bool = False) -> list[float]:
    """Per sample, the time of the rank that took longest: a collective is over when its last rank is.

    Ranks measure in step, so sample i of one rank belongs to sample i of every other.
    """
    columns = [(rank.device_seconds() or []) if device else rank.seconds() for rank in ranks]
    return [max(row) for row in zip(*columns, strict=True)]


STACK_LINES = 40
OUT_OF_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    """A short word a program can act on: `out_of_memory`, `wrong_result`, `unsupported`, `rank_died` …"""
    message: str
    hint: str | None = None
    """The next step."""
    where: str | None = None
    rank: int | None = None
    case: str | None = None
    """Key of the case in flight."""
    exit_code: int | None = None
    """Exit code of the process; negative is the number of the signal that ended it."""
    last_lines: list[str] = []
    """The end of what the rank wrote."""
    stack: list[str] = []


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Something that weakens a result without spoiling it; carries its numbers and the next thing to try."""

    kind: str
    message: str
    hint: str | None = None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a host or a device: not all libraries have an exception of their own for it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(sign in str(error) for sign in OUT_OF_MEMORY_SIGNS)


def describe_exception(error: BaseException) -> Failure:
    """An exception as evidence: its kind, its message, and the stack of an unexpected error."""
    if isinstance(error, StepscopeError):
        return Failure(
            kind=error.kind, message=error.message, hint=error.hint, where=error.where, rank=error.rank, case=error.case
        )
    stack = "".join(traceback.format_exception(error)).splitlines()[-STACK_LINES:]
    text = str(error).strip()
    message = text.splitlines()[0] if text else type(error).__name__
    if is_out_of_memory(error):
        return Failure(kind="out_of_memory", message=message, hint="use a smaller shape or batch", stack=stack)
    return Failure(kind="exception", message=f"{type(error).__name__}: {message}", stack=stack)


_SAMPLES_NAME = re.compile(r"samples/rank-\d+\.jsonl")
"""A path of any other kind could lead out of the run."""

Status = Literal["ok", "failed", "skipped"]
ReadingMoment = Literal["start", "during", "end"]
Timing = Literal["own", "slowest_rank", "device", "slowest_rank_device"]
"""Which times are a case's: a process's own wall times, those of the slowest rank of each sample, device times, or
device times of the slowest rank."""


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
    """Launches per iteration."""
    duration_s: float
    """Sum over all its launches in one iteration."""


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
    timing: Timing = "own"
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
