"""What a program does on the CPU beside its operators: loading data, sleeping, waiting, running Python code."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.step.device_work import Window
from stepscope.analyze.step.intervals import Intervals, clip, join, length, measure_within, subtract
from stepscope.analyze.step.numbers import distinct, seconds
from stepscope.analyze.step.view import TraceView
from stepscope.formats.classify import classify_lone_communication
from stepscope.formats.nesting import fill_parents
from stepscope.formats.timeline import ANNOTATION, MISSING, OPERATOR, PYTHON, RUNTIME, Integers

ACTIVITY_WORDS = {
    "data_loading": "data loading",
    "sleeping": "sleeping",
    "synchronisation": "waiting in synchronisation",
    "python": "Python code",
}
ACTIVITIES = tuple(ACTIVITY_WORDS)
"""In the order in which time is given away: a DataLoader that sleeps loads data."""
DATA_LOADING = re.compile(
    r"enumerate\(DataLoader\)|_(?:Base|MultiProcessing|SingleProcess)DataLoaderIter|dataloader\.py\(\d+\): __next__"
    r"|data ?loading",
    re.IGNORECASE,
)
_SLEEPING = re.compile(r"<built-in (?:method|function) \w*sleep\b|\btime\.sleep\b")
_WAITING = re.compile(
    r"<built-in (?:method|function) (?:acquire|wait|waitpid|wait4|select|accept|recv\w*)(?:>| of (?!Tensor|Parameter))"
    r"|<method '(?:acquire|wait|poll|get|recv\w*|accept)' of '(?:_thread|select|_socket|_queue|_multiprocessing)\."
    r"|<built-in method (?:poll|get) of (?:select|_queue)\."
    r"|\b(?:threading|queue|selectors|subprocess|connection|popen_fork|_base|synchronize)\.py\(\d+\): "
    r"(?:wait|join|acquire|get|select|poll|_?recv\w*|result)\b"
)
"""Calls of the standard library that return when something else has happened; tensors have a `select` too."""
_COMMUNICATING = re.compile(
    r"distributed_c10d\.py\(\d+\): (?:all_|reduce|broadcast|gather|scatter|barrier|monitored_barrier|send|recv)"
)
"""Python functions of torch.distributed: they return when the collective has ended."""
_PATTERNS: dict[str, Callable[[str], object]] = {
    "data_loading": DATA_LOADING.search,
    "sleeping": _SLEEPING.search,
    "synchronisation": _WAITING.search,
    "python": bool,
}


class HostActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of what the program's thread did outside operators and collectives."""

    activity: str
    """One of ACTIVITIES."""
    time_s: float
    count: int
    """Calls that were this activity; of Python code: calls of functions."""
    call: str
    """The name that took most of these calls' time."""
    function: str | None
    """The Python function that took most of it itself; None where stacks were not recorded."""
    function_s: float
    """How much of the activity that function took itself, without what it called."""
    caller: str | None
    """The Python function that called it."""


class CpuTimes(NamedTuple):
    """A window without device work, as sets of time."""

    compute: Intervals
    """Any thread was inside an operator that is neither a collective nor part of loading data."""
    communication: Intervals
    communication_rows: Integers
    beside: dict[str, Intervals]
    """Intervals of each of ACTIVITIES: disjoint, and beside neither compute nor communication."""


def divide_cpu_time(trace: TraceView, window: Window) -> CpuTimes:
    """A thread inside a collective does not compute, whatever operator encloses the collective."""
    rows = _inside(trace, trace.rows(OPERATOR), window)
    collectives = find_host_collectives(trace, window)
    loading = trace.spans(_program_rows(trace, window, DATA_LOADING.search))
    compute: list[Intervals] = []
    for thread in distinct(trace.thread[rows]):
        working = trace.spans(rows[trace.thread[rows] == thread])
        talking = trace.spans(collectives[trace.thread[collectives] == thread])
        working = subtract(working, talking) if len(talking.start) else working
        compute.append(subtract(working, loading) if thread == trace.main_thread else working)
    busy = clip(join(compute), *window)
    communication = clip(trace.spans(collectives), *window)
    taken, beside = join((busy, communication)), {}
    for activity in ACTIVITIES:
        found = clip(trace.spans(_program_rows(trace, window, _PATTERNS[activity])), *window)
        beside[activity] = subtract(found, taken)
        taken = join((taken, beside[activity]))
    return CpuTimes(busy, communication, collectives, beside)


