"""Why a device had nothing to do: every gap with its reason and what the host was activity meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.section import Brief, Section, field, make_table
from stepscope.analyze.step.device_work import DeviceWork, Window, busy_spans, device_label
from stepscope.analyze.step.host_waits import host_waits
from stepscope.analyze.step.intervals import Intervals, measure_within
from stepscope.analyze.step.numbers import (
    Whole,
    distinct,
    expand,
    make_rows,
    number_codes,
    seconds,
    share_of,
    sum_by,
    top_by,
)
from stepscope.analyze.step.view import TraceView, view
from stepscope.core.units import format_duration
from stepscope.formats.classify import short_name
from stepscope.formats.timeline import ANNOTATION, MISSING, OPERATOR, PYTHON, RUNTIME, Integers, Timeline

if TYPE_CHECKING:
    from stepscope.analyze.job import JobReport

HOST_LAUNCH, SYNCHRONISING, EVENT_WAIT, COLLECTIVE_PEER, STREAM_ORDER, UNKNOWN = range(6)
LONGEST_HANDOVER_NS = 30_000
"""From the end of one kernel to the start of the next that waits on its stream takes one or two microseconds; what
takes far longer has another reason."""
REASONS = ("host_launch", "sync", "event_wait", "collective_peer", "stream_order", "unknown")
"""host_launch: the next work had not been launched yet. sync: the same, while the host was inside a blocking call.
event_wait: launched, but its stream waited for an event of another one. collective_peer: the host was inside a
collective that runs on the host. stream_order: launched, and only the hand-over on its stream took time. unknown:
launched and not started, or the trace has no launch."""

HOST_REASONS = (HOST_LAUNCH,)
SYNC_REASONS = (SYNCHRONISING, EVENT_WAIT, COLLECTIVE_PEER)
OTHER_REASONS = (STREAM_ORDER, UNKNOWN)
"""How reasons make up host_idle, sync_idle and other_idle of a breakdown."""

_NOTE = "no device rows in this trace: idle gaps of a device do not apply"


class Gaps(NamedTuple):
    """Maximal times in a window in which no stream of the device was busy."""

    spans: Intervals
    next: Integers
    """Place in the device's work of what ended the gap; −1: nothing came after it."""
    parts: Whole
    """Nanoseconds by reason, one row a gap; each row sums to the length of its gap."""
    thread: Integers
    """Thread that launched what came next; the main one where that is not known."""


class IdleGap(msgspec.Struct, frozen=True, kw_only=True):
    start_s: float
    """From the start of the window."""
    duration_s: float
    reason: str
    """The one with the largest part."""
    parts_s: dict[str, float]
    operator: str
    """What the launching thread was activity during most of it."""
    call: str | None
    """Runtime call that took most of it."""
    next_name: str | None
    """Device work that ended it."""


class IdleOf(msgspec.Struct, frozen=True, kw_only=True):
    """Gaps that one host activity is responsible for."""

    operator: str
    gaps: int
    total_s: float
    share: float
    """Fraction of the idle time."""
    longest_s: float


class IdleCauses(msgspec.Struct, frozen=True, kw_only=True):
    """Idle time of one device in one window, by reason."""

    step: int | None
    device: str
    idle_ns: int
    gaps: int
    by_reason_ns: dict[str, int]
    """Sums to idle_ns exactly."""
    note: str | None = None


class IdleReport(IdleCauses, frozen=True, kw_only=True):
    """Also what the host did meanwhile."""

    idle_s: float
    by_reason_s: dict[str, float]
    by_operator: list[IdleOf]
    """Longest first; sums to idle_s."""
    longest: list[IdleGap]


def idle_by_cause(timeline: Timeline, step: int | None) -> IdleCauses:
    """Only the sums by reason: `explain_idle` without who was responsible, sooner."""
    trace = view(timeline)
    window = trace.window(step)
    if not trace.works:
        nothing = dict.fromkeys(REASONS, 0)
        return IdleCauses(step=step, device="cpu", idle_ns=0, gaps=0, by_reason_ns=nothing, note=_NOTE)
    work = trace.busiest(window)
    return _sum_causes(step, work, find_gaps(trace, work, window))


