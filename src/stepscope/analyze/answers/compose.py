"""The answer about a profiled step: where it went in one sentence, what binds it, what to try first.

Every number comes from the report of the job; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from stepscope.analyze.answers.advice import BETWEEN, OUTSIDE, advise, describe_pageable, pageable, telling_rank_is_late
from stepscope.analyze.answers.cpu_advice import is_work
from stepscope.analyze.answers.facts import (
    CLASSES,
    Advice,
    ClassTime,
    NotablePoint,
    class_times,
    compare_ranks,
    find_limit,
    is_cpu,
    is_unrecorded,
    latest_rank,
    name_communication,
    path_parts,
    profiler_cost_s,
    share_of_step,
    shorten,
    spell_communication,
    wait_share,
)
from stepscope.analyze.critical.kinds import DELAYS
from stepscope.analyze.critical.path import CriticalPath, short_on_path, spell_path_kind
from stepscope.analyze.critical.what_if import Limit
from stepscope.analyze.job import JobReport
from stepscope.analyze.step.breakdown import SHARES, share_words
from stepscope.analyze.step.host_activity import ACTIVITY_WORDS
from stepscope.analyze.step.memory import name_memory
from stepscope.core.units import (
    count_of,
    cut_text,
    format_bytes,
    format_duration,
    format_ratio,
    format_share,
    format_significant,
)
from stepscope.formats.classify import short_name

__all__ = ["CLASSES", "Advice", "Answer", "ClassTime", "NotablePoint", "answer"]

MENTIONED = 0.005
"""Shares of the step below this are not worth a word."""
MANY_HOST = 0.3
"""From this share of the step on, time of the host makes the profiler's own cost worth a warning."""
_LENGTHENED = ("compute", "python", None)
"""What a program without a device is bound by where the profiler's cost for each operator and function matters."""
NOISE = 1.1
"""A profiled step that is less than so many times as long as one without the profiler needs no warning."""
PROFILER_COST = (
    "Profiling itself lengthens the host's time: six models on an NVIDIA H200 took 2.6 to 5.7 times as long with the "
    "profiler as without. Measure a step without it before acting on this."
)

_BOUND_WORDS = {
    "compute": "compute",
    "communication": "exposed {communication}",
    "copies": "exposed copies",
    "host": "the host",
    "synchronisation": "synchronisation",
    "stragglers": "waiting for late ranks in collectives",
    "data_loading": "data loading",
    "sleeping": "sleeping",
    "python": "Python code",
}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a view says first. All times are profiled ones, of the representative rank's step."""

    sentence: str
    bound_by: str | None
    """One of CLASSES; None where most of the step is idle for reasons that the trace does not tell."""
    evidence: str
    """Why: the numbers of the breakdown, of the critical path and of the ranks."""
    classes: list[ClassTime]
    """All of CLASSES, longest first."""
    try_first: Advice
    points: list[NotablePoint]
    caution: str | None
    """What to know before acting on it."""


def answer(job: JobReport, *, limits: Sequence[Limit] = ()) -> Answer:
    """`limits` (of the representative rank's step, see `find_limits`) make the bounds of advice exact."""
    classes = class_times(job)
    bound_by = _bound_by(job, classes)
    chosen = next((one for one in classes if one.name == bound_by), classes[0])
    return Answer(
        sentence=_sentence(job),
        bound_by=bound_by,
        evidence=_evidence(job, chosen, bound_by),
        classes=classes,
        try_first=advise(job, bound_by, limits),
        points=list_points(job, bound_by, limits),
        caution=_caution(job, bound_by),
    )


def _bound_by(job: JobReport, classes: Sequence[ClassTime]) -> str | None:
    """The class that holds the step up longest. A share that all views deny counts for nothing."""
    first = classes[0]
    unknown_s = job.detail.breakdown.breakdown_s.other_idle
    if is_unrecorded(job.detail) or first.time_s <= 0:
        return None
    return None if unknown_s > first.time_s and share_of_step(job, unknown_s) > 0.5 else first.name


def _sentence(job: JobReport) -> str:
    detail = job.detail
    step_s = detail.breakdown.step_s
    subject = f"Profiled step {job.step} takes" if detail.step_marker != "none" else "The whole profiled trace takes"
    if job.unprofiled_step_s:
        subject = f"Without the profiler a step takes {format_duration(job.unprofiled_step_s)}. {subject}"
    where = compare_ranks(job)
    parts = sorted(_parts(job), reverse=True)
    listed = [f"{format_share(share_of_step(job, spent))} {word}" for spent, word in parts]
    kept = [text for text, (spent, _) in zip(listed, parts, strict=True) if share_of_step(job, spent) >= MENTIONED]
    tail = f": {', '.join(kept)}" if kept else ", and nothing ran in it"
    return f"{subject} {format_duration(step_s)}{where}{tail}."


