"""What had to happen before what: edges between rows of a timeline, found by analysis, written by converters."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.formats.timeline import Integers

EDGE_KINDS = ("host", "thread", "launch", "stream", "event", "sync", "queue", "collective", "graph", "data")
"""host: order on one thread; thread: hand-over between threads; launch: call to device work; stream: order on one
stream; event: record and wait between streams; sync: device work that a host call waited for; queue: a full launch
queue held the host; collective: a peer's arrival; graph: order inside a captured graph; data: a tensor was written and
then read."""


@dataclass(frozen=True)
class RowEdges:
    """Edges between rows of one timeline: `after[i]` could not go on before `before[i]` had got far enough."""

    before: Integers
    after: Integers
    kind: Integers
    """Index into EDGE_KINDS."""
    inferred: Integers
    """1 where the trace does not say so and order in time was the evidence."""
