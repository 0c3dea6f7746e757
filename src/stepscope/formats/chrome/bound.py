"""What to leave out of a Chrome trace that must stay small: the shortest host events first, device work last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.core.errors import UsageError
from stepscope.core.units import format_bytes
from stepscope.formats.chrome.arrows import launch_pairs
from stepscope.formats.timeline import COUNTER, DEVICE_ANNOTATION, DEVICE_KINDS, KINDS, MEMORY, SYNC, Integers, Timeline

TRIES = 10
"""How often a file that came out too large, or much smaller than it may be, is written again."""
CLOSE_ENOUGH = 0.9
"""A file with this share of the allowed size is not tried to be filled further."""
AIM = 0.97
"""Of the allowed size, so that the next try fits."""


class DropOrder:
    """Rows of all timelines in the order in which they may go: host events from the shortest, calls that launched,
    device work from the shortest."""

    def __init__(self, ranks: Sequence[Timeline], *, arrow_events: int) -> None:
        self._sizes = [len(timeline) for timeline in ranks]
        standing = np.concatenate([_standing(timeline) for timeline in ranks])
        duration = np.concatenate([_durations(timeline) for timeline in ranks])
        # Of equals the later goes first, so that what is left is the beginning.
        self._order: Integers = np.lexsort((-np.arange(len(standing)), duration, standing))
        launched = np.concatenate([_is_launched(timeline) for timeline in ranks])
        self._events = 1 + arrow_events * launched[self._order]
        """In the file for each, its arrow included."""

    def rows(self) -> int:
        return sum(self._sizes)

    def rows_within(self, max_events: int) -> int:
        """How many rows from the end of the order have so few events in the file."""
        return int(np.searchsorted(np.cumsum(self._events[::-1]), max_events, side="right"))

    def keep(self, rows: int) -> list[Integers]:
        """For each timeline which rows stay, if so many may."""
        kept = np.zeros(len(self._order), bool)
        kept[self._order[len(self._order) - rows :]] = True
        parts: list[Integers] = np.split(kept, np.cumsum(self._sizes)[:-1])
        return parts


def _standing(timeline: Timeline) -> Integers:
    """0 may go first, 2 last."""
    core: Any = timeline.core
    standing = np.zeros(len(timeline), np.int8)
    standing[np.isin(core["kind"], (COUNTER, MEMORY))] = 1
    standing[launch_pairs(timeline)[0]] = 1
    standing[np.isin(core["kind"], (*DEVICE_KINDS, DEVICE_ANNOTATION, SYNC))] = 2
    for span in timeline.steps:
        standing[(core["start_ns"] == span.start_ns) & (core["end_ns"] == span.end_ns)] = 2
    return standing


def _durations(timeline: Timeline) -> Integers:
    core: Any = timeline.core
    durations: Integers = core["end_ns"] - core["start_ns"]
    return durations


def _is_launched(timeline: Timeline) -> Integers:
    launched = np.zeros(len(timeline), np.int64)
    launched[launch_pairs(timeline)[1]] = 1
    return launched


def count_left_out(ranks: Sequence[Timeline], kept: Sequence[Integers] | None) -> dict[str, int]:
    if kept is None:
        return {}
    counts = sum(
        np.bincount(timeline.core["kind"][chosen == 0].astype(np.int64), minlength=len(KINDS))
        for timeline, chosen in zip(ranks, kept, strict=True)
    )
    return {KINDS[kind]: count for kind, count in enumerate(np.asarray(counts).tolist()) if count}


def write_within(
    max_bytes: int, path: Path, order: DropOrder, rows: int, write: Callable[[Sequence[Integers] | None], int]
) -> None:
    """Call `write` (rows to keep → size of the file) with fewer rows until the file fits.

    How far a row packs is only known afterwards, so the bound is approached from both sides. The last call
    is the one that fits.
    """
    too_many, fitting = rows + 1, 0

    def attempt(count: int) -> int:
        return write(None if count == order.rows() else order.keep(count))

    size = attempt(rows)
    for _ in range(TRIES):
        if size <= max_bytes:
            fitting = rows
            if rows + 1 == too_many or size >= CLOSE_ENOUGH * max_bytes:
                return
        else:
            too_many = rows
        if too_many - fitting <= 1:
            break
        rows = min(max(int(rows * AIM * max_bytes / size), fitting + 1), too_many - 1)
        size = attempt(rows)
    if size > max_bytes:
        size = attempt(fitting)
    if size > max_bytes:
        raise UsageError(
            f"not even an empty trace fits into {format_bytes(max_bytes)}: names and headings alone take "
            f"{format_bytes(size)}",
            hint="allow a larger file",
            where=str(path),
        )
