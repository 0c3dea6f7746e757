"""What the answer about a job is made from: how long each class of time holds the step up, and what it is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from stepscope.analyze.critical import kinds
from stepscope.analyze.critical.path import CriticalPath
from stepscope.analyze.critical.what_if import Limit
from stepscope.analyze.job import JobReport, RankSummary
from stepscope.analyze.job.report import TELLING_DIFFERENCE
from stepscope.analyze.ranks.collectives import kernel_collective
from stepscope.analyze.ranks.section import spell_collective
from stepscope.analyze.ranks.stragglers import RankLateness
from stepscope.analyze.step.breakdown import UNRECORDED
from stepscope.analyze.step.host_activity import HostActivity
from stepscope.analyze.step.report import StepReport
from stepscope.core.collectives import COLLECTIVES, DEVICE_BACKENDS, OTHER, SEND_RECV, canonical_collective
from stepscope.core.units import cut_text, format_duration, format_share

ON_CPU = ("data_loading", "sleeping", "python")
"""Classes of a program without a device: what its thread does beside operators."""
CLASSES = ("compute", "communication", "copies", "host", "synchronisation", "stragglers", *ON_CPU)
"""What a step can be bound by. Communication: moving data that nothing hides. Stragglers: the same collectives, but
waiting in them for ranks that came later. Synchronisation: the device was idle while the host was inside a blocking
call, a stream waited for an event, or the host was inside a collective; without a device: the program waited in a
call for something else than a collective."""

LONGEST_NAME = 60
NO_COLLECTIVE = "communication"
"""Where no better name is known; also the class of such kernels."""
COVERING = 0.95
"""Annotations name the communication of a step if they hold so much of it."""


class ClassTime(msgspec.Struct, frozen=True, kw_only=True):
    """One of CLASSES in the explained step of the representative rank."""

    name: str
    device_s: float
    """Fraction of the device's time, see the breakdown."""
    path_s: float | None
    """Seconds on the critical path; None where there is none or where the path does not tell this class from others."""
    time_s: float
    """What both show, the smaller of the two: less of it cannot shorten the step by more. Of the host without what the
    profiler added, where the recording has steps without it."""
    share: float
    """Fraction of the step."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The next thing to try."""

    action: str
    because: str
    """The numbers behind it."""
    limit_s: float | None = None
    """The step could become no shorter by this, as profiled; None where no such bound is known."""


class NotablePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Something else worth knowing, with its number."""

    text: str
    time_s: float
    """How much time it is about."""


def is_cpu(detail: StepReport) -> bool:
    return not detail.breakdown.has_device


def is_unrecorded(detail: StepReport) -> bool:
    """Whether it has none though a device was used: operators do not tell where the time went then."""
    return detail.breakdown.device == UNRECORDED


def find_activity(job: JobReport, name: str) -> HostActivity | None:
    """What a program without a device did beside operators, by kind."""
    return next((one for one in job.detail.breakdown.host_activities if one.activity == name), None)


def profiler_cost_s(job: JobReport) -> float:
    """By how much the profiled step is longer than one without the profiler; 0 where that is not known."""
    known = job.unprofiled_step_s
    return max(job.detail.breakdown.step_s - known, 0.0) if known else 0.0


def share_of_step(job: JobReport, time_s: float) -> float:
    step_s = job.detail.breakdown.step_s
    return time_s / step_s if step_s > 0 else 0.0


def of_step(job: JobReport, time_s: float) -> str:
    return f"{format_duration(time_s)} ({format_share(share_of_step(job, time_s))} of the profiled step)"


def class_times(job: JobReport) -> list[ClassTime]:
    """Longest first.

    The two views err in different ways: time on the critical path may be hidden from the device, and a busy device need
    not be what the step waits for. Only what both show is sure to matter.
    """
    device, path = _by_device(job), _by_path(job)
    found = []
    for name in CLASSES:
        on_path = path.get(name)
        time_s = device[name] if on_path is None else min(device[name], on_path)
        if name == "host":
            # The profiler's own cost is time of the host: it holds no step up that runs without it.
            time_s = max(time_s - profiler_cost_s(job), 0.0)
        share = share_of_step(job, time_s)
        found.append(ClassTime(name=name, device_s=device[name], path_s=on_path, time_s=time_s, share=share))
    return sorted(found, key=lambda one: (-one.time_s, -one.device_s))


def _by_device(job: JobReport) -> dict[str, float]:
    shares = job.detail.breakdown.breakdown_s
    waiting = (wait_share(job) or 0.0) * shares.exposed_comm
    beside = {one.activity: one.time_s for one in job.detail.breakdown.host_activities}
    return {
        "compute": shares.compute,
        "communication": shares.exposed_comm - waiting,
        "copies": shares.exposed_copy,
        "host": max(shares.host_idle - sum(beside.get(name, 0.0) for name in ON_CPU), 0.0),
        "synchronisation": shares.sync_idle,
        "stragglers": waiting,
        **{name: beside.get(name, 0.0) for name in ON_CPU},
    }


def _by_path(job: JobReport) -> dict[str, float]:
    """Synchronisation is left to the breakdown: on the path, a wait belongs to whatever was waited for.

    Nothing for a trace without a device: its path runs through host operators, which are its compute.
    """
    path = own_path(job)
    if path is None or is_cpu(job.detail):
        return {}
    spent = path_parts(path)
    waiting = (wait_share(job) or 0.0) * spent["communication"]
    del spent["unexplained"]
    return {**spent, "communication": spent["communication"] - waiting, "stragglers": waiting}


def path_parts(path: CriticalPath) -> dict[str, float]:
    """Time on a path by class. A delay belongs to what it follows: hand-overs on a stream are compute, the way of a
    launch to its start and the return of a blocking call are the host's."""
    return {
        name: sum(path.by_kind_s.get(kinds.COSTS[cost], 0.0) for cost in costs)
        for name, costs in {
            "compute": (kinds.C_COMPUTE, kinds.C_STREAM),
            "communication": (kinds.C_COMMUNICATION,),
            "copies": (kinds.C_COPY,),
            "host": (*kinds.HOST_COSTS, kinds.C_LAUNCH, kinds.C_SYNC),
            "unexplained": (kinds.C_UNEXPLAINED,),
        }.items()
    }


