"""What changes during a step, as functions of time: the length of the device queues, and bandwidths."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from stepscope.analyze.ranks.collectives import collective_calls
from stepscope.analyze.step.intervals import StepFunction, sweep
from stepscope.analyze.step.view import view
from stepscope.formats.timeline import COPY, SET, Integers, Timeline

_HOST_COPY = re.compile(r"\bHto[ADH]\b|\b[AD]toH\b|Host", re.IGNORECASE)


def queue_length(timeline: Timeline) -> StepFunction:
    """Device activities that were launched and have not started, of all steps and on all devices of the rank."""
    known = [(work.called[work.launch >= 0], work.start[work.launch >= 0]) for work in view(timeline).works]
    called, start = (np.concatenate(part) for part in zip(*known, strict=True)) if known else (np.zeros(0, int),) * 2
    return sweep(called, np.maximum(start, called))


def copy_bandwidth(timeline: Timeline, *, with_host: bool) -> StepFunction:
    """Bytes per second of the copies that run at a time between host and device; else of copies and fills on the
    device, which are many times faster."""
    trace = view(timeline)
    rows = trace.rows(COPY, SET)
    rows = rows[trace.has_name(rows, _HOST_COPY.search) == with_host]
    return add_rates(trace.start[rows], trace.end[rows], trace.column("bytes")[rows])


def collective_bandwidth(timeline: Timeline) -> StepFunction:
    """Algorithm bandwidth (size over duration, in bytes per second) of the collectives that run at a time. Waiting for
    other ranks is part of their duration, so it is a lower bound of what the links gave."""
    calls = collective_calls(timeline).calls
    return add_rates(calls["start_ns"], calls["end_ns"], calls["size_bytes"])


def add_rates(start: Integers, end: Integers, moved_bytes: Integers) -> StepFunction:
    """The sum over everything that is open of its bytes per second; what has no bytes or no duration is left out."""
    known = (moved_bytes > 0) & (end > start)
    start, end, moved = (np.asarray(column[known], np.int64) for column in (start, end, moved_bytes))
    rate = moved / ((end - start) / 1e9)
    times, place = np.unique(np.concatenate((start, end)), return_inverse=True)
    change = np.bincount(place, weights=np.concatenate((rate, -rate)), minlength=len(times))
    # What is open is counted in whole numbers, so that a sum of fractions leaves nothing behind when all is over.
    count: Any = np.bincount(place, weights=np.repeat((1.0, -1.0), len(rate)), minlength=len(times))
    is_open = np.cumsum(count) > 0
    return StepFunction(times, np.where(is_open, np.maximum(np.cumsum(change), 0.0), 0.0))
