"""What the host adds around device work: the five overheads T1 to T5 by operator.

The names are those of Lin et al., "Building a Performance Model for Deep Learning Recommendation Model Training on
GPUs". Nothing is subtracted for the profiler: every value is profiled time, and `events` says how much was recorded
inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.section import Section, field, make_table
from stepscope.analyze.step.host_waits import host_waits
from stepscope.analyze.step.intervals import measure_within
from stepscope.analyze.step.numbers import seconds, sum_by
from stepscope.analyze.step.view import TraceView, view
from stepscope.formats.timeline import DEVICE_KINDS, MISSING, OPERATOR, RUNTIME, Integers, Timeline

if TYPE_CHECKING:
    from stepscope.analyze.job import JobReport

FENCE = 1.5
"""Values more than so many interquartile ranges outside the quartiles are left out of a trimmed mean."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one overhead."""

    count: int
    mean_s: float
    median_s: float
    trimmed_mean_s: float
    """Without values more than 1.5 interquartile ranges outside the quartiles."""


class OperatorOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """Overheads of one top-level operator."""

    name: str
    count: int
    launching: int
    """So many of them launched device work."""
    launches: float
    """Launch calls in each of those, mean."""
    events: float
    """Host events recorded inside, mean: each costs the profiler about the same."""
    t2: Sample | None
    """From the start of the operator to its first launch."""
    t3: Sample | None
    """From the end of its last launch to its end."""
    t5: Sample | None
    """Between two launches in it."""
    t5_without_launch: Sample | None
    """All of it, where it launched nothing."""


class OverheadReport(msgspec.Struct, frozen=True, kw_only=True):
    """Host overheads of a step."""

    step: int | None
    t1: Sample | None
    """Between two top-level operators of a thread."""
    t1_left_out: int
    """Gaps not counted: the host was inside a blocking call, or the step ended."""
    t4: dict[str, Sample]
    """The launch call itself, by its name."""
    operators: list[OperatorOverhead]
    """Most host time first."""
    note: str | None = None


class _Inside(NamedTuple):
    """Launch calls under top-level operators, ordered by operator, then time."""

    call: Any
    operator: Any
    is_first: Any
    is_last: Any


def measure_overheads(timeline: Timeline, step: int | None) -> OverheadReport:
    """The overheads of one step; None: of the whole trace."""
    trace = view(timeline)
    gaps, left_out = _gaps(trace, step)
    launch = trace.parent[trace.rows_of(step, *DEVICE_KINDS)]
    calls = np.flatnonzero(trace.mask(launch[launch >= 0]))
    inside = _calls_in_operators(trace, calls)
    took, named = trace.end[calls] - trace.start[calls], trace.name[calls]
    return OverheadReport(
        step=step,
        t1=_sample(gaps),
        t1_left_out=left_out,
        t4={trace.text(code): sample for code in trace.codes_in(calls) if (sample := _sample(took[named == code]))},
        operators=_by_operator(trace, step, inside),
        note=None if len(calls) else "nothing was launched: T2 to T4 do not apply",
    )


def _sample(values: Any) -> Sample | None:
    if not len(values):
        return None
    ordered = np.sort(values)
    first, middle, third = np.interp(np.array((0.25, 0.5, 0.75)) * (len(ordered) - 1), np.arange(len(ordered)), ordered)
    reach = FENCE * (third - first)
    kept = ordered[(ordered >= first - reach) & (ordered <= third + reach)]
    return Sample(
        count=len(ordered),
        mean_s=seconds(int(ordered.sum()) / len(ordered)),
        median_s=seconds(float(middle)),
        trimmed_mean_s=seconds(int(kept.sum()) / len(kept)),
    )


def _gaps(trace: TraceView, step: int | None) -> tuple[Any, int]:
    """T1, and how many gaps say nothing about it."""
    found: list[Any] = [np.zeros(0, np.int64)]
    left_out = 0
    for thread in trace.stacks:
        top = trace.top_operators(thread)
        if step is not None:
            top = top[trace.step[top] == step]
        if len(top) < 2:
            continue
        begin = np.maximum.accumulate(trace.end[top])[:-1]
        finish = trace.start[top[1:]]
        blocked = measure_within(host_waits(trace).synchronising(thread), begin, finish) > 0
        kept = (finish >= begin) & ~blocked & (trace.step[top[1:]] == trace.step[top[:-1]])
        found.append((finish - begin)[kept])
        left_out += int((~kept).sum())
    return np.concatenate(found), left_out


