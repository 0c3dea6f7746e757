"""Runs of short kernels that come again and again: what fusing them could save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.section import Section, field, make_table
from stepscope.analyze.step.device_work import COMPUTE, DeviceWork, busy_spans
from stepscope.analyze.step.intervals import Intervals, common_length, complement, union
from stepscope.analyze.step.numbers import distinct, seconds, share_of
from stepscope.analyze.step.view import TraceView, view
from stepscope.core.units import format_duration
from stepscope.formats.classify import short_name
from stepscope.formats.timeline import KERNEL, MISSING, OPERATOR, Timeline

if TYPE_CHECKING:
    from stepscope.analyze.job import JobReport

SHORT_NS = 20_000
"""A kernel is short when it takes no longer than this: about what it costs to launch one under a profiler."""
LONGEST = 12
"""Kernels in the longest sequence looked for."""
LEAST_COUNT = 3
_TRIED = 10
"""So many candidates are tried for each one wanted."""


class KernelSequence(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels that followed each other on a stream, with nothing between them there."""

    kernels: list[str]
    operators: list[str | None]
    """What launched each of them the first time."""
    count: int
    """How often, without overlapping itself."""
    kernel_s: float
    """Time in the kernels of all of them."""
    gap_s: float
    """Time between the kernels of a sequence in which the device did nothing: what fusion would save at most."""
    launches_saved: int
    """Launches fewer if each became one kernel."""
    share: float
    """Fraction of all kernels on these streams, by number."""


class SequenceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Candidates for fusion, largest gap_s first. No kernel is part of two, so what they save adds up."""

    step: int | None
    short_s: float
    """Longest kernel that took part."""
    short_kernels: int
    kernels: int
    sequences: list[KernelSequence]
    note: str | None = None


class _Row(NamedTuple):
    """All streams one after the other."""

    place: Any
    code: Any
    start: Any
    end: Any
    joins: Any
    """Whether it and the next may stand in one sequence."""


class _Found(NamedTuple):
    length: int
    places: Any
    """Where it begins, without overlapping itself; ascending."""


def find_sequences(
    timeline: Timeline, step: int | None, *, short_ns: int = SHORT_NS, longest: int = LONGEST, top: int = 20
) -> SequenceReport:
    """Sequences in one step; None: in the whole trace."""
    trace = view(timeline)
    window = trace.window(step)
    found: list[KernelSequence] = []
    kernels = short = 0
    for work in trace.works:
        row, is_short = _line_up(trace, work, step, short_ns)
        mine = int((trace.kind[work.rows[row.place]] == KERNEL).sum())
        candidates = _repeated(row, is_short, longest)
        busy, _ = busy_spans(work, work.part(window))
        idle = complement(busy, *window)
        found += [_describe(trace, work, row, one, idle, kernels=mine) for one in _choose(row, candidates, top)]
        kernels, short = kernels + mine, short + int(is_short.sum())
    return SequenceReport(
        step=step,
        short_s=seconds(short_ns),
        short_kernels=short,
        kernels=kernels,
        sequences=sorted(found, key=lambda one: -one.gap_s)[:top],
        note=None if trace.works else "no device rows in this trace: kernel sequences do not apply",
    )


def _line_up(trace: TraceView, work: DeviceWork, step: int | None, short_ns: int) -> tuple[_Row, Any]:
    place = np.arange(len(work.rows)) if step is None else np.flatnonzero(work.step == step)
    place = place[np.argsort(work.stream[place], kind="stable")]
    rows, stream = work.rows[place], work.stream[place]
    start, end = work.start[place], work.end[place]
    is_short = (trace.kind[rows] == KERNEL) & (work.share[place] == COMPUTE) & (end - start <= short_ns)
    joins = is_short[:-1] & is_short[1:] & (stream[:-1] == stream[1:])
    return _Row(place, trace.name[rows].astype(np.int64), start, end, joins), is_short


def _repeated(row: _Row, is_short: Any, longest: int) -> list[_Found]:
    """Every sequence of two kernels and more that comes often enough and is not always part of one longer one.

    Grows sequences by one kernel at a time; only those that are frequent can be the beginning of a longer frequent one.
    """
    found: list[_Found] = []
    number = row.code
    begins = np.flatnonzero(is_short)
    previous: dict[int, _Found] = {}
    for length in range(2, longest + 1):
        last = begins + length - 1
        begins = begins[last < len(row.code)]
        begins = begins[row.joins[begins + length - 2]]
        if not len(begins):
            break
        keys = number[begins] * (len(row.code) + int(row.code.max()) + 1) + row.code[begins + length - 1]
        _, place, counts = np.unique(keys, return_inverse=True, return_counts=True)
        frequent = counts[place] >= LEAST_COUNT
        begins, place = begins[frequent], place[frequent]
        order = np.argsort(place, kind="stable")
        groups = np.split(begins[order], np.flatnonzero(np.diff(place[order])) + 1)
        current = {}
        for code, group in zip(distinct(place), groups, strict=False):
            if len(places := _apart(group, length)) >= LEAST_COUNT:
                current[code] = _Found(length, places)
        for one in current.values():
            # A shorter sequence that never comes without the longer one says nothing of its own.
            for begin in (int(one.places[0]), int(one.places[0]) + 1):
                inner = previous.get(int(number[begin]))
                if inner is not None and len(inner.places) == len(one.places):
                    del previous[int(number[begin])]
        found += previous.values()
        # The place in the list stands for the sequence from now on, so numbers stay small.
        number = np.full(len(row.code), MISSING, np.int64)
        number[begins] = place
        previous = current
    return found + list(previous.values())


def _apart(places: Any, length: int) -> Any:
    """Those that do not overlap the one before, from the first on."""
    if len(places) < 2 or int(np.diff(places).min()) >= length:
        return places
    kept: list[int] = []
    free = 0
    for begin in places.tolist():
        if begin >= free:
            kept.append(begin)
            free = begin + length
    return np.array(kept, np.int64)


def _choose(row: _Row, candidates: Sequence[_Found], count: int) -> list[_Found]:
    """Those with most time between their kernels, one after the other, each without the kernels of those before it."""
    between = np.concatenate(([0], np.cumsum(np.maximum(row.start[1:] - row.end[:-1], 0))))
    gaps = [int((between[one.places + one.length - 1] - between[one.places]).sum()) for one in candidates]
    order = sorted(range(len(candidates)), key=lambda place: -gaps[place])[: _TRIED * count]
    taken = np.zeros(len(row.code), bool)
    chosen: list[_Found] = []
    for place in order:
        length, places = candidates[place]
        members = places[:, None] + np.arange(length)
        is_free = ~taken[members].any(axis=1)
        if is_free.sum() >= LEAST_COUNT:
            chosen.append(_Found(length, places[is_free]))
            taken[members[is_free]] = True
        if len(chosen) == count:
            break
    return chosen


def _describe(
    trace: TraceView, work: DeviceWork, row: _Row, one: _Found, idle: Intervals, *, kernels: int
) -> KernelSequence:
    members = one.places[:, None] + np.arange(one.length)
    # On several streams gaps overlap each other and other work: time counts once, and only where the device is idle.
    gaps = union(row.end[members[:, :-1]].ravel(), row.start[members[:, 1:]].ravel())
    first = members[0]
    operators = trace.enclosing(work.launch[row.place[first]], trace.is_kind(OPERATOR)).tolist()
    return KernelSequence(
        kernels=[short_name(trace.text(code)) for code in row.code[first].tolist()],
        operators=list(map(trace.label, operators)),
        count=len(one.places),
        kernel_s=seconds(int((row.end[members] - row.start[members]).sum())),
        gap_s=seconds(common_length(gaps, idle)),
        launches_saved=len(one.places) * (one.length - 1),
        share=share_of(members.size, kernels),
    )


def sequences_section(job: JobReport) -> Section:
    found = job.detail.sequences
    caption = (
        f"Short kernels (at most {format_duration(found.short_s)}) that follow each other again and again: "
        f"{found.short_kernels} of {found.kernels} kernels are that short"
    )
    table = make_table("Sequences to fuse", caption, found.sequences, [
        field("Gaps", "gap_s", "s", "Time between its kernels: what fusion saves at most"),
        field("Kernels", "kernel_s", "s"),
        field("Times", "count", "count"),
        field("Launches saved", "launches_saved", "count"),
        field("Length", lambda row: len(row.kernels), "count"),
        field("Operators", lambda row: " → ".join(name or "?" for name in row.operators)),
        field("Kernels in order", lambda row: " → ".join(row.kernels)),
    ])  # fmt: skip
    return Section(id="sequences", title="Sequences to fuse", tables=[table])
