"""Rectangles put together until they are few enough to draw: columns in, columns out, no loop over events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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


class Blocks(NamedTuple):
    lane: Any
    start: Any
    end: Any
    name: Any
    """Of the event, or of the name that takes most of the block."""
    colour: Any
    count: Any
    busy: Any
    """Sum of the durations inside."""


def join(parts: Sequence[Events]) -> Events:
    import numpy as np

    if not parts:
        return Events(*(np.zeros(0, np.int64) for _ in Events._fields))
    return Events(*(np.concatenate(columns).astype(np.int64) for columns in zip(*parts, strict=True)))


def clip(events: Events, window: Window) -> Events:
    """Inside the window, in order of lane, then time."""
    import numpy as np

    start, end = np.maximum(events.start, window.start_ns), np.minimum(events.end, window.end_ns)
    kept = np.flatnonzero(end >= start)
    order = kept[np.lexsort((-end[kept], start[kept], events.lane[kept]))]
    return Events(events.lane[order], start[order], end[order], events.name[order], events.colour[order])


def reduce_events(events: Events, window: Window, most: int) -> Blocks:
    """With the finest cells that leave no more than `most`."""
    cell, count = 0, len(events.lane)
    while count > most and cell <= 2 * window.length_ns:
        cell = max(1, window.length_ns // FINEST) if cell == 0 else cell + cell // 2 + 1
        count = int(_begins(events, cell, window).sum())
    return put_together(events, cell, window)


def put_together(events: Events, cell: int, window: Window) -> Blocks:
    """Neighbours in a lane that are shorter than a cell, begin in the same one and touch, nearly, become a block."""
    import numpy as np

    count = len(events.lane)
    if not count:
        return Blocks(*(np.zeros(0, np.int64) for _ in Blocks._fields))
    duration = events.end - events.start
    if cell == 0:
        ones = np.ones(count, np.int64)
        return Blocks(events.lane, events.start, events.end, events.name, events.colour, ones, duration)
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
    )


def _begins(events: Events, cell: int, window: Window) -> Any:
    """For each event whether a block begins with it."""
    import numpy as np

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
    import numpy as np

    order = np.lexsort((events.name, group))
    changes = (np.diff(group[order]) != 0) | (np.diff(events.name[order]) != 0)
    first = np.concatenate(([0], np.flatnonzero(changes) + 1))
    spent = np.add.reduceat(duration[order], first)
    leaders = order[first]
    ranked = np.lexsort((-spent, group[leaders]))
    _, top = np.unique(group[leaders][ranked], return_index=True)
    return leaders[ranked[top]]


def flatten(blocks: Blocks, window: Window, *, columns: int = 7) -> list[int]:
    """One rectangle after the other, only its first columns; times from the start of the window, lengths for ends."""
    import numpy as np

    values = (blocks.lane, blocks.start - window.start_ns, blocks.end - blocks.start, *blocks[3:])[:columns]
    flat: list[int] = np.stack(values, axis=1).reshape(-1).tolist() if len(blocks.lane) else []
    return flat
