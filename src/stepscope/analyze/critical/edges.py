"""The dependencies of a step between rows, for those who write graphs of events."""

from __future__ import annotations

import numpy as np

from stepscope.analyze.critical import kinds
from stepscope.analyze.critical.model import StepGraph, build_graph
from stepscope.analyze.critical.rows import core
from stepscope.analyze.step.numbers import Whole
from stepscope.formats.timeline import RUNTIME, RowEdges, Timeline

_BETWEEN_ROWS = (kinds.THREAD, kinds.LAUNCH, kinds.STREAM, kinds.EVENT, kinds.SYNC, kinds.QUEUE, kinds.GRAPH)


def row_edges(timeline: Timeline, step: int | None = None) -> RowEdges:
    """What had to happen before what, row by row, without a cycle even together with `parent`.

    `host` edges lead from one event to the next on its thread, not into what it encloses: that is in `parent`. Where
    device work holds up an event that had itself launched it, the edge leads to the next event of the thread.
    """
    graph = build_graph(timeline, step)
    before, after, kind, inferred = [], [], [], []
    for source, target, number, guess in (_host_order(graph), _others(timeline, graph)):
        before.append(source)
        after.append(target)
        kind.append(number)
        inferred.append(guess)
    columns = [np.concatenate(column) for column in (before, after, kind, inferred)]
    keep = (columns[0] >= 0) & (columns[1] >= 0) & (columns[0] != columns[1])
    table = np.unique(np.stack([column[keep] for column in columns], 1), axis=0)
    return RowEdges(before=table[:, 0], after=table[:, 1], kind=table[:, 2], inferred=table[:, 3])


def _host_order(graph: StepGraph) -> tuple[Whole, Whole, Whole, Whole]:
    """From an end to the start that follows it on the thread."""
    source, target = graph.edges.source, graph.edges.target
    mine = np.flatnonzero((graph.edges.kind == kinds.HOST) & (source & 1 == 1) & (target & 1 == 0))
    before, after = graph.node_row[source[mine]], graph.node_row[target[mine]]
    return before, after, np.full(len(mine), kinds.HOST), np.zeros(len(mine), np.int64)


def _others(timeline: Timeline, graph: StepGraph) -> tuple[Whole, Whole, Whole, Whole]:
    mine = np.flatnonzero(np.isin(graph.edges.kind, _BETWEEN_ROWS))
    source, target = graph.edges.source[mine], graph.edges.target[mine]
    before, after = graph.node_row[source], graph.node_row[target]
    is_host = after >= 0
    is_host[is_host] &= core(timeline, "thread")[after[is_host]] >= 0
    to_end = (target & 1 == 1) & is_host
    moved = to_end & ~_is_plain_wait(timeline, before, after)
    after = np.where(moved, _next_started(graph)[target], after)
    # Work that overlaps has an edge from start to start already; that between the ends says nothing about rows.
    keep = is_host | (target & 1 == 0)
    return before[keep], after[keep], graph.edges.kind[mine][keep], graph.edges.inferred[mine][keep]


def _is_plain_wait(timeline: Timeline, before: Whole, after: Whole) -> Whole:
    """Calls that only wait: what they wait for was launched by another call."""
    kind, parent = core(timeline, "kind"), core(timeline, "parent")
    return (kind[after] == RUNTIME) & (parent[before] != after)  # type: ignore[no-any-return]


def _next_started(graph: StepGraph) -> Whole:
    """For each node the row that begins next on its thread; −1 if none does."""
    follows = np.arange(len(graph.node_time))
    is_chain = graph.edges.kind == kinds.HOST
    follows[graph.edges.source[is_chain]] = graph.edges.target[is_chain]
    # Ends follow each other as deep as calls nest: so many steps at most.
    at = follows.copy()
    for _ in range(len(at)):
        ends = (at & 1 == 1) & (follows[at] != at)
        if not ends.any():
            break
        at[ends] = follows[at[ends]]
    return np.where(at & 1 == 0, graph.node_row[at], -1)