def _parts(job: JobReport) -> list[tuple[float, str]]:
    """The shares of the step in words; without a device, what the program did beside operators one by one."""
    breakdown, words = job.detail.breakdown, dict(share_words(job.detail.breakdown))
    words["exposed_comm"] = f"exposed {spell_communication(job)}"
    shares = msgspec.to_builtins(breakdown.breakdown_s)
    told = ("host_idle", "sync_idle") if is_cpu(job.detail) else ()
    return [
        *((shares[name], words[name]) for name in SHARES if name not in told),
        *((one.time_s, ACTIVITY_WORDS[one.activity]) for one in breakdown.host_activities),
    ]


def _evidence(job: JobReport, chosen: ClassTime, bound_by: str | None) -> str:
    if bound_by is None and is_unrecorded(job.detail):
        return "Bottleneck unknown: the trace does not contain what the device did."
    if bound_by is None:
        unknown = job.detail.breakdown.breakdown_s.other_idle
        what = "outside recorded calls" if is_cpu(job.detail) else "idle for no reason that the trace shows"
        return f"Bottleneck unknown: {format_share(share_of_step(job, unknown))} of the step is {what}."
    what = _BOUND_WORDS[bound_by].format(communication=name_communication(job))
    where = "" if is_cpu(job.detail) else " on the device"
    parts = [f"{format_share(share_of_step(job, chosen.device_s))} of the step{where}"]
    if chosen.path_s is not None:
        whose = "the" if job.own_critical is None else "its own"
        parts.append(f"{format_share(share_of_step(job, chosen.path_s))} of {whose} critical path")
    text = f"Bound by {what}: {' and '.join(parts)}"
    waiting = wait_share(job)
    if bound_by in ("communication", "stragglers") and waiting is not None:
        text += f"; of rank {job.telling_rank}'s time in collectives {format_share(waiting)} is waiting for later ranks"
    return text + "."


def _caution(job: JobReport, bound_by: str | None) -> str | None:
    """What the profiler adds to the step, where that matters for what is said."""
    host_s = job.detail.breakdown.breakdown_s.host_idle
    is_host = bound_by in _LENGTHENED if is_cpu(job.detail) else share_of_step(job, host_s) >= MANY_HOST
    known = job.unprofiled_step_s
    if not known:
        return PROFILER_COST if is_host else None
    ratio = job.detail.breakdown.step_s / known
    if ratio < NOISE:
        return None
    text = f"The profiled step is {format_ratio(ratio)} as long as one without the profiler."
    if is_host and not is_cpu(job.detail):
        spent = format_duration(min(profiler_cost_s(job), host_s))
        return (
            f"{text} What it adds is time of the host: {spent} of the launch-bound idle time above is the profiler's."
        )
    return f"{text} Times of the host are longer here than without it." if is_host else text


# Findings beside the answer: each with its number, the longest first

MOST_POINTS = 6
LEAST_SHARE = 0.01
"""Findings about less of the step are left out, except where fewer than LEAST_POINTS would remain."""
LEAST_POINTS = 3
KEPT_WAITING = " of waiting for it, summed over ranks"
NOT_COMPUTE = ("communication", "copy", "set")


def list_points(job: JobReport, bound_by: str | None, limits: Sequence[Limit]) -> list[NotablePoint]:
    """Three to six where the trace has so much to tell. A straggler is named whatever else there is."""
    makers = (_path, _idle, _kernels, _overlap, _late_rank, _copies, _sequences, _launches, _variation, _blocking)
    found = [point for make in makers for point in make(job, bound_by, limits)]
    found += list(_others(job))
    found.sort(key=lambda point: -point.time_s)
    large = [point for point in found if share_of_step(job, point.time_s) >= LEAST_SHARE]
    kept = (large if len(large) >= LEAST_POINTS else found[:LEAST_POINTS])[:MOST_POINTS]
    left_out = [point for point in found if point not in kept and point.text.endswith(KEPT_WAITING)]
    return [*kept[: MOST_POINTS - len(left_out)], *left_out]


