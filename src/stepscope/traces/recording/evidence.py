"""What a recording leaves: one record per rank, and one for the folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import msgspec

from stepscope._version import __version__
from stepscope.core.errors import BadInputError, UsageError
from stepscope.core.files import hash_file, write_file_atomically
from stepscope.formats.timeline import LinkSummary
from stepscope.records import System
from stepscope.store.folder import hold_lock, utc_now
from stepscope.traces import KINETO_FOLDER, RECORDING_FILE

StepMarker = Literal["auto", "optimizer", "mark", "forward"]
STEP_MARKERS: tuple[str, ...] = get_args(StepMarker)
"""What ends a step: `optimizer` the last optimizer's step, `mark` a call of stepscope.step(), `forward` a call of the
outermost module. `auto`: marks where the program makes them, else the optimizer."""


class ProfilerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the profiler looks at; each costs time, so that overheads are stated with them."""

    shapes: bool = True
    """Sizes, dtypes, strides and scalars of every operator's inputs."""
    stacks: bool = False
    """Python calls and their lines."""
    memory: bool = False
    """Every allocation."""
    et: bool = True
    """The execution trace beside the timeline."""
    ranges: bool = False
    """In the execution trace: smallest and largest value of whole-number inputs. Waits for the device at each."""

    @property
    def label(self) -> str:
        wanted = [name for name in ProfilerSettings.__struct_fields__ if getattr(self, name)]
        return ", ".join(["timeline", *("execution trace" if name == "et" else name for name in wanted)])


