"""One concrete thing to try first, for each class of time that a step can be bound by, with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stepscope.analyze.answers.cpu_advice import LOAD_DATA, ON_CPU, advise_cpu, for_unknown, for_unrecorded
from stepscope.analyze.answers.facts import (
    Advice,
    begins_late_s,
    collective_times,
    exceeds_most,
    find_limit,
    host_path_s,
    is_cpu,
    is_unrecorded,
    latest_rank,
    of_step,
    own_path,
    share_of_step,
    shorten,
    wait_share,
)
from stepscope.analyze.critical.kinds import COSTS, HOST_COSTS
from stepscope.analyze.critical.path import PathShare
from stepscope.analyze.critical.what_if import Limit
from stepscope.analyze.job import JobReport
from stepscope.analyze.ranks.collective_table import CollectiveRow
from stepscope.analyze.ranks.section import spell_collective
from stepscope.analyze.ranks.stragglers import RankLateness, steps_to_decide
from stepscope.analyze.step.idle import IdleOf
from stepscope.analyze.step.kernels import Transfer
from stepscope.core.units import (
    count_of,
    format_bandwidth,
    format_bytes,
    format_duration,
    format_share,
    format_significant,
)
from stepscope.formats.classify import does_no_work, is_launch_name, short_name


class Longer(NamedTuple):
    """What a rank that keeps others waiting does longer than they."""

    reason: str
    doing: str


MUCH = 0.5
LATE_EXCESS = 0.05
"""Fraction of the step that a late rank must spend beyond the median rank for that to come first."""
_LONGER = {
    "compute": Longer("it has more to compute; share the work out more evenly", "computing"),
    "copies": Longer("it copies more", "copying"),
    "host": Longer("its host is slower (its cores, other processes, its data)", "waiting for its host"),
    "synchronisation": Longer("it waits more in blocking calls", "in synchronisation"),
    "data_loading": Longer("it loads data longer", "loading data"),
    "sleeping": Longer("it sleeps", "sleeping"),
    "python": Longer("it spends longer in Python code", "in Python code"),
}
DATA_LOADING = 0.25
"""Fraction of the host's time on the path from which loading data is the first thing to fix."""
SMALL_BYTES = 1 << 20
"""Collectives of less are mostly latency: fewer and larger ones take less time."""
MUCH_IDLE, LONG_GAP_S = 0.3, 0.5e-3
"""Gaps that are so much of the idle time and so long on average have another reason than launching."""
OUTSIDE, BETWEEN = "outside recorded calls", "between operators in "
"""How the idle report calls time of the host in which it did nothing recorded."""
LEAST_GAIN = 1.05
"""An advice that makes the step less than so many times faster is within noise."""
START_UP_S = 0.1
"""A runtime call does not take longer than this in a step that has warmed up."""

_OVERLAP = {
    "all_reduce": "start the all-reduce earlier and in other pieces: try DDP's bucket_cap_mb, smaller for an earlier "
    "start, larger for fewer calls",
    "all_gather": "gather parameters earlier: FSDP's prefetch (forward_prefetch, backward_prefetch), or larger units",
    "reduce_scatter": "let gradients go out earlier: FSDP's backward_prefetch, or units of another size",
    "all_to_all": "hide the all-to-all behind work that does not need it: exchange the next batch's data or split the "
    "batch in two",
    "broadcast": "broadcast less: DDP's broadcast_buffers=False where buffers need not agree",
    "send": "use more micro-batches, so that stages of the pipeline wait less for each other",
}
_CATEGORY = {
    "gemm": "make its matrix products cheaper: a lower precision (TF32, bfloat16, FP8), or shapes that are multiples "
    "of 64",
    "convolution": "make its convolutions cheaper: channels_last memory format, a lower precision, cudnn.benchmark",
    "attention": "use a fused attention kernel (scaled_dot_product_attention) and a lower precision",
    "elementwise": "fuse its elementwise kernels: torch.compile",
    "norm": "use fused normalisation kernels: torch.compile",
    "softmax": "fuse its softmax with its neighbours: torch.compile, or a fused loss",
    "optimizer": "use a fused optimizer (fused=True)",
    "embedding": "shrink or cache its embedding look-ups: fewer rows, a lower precision, a fused table",
    "reduction": "fuse its reductions with what makes their input: torch.compile",
}


def advise(job: JobReport, bound_by: str | None, limits: Sequence[Limit]) -> Advice:
    if telling_rank_is_late(job, bound_by):
        return _for_stragglers(job)
    if is_unrecorded(job.detail):
        return for_unrecorded(job)
    if is_cpu(job.detail) and bound_by in ON_CPU:
        return advise_cpu(job, bound_by)
    if bound_by == "host":
        return _for_host(job, limits)
    makers = {
        "stragglers": _for_stragglers,
        "compute": _for_compute,
        "communication": _for_communication,
        "copies": _for_copies,
        "synchronisation": _for_synchronisation,
    }
    return makers[bound_by](job) if bound_by in makers else for_unknown(job)


