"""Everything the analyses say about one profiled step, joined."""

from __future__ import annotations

from itertools import pairwise

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
    parts = (
        break_down(timeline, number),
        explain_idle(timeline, number),
        study_launches(timeline, number),
        measure_overheads(timeline, number),
        find_sequences(timeline, number),
    )
    kernels = list_kernels(timeline, number)
    notes = [*_found_steps(timeline), *_between_steps(trace)]
    notes += [part.note for part in (*parts, memory) if part.note is not None]
    if has_counters and counters.note is not None:
        notes.append(counters.note)
    breakdown, idle, launches, overheads, sequences = parts
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
        notes=list(dict.fromkeys([*notes, *kernels.notes, *_repairs(timeline)])),
    )


def _found_steps(timeline: Timeline) -> list[str]:
    if timeline.step_marker == "none":
        return ["no steps marked: the whole trace is taken as one step"]
    if timeline.step_marker == "optimizer":
        return ["no ProfilerStep: a step is the time from the end of one optimizer step to the end of the next"]
    return []


def _between_steps(trace: TraceView) -> list[str]:
    """Marks of a user need not follow each other: a loop has a longer period then than its marked steps."""
    from statistics import median

    ends = [window.end_ns for window in trace.windows.values()]
    periods = [later - earlier for earlier, later in pairwise(ends)]
    times = [window.length_ns for window in trace.windows.values()]
    if not periods or median(periods) <= BETWEEN_STEPS * median(times):
        return []
    period, time = format_duration(median(periods) / 1e9), format_duration(median(times) / 1e9)
    return [f"one step ends every {period}, and takes {time}: the rest lies between the marked steps"]


def _repairs(timeline: Timeline) -> list[str]:
    return [f"{what}: {count}" for what, count in timeline.repairs.items()]
