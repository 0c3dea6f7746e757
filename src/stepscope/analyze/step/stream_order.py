"""What stood before each row of a device's work on its stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stepscope.analyze.step.row_loops import NEVER
from stepscope.formats.timeline import MISSING

if TYPE_CHECKING:
    from stepscope.formats.timeline import Integers


class StreamOrder(NamedTuple):
    """For each row of a device's work: what was before it on its stream."""

    previous: Integers
    """Place of the row that began last before it on the stream; −1 for the first."""
    free_from: Integers
    """When everything before it on the stream had ended; long ago (−NEVER) for the first."""


def order_on_streams(stream: Integers, end: Integers, *, compiled: bool) -> StreamOrder:
    """Rows come in order of start."""
    import numpy as np

    found = StreamOrder(np.full(len(end), MISSING, np.int64), np.full(len(end), -NEVER, np.int64))
    if compiled:
        from stepscope.analyze.native.step import follow_streams

        follow_streams(stream, end, *found)
        return found
    for one in np.unique(stream).tolist():
        mine = np.flatnonzero(stream == one)
        found.previous[mine[1:]] = mine[:-1]
        found.free_from[mine[1:]] = np.maximum.accumulate(end[mine])[:-1]
    return found