def telling_rank_is_late(job: JobReport, bound_by: str | None) -> bool:
    """Whether the rank that the answer is about keeps the others waiting by more of what binds it."""
    late = latest_rank(job)
    if late is None or not late.straggler or late.rank != job.telling_rank:
        return False
    excess = exceeds_most(job, late.rank)
    return excess is not None and excess[0] == bound_by and share_of_step(job, excess[1]) >= LATE_EXCESS


# Host


def _for_host(job: JobReport, limits: Sequence[Limit]) -> Advice:
    whole = host_path_s(job, *(COSTS[cost] for cost in HOST_COSTS))
    loading = host_path_s(job, "data_loading")
    if whole and loading >= DATA_LOADING * whole:
        return Advice(
            action=f"{LOAD_DATA}, pin_memory, prefetch",
            because=f"loading data takes {format_duration(loading)} of the critical path "
            f"({format_share(share_of_step(job, loading))} of the profiled step)",
            limit_s=job.detail.breakdown.step_s - loading,
        )
    call = longest_runtime_call(job)
    if call is not None and call.time_s >= MUCH * whole:
        return _for_runtime_call(job, call)
    limit = find_limit(limits, "device-bound")
    if limit is not None and limit.step_s * LEAST_GAIN > step_without_profiler_s(job):
        return _for_compute(job)
    held_by = _long_gaps(job)
    return _for_launching(job, limits) if held_by is None else _for_long_gaps(job, held_by)


def _long_gaps(job: JobReport) -> IdleOf | None:
    """What the host does in few and long gaps, where those are much of the idle time: no launch takes so long."""
    first = next(iter(job.detail.idle.by_operator), None)
    if first is None or is_launch_name(first.operator) or does_no_work(first.operator):
        return None
    if first.share < MUCH_IDLE or first.total_s < LONG_GAP_S * first.gaps:
        return None
    return first


def _for_long_gaps(job: JobReport, held_by: IdleOf) -> Advice:
    action = f"find out what the host does in {held_by.operator}"
    if held_by.operator == OUTSIDE or held_by.operator.startswith(BETWEEN):
        action = f"find out what the host does {held_by.operator}: record again with stacks (with_stack=True)"
    return Advice(
        action=action,
        because=f"{count_of(held_by.gaps, 'gap')} there left the device idle for {of_step(job, held_by.total_s)}, the "
        f"longest for {format_duration(held_by.longest_s)}",
        limit_s=job.detail.breakdown.step_s - held_by.total_s,
    )


def longest_runtime_call(job: JobReport) -> PathShare | None:
    """The runtime call that takes most of the representative rank's critical path.

    Launches are left out: a step needs them, and that it makes too many is another advice.
    """
    path = own_path(job)
    named = path.by_name if path is not None else []
    calls = (one for one in named if one.kind == "runtime" and not is_launch_name(one.name))
    return max(calls, key=lambda one: one.time_s, default=None)


def _for_runtime_call(job: JobReport, call: PathShare) -> Advice:
    each = call.time_s / max(call.count, 1)
    action = f"find out why the step calls {call.name}"
    if each >= START_UP_S:
        action = f"record steps after a warm-up: {call.name} takes this long only when a process starts"
    return Advice(
        action=action,
        because=f"{call.name} takes {format_duration(call.time_s)} of the critical path "
        f"({format_share(call.share)}), in {count_of(call.count, 'segment')}",
        limit_s=job.detail.breakdown.step_s - call.time_s,
    )


def _for_launching(job: JobReport, limits: Sequence[Limit]) -> Advice:
    step_s, launches = step_without_profiler_s(job), job.detail.launches
    because, limit_s = _describe_device_alone(job, limits)
    if launches.calls:
        often = format_duration(step_s / launches.calls)
        because += f"; the host makes {launches.calls} launches for it, one every {often}"
    return Advice(
        action="let the host do less for each kernel: torch.compile(mode='reduce-overhead') or CUDA graphs, or fewer, "
        "larger launches",
        because=because,
        limit_s=limit_s,
    )


