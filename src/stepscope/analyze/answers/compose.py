"""The answer about a profiled step: where it went in one sentence, what binds it, what to try first.

Every number comes from the report of the job; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepscope.analyze.answers.advice import advise
from stepscope.analyze.answers.facts import (
    CLASSES,
    Advice,
    ClassTime,
    Point,
    class_times,
    compare_ranks,
    is_cpu,
    is_unrecorded,
    name_communication,
    profiler_cost_s,
    share_of_step,
    spell_communication,
    wait_share,
)
from stepscope.analyze.answers.points import list_points
from stepscope.analyze.critical.what_if import Limit
from stepscope.analyze.job import JobReport
from stepscope.analyze.step.breakdown import SHARES, share_words
from stepscope.analyze.step.host_activity import ACTIVITY_WORDS
from stepscope.core.units import format_duration, format_ratio, format_share

__all__ = ["CLASSES", "Advice", "Answer", "ClassTime", "Point", "answer"]

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
    """What a view says first. All times are profiled ones, of the telling rank's step."""

    sentence: str
    bound_by: str | None
    """One of CLASSES; None where most of the step is idle for reasons that the trace does not tell."""
    evidence: str
    """Why: the numbers of the breakdown, of the critical path and of the ranks."""
    classes: list[ClassTime]
    """All of CLASSES, longest first."""
    try_first: Advice
    points: list[Point]
    caution: str | None
    """What to know before acting on it."""


def answer(job: JobReport, *, limits: Sequence[Limit] = ()) -> Answer:
    """`limits` (of the telling rank's step, see `find_limits`) make the bounds of advice exact."""
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
