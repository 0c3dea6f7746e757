"""From edges as they were found to a graph that gives back the times of the trace."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stepscope.analyze.critical import kinds, loops
from stepscope.analyze.critical.draft import EdgeBuffer
from stepscope.analyze.critical.kinds import GRAPH_EDGE_KINDS
from stepscope.analyze.critical.waits import CLOCK_NS
from stepscope.analyze.step.numbers import Whole

COMPILED_FROM = 80_000
"""Edges from which loading the compiled loops pays."""
_FIRM = (kinds.HOST, kinds.WORK, kinds.STREAM, kinds.WINDOW)
"""Kinds of edges that alone can make no cycle."""
_TWO_CLOCKS = (kinds.SYNC, kinds.LAUNCH, kinds.EVENT)
"""Kinds of edges whose ends were timed by different clocks."""


class Settled(NamedTuple):
    """Edges in an order in which one pass computes all times."""

    source: Whole
    target: Whole
    weight: Whole
    """What the dependency costs, by its kind."""
    unexplained: Whole
    """What it took beyond that; below 0 where two clocks disagree a little."""
    kind: Whole
    """Index into GRAPH_EDGE_KINDS."""
    cost: Whole
    """Index into COSTS."""
    row: Whole
    """The event that the time belongs to; −1: none."""
    rank: Whole
    """Index into timelines: where that row is."""
    inferred: Whole


def settle(
    columns: list[Whole], time: Whole, usual: Whole, *, borders: tuple[int, int], counts: dict[str, int]
) -> Settled:
    """Edges that the times contradict go; the others get what makes every node's time come out exactly.

    `columns`: source, target, weight, kind, cost, row, inferred, rank. `usual`: per rank and kind of edge, the delay
    beyond the least that still counts as its own. `counts` is told what was left out.
    """
    columns = _without_contradicted(columns, time, counts)
    columns, order = _in_order(columns, time, borders, counts)
    source, target, weight, kind, cost, row, inferred, rank = (column[order] for column in columns)
    span = time[target] - time[source]
    weight = np.minimum(weight, np.maximum(span, 0))
    unexplained = np.minimum(span - weight, 0)
    binding, missing = _binding(source, target, weight + unexplained, time)
    own = np.minimum(missing, usual[rank[binding], kind[binding]])
    weight[binding] += own
    unexplained[binding] += missing - own
    return Settled(source, target, weight, unexplained, kind, cost, row, rank, inferred)


def _without_contradicted(columns: list[Whole], time: Whole, counts: dict[str, int]) -> list[Whole]:
    source, target, kind = columns[0], columns[1], columns[3]
    # Two clocks differ by a little: such an edge stays, and takes less than no time.
    keep = time[target] - time[source] >= np.where(np.isin(kind, _TWO_CLOCKS), -CLOCK_NS, 0)
    for number in np.unique(kind[~keep]).tolist():
        counts[f"contradicted_{GRAPH_EDGE_KINDS[number]}"] = int((kind[~keep] == number).sum())
    return [column[keep] for column in columns]


def _binding(source: Whole, target: Whole, weight: Whole, time: Whole) -> tuple[Whole, Whole]:
    """For each node the edge that reaches it last (the first of equals), and what is missing to its time."""
    if not len(target):
        return target, target
    begins = np.flatnonzero(np.append(True, target[1:] != target[:-1]))
    reached = time[source] + weight
    latest = np.maximum.reduceat(reached, begins)
    of_node = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(target))))
    candidates = np.flatnonzero(reached == latest[of_node])
    node = of_node[candidates]
    binding = candidates[np.append(True, node[1:] != node[:-1])]
    return binding, time[target[binding]] - latest


def _in_order(
    columns: list[Whole], time: Whole, borders: tuple[int, int], counts: dict[str, int]
) -> tuple[list[Whole], Whole]:
    """The order of edges for one pass. Events at the very same time can seem to wait for each other: such edges go."""
    counts["cycles_cut"] = 0
    while True:
        columns = _anchored(columns, len(time), borders, counts)
        source, target, kind, inferred = columns[0], columns[1], columns[3], columns[6]
        order, waiting = order_edges(source, target, len(time))
        if order is not None:
            return columns, order
        stuck = (waiting[source] > 0) & (waiting[target] > 0) & ~np.isin(kind, _FIRM)
        guessed = stuck & (inferred > 0)
        cut = guessed if guessed.any() else stuck
        counts["cycles_cut"] += int(cut.sum())
        columns = [column[~cut] for column in columns]


def _anchored(columns: list[Whole], nodes: int, borders: tuple[int, int], counts: dict[str, int]) -> list[Whole]:
    """What nothing leads to any more hangs on the window's start, what leads nowhere on its end."""
    source, sink = borders
    left, entered = (np.bincount(column, minlength=nodes) for column in columns[:2])
    entered[source] = left[sink] = 1
    begins, ends = np.flatnonzero(entered == 0), np.flatnonzero(left == 0)
    if not len(begins) and not len(ends):
        return columns
    counts["loose"] = counts.get("loose", 0) + len(begins)
    more = EdgeBuffer()
    more.add(source, begins, 0, kind=kinds.WINDOW, cost=kinds.C_GAP)
    more.add(ends, sink, 0, kind=kinds.WINDOW, cost=kinds.C_GAP)
    added = more.columns()
    return [np.concatenate(pair) for pair in zip(columns, (*added, np.zeros_like(added[0])), strict=True)]


def order_edges(source: Whole, target: Whole, nodes: int) -> tuple[Whole | None, Whole]:
    """Order of edges in which one pass computes all times (None if there is a cycle).

    Also, for each node, how many of its predecessors a cycle keeps back.
    """
    by_source, ends = _group(source, nodes)
    followers, first = target[by_source], np.append(0, ends[:nodes])
    waiting = np.bincount(target, minlength=nodes)
    if len(source) >= COMPILED_FROM:
        from stepscope.analyze.native.critical import order_nodes

        queue = np.zeros(nodes, np.int64)
        reached = order_nodes(followers, first, waiting, queue)
    else:
        left, came = waiting.tolist(), [0] * nodes
        reached = loops.order_nodes(followers.tolist(), first.tolist(), left, came)
        queue, waiting = np.array(came, np.int64), np.array(left, np.int64)
    if reached < nodes:
        return None, waiting
    position = np.empty(nodes, np.int64)
    position[queue] = np.arange(nodes)
    return _group(position[target], nodes)[0], waiting


def _group(key: Whole, keys: int) -> tuple[Whole, Whole]:
    """Edges sorted by a key below `keys`, and where those of each end."""
    if len(key) >= COMPILED_FROM:
        from stepscope.analyze.native.critical import group_edges

        first, order = np.zeros(keys + 1, np.int64), np.zeros(len(key), np.int64)
        group_edges(key, first, order)
        return order, first
    return np.argsort(key, kind="stable"), np.cumsum(np.bincount(key, minlength=keys))
