"""Everything the analyses say about one profiled step, joined."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import msgspec

from stepscope.analyze.step.breakdown import Breakdown, break_down
from stepscope.analyze.step.counters import CounterReport, count_by_operator
from stepscope.analyze.step.idle import IdleReport, explain_idle
from stepscope.analyze.step.kernels import KernelReport, list_kernels
from stepscope.analyze.step.launches import LaunchReport, study_launches
from stepscope.analyze.step.memory import MemoryReport, trace_memory
from stepscope.analyze.step.overheads import OverheadReport, measure_overheads
from stepscope.analyze.step.sequences import SequenceReport, find_sequences
from stepscope.analyze.step.variation import StepVariation, compare_steps
from stepscope.analyze.step.view import TraceView, view
from stepscope.core.errors import BadInputError
from stepscope.core.units import format_duration
from stepscope.formats.timeline import Timeline

BETWEEN_STEPS = 1.05
"""Steps that end further apart than so many times their length leave time between them."""
NO_DEVICE = (
    "idle gaps, launches, overheads and kernel sequences do not apply without a device; see operators on the host"
)
"""Instead of the note of each of these analyses, which stands with its result."""
_MARKERS = {
    "none": "no steps marked: the whole trace is taken as one step",
    "optimizer": "no ProfilerStep: a step is the time from the end of one optimizer step to the end of the next",
}
CHOSEN = "step {step} of {count}: the one nearest to the median step time"


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One profiled step of one rank."""

    rank: int | None
    world_size: int | None
    step: int
    chosen: str | None
    """Why this step; None where the caller named it."""
    steps: int
    step_marker: str
    """How steps were found, see Timeline."""
    breakdown: Breakdown
    idle: IdleReport
    kernels: KernelReport
    launches: LaunchReport
    overheads: OverheadReport
    sequences: SequenceReport
    variation: StepVariation
    counters: CounterReport | None
    """None where the trace has none."""
    memory: MemoryReport | None
    """None where it was not recorded."""
    notes: list[str]
    """What does not apply to this trace, and what was repaired while reading it."""


def explain_step(timeline: Timeline, step: int | None = None) -> StepReport:
    """One step; without a number the one nearest to the median step time, without the first and last of many."""
    trace = view(timeline)
    number = trace.median_step() if step is None else step
    if number is None:
        raise BadInputError("the trace has no events", hint="record it again", where=trace.source)
    counters, memory = count_by_operator(timeline, number), trace_memory(timeline, number)
    has_counters = bool(counters.ranges or counters.series)
    breakdown = break_down(timeline, number)
    idle, launches = explain_idle(timeline, number), study_launches(timeline, number)
    overheads, sequences = measure_overheads(timeline, number), find_sequences(timeline, number)
    kernels = list_kernels(timeline, number)
    notes = [_MARKERS.get(timeline.step_marker), *_between_steps(trace), breakdown.note]
    if trace.works:
        notes += [idle.note, launches.note, overheads.note, sequences.note, memory.note, *kernels.notes]
    else:
        notes += [NO_DEVICE, memory.note]
    if has_counters:
        notes.append(counters.note)
    repairs = [f"{what}: {count}" for what, count in timeline.repairs.items()]
    return StepReport(
        rank=timeline.rank,
        world_size=timeline.world_size,
        step=number,
        chosen=CHOSEN.format(step=number, count=len(timeline.steps)) if step is None else None,
        steps=len(timeline.steps),
        step_marker=timeline.step_marker,
        breakdown=breakdown,
        idle=idle,
        kernels=kernels,
        launches=launches,
        overheads=overheads,
        sequences=sequences,
        variation=compare_steps(timeline),
        counters=counters if has_counters else None,
        memory=memory if memory.devices else None,
        notes=[note for note in dict.fromkeys([*notes, *repairs]) if note is not None],
    )


def _between_steps(trace: TraceView) -> list[str]:
    """Marks of a user need not follow each other: a loop has a longer period then than its marked steps."""
    windows = list(trace.windows.values())
    # Of the same step each: the median of all periods and that of all step times may be of different steps.
    pairs = [(later.end_ns - earlier.end_ns, later.length_ns) for earlier, later in pairwise(windows)]
    if not pairs or median(period / max(time, 1) for period, time in pairs) <= BETWEEN_STEPS:
        return []
    period, time = (format_duration(median(column) / 1e9) for column in zip(*pairs, strict=True))
    return [f"one step ends every {period}, and takes {time}: the rest lies between the marked steps"]
