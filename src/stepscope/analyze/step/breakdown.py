"""Where a profiled step went on the device: shares that exclude each other and add up to the step to the nanosecond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from stepscope.analyze.step.device_work import COMMUNICATION, COMPUTE, TRANSFER, DeviceWork, Window, device_label
from stepscope.analyze.step.host_activity import HostActivity, describe_activities, divide_cpu_time
from stepscope.analyze.step.idle import HOST_REASONS, OTHER_REASONS, SYNC_REASONS, find_gaps
from stepscope.analyze.step.intervals import (
    Intervals,
    clip,
    common_length,
    complement,
    intersect,
    join,
    length,
    no_intervals,
    subtract,
    union,
)
from stepscope.analyze.step.numbers import distinct, seconds
from stepscope.analyze.step.view import TraceView, view
from stepscope.core.units import format_duration
from stepscope.formats.timeline import KERNEL, MISSING, Integers, Timeline

SHARES = ("compute", "exposed_comm", "exposed_copy", "host_idle", "sync_idle", "other_idle")
"""In the order in which time is given away: what two kinds of work cover at once belongs to the first of them."""

SHARE_WORDS = {
    "compute": "compute",
    "exposed_comm": "exposed communication",
    "exposed_copy": "exposed copies",
    "host_idle": "launch-bound idle",
    "sync_idle": "idle in synchronisation",
    "other_idle": "other idle",
}
CPU_SHARE_WORDS = {
    **SHARE_WORDS,
    "compute": "inside operators",
    "host_idle": "data loading, sleeping and Python code",
    "sync_idle": "waiting in synchronisation",
    "other_idle": "outside recorded calls",
}
"""What they are called where the trace has no device work."""

CPU = "cpu"
UNRECORDED = "not recorded"
"""The label of the device where the trace has no device work: none was used, or it was left out."""
CPU_NOTE = (
    "no device rows in this trace: the CPU is the device; compute is time in which any thread was inside an operator, "
    "communication is time inside collectives on the host; beside these, what the program's thread did counts: "
    "loading data, sleeping, waiting, Python code"
)
UNRECORDED_NOTE = (
    "no device rows in this trace, though {evidence}: operators show what the host takes to launch, and nothing shows "
    "what the device takes"
)
_SEVERAL_NOTE = "the rank has {count} devices; these are the values of device {device}, which was busy longest"
_OTHER_STEPS_NOTE = "for {spent} of the step the device ran only work of other steps"
_RUN_AHEAD_NOTE = (
    "the host runs ahead of the device: from its first launch to the end of its last device activity the step takes "
    "{whole} (launch to completion), of which the device spends {before} on the steps before"
)
_OTHER_STEPS_SHARE = 0.01


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a window; see SHARES."""

    compute: float
    exposed_comm: float
    exposed_copy: float
    host_idle: float
    sync_idle: float
    other_idle: float


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """How much of some communication ran beside compute."""

    communication_s: float
    """Time in which any of it ran."""
    overlapped_s: float
    exposed_s: float
    hidden_share: float | None
    """overlapped_s over communication_s; None without communication."""


class GroupOverlap(Exposure, frozen=True, kw_only=True):
    """Communication of one process group."""

    group: str | None
    """None: kernels that do not say which group they are of."""
    description: str | None
    kernels: int


class Overlap(Exposure, frozen=True, kw_only=True):
    """All communication."""

    communication_sum_s: float
    """Sum of the durations of communication kernels: more, where several run at once."""
    exposed_from_all_s: float
    """Communication beside which neither compute nor copies ran."""
    groups: list[GroupOverlap]


class DeviceBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """One device in one window."""

    device: str
    breakdown_s: Shares
    breakdown_ns: dict[str, int]
    """The same in whole nanoseconds; adds up to the window exactly."""
    device_busy_s: float
    kernels: int
    """Kernels that the step launched."""
    copies: int
    """Copies and fills that it launched."""
    head_idle_s: float
    between_idle_s: float
    tail_idle_s: float
    """Idle before the first work in the window, between, and after the last."""
    combinations_s: dict[str, float]
    """Time by what ran at once (`compute+communication`)."""
    overlap: Overlap
    other_steps_s: float
    """Part of the busy time in which only work of other steps ran: it is busy time here all the same."""