def _sum_causes(step: int | None, work: DeviceWork, gaps: Gaps) -> IdleCauses:
    by_reason = dict(zip(REASONS, gaps.parts.sum(axis=0).tolist(), strict=True))
    idle_ns, device = sum(by_reason.values()), device_label(work.device)
    return IdleCauses(step=step, device=device, idle_ns=idle_ns, gaps=len(gaps.next), by_reason_ns=by_reason)


def explain_idle(timeline: Timeline, step: int | None, *, top: int = 20) -> IdleReport:
    """Gaps of the rank's device (its busiest) in a step; None: in the whole trace."""
    trace = view(timeline)
    window = trace.window(step)
    by_operator, longest = [], []
    if not trace.works:
        causes = idle_by_cause(timeline, step)
    else:
        work = trace.busiest(window)
        gaps = find_gaps(trace, work, window)
        causes = _sum_causes(step, work, gaps)
        lengths, activity = gaps.spans.end - gaps.spans.start, _find_host_activities(trace, gaps)
        labels, place = _name_host_activities(trace, activity)
        by_operator = _by_label(labels, place, lengths, causes.idle_ns)
        longest = [
            _describe_gap(trace, work, window, gaps, one=one, label=labels[place[one]], activity=int(activity[one]))
            for one in top_by(lengths, top)
        ]
    return IdleReport(
        **msgspec.structs.asdict(causes),
        idle_s=seconds(causes.idle_ns),
        by_reason_s={reason: seconds(spent) for reason, spent in causes.by_reason_ns.items()},
        by_operator=by_operator,
        longest=longest,
    )


def find_gaps(trace: TraceView, work: DeviceWork, window: Window) -> Gaps:
    part = work.part(window)
    busy, first = busy_spans(work, part)
    begin = np.concatenate(([window.start_ns], busy.end))
    finish = np.concatenate((busy.start, [window.end_ns]))
    following = np.append(first, part.stop if part.stop < len(work.rows) else MISSING)
    begin, finish = np.maximum(begin, window.start_ns), np.minimum(finish, window.end_ns)
    kept = np.flatnonzero(finish > begin)
    spans, following = Intervals(begin[kept], finish[kept]), following[kept]
    launch = np.where(following >= 0, work.launch[following], MISSING) if len(work.rows) else following
    thread = np.where(launch >= 0, trace.thread[launch], trace.main_thread)
    reasons, not_launched = _reasons(trace, work, spans, following, launch=launch)
    parts = np.zeros((len(REASONS), len(following)), np.int64).T  # reasons lie together: they are asked one by one
    parts[np.arange(len(following)), reasons] = spans.end - spans.start
    _part_host_time(trace, parts, spans, not_launched, thread=thread)
    return Gaps(spans, following, parts, thread)


def _reasons(
    trace: TraceView, work: DeviceWork, spans: Intervals, following: Integers, *, launch: Integers
) -> tuple[Integers, Integers]:
    """The reason of each gap by what had to come last before its end, and until when its next work was not launched."""
    waits = host_waits(trace)
    begin, finish = spans
    nothing_follows = following == MISSING
    known = launch >= 0
    called = np.where(known, trace.start[launch], begin)
    least = np.where(known, waits.least[trace.name[launch]], 0)
    # A call that has not returned by the end of the gap has not done its work before either.
    late = known & ((called + least > begin) | (trace.end[launch] >= finish))
    reasons = np.where(late | nothing_follows, HOST_LAUNCH, UNKNOWN)
    early = np.flatnonzero(known & ~late)
    if len(early):
        held = Intervals(begin[early], finish[early])
        reasons[early] = _reasons_after_launch(trace, work, held, following[early])
    not_launched = np.where(nothing_follows, finish, np.minimum(np.maximum(called, begin), finish))
    return reasons, not_launched