def own_path(job: JobReport) -> CriticalPath | None:
    """The critical path of the representative rank alone: as long as its step, and comparable to its breakdown."""
    return job.own_critical if job.own_critical is not None else job.critical


def wait_share(job: JobReport) -> float | None:
    """Fraction of the representative rank's time in collectives that was waiting for others; None: not known."""
    if job.across is None:
        return None
    return next((one.wait_share for one in job.across.waiting if one.rank == job.telling_rank), None)


def host_path_s(job: JobReport, *kinds: str) -> float:
    """Time on the representative rank's critical path of these kinds."""
    path = own_path(job)
    return 0.0 if path is None else sum(path.by_kind_s.get(kind, 0.0) for kind in kinds)


def find_limit(limits: Sequence[Limit], name: str) -> Limit | None:
    return next((limit for limit in limits if limit.name == name), None)


def shorten(name: str) -> str:
    return cut_text(name, LONGEST_NAME)


# Names of collectives


def collective_times(job: JobReport) -> dict[str, float]:
    """Collective → time in it, longest first.

    The representative rank's own times where its annotations or kernels name every collective; else the records of all
    ranks, which know what a SendRecv kernel was.
    """
    named = _by_annotation(job) or _by_kernel(job)
    vague = {NO_COLLECTIVE, COLLECTIVES[SEND_RECV]} & named.keys()
    if (vague or not named) and job.across is not None and job.across.table:
        named = _add_up((row.collective, row.total_s) for row in job.across.table)
    return dict(sorted(named.items(), key=lambda item: -item[1]))


