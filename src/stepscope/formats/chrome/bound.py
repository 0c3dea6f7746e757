"""Arrows of a Chrome trace, and what a small one leaves out: the shortest host events first, device work last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepscope.core.errors import UsageError
from stepscope.core.units import format_bytes
from stepscope.formats.chrome.rows import PIECE_ROWS, RowText
from stepscope.formats.timeline import (
    COUNTER,
    DEVICE_ANNOTATION,
    DEVICE_KINDS,
    EDGE_KINDS,
    KINDS,
    MEMORY,
    OPERATOR,
    SYNC,
    Integers,
    RowEdges,
    Timeline,
)

FLOWS = ("ac2g", "fwdbwd")
"""Arrows found from the columns, by the categories they have in the file: from a launch call to its device work, and
from an operator to its backward pass."""


class Arrow(NamedTuple):
    """From the start of one row to the start of another; timelines by their place in the list."""

    from_timeline: int
    from_row: int
    to_timeline: int
    to_row: int
    category: str = "dependency"


def arrows_of_edges(timeline: int, edges: RowEdges) -> Iterator[Arrow]:
    """Arrows for dependencies that an analysis has found in one timeline of the list."""
    for before, after, kind in zip(edges.before.tolist(), edges.after.tolist(), edges.kind.tolist(), strict=True):
        yield Arrow(timeline, before, timeline, after, EDGE_KINDS[kind])


def flow_lines(
    timeline: Timeline, writer: RowText, category: str, kept: Integers | None, next_id: int
) -> Iterator[tuple[list[str], int]]:
    begins, ends = launch_pairs(timeline) if category == "ac2g" else _passes(timeline)
    if kept is not None:
        both = (kept[begins] & kept[ends]).astype(bool)
        begins, ends = begins[both], ends[both]
    for first in range(0, len(begins), PIECE_ROWS):
        part = slice(first, first + PIECE_ROWS)
        ids = np.arange(next_id + first, next_id + first + len(begins[part])).tolist()
        lines = writer.arrow("s", category, begins[part], ids) + writer.arrow("f", category, ends[part], ids)
        yield lines, len(ids)


def launch_pairs(timeline: Timeline) -> tuple[Integers, Integers]:
    """Rows of the calls, rows of the device work each launched."""
    parent: Any = timeline.core["parent"]
    devices = np.flatnonzero(np.isin(timeline.core["kind"], DEVICE_KINDS) & (parent >= 0))
    return parent[devices], devices


def _passes(timeline: Timeline) -> tuple[Integers, Integers]:
    """For each autograd sequence number the last operator that carries it forward and the first that does backward."""
    core: Any = timeline.core
    rows = np.flatnonzero((core["kind"] == OPERATOR) & (core["sequence"] >= 0))
    rows = rows[np.argsort(core["start_ns"][rows], kind="stable")]
    backward = core["forward_thread"][rows] > 0
    later, earlier = rows[backward], rows[~backward][::-1]
    numbers, first = np.unique(core["sequence"][later], return_index=True)
    forward_numbers, last = np.unique(core["sequence"][earlier], return_index=True)
    _, left, right = np.intersect1d(forward_numbers, numbers, assume_unique=True, return_indices=True)
    return earlier[last[left]], later[first[right]]


def arrow_lines(
    writers: Sequence[RowText], arrows: Sequence[Arrow], kept: Sequence[Integers] | None, next_id: int
) -> Iterator[list[str]]:
    """Arrows given by the caller; those to rows that were left out go with them."""
    for number, arrow in enumerate(arrows, next_id):
        begin, end = (arrow.from_timeline, arrow.from_row), (arrow.to_timeline, arrow.to_row)
        if kept is not None and not all(kept[timeline][row] for timeline, row in (begin, end)):
            continue
        yield [
            line
            for phase, (timeline, row) in (("s", begin), ("f", end))
            for line in writers[timeline].arrow(phase, arrow.category, np.array([row]), [number])
        ]


TRIES = 10
"""How often a file that came out too large, or much smaller than it may be, is written again."""
CLOSE_ENOUGH = 0.9
"""A file with this share of the allowed size is not tried to be filled further."""
AIM = 0.97
"""Fraction of the allowed size that the next attempt aims at, so that it fits."""


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
