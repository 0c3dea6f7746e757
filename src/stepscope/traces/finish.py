"""What every trace needs after reading: classes of kernels, who launched and enclosed what, steps."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stepscope.core.errors import UsageError
from stepscope.formats.classify import CATEGORIES, COMMUNICATION, classify_names, is_device_wait, is_host_work
from stepscope.formats.nesting import fill_parents, look_up
from stepscope.formats.timeline import (
    ANNOTATION,
    COPY,
    DEVICE_KINDS,
    HOST_KINDS,
    KERNEL,
    MISSING,
    OPERATOR,
    OTHER,
    RUNTIME,
    SET,
    SYNC,
    Array,
    Integers,
    Span,
    Timeline,
)

_PROFILER_STEP = re.compile(r"ProfilerStep\s*#?(\d{1,9})$")
"""Nine digits fit a column; longer numbers are no step numbers."""
_INSIDE = "steps that began inside another were left out"
_REPEATED = "steps with a number that was there already were counted on"
_OPTIMIZER_STEP = re.compile(r"Optimizer\.step#")
_LAST_NUMBER = re.compile(r"(\d+)\D*$")


class FoundSteps(NamedTuple):
    spans: list[Span]
    """In order of time."""
    marker: str
    """How they were found."""
    repairs: dict[str, int]


def find_steps(timeline: Timeline, marker: str | None = None) -> FoundSteps:
    """Steps and how they were found.

    `marker` names an annotation each of whose instances is a step. Without it: ProfilerStep, else the time from one end
    of the optimizer to the next, else the whole trace as one step.
    """
    if marker is not None:
        # `train` is also `train#7`, but not `train_eval`.
        found = _annotated(timeline, re.compile(re.escape(marker) + r"(?:\s*#?\s*\d+)?$"), f"annotation {marker}")
        if not found.spans:
            raise UsageError(f"no annotation is called {marker!r}", hint=_annotations(timeline), where="--step-marker")
        return found
    found = _annotated(timeline, _PROFILER_STEP, "profiler")
    if found.spans:
        return found
    if spans := _between_optimizers(timeline):
        return FoundSteps(spans, "optimizer", {})
    return FoundSteps(_whole(timeline), "none", {})


def assign_steps(timeline: Timeline, spans: list[Span]) -> Integers:
    """Step number of each row: by start for host rows, by their launch for device rows; −1 outside every step."""
    start = timeline.core["start_ns"]
    if not spans:
        return np.full(len(start), -1, np.int32)
    begins = np.array([span.start_ns for span in spans])
    ends = np.array([span.end_ns for span in spans])
    numbers = np.array([span.number for span in spans], np.int32)
    place = np.searchsorted(begins, start, side="right") - 1
    # The end belongs to the step where nothing else does, so that an instant at the very end is not lost.
    inside = (place >= 0) & (start <= ends[np.maximum(place, 0)])
    step: Integers = np.where(inside, numbers[np.maximum(place, 0)], -1).astype(np.int32)
    launch = timeline.core["parent"]
    launched = np.isin(timeline.core["kind"], DEVICE_KINDS) & (launch >= 0)
    step[launched] = step[launch[launched]]
    return step


def _annotated(timeline: Timeline, pattern: re.Pattern[str], marker: str) -> FoundSteps:
    """Instances of matching annotations; of nested ones the outer, since time would count twice."""
    codes = [code for code, text in enumerate(timeline.texts) if pattern.match(text)]
    repairs: dict[str, int] = {}
    wanted = (timeline.core["kind"] == ANNOTATION) & np.isin(timeline.core["name"], codes)
    rows = np.flatnonzero(wanted)
    spans: list[Span] = []
    for row in rows[np.argsort(timeline.core["start_ns"][rows], kind="stable")]:
        start_ns, end_ns = int(timeline.core["start_ns"][row]), int(timeline.core["end_ns"][row])
        if spans and start_ns < spans[-1].end_ns:
            repairs[_INSIDE] = repairs.get(_INSIDE, 0) + 1
            continue
        found = _LAST_NUMBER.search(timeline.texts[int(timeline.core["name"][row])])
        number = int(found[1]) if found and pattern is _PROFILER_STEP else len(spans)
        if spans and number <= spans[-1].number:
            number = spans[-1].number + 1
            repairs[_REPEATED] = repairs.get(_REPEATED, 0) + 1
        spans.append(Span(number, start_ns, end_ns))
    return FoundSteps(spans, marker, repairs)


def _annotations(timeline: Timeline) -> str:
    """The commonest ones, for a message."""
    codes, counts = np.unique(timeline.core["name"][timeline.core["kind"] == ANNOTATION], return_counts=True)
    names = [timeline.texts[code] for code in codes[np.argsort(-counts, kind="stable")].tolist()]
    return f"annotations here: {', '.join(names[:8])}" if names else "the trace has no annotations"


def _between_optimizers(timeline: Timeline) -> list[Span]:
    """From the end of one optimizer step to the end of the next; the first begins with the first event."""
    codes = [code for code, text in enumerate(timeline.texts) if _OPTIMIZER_STEP.match(text)]
    wanted = np.isin(timeline.core["name"], codes) & (timeline.core["kind"] == ANNOTATION)
    rows = np.flatnonzero(wanted)
    if len(rows) < 2:
        return []
    # A program with several optimizers runs each once a step: the first one counts.
    first = timeline.core["name"][rows[np.argmin(timeline.core["start_ns"][rows])]]
    ends = np.sort(timeline.core["end_ns"][rows[timeline.core["name"][rows] == first]])
    begin = int(timeline.core["start_ns"].min())
    bounds = [begin, *(int(end) for end in ends)]
    return [Span(number, *pair) for number, pair in enumerate(pairwise(bounds)) if pair[1] > pair[0]]


def _whole(timeline: Timeline) -> list[Span]:
    if not len(timeline):
        return []
    return [Span(0, int(timeline.core["start_ns"].min()), int(timeline.core["end_ns"].max()))]


MOST_DEVICE_NUMBER = (1 << 31) - 1
MOST_DEVICES = 128
MOST_STREAMS = 1024
"""Numbers of streams of one rank, whatever their devices."""
MOST_THREADS = 4096


def finish(timeline: Timeline, *, step_marker: str | None = None) -> Timeline:
    """Fill `category`, `parent` and `step`; steps that a reader has found itself are kept."""
    repairs = dict(timeline.repairs)
    core: dict[str, Array] = dict(timeline.core)
    core["kind"] = _kinds(timeline)
    timeline = replace(timeline, core=core)
    core["category"] = _categories(timeline)
    repairs |= _limit_places(timeline, core)
    core["parent"], crossing = _parents(timeline)
    if crossing:
        repairs["host events that end after the event they began in"] = crossing
    timeline = replace(timeline, core=core, repairs=repairs)
    if timeline.steps and step_marker is None:
        spans, marker = list(timeline.steps), timeline.step_marker
    else:
        spans, marker, step_repairs = find_steps(timeline, step_marker)
        repairs |= step_repairs
    core["step"] = assign_steps(timeline, spans)
    return replace(timeline, core=core, steps=tuple(spans), step_marker=marker, repairs=repairs)


def _kinds(timeline: Timeline) -> Array:
    """What a name says better than the category: a wait of a device keeps no device busy, and a collective on the host
    is an operator, whatever either was recorded as."""
    kind, name = timeline.core["kind"], timeline.core["name"]
    for is_meant, wrong, right in ((is_device_wait, (KERNEL,), SYNC), (is_host_work, (ANNOTATION, OTHER), OPERATOR)):
        codes = [code for code, text in enumerate(timeline.texts) if is_meant(text)]
        if codes:
            kind = np.where(np.isin(name, codes) & np.isin(kind, wrong), right, kind).astype(kind.dtype)
    return kind


def _limit_places(timeline: Timeline, core: dict[str, Array]) -> dict[str, int]:
    """Devices, streams and threads beyond any machine's are damage; analyses take time for each: these are unknown."""
    repairs = {}
    impossible = (core["device"] > MOST_DEVICE_NUMBER) | (core["device"] < MISSING)
    if impossible.any():
        core["device"] = np.where(impossible, MISSING, core["device"])
        repairs["device numbers below 0 or beyond 32 bits: the device is unknown"] = int(impossible.sum())
    on_device = np.flatnonzero(np.isin(core["kind"], (*DEVICE_KINDS, SYNC)))
    on_host = np.flatnonzero(core["thread"] >= 0)
    limits = (
        ("device", MOST_DEVICES, on_device),
        ("stream", MOST_STREAMS, on_device),
        ("thread", MOST_THREADS, on_host),
    )
    for name, most, rows in limits:
        used = core[name][rows]
        if not len(rows) or int(used.max()) - int(used.min()) < most:
            continue  # the usual case, told without sorting
        numbers, places, counts = np.unique(used, return_inverse=True, return_counts=True)
        if len(numbers) > most:
            left_out = np.argsort(-counts, kind="stable")[most:]
            unknown = rows[np.isin(places, left_out)]
            core[name] = core[name].copy()
            core[name][unknown] = MISSING
            repairs[f"events on a {name} beyond the {most:,} with most events: their {name} is unknown"] = len(unknown)
    return repairs


