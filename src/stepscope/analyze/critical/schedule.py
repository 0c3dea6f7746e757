"""A graph of edges and its times: when everything happens (forward), and how long it could wait (backward)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.critical import kinds
from stepscope.analyze.critical.draft import Constants, EdgeBuffer
from stepscope.analyze.critical.kinds import GRAPH_EDGE_KINDS
from stepscope.analyze.critical.rows import is_large, run_loop
from stepscope.analyze.critical.waits import CLOCK_NS
from stepscope.analyze.step.device_work import LONG_AGO
from stepscope.analyze.step.numbers import Whole, distinct
from stepscope.formats.timeline import Timeline

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
    for number in distinct(kind[~keep]):
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
    queue = np.zeros(nodes, np.int64)
    reached = run_loop(order_nodes, len(source), (followers, first), (waiting, queue))
    if reached < nodes:
        return None, waiting
    position = np.empty(nodes, np.int64)
    position[queue] = np.arange(nodes)
    return _group(position[target], nodes)[0], waiting


def _group(key: Whole, keys: int) -> tuple[Whole, Whole]:
    """Edges sorted by a key below `keys`, and where those of each end."""
    if is_large(len(key)):
        first, order = np.zeros(keys + 1, np.int64), np.zeros(len(key), np.int64)
        run_loop(group_edges, len(key), (key,), (first, order))
        return order, first
    return np.argsort(key, kind="stable"), np.cumsum(np.bincount(key, minlength=keys))


@dataclass(frozen=True)
class StepGraph:
    """Nodes are numbers, edges are columns. Times are ns from the window's start."""

    timelines: Sequence[Timeline]
    step: int | None
    start_ns: int
    length_ns: int
    source: int
    sink: int
    node_time: Whole
    node_rank: Whole
    """Index into timelines."""
    node_row: Whole
    """−1: the window's borders and the meetings of ranks. A row's end is the node after its start."""
    edges: Settled
    constants: Sequence[Constants]
    """One set per rank."""
    counts: Mapping[str, int]
    """What was left out and what is loose; see Checks."""

    @cached_property
    def ends(self) -> tuple[Any, Any]:
        """Source and target of the edges, as the loops take them."""
        source, target = self.edges.source, self.edges.target
        return (source, target) if is_large(len(source)) else (source.tolist(), target.tolist())


@dataclass(frozen=True)
class Schedule:
    """When every node happens if its edges take these times (ns from the window's start)."""

    time: Whole
    binding: Whole
    """The edge that decided a node's time; −1 for the first node."""
    weight: Whole
    """Delay of each edge, without what is unexplained."""
    unexplained: Whole
    sink: int

    @property
    def length_ns(self) -> int:
        return int(self.time[self.sink])


_COUNTED = ("device_events", "without_launch", "loose", "cycles_cut", "meetings", "meetings_skipped")


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """What must hold before a number is believed. `failures` is empty if all does."""

    nodes: int
    edges: int
    window_ns: int
    retimed_ns: int
    """The window as computed from the graph."""
    largest_error_ns: int
    """Between any node's computed and measured time."""
    path_ns: int
    unexplained_on_path_ns: int
    joins: int
    """Nodes that wait for more than one thing: without them nothing could be explained."""
    device_events: int
    without_launch: int
    """Device events whose launching call the trace does not have."""
    loose: int
    """Events that nothing known leads to but the beginning of the window."""
    inferred: dict[str, int]
    """Edges that the trace does not state, by kind."""
    contradicted: dict[str, int]
    """Edges left out because the times contradict them, by kind."""
    cycles_cut: int
    meetings: int
    meetings_skipped: int
    """Collectives whose members' times do not overlap: clocks or matching are wrong there."""
    failures: list[str]


def retime(graph: StepGraph, weight: Whole | None = None, unexplained: Whole | None = None) -> Schedule:
    """The schedule with these delays on the edges; without any, that of the trace."""
    own = graph.edges.weight if weight is None else weight
    rest = graph.edges.unexplained if unexplained is None else unexplained
    time, binding = np.full(len(graph.node_time), LONG_AGO), np.full(len(graph.node_time), -1)
    time[graph.source] = 0
    run_loop(pass_forward, len(own), (*graph.ends, own + rest), (time, binding))
    return Schedule(time=time, binding=binding, weight=own, unexplained=rest, sink=graph.sink)


def find_slack(graph: StepGraph, schedule: Schedule) -> Whole:
    """By how much each node could be later without moving the end (ns)."""
    latest = np.full(len(graph.node_time), schedule.length_ns)
    total = schedule.weight + schedule.unexplained
    run_loop(pass_backward, len(total), (*graph.ends, total), (latest,))
    return latest - schedule.time