def _reasons_after_launch(trace: TraceView, work: DeviceWork, spans: Intervals, place: Integers) -> Integers:
    """What held back work that had been launched before the device fell idle."""
    by_end = trace.keep(("by end", work.device), lambda: np.argsort(work.end, kind="stable"))
    last = work.end.searchsorted(spans.start, side="right", sorter=by_end) - 1
    before = by_end[last]
    has_before = (last >= 0) & (work.end[before] == spans.start)
    same_queue = (work.stream[before] == work.stream[place]) | (work.launch[before] == work.launch[place])
    short = spans.end - spans.start < LONGEST_HANDOVER_NS
    reasons = np.where(has_before & same_queue & short, STREAM_ORDER, UNKNOWN)
    crossing = np.flatnonzero(has_before & ~same_queue)
    if len(crossing):
        reasons[crossing[host_waits(trace).waited(work, place[crossing])]] = EVENT_WAIT
    return reasons


def _part_host_time(
    trace: TraceView, parts: Whole, spans: Intervals, not_launched: Integers, *, thread: Integers
) -> None:
    """Take from the time before the launch what the host spent waiting."""
    waits = host_waits(trace)
    for one in distinct(thread):
        mine = np.flatnonzero((thread == one) & (parts[:, HOST_LAUNCH] > 0))
        if not len(mine):
            continue
        for reason, held in ((SYNCHRONISING, waits.synchronising(one)), (COLLECTIVE_PEER, waits.with_peers(one))):
            if len(held.start):
                taken = measure_within(held, spans.start[mine], not_launched[mine])
                parts[mine, reason] += taken
                parts[mine, HOST_LAUNCH] -= taken


def _find_host_activities(trace: TraceView, gaps: Gaps) -> Integers:
    """For each gap the host row that says what the thread was activity during most of it; −1: nothing recorded.

    It is the innermost one that covers more than half. That one also covers the middle, so only the stack there need be
    climbed. Where only an annotation does, the operator that covers most.
    """
    begin, finish = gaps.spans
    middle = begin + (finish - begin) // 2
    found = trace.innermost_of(gaps.thread, middle)
    thread = gaps.thread
    elsewhere = np.flatnonzero((found == MISSING) & (thread != trace.main_thread))
    if len(elsewhere):
        found[elsewhere] = trace.innermost(trace.main_thread, middle[elsewhere])
        thread = np.array(thread)
        thread[elsewhere] = np.where(found[elsewhere] >= 0, trace.main_thread, thread[elsewhere])
    searching = np.flatnonzero(found >= 0)
    while len(searching):
        row, low, high = found[searching], begin[searching], finish[searching]
        covered = np.minimum(trace.end[row], high) - np.maximum(trace.start[row], low)
        searching = searching[covered * 2 <= high - low]
        found[searching] = trace.parent[found[searching]]
        searching = searching[found[searching] >= 0]
    unclear = (found == MISSING) | (trace.kind[found] == ANNOTATION)
    for one in trace.stacks:
        mine = np.flatnonzero(unclear & (thread == one))
        if len(mine):
            spans = Intervals(begin[mine], finish[mine])
            found[mine] = _longest_operator(trace, one, spans, found[mine])
    return found


def _longest_operator(trace: TraceView, thread: int, spans: Intervals, otherwise: Integers) -> Integers:
    """For each gap the outermost operator of the thread that covers most of it, if more than what lies between."""
    begin, finish = spans
    rows = trace.top_operators(thread)
    start, end = trace.start[rows], np.maximum.accumulate(trace.end[rows])
    first, last = end.searchsorted(begin, side="right"), start.searchsorted(finish, side="left")
    count = np.maximum(last - first, 0)
    gap, place = expand(first, count)
    if not len(gap):
        return otherwise
    covered = np.minimum(end[place], finish[gap]) - np.maximum(start[place], begin[gap])
    covers_most = np.zeros(len(begin), np.int64)
    np.maximum.at(covers_most, gap, covered)
    between = finish - begin
    np.subtract.at(between, gap, covered)
    # Assigned backwards, so that the first of equals stays.
    best = np.flatnonzero((covered == covers_most[gap]) & (covered > between[gap]))[::-1]
    longest = np.array(otherwise)
    longest[gap[best]] = rows[place[best]]
    return longest