class RecordSettings(ProfilerSettings, frozen=True, kw_only=True):
    """All counts are in steps of the program, one after the other in the order of these fields."""

    warmup: int = 2
    """Left alone: the first steps allocate, tune and compile."""
    unprofiled: int = 5
    """Timed without the profiler, before it starts and again after it ended."""
    profiler_warmup: int = 1
    """Run under the profiler and thrown away: its own first steps are slow."""
    steps: int = 3
    """Recorded."""
    settle: int = 1
    """Left alone after the profiler has ended."""
    lean: bool = False
    """Record as many further steps with the timeline alone: their host times are nearer to those without profiler."""
    overheads: bool = False
    """After the recording, run the profiler with other settings too, and state what each of them costs."""
    step_marker: StepMarker = "auto"
    every: int = 1
    """So many marks make one step."""
    stop: bool = False
    """End the program when everything is recorded (programs started by `stepscope trace record` only)."""

    def __post_init__(self) -> None:
        for name in ("warmup", "unprofiled", "profiler_warmup", "settle"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it cannot be below 0")
        for name in ("steps", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.step_marker not in STEP_MARKERS:
            raise ValueError(f"step_marker {self.step_marker!r} is none of {', '.join(STEP_MARKERS)}")
        if self.ranges and not self.et:
            raise ValueError("ranges stand in the execution trace: they need et")

    @property
    def profiler(self) -> ProfilerSettings:
        names = ProfilerSettings.__struct_fields__
        return ProfilerSettings(**{name: getattr(self, name) for name in names})

    @property
    def steps_before(self) -> int:
        """Steps that pass before the first recorded one."""
        return self.warmup + self.unprofiled + self.profiler_warmup


def make_settings(**chosen: Any) -> RecordSettings:
    """Raises UsageError for what cannot be."""
    try:
        return msgspec.convert(chosen, RecordSettings)
    except (ValueError, msgspec.ValidationError) as error:
        raise UsageError(str(error), hint="stepscope trace record --help explains the options") from error


StageKind = Literal["alone", "timed", "prepared", "profiled"]
"""`alone`: nothing is done. `timed`: without the profiler. `prepared`: the profiler runs and keeps nothing."""
When = Literal["before", "recorded", "after", "lean", "variant"]

LEAN = ProfilerSettings(shapes=False, et=False)
"""What a timeline needs and nothing more."""


class RecordingStage(NamedTuple):
    kind: StageKind
    steps: int
    when: When
    profiler: ProfilerSettings | None = None
    """Settings of `prepared` and `profiled` stages."""


def make_stages(settings: RecordSettings) -> list[RecordingStage]:
    """Stages without steps are left out."""

    def profiled(when: When, profiler: ProfilerSettings) -> list[RecordingStage]:
        return [
            RecordingStage("prepared", settings.profiler_warmup, when, profiler),
            RecordingStage("profiled", settings.steps, when, profiler),
        ]

    chosen = settings.profiler
    stages = [
        RecordingStage("alone", settings.warmup, "before"),
        RecordingStage("timed", settings.unprofiled, "before"),
        *profiled("recorded", chosen),
        RecordingStage("alone", settings.settle, "after"),
        RecordingStage("timed", settings.unprofiled, "after"),
    ]
    if settings.lean:
        stages += profiled("lean", LEAN)
    if settings.overheads:
        for other in make_variants(chosen, *([LEAN] if settings.lean else [])):
            stages += profiled("variant", other)
    return [stage for stage in stages if stage.steps]


def make_variants(*chosen: ProfilerSettings) -> list[ProfilerSettings]:
    """From the cheapest on, each with one thing more; those that are `chosen` are timed while they record."""
    added = ((), ("shapes",), ("et",), ("shapes", "et"), ("memory",), ("stacks",))
    variants = [msgspec.structs.replace(LEAN, **dict.fromkeys(names, True)) for names in added]
    return [one for one in variants if one not in chosen]


RANKS_FOLDER, ET_FOLDER, LEAN_FOLDER = "ranks", "et", "lean"
FOLDERS = (RANKS_FOLDER, KINETO_FOLDER, ET_FOLDER, LEAN_FOLDER)
SCHEMA_VERSION = 1

T = TypeVar("T")

Status = Literal["recorded", "partial", "nothing"]
"""`partial`: the program ended before all steps were recorded; what there is, is whole."""


class RecordedFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    """Relative to the recording."""
    size_bytes: int
    sha256: str


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that were timed in one go: the device was waited for before the first and after the last, not between."""

    when: When
    profiler: ProfilerSettings | None
    """None: without the profiler."""
    total_s: float
    intervals_s: list[float]
    """From mark to mark on the host, which may run ahead of the device."""

    @property
    def steps(self) -> int:
        return len(self.intervals_s)

    @property
    def step_s(self) -> float:
        return self.total_s / self.steps


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """How much longer a step takes under the profiler."""

    profiler: ProfilerSettings
    profiled_s: float
    unprofiled_s: float

    @property
    def ratio(self) -> float:
        return self.profiled_s / self.unprofiled_s


class RankRecording(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank recorded of itself."""

    rank: int
    world_size: int
    local_rank: int = 0
    host: str = ""
    pid: int = 0
    device: str | None = None
    """Name of the accelerator in use; None: none."""
    versions: dict[str, str] = {}
    status: Status = "nothing"
    step_marker: str = ""
    """What ended the steps."""
    steps_seen: int = 0
    """Marks that the program made in all, as steps."""
    recorded_steps: list[int] = []
    """Their numbers; the program's first step is 0."""
    times: list[StageTimes] = []
    kineto: RecordedFile | None = None
    et: RecordedFile | None = None
    lean: RecordedFile | None = None
    """The timeline alone, of other steps."""
    resources: str | None = None
    """Folder with the sources of compiled kernels."""
    notices: list[str] = []
    system: System | None = None
    """Recorded by the first rank on each host."""
    linked: LinkSummary | None = None
    """How far the two traces were joined; None where that was not tried."""

    def unprofiled_s(self) -> float | None:
        """A step's time without the profiler, over all steps that were timed so.

        On a GPU, before the profiler alone where that was timed: CUPTI stays attached to the process once it was used,
        and its callbacks go on slowing every launch.
        """
        timed = [one for one in self.times if one.profiler is None]
        if self.device is not None:
            timed = [one for one in timed if one.when == "before"] or timed
        steps = sum(one.steps for one in timed)
        return sum(one.total_s for one in timed) / steps if steps else None

    def overheads(self) -> list[Overhead]:
        """One for each profiler setting that ran; empty where nothing was timed without the profiler."""
        unprofiled_s = self.unprofiled_s()
        if not unprofiled_s:
            return []
        return [
            Overhead(profiler=one.profiler, profiled_s=one.step_s, unprofiled_s=unprofiled_s)
            for one in self.times
            if one.profiler is not None
        ]


class Recording(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="recording"):
    """The folder's own record; made anew whenever a rank has something to add."""

    schema_version: int = SCHEMA_VERSION
    created_at: str
    tool_version: str
    command: list[str]
    settings: RecordSettings
    world_size: int
    ranks: list[RankRecording]
    """Those whose files are in this folder; ranks of other hosts may have written elsewhere."""
    system: System | None = None
    exit_code: int | None = None
    """Exit code of the program; None where it is not known."""


def describe_file(folder: Path, path: Path) -> RecordedFile:
    return RecordedFile(path=str(path.relative_to(folder)), size_bytes=path.stat().st_size, sha256=hash_file(path))


def rank_file(folder: Path, rank: int) -> Path:
    return folder / RANKS_FOLDER / f"rank{rank}.json"


def write_rank(folder: Path, record: RankRecording) -> None:
    write_file_atomically(rank_file(folder, record.rank), msgspec.json.encode(record))


def read_ranks(folder: Path) -> list[RankRecording]:
    """In order of their numbers. Empty files are claims of ranks that have not recorded yet."""
    found = []
    for path in (folder / RANKS_FOLDER).glob("rank*.json"):
        data = path.read_bytes()
        if data:
            found.append(_decode(data, RankRecording, path))
    return sorted(found, key=lambda one: one.rank)


def write_recording(
    folder: Path, *, command: Sequence[str], settings: RecordSettings, exit_code: int | None = None
) -> Recording:
    """Put together what the ranks have written so far. Ranks that end at the same time wait for each other."""
    with hold_lock(folder):
        ranks = read_ranks(folder)
        recording = Recording(
            created_at=utc_now(),
            tool_version=__version__,
            command=list(command),
            settings=settings,
            world_size=max((one.world_size for one in ranks), default=1),
            ranks=[msgspec.structs.replace(one, system=None) for one in ranks],
            system=_merge([one.system for one in ranks if one.system is not None]),
            exit_code=exit_code,
        )
        data = msgspec.json.format(msgspec.json.encode(recording), indent=1)
        write_file_atomically(folder / RECORDING_FILE, data)
    return recording


def _merge(systems: list[System]) -> System | None:
    from stepscope.system import merge_systems

    return merge_systems(systems) if systems else None


def read_recording(folder: Path) -> Recording:
    """Raises BadInputError where the folder holds none."""
    path = folder / RECORDING_FILE if folder.is_dir() else folder
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInputError(
            f"{folder} holds no recording: {error.strerror}", hint="stepscope trace record makes one", where=str(path)
        ) from error
    return _decode(data, Recording, path)


def is_recording(path: Path) -> bool:
    return (path / RECORDING_FILE).is_file()


def _decode(data: bytes, kind: type[T], path: Path) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise BadInputError(
            f"{path.name} is not what a recording writes: {error}", hint="record again", where=str(path)
        ) from error
