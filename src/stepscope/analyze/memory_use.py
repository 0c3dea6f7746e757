"""What the memory of a device held at its peak, whether it grows from step to step, and how fragmented it is."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from stepscope.analyze.section import Brief, Section, Table, field, make_table
from stepscope.analyze.step.numbers import highest_places, make_rows, sum_by
from stepscope.core.units import format_bytes, format_duration, format_share
from stepscope.formats.memory import Fragmentation, MemoryHistory, OutOfMemory
from stepscope.formats.timeline import Integers

MOST_POINTS = 1000
LEAST_STEPS = 3
LEAST_REPEATED = 0.8
"""Share of the allocations that must come again, in order and size, in the next step."""
AS_GOOD = 0.005
"""If the fractions of two periods differ by less, the shorter period is the step."""
MOST_FOR_PERIOD = 1 << 20
"""Allocations looked at for it: the last ones."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one owner."""

    owner: str
    bytes: int
    share: float
    blocks: int | None
    """None where the file adds several up, or does not say how many there were before it begins."""
    stack: list[str]
    """Innermost call first; empty for categories."""


class StepMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory at the end of a step and the most it held."""

    step: int
    end_bytes: int
    peak_bytes: int


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """What steps leave behind."""

    found_by: str
    steps: list[StepMemory]
    bytes_per_step: float
    """Median change of what is held from the end of one step to the end of the next."""
    grows: bool
    """Whether all but at most one in five of these changes are upwards, and their median is."""
    by_owner: list[Held]
    """What was held more at the end of the last step than at the end of the first; largest first."""


class MemoryUsePoint(msgspec.Struct, frozen=True, kw_only=True):
    time_s: float | None
    allocated_bytes: int
    reserved_bytes: int | None


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device."""

    sentence: str
    source: str
    format: str
    device: str
    owner_kind: str
    """category or allocation stack: what `at_peak` is divided by."""
    events: int
    duration_s: float | None
    start_bytes: int
    end_bytes: int
    peak_bytes: int
    peak_time_s: float | None
    """From the first event; None where the file has no times, or the peak was before them."""
    peak_reserved_bytes: int | None
    at_peak: list[Held]
    """Largest first; adds up to peak_bytes."""
    growth: Growth | None
    fragmentation: Fragmentation | None
    out_of_memory: list[OutOfMemory]
    timeline: list[MemoryUsePoint]
    notes: list[str]


def memory_use(history: MemoryHistory) -> MemoryUse:
    base = sum(history.start_bytes.values())
    total = base + np.concatenate([[0], np.cumsum(history.change_bytes)])
    time = history.time_ns
    first = int(time[0]) if time is not None and len(time) else 0
    peak = int(np.argmax(total))
    at_peak = _held(history, peak)
    growth = _growth(history, total)
    notes = [f"{what} ({count})" for what, count in history.repairs.items()]
    if not len(history.change_bytes):
        notes.append("no history was recorded: only the moment of the snapshot is known")
    elif growth is None:
        notes.append("no steps: neither annotations nor repeating allocations tell them apart")
    known = [] if history.fragmentation is None else [history.fragmentation.reserved_bytes]
    if history.reserved_bytes is not None and len(history.reserved_bytes):
        known.append(int(history.reserved_bytes.max()))
    return MemoryUse(
        sentence=_sentence(history, int(total[peak]), at_peak, growth),
        source=history.source,
        format=history.format,
        device=history.device,
        owner_kind=history.owner_kind,
        events=len(history.change_bytes),
        duration_s=None if time is None or not len(time) else (int(time.max()) - first) / 1e9,
        start_bytes=base,
        end_bytes=int(total[-1]),
        peak_bytes=int(total[peak]),
        peak_time_s=None if time is None or not peak else (int(time[peak - 1]) - first) / 1e9,
        peak_reserved_bytes=max(known, default=None),
        at_peak=at_peak,
        growth=growth,
        fragmentation=history.fragmentation,
        out_of_memory=list(history.failures),
        timeline=_points(history, total[1:], first),
        notes=notes,
    )


def _by_owner(history: MemoryHistory, count: int) -> Integers:
    """Bytes by owner after so many changes."""
    held = sum_by(history.owner[:count], history.change_bytes[:count], len(history.owners))
    for owner, size in history.start_bytes.items():
        held[owner] += size
    return held


