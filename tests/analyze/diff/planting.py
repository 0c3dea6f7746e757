"""Changes planted into real traces: what the comparison must find is then known to the nanosecond."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stepscope.formats.timeline import KERNEL, MISSING, OPERATOR, Span, Timeline
from stepscope.traces.cut import take_rows
from stepscope.traces.finish import finish

RESNET = "public/param/resnet_kineto.json.gz"
LINEAR = "public/param/linear_kineto.json.gz"


def rows_named(timeline: Timeline, kind: int, name: str) -> np.ndarray:
    code = list(timeline.texts).index(name)
    return np.flatnonzero((timeline.core["kind"] == kind) & (timeline.core["name"] == code))


def lonely_kernel(timeline: Timeline, least_calls: int = 1) -> str:
    """The name of the kernel with most time among those beside which no other device work ever runs."""
    device = timeline.rows(2, 3, 4)
    start, end = timeline.core["start_ns"][device], timeline.core["end_ns"][device]
    reached = np.maximum.accumulate(end)
    crowded = np.zeros(len(device), bool)
    crowded[1:] |= start[1:] < reached[:-1]
    crowded[:-1] |= start[1:] < reached[:-1]
    names, kinds = timeline.core["name"][device], timeline.core["kind"][device]
    spent = np.bincount(names, weights=end - start)
    spent[np.unique(names[crowded | (kinds != KERNEL)])] = 0
    spent[np.bincount(names) < least_calls] = 0
    return timeline.texts[int(np.argmax(spent))]


def durations(timeline: Timeline, rows: np.ndarray) -> np.ndarray:
    return timeline.core["end_ns"][rows] - timeline.core["start_ns"][rows]


def by_step(timeline: Timeline, rows: np.ndarray, numbers: Sequence[int]) -> list[int]:
    """Nanoseconds these rows take in each of the steps."""
    spent = durations(timeline, rows)
    return [int(spent[timeline.core["step"][rows] == number].sum()) for number in numbers]


def slow_down(timeline: Timeline, rows: np.ndarray) -> Timeline:
    """Each of these takes twice as long; everything after its end happens that much later."""
    ends = timeline.core["end_ns"][rows]
    order = np.argsort(ends)
    ends, added = ends[order], np.concatenate(([0], np.cumsum(durations(timeline, rows)[order])))
    return _moved(timeline, lambda times: times + added[np.searchsorted(ends, times, side="right")])


def remove(timeline: Timeline, rows: np.ndarray) -> Timeline:
    """These never ran, and the time they took is gone for everybody. They must not overlap."""
    order = np.argsort(timeline.core["start_ns"][rows])
    start, end = timeline.core["start_ns"][rows][order], timeline.core["end_ns"][rows][order]
    assert (start[1:] >= end[:-1]).all()
    whole = np.concatenate(([0], np.cumsum(end - start)))

    def earlier(times: np.ndarray) -> np.ndarray:
        begun = np.searchsorted(start, times, side="right")
        last = np.maximum(begun - 1, 0)
        return times - whole[begun] + np.where(begun > 0, np.maximum(end[last] - times, 0), 0)

    return take_rows(_moved(timeline, earlier), np.delete(np.arange(len(timeline)), rows))


def _moved(timeline: Timeline, move: object) -> Timeline:
    core = dict(timeline.core)
    for column in ("start_ns", "end_ns"):
        core[column] = move(np.asarray(core[column]))  # type: ignore[operator]
    spans = [
        Span(span.number, *(int(time) for time in move(np.array([span.start_ns, span.end_ns]))))  # type: ignore[operator]
        for span in timeline.steps
    ]
    return replace(timeline, core=core, steps=tuple(spans))


def rename(timeline: Timeline, old: str, new: str) -> Timeline:
    return replace(timeline, texts=[new if text == old else text for text in timeline.texts])


def add_operator(timeline: Timeline, name: str, inside: str) -> Timeline:
    """An operator of this name around every call of another one."""
    rows = rows_named(timeline, OPERATOR, inside)
    core = {column: np.concatenate([values, values[rows]]) for column, values in timeline.core.items()}
    core["name"] = core["name"].astype(np.int64)
    core["name"][len(timeline) :] = len(timeline.texts)
    core["event_index"] = core["event_index"].astype(np.int64)
    core["event_index"][len(timeline) :] = MISSING
    return finish(replace(timeline, core=core, texts=[*timeline.texts, name]))


def reorder_steps(timeline: Timeline, order: Sequence[int]) -> Timeline:
    """The same steps in another order of time; `order` names their places."""
    core = dict(timeline.core)
    step = np.asarray(core["step"]).copy()
    times = {column: np.asarray(core[column]).copy() for column in ("start_ns", "end_ns")}
    spans, clock = [], timeline.steps[0].start_ns
    for number, place in enumerate(order):
        span = timeline.steps[place]
        mine = core["step"] == span.number
        for column in times.values():
            column[mine] += clock - span.start_ns
        step[mine] = number
        spans.append(Span(number, clock, clock + span.end_ns - span.start_ns))
        clock = spans[-1].end_ns + 50_000
    return replace(timeline, core={**core, **times, "step": step}, steps=tuple(spans))
