"""What to record, and how much of the program's life is spent on it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import msgspec

from stepscope.core.errors import UsageError

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
        words = {
            "shapes": "shapes",
            "stacks": "stacks",
            "memory": "memory",
            "et": "execution trace",
            "ranges": "ranges",
        }
        return ", ".join(["timeline", *(word for name, word in words.items() if getattr(self, name))])


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


class Stage(NamedTuple):
    kind: StageKind
    steps: int
    when: When
    profiler: ProfilerSettings | None = None
    """Settings of `prepared` and `profiled` stages."""


def make_stages(settings: RecordSettings) -> list[Stage]:
    """Stages without steps are left out."""
    chosen = settings.profiler
    stages = [
        Stage("alone", settings.warmup, "before"),
        Stage("timed", settings.unprofiled, "before"),
        Stage("prepared", settings.profiler_warmup, "recorded", chosen),
        Stage("profiled", settings.steps, "recorded", chosen),
        Stage("alone", settings.settle, "after"),
        Stage("timed", settings.unprofiled, "after"),
    ]
    if settings.lean:
        stages += [
            Stage("prepared", settings.profiler_warmup, "lean", LEAN),
            Stage("profiled", settings.steps, "lean", LEAN),
        ]
    if settings.overheads:
        for other in make_variants(chosen, *([LEAN] if settings.lean else [])):
            stages += [
                Stage("prepared", settings.profiler_warmup, "variant", other),
                Stage("profiled", settings.steps, "variant", other),
            ]
    return [stage for stage in stages if stage.steps]


def make_variants(*chosen: ProfilerSettings) -> list[ProfilerSettings]:
    """From the cheapest on, each with one thing more; those that are `chosen` are timed while they record."""
    variants = [
        LEAN,
        msgspec.structs.replace(LEAN, shapes=True),
        msgspec.structs.replace(LEAN, et=True),
        msgspec.structs.replace(LEAN, shapes=True, et=True),
        msgspec.structs.replace(LEAN, memory=True),
        msgspec.structs.replace(LEAN, stacks=True),
    ]
    return [one for one in variants if one not in chosen]