def _held(history: MemoryHistory, count: int, since: int | None = None) -> list[Held]:
    """By owner after so many changes; `since`: only what is more than after that many."""
    held = _by_owner(history, count) - (0 if since is None else _by_owner(history, since))
    later = slice(since or 0, count)
    blocks = sum_by(history.owner[later], np.sign(history.change_bytes[later]), len(held))
    whole = max(1, int(held[held > 0].sum()))
    return [
        Held(
            owner=history.owners[place].name,
            bytes=int(held[place]),
            share=int(held[place]) / whole,
            blocks=int(blocks[place]) if history.counts_blocks and not history.start_bytes.get(place) else None,
            stack=list(history.owners[place].stack),
        )
        for place in np.argsort(-held, kind="stable").tolist()
        if held[place] > 0
    ]


def _growth(history: MemoryHistory, total: Integers) -> Growth | None:
    if len(history.steps) >= LEAST_STEPS and history.time_ns is not None:
        begins, ends = (
            np.searchsorted(history.time_ns, [span[place] for span in history.steps], side="right") for place in (1, 2)
        )
        numbers, found_by = [span.number for span in history.steps], "annotations of the profiler's steps"
    else:
        bounds = _repeating_bounds(history.change_bytes, total)
        if bounds is None:
            return None
        begins, ends = bounds[:-1], bounds[1:]
        numbers, found_by = list(range(1, len(bounds))), "allocations that repeat in order and size"
    steps = [
        StepMemory(step=number, end_bytes=int(total[end]), peak_bytes=int(total[begin : end + 1].max()))
        for number, begin, end in zip(numbers, begins.tolist(), ends.tolist(), strict=True)
    ]
    changes = np.diff(total[ends])
    median = float(np.median(changes))
    return Growth(
        found_by=found_by,
        steps=steps,
        bytes_per_step=median,
        grows=bool(median > 0 and (changes > 0).mean() >= 0.8),
        by_owner=_held(history, int(ends[-1]), since=int(ends[0])),
    )


def _repeating_bounds(change: Integers, total: Integers) -> Integers | None:
    """Numbers of changes before each step and after the last, where allocations repeat; None where they do not.

    A step begins where least is held before an allocation, among those of one period.
    """
    allocations = np.flatnonzero(change > 0)[-MOST_FOR_PERIOD:]
    period = _period(change[allocations])
    if period is None:
        return None
    rows = allocations[len(allocations) % period :].reshape(-1, period)
    phase = int(np.argmin(total[rows].mean(axis=0)))
    bounds = rows[:, phase]
    return bounds if phase else np.append(bounds, len(change))


def _period(sizes: Integers) -> int | None:
    """The shortest distance at which sizes come again, best of all distances that leave three periods."""
    count = len(sizes)
    longest = count // LEAST_STEPS
    if longest < 1:
        return None
    # Each size becomes a direction; the autocorrelation then counts equal pairs, up to noise that the check removes.
    values, which = np.unique(sizes, return_inverse=True)
    direction = np.exp(2j * np.pi * np.random.default_rng(0).random(len(values)))[which]
    spectrum = np.fft.fft(direction, 2 * count)
    pairs = np.fft.ifft(spectrum * spectrum.conj()).real[1 : longest + 1] / (count - np.arange(1, longest + 1))
    tried = np.argsort(-pairs)[:64] + 1
    shares = {int(lag): float((sizes[lag:] == sizes[:-lag]).mean()) for lag in tried}
    best = max(shares.values())
    if best < LEAST_REPEATED:
        return None
    return min(lag for lag, share in shares.items() if share >= best - AS_GOOD)


def _points(history: MemoryHistory, total: Integers, first_ns: int) -> list[MemoryUsePoint]:
    """All changes, or the highest of each of equally long segments where there are too many."""
    chosen = highest_places(total, MOST_POINTS)
    time, reserved = history.time_ns, history.reserved_bytes
    columns = {"time_s": [None] * len(chosen) if time is None else (time[chosen] - first_ns) / 1e9}
    columns["reserved_bytes"] = [None] * len(chosen) if reserved is None else reserved[chosen]
    return make_rows(MemoryUsePoint, columns | {"allocated_bytes": total[chosen]})


