"""Memory of a device as text: the answer first, then what was held, growth and fragmentation."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analyze.memory_use import Growth, Held, MemoryUse
from stepscope.core.units import format_bytes, format_duration, format_share
from stepscope.formats.memory import Fragmentation

SHOWN = 10
SHOWN_STEPS = 8


def format_memory(found: Sequence[MemoryUse]) -> str:
    return "\n".join(line for use in found for line in _lines(use))


def _lines(use: MemoryUse) -> list[str]:
    times = "no times" if use.duration_s is None else format_duration(use.duration_s)
    when = "" if use.peak_time_s is None else f", {format_duration(use.peak_time_s)} after the first event"
    reserved = "" if use.peak_reserved_bytes is None else f"; at most {format_bytes(use.peak_reserved_bytes)} reserved"
    begin, peak, end = (format_bytes(size) for size in (use.start_bytes, use.peak_bytes, use.end_bytes))
    return [
        use.sentence,
        f"# {use.source}: {use.format}, device {use.device}, {use.events} changes, {times}",
        f"allocated: {begin} at the beginning, {peak} at the peak{when}, {end} at the end{reserved}",
        f"held at the peak, by {use.owner_kind}:",
        *_owners(use.at_peak),
        *(_growth(use.growth) if use.growth else ()),
        *(_fragmentation(use.fragmentation) if use.fragmentation else ()),
        *(
            f"out of memory: {format_bytes(one.requested_bytes)} were asked for by {one.owner} with "
            f"{format_bytes(one.allocated_bytes)} allocated and {format_bytes(one.reserved_bytes)} reserved"
            for one in use.out_of_memory[:SHOWN]
        ),
        *(f"note: {note}" for note in use.notes),
    ]


def _owners(held: Sequence[Held]) -> list[str]:
    lines = [
        f"  {format_bytes(one.bytes):>10}  {format_share(one.share):>7}  "
        f"{'' if one.blocks is None else f'{one.blocks} ×':>8}  {one.owner[-90:]}"
        for one in held[:SHOWN]
    ]
    if len(held) > SHOWN:
        rest = sum(one.bytes for one in held[SHOWN:])
        lines.append(f"  {format_bytes(rest):>10}  in {len(held) - SHOWN} more")
    return lines


def _growth(growth: Growth) -> list[str]:
    way = "more" if growth.bytes_per_step >= 0 else "less"
    per_step = format_bytes(abs(round(growth.bytes_per_step)))
    verdict = "memory grows" if growth.grows else "no steady growth"
    ends = ", ".join(format_bytes(step.end_bytes) for step in growth.steps[-SHOWN_STEPS:])
    peak = format_bytes(max(step.peak_bytes for step in growth.steps))
    shown = min(SHOWN_STEPS, len(growth.steps))
    lines = [
        f"{len(growth.steps)} steps, found by {growth.found_by}: {verdict}, a step leaves {per_step} {way} (median)",
        f"  held at the end of the last {shown} steps: {ends}; at most {peak} within one",
    ]
    if growth.grows:
        lines += ["  more at the end of the last step than of the first:", *_owners(growth.by_owner)]
    return lines


def _fragmentation(found: Fragmentation) -> list[str]:
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
        *(f"  {format_bytes(size):>10}  {meaning}" for meaning, size in parts.items()),
    ]