def _describe_device_alone(job: JobReport, limits: Sequence[Limit]) -> tuple[str, float | None]:
    """The what-if gives a bound; without it the time that the device was busy says about as much."""
    busy_s, step_s = job.detail.breakdown.device_busy_s, step_without_profiler_s(job)
    of = f"the profiled {format_duration(job.detail.breakdown.step_s)}"
    if job.unprofiled_step_s:
        of = f"the {format_duration(step_s)} that a step takes without the profiler"
    limit = find_limit(limits, "device-bound")
    if limit is not None and limit.step_s > 0:
        faster = format_significant(step_s / limit.step_s, 3)
        text = f"with a host that costs nothing a step takes {format_duration(limit.step_s)} instead of {of}: "
        return f"{text}at most {faster}× faster", limit.step_s
    text = f"the device is busy for {format_duration(busy_s)} of {of}"
    if busy_s > 0:
        text += f": about {format_significant(step_s / busy_s, 3)}× faster if the host cost nothing"
    return text, None


def step_without_profiler_s(job: JobReport) -> float:
    """As recorded, else the profiled step: what an improvement is measured by."""
    return job.unprofiled_step_s or job.detail.breakdown.step_s


# Ranks


def _for_stragglers(job: JobReport) -> Advice:
    late = latest_rank(job)
    if late is None:
        return _for_unknown_stragglers(job)
    because = _describe_lateness(job, late)
    begins = begins_late_s(job, late.rank)
    if begins is not None and begins >= MUCH * late.skew_s / max(len(job.steps), 1):
        action = (
            f"look at what rank {late.rank} does before the step (loading data, the end of the last step, the start of "
            "the profiler)"
        )
        because += f"; it begins the step {format_duration(begins)} after the median rank"
        return Advice(action=action, because=because)
    action = f"look at rank {late.rank}"
    excess = exceeds_most(job, late.rank)
    if excess is not None:
        name, spent = excess
        action += f": {_LONGER[name].reason}"
        because += f"; it spends {format_duration(spent)} more than the median rank {_LONGER[name].doing}"
    return Advice(action=action, because=because)


def _for_unknown_stragglers(job: JobReport) -> Advice:
    """Lateness itself decides nothing in so few steps; what a rank did meanwhile may show why the others waited. Time
    in which its device waited for its host is no reason: it is the lateness."""
    telling, ranks = job.telling_rank, len(job.ranks)
    action = "record all ranks of a few more steps: which one is late cannot be told from these"
    if ranks < 2:
        return Advice(action=action, because=f"rank {telling} spends most of its collectives waiting")
    waited_s = (wait_share(job) or 0.0) * job.detail.breakdown.breakdown_s.exposed_comm
    because = f"rank {telling} waits {format_duration(waited_s)} of the step in collectives for later ranks"
    found = [(more[1], one.rank, more[0]) for one in job.ranks if (more := exceeds_most(job, one.rank, over=telling))]
    spent, rank, name = max(found, default=(0.0, telling, "host"))
    if name != "host" and spent >= MUCH * waited_s:
        action = f"look at rank {rank}: {_LONGER[name].reason}"
        because += f"; rank {rank} spends {format_duration(spent)} more than rank {telling} {_LONGER[name].doing}"
    if (needed := steps_to_decide(ranks)) > len(job.steps):
        steps = count_of(len(job.steps), "step does", "steps do")
        because += f"; {steps} not tell whether one rank is always late: {needed} would"
    return Advice(action=action, because=because)


def _describe_lateness(job: JobReport, late: RankLateness) -> str:
    if job.across is None:
        return ""
    whole = "" if late.last_share is None else f" ({format_share(late.last_share)} of all waiting)"
    throughout = "" if late.straggler else ", though not throughout"
    over = f" over {len(job.steps)} steps" if len(job.steps) > 1 else ""
    return (
        f"rank {late.rank} comes last to {count_of(late.last_calls, 'collective')} and keeps others waiting for "
        f"{format_duration(late.caused_s)} in sum{over}{whole}{throughout}"
    )


# Communication and copies


def _for_communication(job: JobReport) -> Advice:
    overlap = job.detail.breakdown.overlap
    name = next(iter(collective_times(job)), "")
    because = (
        f"{format_duration(overlap.exposed_s)} of {format_duration(overlap.communication_s)} of communication is "
        f"exposed; {format_share(overlap.hidden_share or 0.0)} runs beside compute"
    )
    rows = [] if job.across is None else [row for row in job.across.table if row.collective == name]
    row = max(rows, key=lambda row: row.total_s, default=None)
    action = _OVERLAP.get(name, f"move the {spell_collective(name) if name else 'communication'} beside compute")
    if row is not None:
        because += _describe_rate(row)
        if row.size_bytes is not None and row.size_bytes < SMALL_BYTES and row.count >= 4:
            action = f"join small {spell_collective(name)} calls into few large ones"
    return Advice(action=action, because=because, limit_s=job.detail.breakdown.step_s - overlap.exposed_s)


