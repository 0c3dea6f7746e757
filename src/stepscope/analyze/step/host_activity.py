"""What a program does on the CPU beside its operators: loading data, sleeping, waiting, running Python code."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope.analyze.step.device_work import Window
from stepscope.analyze.step.intervals import Intervals, clip, length, no_intervals, subtract, union
from stepscope.analyze.step.numbers import seconds
from stepscope.analyze.step.view import TraceView
from stepscope.traces.timeline import ANNOTATION, MISSING, OPERATOR, PYTHON, RUNTIME

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.analyze.step.numbers import Mask
    from stepscope.traces.timeline import Integers

ACTIVITIES = ("data_loading", "sleeping", "synchronisation", "python")
"""In the order in which time is given away: a DataLoader that sleeps loads data."""
DATA_LOADING = re.compile(
    r"enumerate\(DataLoader\)|_BaseDataLoaderIter|_(?:Multi|Single)ProcessingDataLoaderIter|data ?loading",
    re.IGNORECASE,
)
_SLEEPING = re.compile(r"<built-in (?:method|function) \w*sleep\b|\btime\.sleep\b")
_WAITING = re.compile(
    r"<(?:built-in )?(?:method|function) '?(?:acquire|wait|waitpid|wait4|join|select|poll|recv\w*|accept)\b"
    r"|\b(?:threading|queue|selectors|subprocess|connection|popen_fork|_base|synchronize)\.py\(\d+\): "
    r"(?:wait|join|acquire|get|select|poll|_?recv\w*|result)\b"
)
_COMMUNICATING = re.compile(
    r"distributed_c10d\.py\(\d+\): (?:all_|reduce|broadcast|gather|scatter|barrier|monitored_barrier|send|recv)"
)
"""Python functions of torch.distributed: they return when the collective has ended."""


class HostActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of what the program's thread did outside operators and collectives."""

    activity: str
    """One of ACTIVITIES."""
    time_s: float
    count: int
    """Calls that took part; of Python code: functions by name."""
    longest: str
    """The call or function that took most of it."""
    longest_s: float
    caller: str | None
    """The Python function that made the longest call; None where stacks were not recorded."""


class CpuTimes(NamedTuple):
    """A window without device work, as sets of time."""

    compute: Intervals
    """Any thread was inside an operator that is neither a collective nor part of loading data."""
    communication: Intervals
    communication_rows: Integers
    beside: dict[str, Intervals]
    """Of each of ACTIVITIES: disjoint, and beside neither compute nor communication."""


def divide_cpu_time(trace: TraceView, window: Window) -> CpuTimes:
    """A thread inside a collective does not compute, whatever operator encloses the collective."""
    import numpy as np

    rows = _inside(trace, trace.rows(OPERATOR), window)
    collectives = find_host_collectives(trace, window)
    loading = clip(trace.spans(_program_rows(trace, window, DATA_LOADING.search)), *window)
    compute: list[Intervals] = []
    for thread in np.unique(trace.thread[rows]).tolist():
        working = trace.spans(rows[trace.thread[rows] == thread])
        talking = trace.spans(collectives[trace.thread[collectives] == thread])
        working = subtract(working, talking) if len(talking.start) else working
        compute.append(subtract(working, loading) if thread == trace.main_thread else working)
    busy = clip(join(compute), *window)
    communication = clip(trace.spans(collectives), *window)
    taken, beside = join((busy, communication)), {}
    for activity, found in (
        ("data_loading", loading),
        ("sleeping", trace.spans(_program_rows(trace, window, _SLEEPING.search))),
        ("synchronisation", trace.spans(_program_rows(trace, window, _WAITING.search))),
        ("python", trace.spans(_program_rows(trace, window, bool, PYTHON))),
    ):
        beside[activity] = subtract(clip(found, *window), taken)
        taken = join((taken, beside[activity]))
    return CpuTimes(busy, communication, collectives, beside)


