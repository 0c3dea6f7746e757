"""The order in which each thread passed the starts and ends of its events."""

from __future__ import annotations
from stepscope.analyze.step.numbers import Whole
import numpy as np


from stepscope.analyze.critical import loops
from stepscope.analyze.critical.rows import Hosts


COMPILED_FROM = 35_000
"""Events from which loading the compiled loops pays."""


class Chains:
    """Points of all threads, one thread after the other: nodes (2·place for a start, one more for an end) and times."""

    def __init__(self, hosts: Hosts) -> None:
        nodes = _points(hosts)
        thread = hosts.thread[nodes >> 1]
        time = np.where(nodes & 1, hosts.end[nodes >> 1], hosts.start[nodes >> 1])
        back = (time[1:] < time[:-1]) & (thread[1:] == thread[:-1])
        if back.any():  # events that cross instead of nesting
            order = np.lexsort((np.arange(len(nodes)), time, thread))
            nodes, thread, time = nodes[order], thread[order], time[order]
        self.nodes: Whole = nodes
        self.thread: Whole = thread
        self.time: Whole = time
        self.numbers: list[int] = np.unique(hosts.thread).tolist()
        """The threads there are."""
        self._parent = hosts.parent

    def of(self, thread: int) -> slice:
        """Where the points of a thread stand."""
        first, last = np.searchsorted(self.thread, (thread, thread + 1))
        return slice(int(first), int(last))

    def open_after(self, nodes: Whole) -> Whole:
        """Place of the innermost event that is open just after each point; −1 where none is."""
        # After a start that is the event itself, after an end what encloses it.
        return np.where(nodes & 1, self._parent[nodes >> 1], nodes >> 1)


def _points(hosts: Hosts) -> Whole:
    count = len(hosts.rows)
    if count >= COMPILED_FROM:
        from stepscope.analyze.native.critical import emit_points

        points = np.zeros(2 * count, np.int64)
        emit_points(hosts.thread, hosts.parent, points, np.zeros(count + 1, np.int64))
        return points
    listed = [0] * (2 * count)
    loops.emit_points(hosts.thread.tolist(), hosts.parent.tolist(), listed, [0] * (count + 1))
    return np.array(listed, np.int64)