def _path(job: JobReport, _bound_by: str | None, _limits: Sequence[Limit]) -> Iterator[NotablePoint]:
    path = job.critical
    if path is None or is_cpu(job.detail):
        return

    parts = path_parts(path)
    whole = path.length_s or 1.0
    listed = [
        f"{format_share(spent / whole)} {name}"
        for name, spent in sorted(parts.items(), key=lambda item: -item[1])
        if spent / whole >= LEAST_SHARE / 2
    ]
    first = next((one for one in path.by_name if one.name != "(no event)"), None)
    delays_s = sum(path.by_kind_s.get(kind, 0.0) for kind in DELAYS)
    note = f", of which delays are {format_share(delays_s / whole)}" if delays_s >= LEAST_SHARE / 20 * whole else ""
    text = f"critical path{_whose_path(job, path)}: {', '.join(listed)}{note}"
    if first is not None:
        name = shorten(short_on_path(first.name, first.kind))
        text += f"; longest on it: {name} ({spell_path_kind(first.kind)}) {format_duration(first.time_s)}"
    yield NotablePoint(text=text, time_s=max(parts.values()))


def _whose_path(job: JobReport, path: CriticalPath) -> str:
    """` through 8 ranks (74.1 % on rank 2)`, ` of rank 3 alone`; nothing where there is one rank."""
    if len(job.ranks) < 2:
        return ""
    if len(path.ranks) < 2:
        return f" of rank {job.telling_rank} alone"
    longest = max(range(len(path.ranks)), key=lambda place: path.by_rank_s[place])
    share = path.by_rank_s[longest] / (path.length_s or 1.0)
    return f" through {len(path.ranks)} ranks ({format_share(share)} on rank {path.ranks[longest]})"


def _idle(job: JobReport, _bound_by: str | None, _limits: Sequence[Limit]) -> Iterator[NotablePoint]:
    idle = job.detail.idle
    first = next(iter(idle.by_operator), None)
    if first is not None and not is_cpu(job.detail):
        # The report names an operator, or says that none was running.
        is_plain = first.operator == OUTSIDE or first.operator.startswith(BETWEEN)
        where = f"{'' if is_plain else 'in '}{shorten(first.operator)}"
        yield NotablePoint(
            text=f"the device is idle {format_duration(idle.idle_s)} in {count_of(idle.gaps, 'gap')}; most while the "
            f"host was {where}: {format_duration(first.total_s)} in {first.gaps}",
            time_s=first.total_s,
        )


def _kernels(job: JobReport, _bound_by: str | None, _limits: Sequence[Limit]) -> Iterator[NotablePoint]:
    kernels = job.detail.kernels
    rows = [row for row in kernels.by_name.rows if kernels.names[row.name].category not in NOT_COMPUTE]
    if rows:
        first = rows[0]
        yield NotablePoint(
            text=f"longest on the device: {shorten(short_name(first.name))} ({kernels.names[first.name].category}), "
            f"{format_duration(first.total_s)} in {first.count} × ({format_share(first.share)} of device work)",
            time_s=first.total_s,
        )
    operator = next((one for one in kernels.host_operators if is_work(one.name)), None)
    if operator is not None and is_cpu(job.detail):
        yield NotablePoint(
            text=f"longest operator: {shorten(operator.name)} {format_duration(operator.self_s)} itself in "
            f"{count_of(operator.count, 'call')}",
            time_s=operator.self_s,
        )


def _overlap(job: JobReport, _bound_by: str | None, _limits: Sequence[Limit]) -> Iterator[NotablePoint]:
    overlap = job.detail.breakdown.overlap
    if overlap.hidden_share is None:
        return
    text = (
        f"{name_communication(job)}: {format_duration(overlap.communication_s)}, "
        f"{format_share(overlap.hidden_share)} of it hidden beside compute"
    )
    waiting = wait_share(job)
    if waiting is not None:
        text += f", {format_share(waiting)} waiting for later ranks"
    yield NotablePoint(text=text, time_s=overlap.exposed_s)


