"""What happens at which step: stages of a recording, one after the other. Knows neither torch nor a clock."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from stepscope.traces.recording.settings import ProfilerSettings, RecordSettings

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
    """Of `prepared` and `profiled`."""


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
