"""Arrows of a Chrome trace: from launch calls to device work, from forward to backward, and those a caller asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from stepscope.formats.chrome.rows import PIECE_ROWS, RowText
from stepscope.formats.dependencies import EDGE_KINDS, RowEdges
from stepscope.formats.timeline import DEVICE_KINDS, OPERATOR, Integers, Timeline

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