def _sentence(history: MemoryHistory, peak_bytes: int, at_peak: Sequence[Held], growth: Growth | None) -> str:
    said = f"At most {format_bytes(peak_bytes)} were allocated"
    if at_peak:
        said += f", {format_share(at_peak[0].share)} of it {at_peak[0].owner}"
    if growth is not None and growth.grows:
        said += f"; each step leaves {format_bytes(round(growth.bytes_per_step))} more behind"
    lost = history.fragmentation
    if lost is not None and lost.reserved_bytes:
        said += (
            f"; of {format_bytes(lost.reserved_bytes)} reserved, "
            f"{format_bytes(lost.free_in_used_segments_bytes)} are free but cannot be returned"
        )
    return f"{said}."


SHOWN, SHOWN_STEPS = 10, 8
"""Owners, and steps, that the text shows."""


def memory_section(use: MemoryUse) -> Section:
    times = "no times" if use.duration_s is None else format_duration(use.duration_s)
    when = "" if use.peak_time_s is None else f", {format_duration(use.peak_time_s)} after the first event"
    reserved = "" if use.peak_reserved_bytes is None else f"; at most {format_bytes(use.peak_reserved_bytes)} reserved"
    begin, peak, end = (format_bytes(size) for size in (use.start_bytes, use.peak_bytes, use.end_bytes))
    return Section(
        id="memory",
        title="Memory",
        summary=[
            use.sentence,
            f"# {use.source}: {use.format}, device {use.device}, {use.events} changes, {times}",
            f"allocated: {begin} at the beginning, {peak} at the peak{when}, {end} at the end{reserved}",
            Brief(f"held at the peak, by {use.owner_kind}:", _owners_table(use.at_peak), SHOWN + 1),
            *(_describe_growth(use.growth) if use.growth else ()),
            *(_describe_fragmentation(use.fragmentation) if use.fragmentation else ()),
            *(
                f"out of memory: {format_bytes(one.requested_bytes)} were asked for by {one.owner} with "
                f"{format_bytes(one.allocated_bytes)} allocated and {format_bytes(one.reserved_bytes)} reserved"
                for one in use.out_of_memory[:SHOWN]
            ),
            *(f"note: {note}" for note in use.notes),
        ],
    )


def _owners_table(held: Sequence[Held]) -> Table:
    """The largest, and all others in one row."""
    rows = list(held[:SHOWN])
    if len(held) > SHOWN:
        rest = held[SHOWN:]
        size, share = sum(one.bytes for one in rest), sum(one.share for one in rest)
        rows.append(Held(owner=f"{len(rest)} more", bytes=size, share=share, blocks=None, stack=[]))
    return make_table("Held", "", rows, [
        field("Bytes", "bytes", "B", brief=1),
        field("% of all", "share", "share", brief=1),
        field("Blocks", "blocks", "count", brief=1),
        field("Owner", lambda one: one.owner[-90:], brief=1),
    ])  # fmt: skip


def _describe_growth(growth: Growth) -> list[str | Brief]:
    way = "more" if growth.bytes_per_step >= 0 else "less"
    per_step = format_bytes(abs(round(growth.bytes_per_step)))
    verdict = "memory grows" if growth.grows else "no steady growth"
    ends = ", ".join(format_bytes(step.end_bytes) for step in growth.steps[-SHOWN_STEPS:])
    peak = format_bytes(max(step.peak_bytes for step in growth.steps))
    shown = min(SHOWN_STEPS, len(growth.steps))
    lines: list[str | Brief] = [
        f"{len(growth.steps)} steps, found by {growth.found_by}: {verdict}, a step leaves {per_step} {way} (median)",
        f"  held at the end of the last {shown} steps: {ends}; at most {peak} within one",
    ]
    if growth.grows:
        table = _owners_table(growth.by_owner)
        lines.append(Brief("more at the end of the last step than of the first:", table, SHOWN + 1))
    return lines


def _describe_fragmentation(found: Fragmentation) -> list[str]:
    free = found.free_in_used_segments_bytes + found.free_segments_bytes
    share = f" ({format_share(free / found.reserved_bytes)})" if found.reserved_bytes else ""
    parts = {
        "is free beside blocks in use: empty_cache() cannot return it": found.free_in_used_segments_bytes,
        "is free in segments without a block in use: empty_cache() returns it": found.free_segments_bytes,
        "is the largest free block": found.largest_free_block_bytes,
        "is lost to rounding up": found.allocated_bytes - found.requested_bytes,
        "is freed and waits for another stream": found.awaiting_free_bytes,
    }
    return [
        f"fragmentation at the snapshot: {format_bytes(free)}{share} of {format_bytes(found.reserved_bytes)} reserved",
        *(f"  {format_bytes(size)} {meaning}" for meaning, size in parts.items()),
    ]