class Breakdown(DeviceBreakdown, frozen=True, kw_only=True):
    """A profiled step on the rank's device, which is the one that was busy longest."""

    step: int | None
    """None: the whole trace."""
    step_s: float
    """Step time: from the end of the device work of the steps before (from the start on the host where that is later)
    to the end of the step's own. In steady state the period of the loop. Profiled time, which is longer than a step
    without the profiler."""
    host_s: float
    """Length of the step on the host, without device work that ran on after it."""
    launch_to_completion_s: float
    """From the start of the step on the host to the end of its device work: longer than step_s where the host runs
    ahead of the device."""
    window_start_ns: int
    window_end_ns: int
    profiled: bool = True
    devices: list[DeviceBreakdown] = []
    """Every device of the rank, where it has several."""
    host_activities: list[HostActivity] = []
    """What the program did beside operators, longest first; only in a trace without device work, and only from
    `break_down`."""
    note: str | None = None

    @property
    def has_device(self) -> bool:
        """Whether the trace has device work."""
        return self.device not in (CPU, UNRECORDED)


def share_words(breakdown: Breakdown) -> dict[str, str]:
    """What each of SHARES is called, in their order."""
    return SHARE_WORDS if breakdown.has_device else CPU_SHARE_WORDS


def list_shares(shares: Shares) -> list[float]:
    """In the order of SHARES."""
    return [getattr(shares, name) for name in SHARES]


def break_down(timeline: Timeline, step: int | None) -> Breakdown:
    """The shares of one step; None: of the whole trace."""
    trace = view(timeline)
    window = trace.window(step)
    found = _break_down(trace, step, window)
    if trace.works:
        return found
    activities = describe_activities(trace, window, divide_cpu_time(trace, window))
    return msgspec.structs.replace(found, host_activities=activities)


def measure_overlap(timeline: Timeline, step: int | None) -> Overlap:
    """Only `overlap` of `break_down`: the reasons of idle time are not looked for, so it comes sooner."""
    trace = view(timeline)
    window = trace.window(step)
    if not trace.works:
        return _break_down_cpu(trace, window).overlap
    work = trace.busiest(window)
    sets = _device_sets(work, window)
    groups, sum_ns = _communication(trace, work, window, sets[COMPUTE])
    return _overlap(*_combine(sets), groups=groups, sum_ns=sum_ns)


def break_down_steps(timeline: Timeline) -> list[Breakdown]:
    """Every step, in order of time: they add up."""
    trace = view(timeline)
    return [_break_down(trace, number, window) for number, window in trace.windows.items()]


def _break_down(trace: TraceView, step: int | None, window: Window) -> Breakdown:
    return trace.keep(("breakdown", step), lambda: _divide(trace, step, window))


def _divide(trace: TraceView, step: int | None, window: Window) -> Breakdown:
    notes = []
    devices: list[DeviceBreakdown] = []
    if not trace.works:
        rank = _break_down_cpu(trace, window)
        unrecorded = trace.launch_evidence
        notes.append(CPU_NOTE if unrecorded is None else UNRECORDED_NOTE.format(evidence=unrecorded))
    else:
        chosen = trace.busiest(window)
        rank = _break_down_device(trace, chosen, step, window)
        if len(trace.works) > 1:
            notes.append(_SEVERAL_NOTE.format(count=len(trace.works), device=rank.device))
            devices = [
                rank if work is chosen else _break_down_device(trace, work, step, window) for work in trace.works
            ]
    step_s = seconds(window.length_ns)
    if rank.other_steps_s > _OTHER_STEPS_SHARE * step_s:
        notes.append(_OTHER_STEPS_NOTE.format(spent=format_duration(rank.other_steps_s)))
    span = None if step is None else trace.span(step)
    whole_s = step_s if step is None else seconds(trace.completion_windows[step].length_ns)
    if whole_s > (1 + _OTHER_STEPS_SHARE) * step_s:
        before = format_duration(whole_s - step_s)
        notes.append(_RUN_AHEAD_NOTE.format(whole=format_duration(whole_s), before=before))
    return Breakdown(
        **{name: getattr(rank, name) for name in DeviceBreakdown.__struct_fields__},
        step=step,
        step_s=step_s,
        host_s=step_s if span is None else seconds(span.end_ns - span.start_ns),
        launch_to_completion_s=whole_s,
        window_start_ns=window.start_ns,
        window_end_ns=window.end_ns,
        devices=devices,
        note="; ".join(notes) or None,
    )