def find_host_collectives(trace: TraceView, window: Window) -> Integers:
    """Collectives that run on the host, and Python functions that wait for them."""
    import numpy as np

    from stepscope.traces.classify import classify_lone_communication

    found = _inside(trace, trace.rows(OPERATOR), window)
    waits = _program_rows(trace, window, _COMMUNICATING.search, PYTHON)
    return np.union1d(trace.named(found, classify_lone_communication), waits)


def describe_activities(trace: TraceView, window: Window, times: CpuTimes) -> list[HostActivity]:
    """Those that took any time, longest first."""
    patterns: dict[str, Callable[[str], object]] = {
        "data_loading": DATA_LOADING.search,
        "sleeping": _SLEEPING.search,
        "synchronisation": _WAITING.search,
        "python": bool,
    }
    found = [
        _describe(trace, activity, times.beside[activity], _program_rows(trace, window, wanted))
        for activity, wanted in patterns.items()
        if len(times.beside[activity].start)
    ]
    return sorted(found, key=lambda one: -one.time_s)


def _describe(trace: TraceView, activity: str, spans: Intervals, rows: Integers) -> HostActivity:
    import numpy as np

    if activity == "python":
        rows = rows[trace.kind[rows] == PYTHON]
        taken = _own_times(trace, rows)
    else:
        rows = rows[trace.enclosing(trace.parent[rows], _marked(trace, rows)) == MISSING]  # the outermost of each
        taken = trace.end[rows] - trace.start[rows]
    codes, place = np.unique(trace.name[rows], return_inverse=True)
    sums = np.bincount(place, weights=taken, minlength=len(codes))
    most = int(sums.argmax())
    one = rows[place == most][int(taken[place == most].argmax())]
    caller = int(trace.enclosing(trace.parent[one : one + 1], trace.is_kind(PYTHON))[0])
    return HostActivity(
        activity=activity,
        time_s=seconds(length(spans)),
        count=len(codes) if activity == "python" else len(rows),
        longest=trace.text(int(codes[most])),
        longest_s=seconds(float(sums[most])),
        caller=trace.text(int(trace.name[caller])) if caller >= 0 and activity != "python" else None,
    )


def _marked(trace: TraceView, rows: Integers) -> Mask:
    import numpy as np

    mask: Mask = np.zeros(len(trace.start), bool)
    mask[rows] = True
    return mask


def _own_times(trace: TraceView, rows: Integers) -> Integers:
    """Of each Python function, without what it calls."""
    import numpy as np

    parent = trace.parent[trace.rows(OPERATOR, RUNTIME, ANNOTATION, PYTHON)]
    children = trace.rows(OPERATOR, RUNTIME, ANNOTATION, PYTHON)[parent >= 0]
    inner = np.bincount(
        parent[parent >= 0], weights=trace.end[children] - trace.start[children], minlength=len(trace.start)
    )
    own: Integers = np.maximum(trace.end[rows] - trace.start[rows] - inner[rows], 0)
    return own


def _program_rows(trace: TraceView, window: Window, is_wanted: Callable[[str], object], *kinds: int) -> Integers:
    """Annotations and Python functions of the program's thread that reach into the window, by name."""
    rows = trace.rows(*(kinds or (ANNOTATION, PYTHON)))
    rows = _inside(trace, rows[trace.thread[rows] == trace.main_thread], window)
    return trace.named(rows, is_wanted)


def _inside(trace: TraceView, rows: Integers, window: Window) -> Integers:
    kept: Integers = rows[(trace.end[rows] > window.start_ns) & (trace.start[rows] < window.end_ns)]
    return kept


def join(sets: tuple[Intervals, ...] | list[Intervals]) -> Intervals:
    """The union of several sets."""
    import numpy as np

    if not sets:
        return no_intervals()
    return union(np.concatenate([one.start for one in sets]), np.concatenate([one.end for one in sets]))
