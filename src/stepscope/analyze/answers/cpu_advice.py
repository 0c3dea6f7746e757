"""What to try first where the trace has no device work: the program runs on the CPU, or its device was not recorded."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analyze.answers.facts import Advice, find_activity, is_cpu, of_step
from stepscope.analyze.job import JobReport
from stepscope.analyze.step.host_activity import ACTIVITY_WORDS, HostActivity
from stepscope.analyze.step.kernels import HostOperator
from stepscope.core.units import count_of, format_duration, format_share
from stepscope.formats.classify import classify_lone_communication, does_no_work

LOAD_DATA = "load data beside the step: more DataLoader workers (num_workers)"
SMALL_OPERATOR_S = 10e-6
"""Operators that take less on average are mostly the cost of calling them, which recording them doubles."""


def _for_operators(job: JobReport) -> Advice:
    """Views and allocations do nothing: their time is that of the call, and of the profiler."""
    recorded = job.detail.kernels.host_operators
    operators = [one for one in recorded if is_work(one.name)]
    if not operators:
        return for_unknown(job)
    first, (count, spent_s) = operators[0], _sum_up(operators)
    idle, idle_s = _sum_up([one for one in recorded if does_no_work(one.name)])
    fewer = "run fewer and larger operators: a larger batch, or torch.compile, which fuses them"
    if idle_s > spent_s:
        return Advice(
            action=fewer,
            because=f"{format_duration(idle_s)} of operators' own time are {idle} views and allocations, which compute "
            "nothing: it is the cost of calling and recording them",
        )
    if spent_s / count < SMALL_OPERATOR_S:
        return Advice(
            action=fewer,
            because=f"{count} operators take {format_duration(spent_s / count)} each on average: about what calling "
            "and recording one costs",
        )
    return Advice(
        action=f"start with {first.name}: more threads, a lower precision, torch.compile",
        because=f"{first.name} takes {format_duration(first.self_s)} itself ({format_share(first.share)} of all "
        f"operators' own time) in {count_of(first.count, 'call')}",
    )


def _sum_up(operators: Sequence[HostOperator]) -> tuple[int, float]:
    """Calls, and seconds inside them themselves."""
    return sum(one.count for one in operators), sum(one.self_s for one in operators)


def is_work(operator: str) -> bool:
    """Whether an operator computes something itself: no view, no allocation, no collective."""
    return not does_no_work(operator) and classify_lone_communication(operator) is None


def _what_to_do(one: HostActivity) -> str:
    within = "" if one.caller is None else f" in {one.caller}"
    # What is built in is fast: its caller asks too much of it.
    is_built_in = one.caller is not None and (one.function or "").startswith("<")
    code = (one.caller if is_built_in else one.function) or one.call
    return {
        "data_loading": f"{LOAD_DATA}, or a faster dataset",
        "sleeping": f"take the sleep{within} out of the step",
        "synchronisation": f"find out what the program waits for in {one.caller or one.call}",
        "python": f"make {code} faster, or move it out of the step",
    }[one.activity]


ON_CPU = ("compute", *ACTIVITY_WORDS)
"""What a program without a device can be bound by."""


def advise_cpu(job: JobReport, bound_by: str) -> Advice:
    """`bound_by`: one of ON_CPU."""
    if bound_by == "compute":
        return _for_operators(job)
    activity = find_activity(job, bound_by)
    if activity is None:
        return for_unknown(job)
    because = f"{ACTIVITY_WORDS[bound_by]} takes {of_step(job, activity.time_s)}"
    if bound_by != "python":
        because += f", in {count_of(activity.count, 'call')} of {activity.call}"
    if activity.function is not None and activity.function != activity.call:
        by = "" if activity.caller is None else f", called by {activity.caller}"
        because += f"; {activity.function} takes {format_duration(activity.function_s)} of it{by}"
    limit_s = job.detail.breakdown.step_s - activity.time_s
    return Advice(action=_what_to_do(activity), because=because, limit_s=limit_s)


def for_unrecorded(job: JobReport) -> Advice:
    return Advice(
        action="record the step again with device activities (ProfilerActivity.CUDA, and no counters of kernels)",
        because=job.detail.breakdown.note or "the trace has no device work",
    )


def for_unknown(job: JobReport) -> Advice:
    unknown = format_duration(job.detail.breakdown.breakdown_s.other_idle)
    if is_cpu(job.detail):
        return Advice(
            action="record the step again with stacks (trace record --stacks, or with_stack=True): they show the "
            "Python code",
            because=f"{unknown} of the step lie outside recorded calls",
        )
    return Advice(
        action="record the step again with CPU and device activities, so that launches are in the trace",
        because=f"{unknown} of the step have no reason in this trace",
    )