def _describe_rate(row: CollectiveRow) -> str:
    if row.size_bytes is None and row.busbw_bytes_per_s is None:
        return ""
    text = f"; the longest {spell_collective(row.collective)}: {row.count} ×"
    if row.size_bytes is not None:
        text += f" {format_bytes(row.size_bytes)}"
    if row.busbw_bytes_per_s is not None:
        bound = "at least " if row.includes_waiting else ""
        text += f" at {bound}{format_bandwidth(row.busbw_bytes_per_s)} on the bus"
    return text


def pageable(job: JobReport) -> list[Transfer]:
    """Copies between the device and memory that is not pinned."""
    return [one for one in job.detail.kernels.transfers if "pageable" in one.name.lower()]


def _for_copies(job: JobReport) -> Advice:
    transfers = job.detail.kernels.transfers
    unpinned = pageable(job)
    exposed = job.detail.breakdown.breakdown_s.exposed_copy
    limit_s = job.detail.breakdown.step_s - exposed
    if unpinned and sum(one.busy_s for one in unpinned) >= MUCH * exposed:
        return Advice(
            action="pin the memory that is copied from (pin_memory=True) and copy with non_blocking=True",
            because=describe_pageable(unpinned),
            limit_s=limit_s,
        )
    longest = max(transfers, key=lambda one: one.busy_s, default=None)
    name = "" if longest is None else longest.name
    between = "DtoD" in name or "Device -> Device" in name
    action = "copy earlier, on a stream of its own, so that compute hides it"
    if between:
        action = "avoid copies inside the device: contiguous(), clone() and changes of layout or type"
    because = f"{format_duration(exposed)} of copies have nothing beside them"
    if longest is not None:
        rate = "" if longest.bytes_per_s is None else f" at {format_bandwidth(longest.bytes_per_s)}"
        count = count_of(longest.count, "copy", "copies")
        because += f"; {longest.name} takes {format_duration(longest.busy_s)} in {count}{rate}"
    return Advice(action=action, because=because, limit_s=limit_s)


def describe_pageable(unpinned: Sequence[Transfer]) -> str:
    busy = sum(one.busy_s for one in unpinned)
    moved = sum(one.bytes for one in unpinned)
    rate = f" at {format_bandwidth(moved / busy)}" if moved and busy else ""
    count = count_of(sum(one.count for one in unpinned), "copy", "copies")
    return f"{count} from or to pageable memory, {format_duration(busy)} for {format_bytes(moved)}{rate}"


# Synchronisation


def _for_synchronisation(job: JobReport) -> Advice:
    reasons = job.detail.idle.by_reason_s
    waited = {name: reasons.get(name, 0.0) for name in ("sync", "event_wait", "collective_peer")}
    reason = max(waited, key=lambda name: waited[name])
    gaps = [gap for gap in job.detail.idle.longest if gap.parts_s.get(reason, 0.0) > 0]
    gap = max(gaps, key=lambda gap: gap.parts_s[reason], default=None)
    where = "" if gap is None else f" (longest: {format_duration(gap.duration_s)} in {gap.operator})"
    culprit = "the blocking call" if gap is None else gap.operator
    culprit += f" ({gap.call})" if gap is not None and gap.call is not None else ""
    action, what = {
        "event_wait": (
            "let streams wait for each other less: record events earlier, or keep dependent work on one stream",
            "work was launched and its stream waited for an event",
        ),
        "collective_peer": (
            "take collectives off the host's way: a device backend, or async_op=True and a later wait",
            "the device was idle while the host was inside a collective",
        ),
        "sync": (
            f"do not wait for the device in {culprit}: keep values on the device, read them back later or less often",
            "the device was idle while the host was inside a blocking call",
        ),
    }[reason]
    because = f"for {format_duration(waited[reason])} of the profiled step {what}{where}"
    return Advice(action=action, because=because, limit_s=job.detail.breakdown.step_s - waited[reason])


# Compute


def _for_compute(job: JobReport) -> Advice:
    kernels = job.detail.kernels
    rows = [row for row in kernels.by_category.rows if row.name not in ("communication", "copy", "set")]
    if not rows:
        return for_unknown(job)
    first = rows[0]
    named = next((row for row in kernels.by_name.rows if kernels.names[row.name].category == first.name), None)
    because = f"{first.name} kernels take {format_duration(first.total_s)} ({format_share(first.share)} of device work)"
    if named is not None:
        count = count_of(named.count, "launch", "launches")
        because += f", the most of it {shorten(short_name(named.name))}: {format_duration(named.total_s)} in {count}"
    action = _CATEGORY.get(first.name, f"make its {first.name} kernels faster, or run fewer of them")
    if first.name == "other" and named is not None:
        action = f"make {short_name(named.name)} faster, or run it less often"
    return Advice(action=action, because=because)