def path_edges(graph: StepGraph, schedule: Schedule) -> Whole:
    """The binding edges from the window's start to its end."""
    edges = np.zeros(len(graph.node_time), np.int64)
    count = run_loop(walk_back, len(schedule.weight), (graph.ends[0], schedule.binding, graph.sink), (edges,))
    return edges[:count][::-1]


def slack_of_rows(graph: StepGraph, schedule: Schedule, index: int = 0) -> Whole:
    """For each row of a timeline by how much its end could be later (ns); −1 for rows outside the window."""
    slack = find_slack(graph, schedule)
    ends = np.flatnonzero((graph.node_row >= 0) & (graph.node_rank == index))[1::2]
    found = np.full(len(graph.timelines[index]), -1, np.int64)
    found[graph.node_row[ends]] = slack[ends]
    return found


def check_graph(graph: StepGraph, schedule: Schedule, edges: Whole) -> Checks:
    """`schedule` and `edges` are those of the trace as it is."""
    error = int(np.abs(schedule.time - graph.node_time).max(initial=0))
    path_ns = int((schedule.weight + schedule.unexplained)[edges].sum())
    entered = np.bincount(graph.edges.target, minlength=len(graph.node_time))
    inferred = np.bincount(graph.edges.kind[graph.edges.inferred > 0], minlength=len(GRAPH_EDGE_KINDS))
    prefix = "contradicted_"
    failures = []
    if error:
        failures.append(f"computed times differ from the trace by up to {error} ns")
    if path_ns != graph.length_ns:
        failures.append(f"the path is {path_ns} ns long, the window {graph.length_ns} ns")
    if len(edges) and graph.edges.source[edges[0]] != graph.source:
        failures.append("the path does not begin with the window")
    return Checks(
        nodes=len(graph.node_time),
        edges=len(graph.edges.source),
        window_ns=graph.length_ns,
        retimed_ns=schedule.length_ns,
        largest_error_ns=error,
        path_ns=path_ns,
        unexplained_on_path_ns=int(schedule.unexplained[edges].sum()),
        joins=int((entered > 1).sum()),
        inferred={GRAPH_EDGE_KINDS[kind]: int(count) for kind, count in enumerate(inferred.tolist()) if count},
        contradicted={name.removeprefix(prefix): count for name, count in graph.counts.items() if prefix in name},
        failures=failures,
        **{name: graph.counts.get(name, 0) for name in _COUNTED},
    )


def group_edges(key: Any, first: Any, order: Any) -> int:
    """Fill `order` with the edges sorted by their key, in their old order where keys are equal.

    `first` is zeros, one more than there are keys; afterwards those of key k end at `first[k]`.
    """
    for edge in range(len(key)):
        first[key[edge] + 1] += 1
    for place in range(len(first) - 1):
        first[place + 1] += first[place]
    for edge in range(len(key)):
        order[first[key[edge]]] = edge
        first[key[edge]] += 1
    return len(key)


def order_nodes(followers: Any, first: Any, waiting: Any, queue: Any) -> int:
    """Fill `queue` with nodes so that each comes after its predecessors; returns how many came.

    `followers` are the targets of all edges, those of node n from `first[n]` to `first[n + 1]`; `waiting` is how many
    edges lead to each node. If not all nodes came, the rest lies on or behind a cycle; `waiting` is above 0 for these.
    """
    head = 0
    tail = 0
    for node in range(len(queue)):
        if waiting[node] == 0:
            queue[tail] = node
            tail += 1
    while head < tail:
        node = queue[head]
        head += 1
        for after in followers[first[node] : first[node + 1]]:
            left = waiting[after] - 1
            waiting[after] = left
            if left == 0:
                queue[tail] = after
                tail += 1
    return tail


def pass_forward(source: Any, target: Any, weight: Any, time: Any, binding: Any) -> int:
    """Earliest times: `time` begins as LONG_AGO but for the first node.

    `binding` gets the edge that decided, the first of equals. Edges into a node come after those into its predecessors.
    """
    for edge, (before, after, delay) in enumerate(zip(source, target, weight)):  # noqa: B905  # numba has no strict
        reached = time[before] + delay
        if reached > time[after]:
            time[after] = reached
            binding[after] = edge
    return len(source)


def pass_backward(source: Any, target: Any, weight: Any, latest: Any) -> int:
    """Latest times that leave the end where it is: `latest` begins as the end everywhere."""
    for before, after, delay in zip(source[::-1], target[::-1], weight[::-1]):  # noqa: B905  # numba has no strict
        limit = latest[after] - delay
        if limit < latest[before]:  # noqa: PLR1730  # as a call of min it is slower
            latest[before] = limit
    return len(source)


def walk_back(source: Any, binding: Any, last: int, edges: Any) -> int:
    """Binding edges from `last` back to the node that has none; returns how many."""
    count = 0
    edge = binding[last]
    while edge >= 0:
        edges[count] = edge
        edge = binding[source[edge]]
        count += 1
    return count