def _break_down_device(trace: TraceView, work: DeviceWork, step: int | None, window: Window) -> DeviceBreakdown:
    part = work.part(window)
    start, end = work.start[part], work.end[part]
    sets = _device_sets(work, window)
    groups, sum_ns = _communication(trace, work, window, sets[COMPUTE])
    gaps = find_gaps(trace, work, window)
    sums = gaps.parts.sum(axis=0)
    idle = [int(sums[list(reasons)].sum()) for reasons in (HOST_REASONS, SYNC_REASONS, OTHER_REASONS)]
    rows, others = work.rows, 0
    if step is not None:
        own = work.step == step
        rows, mine = rows[own], own[part]
        if not mine.all():
            foreign, native = (union(start[kept], end[kept], in_order=True) for kept in (~mine, mine))
            others = length(clip(subtract(foreign, native), *window))
    kernels = int((trace.kind[rows] == KERNEL).sum())
    return _assemble(
        device=device_label(work.device),
        sets=sets,
        idle=idle,
        positions=_idle_positions(gaps.spans, sets, window),
        counts=(kernels, len(rows) - kernels),
        other_steps_ns=others,
        groups=groups,
        sum_ns=sum_ns,
    )


def _device_sets(work: DeviceWork, window: Window) -> list[Intervals]:
    """When the device computed, communicated and copied."""
    part = work.part(window)
    start, end, share = work.start[part], work.end[part], work.share[part]
    sets = []
    for one in (COMPUTE, COMMUNICATION, TRANSFER):
        mine = share == one
        sets.append(clip(union(start[mine], end[mine], in_order=True), *window))
    return sets


def _communication(
    trace: TraceView, work: DeviceWork, window: Window, compute: Intervals
) -> tuple[list[GroupOverlap], int]:
    """The overlap of each process group, and the sum of all durations."""
    part = work.part(window)
    mine = np.flatnonzero(work.share[part] == COMMUNICATION) + part.start
    sum_ns = length(clip(Intervals(work.start[mine], work.end[mine]), *window))
    return _group_overlaps(trace, work.rows[mine], window, compute), sum_ns


def _assemble(
    *,
    device: str,
    sets: Sequence[Intervals],
    idle: Sequence[int],
    positions: tuple[int, int, int],
    counts: tuple[int, int],
    other_steps_ns: int,
    groups: list[GroupOverlap],
    sum_ns: int,
) -> DeviceBreakdown:
    alone, together = _combine(sets)
    compute, communication = (_time_with(together, {name}) for name in ("compute", "communication"))
    overlapped = _time_with(together, {"compute", "communication"})
    in_ns = dict(zip(SHARES, (compute, communication - overlapped, alone["copy"], *idle), strict=True))
    head, between, tail = positions
    return DeviceBreakdown(
        device=device,
        breakdown_s=Shares(**{name: seconds(value) for name, value in in_ns.items()}),
        breakdown_ns=in_ns,
        device_busy_s=seconds(sum(together.values())),
        kernels=counts[0],
        copies=counts[1],
        head_idle_s=seconds(head),
        between_idle_s=seconds(between),
        tail_idle_s=seconds(tail),
        combinations_s={"+".join(names): seconds(spent) for names, spent in together.items()},
        overlap=_overlap(alone, together, groups=groups, sum_ns=sum_ns),
        other_steps_s=seconds(other_steps_ns),
    )


