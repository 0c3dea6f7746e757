"""Where a step begins and ends, and which events belong to it."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stepscope.core.errors import UsageError
from stepscope.formats.timeline import ANNOTATION, DEVICE_KINDS, Integers, Span, Timeline

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