def _add_up(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, time_s in times:
        sums[name] = sums.get(name, 0.0) + time_s
    return sums


def _by_annotation(job: JobReport) -> dict[str, float]:
    """From names such as `nccl:all_to_all`; empty where they do not cover nearly all communication."""
    kernels = job.detail.kernels
    rows = [row for row in kernels.by_annotation.rows if row.name.startswith(DEVICE_BACKENDS)]
    codes = ((canonical_collective(row.name), row.total_s) for row in rows)
    times = _add_up((COLLECTIVES[code], time_s) for code, time_s in codes if code is not None)
    whole = sum(row.total_s for row in kernels.by_category.rows if row.name == NO_COLLECTIVE)
    return times if sum(times.values()) >= COVERING * whole else {}


def _by_kernel(job: JobReport) -> dict[str, float]:
    kernels = job.detail.kernels
    rows = [row for row in kernels.by_name.rows if kernels.names[row.name].category == NO_COLLECTIVE]
    codes = ((kernel_collective(row.name), row.total_s) for row in rows)
    return _add_up((NO_COLLECTIVE if code == OTHER else COLLECTIVES[code], time_s) for code, time_s in codes)


def name_communication(job: JobReport) -> str:
    """`all-reduce` where there is (nearly) one kind, else `communication`."""
    times = collective_times(job)
    first = next(iter(times), "")
    return spell_collective(first) if first and times[first] >= 0.99 * sum(times.values()) else NO_COLLECTIVE


def spell_communication(job: JobReport) -> str:
    """The same with the shares of several kinds: `communication (84 % all-to-all, 16 % all-reduce)`."""
    times = collective_times(job)
    name, whole = name_communication(job), sum(times.values())
    if name != NO_COLLECTIVE or not whole:
        return name
    listed = [f"{format_share(spent / whole, 0)} {spell_collective(one)}" for one, spent in times.items()]
    kept = [text for text, spent in zip(listed, times.values(), strict=True) if spent >= 0.05 * whole][:3]
    return f"{NO_COLLECTIVE} ({', '.join(kept)})"


# Ranks


def latest_rank(job: JobReport) -> RankLateness | None:
    """The rank that caused most waiting: one that is late throughout before one that is late now and then.

    None where nobody's lateness is more than noise: somebody always comes last.
    """
    if job.across is None or len(job.ranks) < 2:
        return None
    causing = [one for one in job.across.stragglers.ranks if one.stands_out]
    return max(causing, key=lambda one: (one.straggler, one.caused_s), default=None)


def begins_late_s(job: JobReport, rank: int) -> float | None:
    """How much later than the median rank it begins the step; None where the ranks' clocks cannot be compared."""
    if job.across is None or len(job.details) != len(job.ranks) or job.across.clocks == "durations":
        return None
    clocks, is_aligned = job.across.clock_offsets, job.across.clocks == "aligned"
    if clocks.largest_offset_s is not None and not is_aligned:
        return None
    ahead = {one.rank: (one.offset_s or 0.0) * 1e9 for one in clocks.offsets if one.usable and is_aligned}
    # Differences come first: nanoseconds since 1970 do not fit a float.
    begun = {detail.rank: detail.breakdown.window_start_ns for detail in job.details}
    starts = {one: time - begun[job.details[0].rank] - ahead.get(one or 0, 0.0) for one, time in begun.items()}
    if rank not in starts:
        return None
    return (starts[rank] - median(starts.values())) / 1e9


def compare_ranks(job: JobReport) -> str:
    """How the representative rank's step stands among all: ` on rank 3, the slowest of 8`. Empty for one rank."""
    if len(job.ranks) < 2:
        return ""
    mine = next((one.step_s for one in job.ranks if one.rank == job.telling_rank), job.detail.breakdown.step_s)
    others = [one.step_s for one in job.ranks if one.rank != job.telling_rank]
    unit = 0.0 if job.across is None else 2 * job.across.clock_offsets.resolution_s
    noise = max(TELLING_DIFFERENCE * mine, unit)
    if mine - max(others, default=0.0) > noise:
        how = f"the slowest of {len(job.ranks)}"
    elif mine - min(others, default=0.0) > noise:
        how = f"among the slowest of {len(job.ranks)}"
    else:
        how = f"and about as long on all {len(job.ranks)} ranks"
    return f" on rank {job.telling_rank}, {how}"


def exceeds_most(job: JobReport, rank: int, *, over: int | None = None) -> tuple[str, float] | None:
    """One of CLASSES in which a rank spends most more than the median rank (or than the rank `over`), waiting for other
    ranks left out."""
    parts = {one.rank: _own_parts(job, one) for one in job.ranks}
    if rank not in parts:
        return None
    usual = list(parts.values()) if over is None else [parts[over]]
    excess = {name: spent - median(one.get(name, 0.0) for one in usual) for name, spent in parts[rank].items()}
    name = max(excess, key=lambda one: excess[one])
    return (name, excess[name]) if excess[name] > 0 else None


def _own_parts(job: JobReport, one: RankSummary) -> dict[str, float]:
    """What a rank does itself; of a program without a device, what it does beside operators one by one."""
    shares, detail = one.breakdown_s, next((detail for detail in job.details if detail.rank == one.rank), None)
    parts = {"copies": shares.exposed_copy, "host": shares.host_idle, "synchronisation": shares.sync_idle}
    if detail is not None and is_cpu(detail):
        parts = {activity.activity: activity.time_s for activity in detail.breakdown.host_activities}
    return {"compute": shares.compute, **parts}