def _time_with(together: Mapping[tuple[str, ...], int], kinds: set[str]) -> int:
    """Time in which at least these kinds of work ran."""
    return sum(spent for names, spent in together.items() if kinds.issubset(names))


def _overlap(
    alone: Mapping[str, int], together: Mapping[tuple[str, ...], int], *, groups: list[GroupOverlap], sum_ns: int
) -> Overlap:
    communication = _time_with(together, {"communication"})
    overlapped = _time_with(together, {"compute", "communication"})
    return Overlap(
        **_exposure(communication, overlapped),
        communication_sum_s=seconds(sum_ns),
        exposed_from_all_s=seconds(alone["communication"]),
        groups=groups,
    )


def _exposure(total: int, overlapped: int) -> dict[str, Any]:
    """Fields of Exposure."""
    times = {"communication_s": total, "overlapped_s": overlapped, "exposed_s": total - overlapped}
    return {
        **{name: seconds(spent) for name, spent in times.items()},
        "hidden_share": overlapped / total if total else None,
    }


def _combine(sets: Sequence[Intervals]) -> tuple[dict[str, int], dict[tuple[str, ...], int]]:
    """Nanoseconds in which each kind of work ran alone, and in which each combination ran: inclusion and exclusion."""
    one, two, three = sets
    first, second, third = common_length(one, two), common_length(one, three), common_length(two, three)
    every = common_length(one, intersect(two, three)) if third else 0
    alone = {
        "compute": length(one) - first - second + every,
        "communication": length(two) - first - third + every,
        "copy": length(three) - second - third + every,
    }
    together: dict[tuple[str, ...], int] = {(name,): spent for name, spent in alone.items()}
    together["compute", "communication"] = first - every
    together["compute", "copy"] = second - every
    together["communication", "copy"] = third - every
    together["compute", "communication", "copy"] = every
    return alone, {names: spent for names, spent in together.items() if spent}


def _idle_positions(gaps: Intervals, sets: Sequence[Intervals], window: Window) -> tuple[int, int, int]:
    """Idle time before the first work, between, and after the last; all of it is before where there is no work."""
    starts = [int(one.start[0]) for one in sets if len(one.start)]
    ends = [int(one.end[-1]) for one in sets if len(one.end)]
    first, last = (min(starts), max(ends)) if starts else (window.end_ns, window.end_ns)
    head, tail = first - window.start_ns, window.end_ns - last
    return head, length(gaps) - head - tail, tail


def _group_overlaps(trace: TraceView, rows: Integers, window: Window, compute: Intervals) -> list[GroupOverlap]:
    rows = rows[trace.end[rows] > window.start_ns]
    codes = trace.column("group")[rows] if len(rows) else rows
    overlaps = []
    for code in distinct(codes):
        mine = rows[codes == code]
        spans = clip(trace.spans(mine), *window)
        overlaps.append(
            GroupOverlap(
                group=None if code == MISSING else trace.text(code),
                description=trace.timeline.text("group_description", int(mine[0])),
                kernels=len(mine),
                **_exposure(length(spans), common_length(spans, compute)),
            )
        )
    return overlaps


def _break_down_cpu(trace: TraceView, window: Window) -> DeviceBreakdown:
    times = divide_cpu_time(trace, window)
    sets = (times.compute, times.communication, no_intervals())
    gaps = complement(join(sets), *window)
    spent = {activity: length(spans) for activity, spans in times.beside.items()}
    waiting = spent["synchronisation"]
    host = sum(spent.values()) - waiting
    rows = times.communication_rows
    return _assemble(
        device=CPU if trace.launch_evidence is None else UNRECORDED,
        sets=sets,
        idle=(host, waiting, length(gaps) - host - waiting),
        positions=_idle_positions(gaps, sets, window),
        counts=(0, 0),
        other_steps_ns=0,
        groups=[],
        sum_ns=length(clip(Intervals(trace.start[rows], trace.end[rows]), *window)),
    )