def _calls_in_operators(trace: TraceView, calls: Integers) -> _Inside:
    operator = trace.outermost(calls, trace.is_kind(OPERATOR))
    calls, operator = calls[operator >= 0], operator[operator >= 0]
    order = np.lexsort((trace.start[calls], operator))
    calls, operator = calls[order], operator[order]
    changes = np.diff(operator, prepend=MISSING, append=MISSING) != 0
    return _Inside(calls, operator, is_first=changes[:-1], is_last=changes[1:])


def _by_operator(trace: TraceView, step: int | None, inside: _Inside) -> list[OperatorOverhead]:
    tops = [trace.top_operators(thread) for thread in trace.stacks]
    top = np.concatenate(tops) if tops else trace.rows(OPERATOR)[:0]
    if step is not None:
        top = top[trace.step[top] == step]
    launches = np.bincount(inside.operator, minlength=len(trace.start))
    # How many operators and calls were recorded under each row as the top-level operator.
    rows = trace.rows_of(step, OPERATOR, RUNTIME)
    above = trace.outermost(rows, trace.is_kind(OPERATOR))
    events = np.bincount(above[(above != MISSING) & (above != rows)], minlength=len(trace.start))
    before = trace.start[inside.call] - trace.start[inside.operator]
    after = trace.end[inside.operator] - trace.end[inside.call]
    between = np.maximum(trace.start[inside.call[1:]] - trace.end[inside.call[:-1]], 0)
    is_inner = ~inside.is_first[1:]
    found = []
    code_inside, code_top = trace.name[inside.operator], trace.name[top]
    spent = sum_by(code_top, trace.end[top] - trace.start[top], len(trace.timeline.texts))
    for code in sorted(trace.codes_in(top), key=lambda code: -spent[code]):
        here, mine = code_inside == code, top[code_top == code]
        count = launches[mine]
        found.append(
            OperatorOverhead(
                name=trace.text(code),
                count=len(mine),
                launching=int((count > 0).sum()),
                launches=float(count[count > 0].mean()) if count.any() else 0.0,
                events=float(events[mine].mean()),
                t2=_sample(before[here & inside.is_first]),
                t3=_sample(np.maximum(after[here & inside.is_last], 0)),
                t5=_sample(between[(here[1:]) & is_inner]),
                t5_without_launch=_sample((trace.end[mine] - trace.start[mine])[count == 0]),
            )
        )
    return found


def overheads_section(job: JobReport) -> Section:
    overheads = job.detail.overheads
    whole = [("T1 between two operators", overheads.t1)] if overheads.t1 is not None else []
    whole += [(f"T4 {name}", sample) for name, sample in overheads.t4.items()]
    by_kind = make_table("T1 and T4", "Between top-level operators of a thread, and inside launch calls", whole, [
        field("Overhead", lambda item: item[0]),
        field("Count", lambda item: item[1].count, "count"),
        field("Mean", lambda item: item[1].mean_s, "s"),
        field("Median", lambda item: item[1].median_s, "s"),
        field("Trimmed mean", lambda item: item[1].trimmed_mean_s, "s", "Without outliers"),
    ])  # fmt: skip
    by_operator = make_table("T2, T3 and T5", "By top-level operator; trimmed means", overheads.operators, [
        field("Operator", "name"),
        field("Count", "count", "count"),
        field("Launches", "launches", "number"),
        field("Events", "events", "number", "Host events recorded inside: each costs the profiler time"),
        field("T2", "t2.trimmed_mean_s", "s", "From its start to its first launch"),
        field("T3", "t3.trimmed_mean_s", "s", "From its last launch to its end"),
        field("T5", "t5.trimmed_mean_s", "s", "Between two launches in it"),
        field("T5 without launch", "t5_without_launch.trimmed_mean_s", "s", "Where it launched nothing"),
    ])  # fmt: skip
    return Section(id="overheads", title="Overheads of the host", tables=[by_kind, by_operator])