def _name_host_activities(trace: TraceView, activity: Integers) -> tuple[list[str], Integers]:
    """The different names of what was done, and which of them each gap has. A call goes by the operator around it."""
    texts = trace.timeline.texts
    named = trace.enclosing(activity, trace.is_kind(OPERATOR, PYTHON))
    row = np.where(named >= 0, named, activity)
    is_annotation = (row >= 0) & (trace.kind[row] == ANNOTATION)
    codes = np.where(row >= 0, trace.name[row] + is_annotation * len(texts), 2 * len(texts))
    different, place = number_codes(codes, 2 * len(texts) + 1)
    return [_label(texts, code) for code in different], place


def _label(texts: Sequence[str], code: int) -> str:
    if code == 2 * len(texts):
        return "outside recorded calls"
    return texts[code] if code < len(texts) else f"between operators in {texts[code - len(texts)]}"


def _by_label(labels: Sequence[str], place: Integers, lengths: Whole, total: int) -> list[IdleOf]:
    counts, sums = np.bincount(place, minlength=len(labels)), sum_by(place, lengths, len(labels))
    longest = np.zeros(len(labels), np.int64)
    np.maximum.at(longest, place, lengths)
    order = np.argsort(-sums, kind="stable")
    columns = {"operator": [labels[one] for one in order.tolist()], "gaps": counts[order]}
    columns |= {"total_s": sums[order] / 1e9, "share": sums[order] / max(total, 1), "longest_s": longest[order] / 1e9}
    return make_rows(IdleOf, columns)


def _describe_gap(
    trace: TraceView, work: DeviceWork, window: Window, gaps: Gaps, *, one: int, label: str, activity: int
) -> IdleGap:
    start, end = int(gaps.spans.start[one]), int(gaps.spans.end[one])
    parts = gaps.parts[one].tolist()
    following = int(gaps.next[one])
    name = trace.label(int(work.rows[following])) if following >= 0 else None
    return IdleGap(
        start_s=seconds(start - window.start_ns),
        duration_s=seconds(end - start),
        reason=REASONS[parts.index(max(parts))],
        parts_s={reason: seconds(spent) for reason, spent in zip(REASONS, parts, strict=True) if spent},
        operator=label,
        call=trace.label(activity) if trace.kind[activity] == RUNTIME else None,
        next_name=None if name is None else short_name(name),
    )


REASON_WORDS = {
    "host_launch": "not launched yet",
    "sync": "host in a blocking call",
    "event_wait": "stream waited for an event",
    "collective_peer": "host in a collective",
    "stream_order": "hand-over on a stream",
    "unknown": "unknown",
}


def idle_section(job: JobReport) -> Section | None:
    idle = job.detail.idle
    if not idle.gaps:
        return None
    reasons = sorted((item for item in idle.by_reason_s.items() if item[1] > 0), key=lambda item: -item[1])
    listed = ", ".join(f"{REASON_WORDS[name]} {format_duration(spent)}" for name, spent in reasons)
    by_reason = make_table("Reasons", f"{format_duration(idle.idle_s)} in {idle.gaps} gaps", reasons, [
        field("Time", lambda item: item[1], "s"),
        field("% of idle", lambda item: share_of(item[1], idle.idle_s), "share"),
        field("Reason", lambda item: REASON_WORDS[item[0]]),
    ], is_folded=False)  # fmt: skip
    by_operator = make_table("Host activity", "What the host was activity during most of each gap", idle.by_operator, [
        field("Time", "total_s", "s", brief=1),
        field("% of idle", "share", "share", brief=1),
        field("Gaps", "gaps", "count", brief=1),
        field("Longest", "longest_s", "s", brief=1),
        field("The host was in", "operator", brief=1),
    ], is_folded=False)  # fmt: skip
    longest = make_table("Longest gaps", "The longest first", idle.longest, [
        field("At", "start_s", "s", "From the start of the step"),
        field("Length", "duration_s", "s"),
        field("Reason", lambda gap: REASON_WORDS[gap.reason]),
        field("The host was in", "operator"),
        field("Call", "call"),
        field("Next device activity", "next_name"),
    ])  # fmt: skip
    return Section(
        id="idle",
        title="Idle time",
        summary=[f"Idle {format_duration(idle.idle_s)} in {idle.gaps} gaps: {listed}", Brief("", by_operator, 3)],
        tables=[by_reason, by_operator, longest],
    )