def _late_rank(job: JobReport, bound_by: str | None, _limits: Sequence[Limit]) -> Iterator[NotablePoint]:
    late = latest_rank(job)
    if late is not None and bound_by != "stragglers" and not telling_rank_is_late(job, bound_by):
        kind = "a straggler" if late.straggler else "late now and then"
        yield NotablePoint(
            text=f"rank {late.rank} is {kind}: last to {count_of(late.last_calls, 'collective')}, "
            f"{format_duration(late.caused_s)}{KEPT_WAITING}",
            time_s=late.caused_s / max(len(job.ranks) - 1, 1) / max(len(job.steps), 1),
        )
    balance = job.across.balance if job.across is not None else None
    if balance is not None and balance.imbalance is not None and balance.imbalance > 1.02 and len(balance.busy_s) > 1:
        most = max(balance.busy_s.values())
        mean = sum(balance.busy_s.values()) / len(balance.busy_s)
        yield NotablePoint(
            text=f"work is shared out unevenly: rank {balance.busiest_rank} computes and copies "
            f"{format_significant(balance.imbalance, 3)} times the mean ({format_duration(most)} against "
            f"{format_duration(mean)})",
            time_s=most - mean,
        )


def _copies(job: JobReport, bound_by: str | None, _limits: Sequence[Limit]) -> Iterator[NotablePoint]:
    unpinned = pageable(job)
    if unpinned and bound_by != "copies":
        yield NotablePoint(
            text=f"{describe_pageable(unpinned)}: pinned memory would be faster and would not hold the host up",
            time_s=sum(one.busy_s for one in unpinned),
        )


def _sequences(job: JobReport, _bound_by: str | None, _limits: Sequence[Limit]) -> Iterator[NotablePoint]:
    sequences = job.detail.sequences
    if not sequences.sequences:
        return
    first = sequences.sequences[0]
    names = [operator or kernel for operator, kernel in zip(first.operators, first.kernels, strict=True)]
    shown = " → ".join([*(cut_text(name, 30) for name in names[:4]), *(["…"] if len(names) > 4 else [])])
    yield NotablePoint(
        text=f"{sequences.short_kernels} of {sequences.kernels} kernels take at most "
        f"{format_duration(sequences.short_s)}; fuse {shown} ({first.count} times): {first.launches_saved} launches "
        f"fewer, up to {format_duration(first.gap_s)} of gaps",
        time_s=first.gap_s,
    )


def _launches(job: JobReport, _bound_by: str | None, _limits: Sequence[Limit]) -> Iterator[NotablePoint]:
    launches = job.detail.launches
    if not launches.calls:
        return
    text = f"{count_of(launches.calls, 'launch', 'launches')} take the host {format_duration(launches.call_s)}"
    queue = next((one for one in launches.queue if one.stream is None), None)
    if queue is not None:
        text += (
            f"; on average {format_significant(queue.pending_mean, 2)} device activities wait in the device's queues"
        )
    if launches.blocked.calls:
        text += f"; {launches.blocked.calls} calls waited for room in a full queue"
    yield NotablePoint(text=text, time_s=launches.call_s)


def _variation(job: JobReport, _bound_by: str | None, _limits: Sequence[Limit]) -> Iterator[NotablePoint]:
    variation = job.detail.variation
    if variation.slow_steps and variation.max_s is not None and variation.median_s is not None:
        verb = "takes" if len(variation.slow_steps) == 1 else "take"
        explained_by = variation.explained_by
        why = "" if explained_by is None else f", mostly by {share_words(job.detail.breakdown)[explained_by]}"
        yield NotablePoint(
            text=f"{len(variation.slow_steps)} of {variation.judged} steps {verb} over 5 % more than the median of "
            f"{format_duration(variation.median_s)}; the slowest takes {format_duration(variation.max_s)}{why}",
            time_s=variation.max_s - variation.median_s,
        )


def _blocking(job: JobReport, bound_by: str | None, limits: Sequence[Limit]) -> Iterator[NotablePoint]:
    limit = find_limit(limits, "no blocking")
    if limit is not None and bound_by != "synchronisation":
        yield NotablePoint(
            text=f"if no call waited for the device, the profiled step would take {format_duration(limit.step_s)}: "
            f"{format_duration(limit.saved_s)} less",
            time_s=limit.saved_s,
        )


def _others(job: JobReport) -> Iterator[NotablePoint]:
    """What is rarely long, but good to know where little else is there."""
    for device in job.detail.memory.devices if job.detail.memory is not None else []:
        holder = f", most of it from {shorten(device.at_peak[0].operator)}" if device.at_peak else ""
        yield NotablePoint(
            text=f"memory of {name_memory(device)} peaks at {format_bytes(device.peak_bytes)}{holder}", time_s=0.0
        )
    unknown = job.detail.idle.by_reason_s.get("unknown", 0.0)
    if unknown > 0:
        yield NotablePoint(text=f"{format_duration(unknown)} of idle time has no known reason", time_s=unknown)