def find_host_collectives(trace: TraceView, window: Window) -> Integers:
    """Collectives that run on the host, and Python functions that wait for them."""
    found = _inside(trace, trace.rows(OPERATOR), window)
    waits = _program_rows(trace, window, _COMMUNICATING.search)
    return np.union1d(trace.named(found, classify_lone_communication), waits)


def describe_activities(trace: TraceView, window: Window, times: CpuTimes) -> list[HostActivity]:
    """Those that took any time, longest first."""
    program = _list_calls(trace, window)
    spent = [(activity, spans) for activity, spans in times.beside.items() if len(spans.start)]
    found = [_describe(trace, window, activity, spans, program) for activity, spans in spent]
    return sorted(found, key=lambda one: -one.time_s)


class _Calls(NamedTuple):
    """Operators, runtime calls and Python functions of the program's thread in a window."""

    rows: Integers
    above: Integers
    """Place here of the call around each; −1 without one."""
    is_function: Integers


def _describe(trace: TraceView, window: Window, activity: str, spans: Intervals, program: _Calls) -> HostActivity:
    calls = _program_rows(trace, window, _PATTERNS[activity])
    if activity == "python":
        calls = program.rows[program.is_function]
    else:
        # Inside another it is the same call.
        calls = calls[trace.enclosing(trace.parent[calls], trace.mask(calls)) == MISSING]
    longest, _ = _longest(trace, calls, trace.end[calls] - trace.start[calls])
    own = _own_times(trace, program, spans)
    taking = np.flatnonzero(program.is_function & (own > 0))
    function, own_ns = _longest(trace, program.rows[taking], own[taking])
    caller = MISSING
    if function >= 0:
        above = int(program.above[np.flatnonzero(program.rows == function)[0]])
        caller = int(program.rows[above]) if above >= 0 and program.is_function[above] else MISSING
    return HostActivity(
        activity=activity,
        time_s=seconds(length(spans)),
        count=len(calls),
        call=trace.text(int(trace.name[longest])),
        function=trace.label(function),
        function_s=seconds(own_ns),
        caller=trace.label(caller),
    )


def _longest(trace: TraceView, rows: Integers, taken: Integers) -> tuple[int, float]:
    """The longest row of the name that took most time in sum, and that time; −1 without rows."""
    if not len(rows):
        return MISSING, 0.0
    codes, place = np.unique(trace.name[rows], return_inverse=True)
    sums = np.bincount(place, weights=taken, minlength=len(codes))
    mine = np.flatnonzero(place == int(sums.argmax()))
    return int(rows[mine[int(taken[mine].argmax())]]), float(sums.max())


def _list_calls(trace: TraceView, window: Window) -> _Calls:
    """Annotations are left out: one of a profiler's step begins inside one function and ends inside another."""
    rows = trace.rows(OPERATOR, RUNTIME, PYTHON)
    rows = _inside(trace, rows[trace.thread[rows] == trace.main_thread], window)
    start, end = trace.start[rows], trace.end[rows]
    above = np.full(len(rows), MISSING, np.int32)
    places, index = np.arange(len(rows), dtype=np.int32), trace.column("event_index")[rows]
    fill_parents(places, thread=trace.thread[rows], start=start, end=end, index=index, parent=above)
    return _Calls(rows, above, trace.kind[rows] == PYTHON)


def _own_times(trace: TraceView, program: _Calls, spans: Intervals) -> Integers:
    """How much of an activity each call took itself, without what it called."""
    taken = measure_within(spans, trace.start[program.rows], trace.end[program.rows])
    inside = program.above >= 0
    inner = np.bincount(program.above[inside], weights=taken[inside], minlength=len(taken))
    own: Integers = np.maximum(taken - inner, 0).astype(np.int64)
    return own


def _program_rows(trace: TraceView, window: Window, is_wanted: Callable[[str], object]) -> Integers:
    """Annotations and Python functions of the program's thread that reach into the window, by name."""

    def find() -> Integers:
        rows = trace.rows(PYTHON) if is_wanted is bool else trace.rows(ANNOTATION, PYTHON)
        return trace.named(rows[trace.thread[rows] == trace.main_thread], is_wanted)

    return _inside(trace, trace.keep(("program rows", is_wanted), find), window)


def _inside(trace: TraceView, rows: Integers, window: Window) -> Integers:
    kept: Integers = rows[(trace.end[rows] > window.start_ns) & (trace.start[rows] < window.end_ns)]
    return kept
