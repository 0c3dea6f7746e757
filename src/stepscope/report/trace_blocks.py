"""Rectangles put together until they are few enough to draw: columns in, columns out, no loop over events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from stepscope.analyze.step.device_work import Window

FINEST = 4000
"""The first cells that are tried are this part of the window."""


class Events(NamedTuple):
    """Rectangles before they are put together; columns of one length."""

    lane: Any
    start: Any
    end: Any
    name: Any
    """A number for each text."""
    colour: Any
    row: Any
    """Row of the timeline; −1 where it is no event of its own."""


class Blocks(NamedTuple):
    lane: Any
    start: Any
    end: Any
    name: Any
    """Name of the event, or the name that takes most of the block."""
    colour: Any
    count: Any
    busy: Any
    """Sum of the durations inside."""
    first: Any
    """Place of its first event: those up to the next block's are inside."""


def join(parts: Sequence[Events]) -> Events:
    if not parts:
        return Events(*(np.zeros(0, np.int64) for _ in Events._fields))
    return Events(*(np.concatenate(columns).astype(np.int64) for columns in zip(*parts, strict=True)))


def follow(one: Blocks, other: Blocks) -> Blocks:
    """Blocks of lanes that stand below each other."""
    behind = other._replace(first=other.first + int(one.count.sum()))
    return Blocks(*(np.concatenate(columns) for columns in zip(one, behind, strict=True)))


def clip(events: Events, window: Window) -> Events:
    """Inside the window, in order of lane, then time."""
    start, end = np.maximum(events.start, window.start_ns), np.minimum(events.end, window.end_ns)
    kept = np.flatnonzero(end >= start)
    order = kept[np.lexsort((-end[kept], start[kept], events.lane[kept]))]
    return Events(*(column[order] for column in events._replace(start=start, end=end)))


def reduce_events(events: Events, window: Window, most: int) -> Blocks:
    """With the finest cells that leave no more than `most`."""
    cell, count = 0, len(events.lane)
    while count > most and cell <= 2 * window.length_ns:
        cell = max(1, window.length_ns // FINEST) if cell == 0 else cell + cell // 2 + 1
        count = int(_begins(events, cell, window).sum())
    return put_together(events, cell, window)


def put_together(events: Events, cell: int, window: Window) -> Blocks:
    """Neighbours in a lane that are shorter than a cell, begin in the same one and touch, nearly, become a block."""
    count = len(events.lane)
    if not count:
        return Blocks(*(np.zeros(0, np.int64) for _ in Blocks._fields))
    duration = events.end - events.start
    if cell == 0:
        ones = np.ones(count, np.int64)
        return Blocks(*events[:5], ones, duration, np.arange(count))
    begins = _begins(events, cell, window)
    first = np.flatnonzero(begins)
    best = _longest_name(np.cumsum(begins) - 1, events, duration)
    return Blocks(
        events.lane[first],
        events.start[first],
        np.maximum.reduceat(events.end, first),
        events.name[best],
        events.colour[best],
        np.diff(np.append(first, count)),
        np.add.reduceat(duration, first),
        first,
    )


def _begins(events: Events, cell: int, window: Window) -> Any:
    """For each event whether a block begins with it."""
    long = events.end - events.start >= cell
    place = (events.start - window.start_ns) // cell
    begins = np.ones(len(events.lane), bool)
    begins[1:] = (
        (events.lane[1:] != events.lane[:-1])
        | (place[1:] != place[:-1])
        | long[1:]
        | long[:-1]
        | (events.start[1:] - events.end[:-1] > cell // 2)
    )
    return begins


def _longest_name(group: Any, events: Events, duration: Any) -> Any:
    """For each block an event that has the name which takes most of it."""
    order = np.lexsort((events.name, group))
    changes = (np.diff(group[order]) != 0) | (np.diff(events.name[order]) != 0)
    first = np.concatenate(([0], np.flatnonzero(changes) + 1))
    spent = np.add.reduceat(duration[order], first)
    leaders = order[first]
    ranked = np.lexsort((-spent, group[leaders]))
    _, top = np.unique(group[leaders][ranked], return_index=True)
    return leaders[ranked[top]]


def flatten(blocks: Blocks, window: Window, lanes: int, *, columns: int = 4) -> list[list[int]]:
    """By lane: time since the start of the rectangle before it, duration, name and colour (or only the first of these
    columns), one rectangle after the other. Differences are short numbers, which keeps the page small."""
    cuts = np.searchsorted(blocks.lane, np.arange(lanes + 1))
    flat = []
    for low, high in pairwise(cuts.tolist()):
        since = np.diff(blocks.start[low:high], prepend=window.start_ns)
        values = (since, blocks.end[low:high] - blocks.start[low:high], blocks.name[low:high], blocks.colour[low:high])
        flat.append(np.stack(values[:columns], axis=1).reshape(-1).tolist())
    return flat


def list_contents(blocks: Blocks, events: Events, *, most: int) -> list[list[int]]:
    """For every block of several events: its place, how many it holds, the sum of their durations, and then name and
    count of those names that take most of it, at most so many."""
    several = blocks.count > 1
    if not several.any():
        return []
    owner = np.repeat(np.arange(len(blocks.lane)), blocks.count)
    place = np.flatnonzero(several[owner])
    width = int(events.name.max()) + 1
    keys, back = np.unique(owner[place] * width + events.name[place], return_inverse=True)
    spent = np.bincount(back, weights=(events.end - events.start)[place])
    count = np.bincount(back)
    block, name = keys // width, keys % width
    order = np.lexsort((name, -spent, block))
    block, name, count = block[order], name[order], count[order]
    starts = np.flatnonzero(np.r_[True, block[1:] != block[:-1]])
    contents = []
    for first, last in pairwise([*starts.tolist(), len(block)]):
        one, listed = int(block[first]), slice(first, min(last, first + most))
        named = np.stack((name[listed], count[listed]), axis=1).reshape(-1).tolist()
        contents.append([one, int(blocks.count[one]), int(blocks.busy[one]), *named])
    return contents