def _categories(timeline: Timeline) -> Array:
    kind, name = timeline.core["kind"], timeline.core["name"]
    category = np.full(len(timeline), MISSING, np.int8)
    kernels = kind == KERNEL
    codes = np.flatnonzero(np.bincount(name[kernels]))
    by_code = np.zeros(int(codes.max()) + 1 if len(codes) else 0, np.int8)
    by_code[codes] = classify_names([timeline.texts[code] for code in codes.tolist()])
    category[kernels] = by_code[name[kernels]]
    category[kind == COPY] = CATEGORIES.index("copy")
    category[kind == SET] = CATEGORIES.index("set")
    # What a reader knows of its own format (an operation's class in XLA, say) is kept.
    given = timeline.core["category"]
    category[given >= 0] = given[given >= 0]
    block = timeline.blocks.get("collective")
    if block is not None and "collective" in block.columns:
        rows = block.rows[block.columns["collective"] != MISSING]
        category[rows[kind[rows] == KERNEL]] = COMMUNICATION
    return category


def _parents(timeline: Timeline) -> tuple[Integers, int]:
    core = timeline.core
    parent = np.full(len(timeline), MISSING, np.int32)
    hosts = np.flatnonzero(np.isin(core["kind"], HOST_KINDS) & (core["thread"] >= 0)).astype(np.int32)
    crossing = fill_parents(
        hosts,
        thread=core["thread"],
        start=core["start_ns"],
        end=core["end_ns"],
        index=core["event_index"],
        parent=parent,
    )
    devices = np.flatnonzero(np.isin(core["kind"], DEVICE_KINDS))
    parent[devices] = find_launches(timeline, devices)
    return parent, crossing


def find_launches(timeline: Timeline, devices: Integers) -> Integers:
    """Row of the runtime call that launched each device row, by correlation; −1 where the file has none."""
    correlation = timeline.core["correlation"]
    calls = np.flatnonzero((timeline.core["kind"] == RUNTIME) & (correlation >= 0))
    return look_up(correlation[devices], correlation[calls], calls)
