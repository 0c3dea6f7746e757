"""Times of the graph: one pass forward gives when everything happens, one pass backward how long it could wait."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from stepscope.analyze.critical import loops
from stepscope.analyze.critical.kinds import GRAPH_EDGE_KINDS
from stepscope.analyze.critical.model import StepGraph
from stepscope.analyze.step.numbers import Whole


@dataclass(frozen=True)
class Schedule:
    """When every node happens if its edges take these times (ns from the window's start)."""

    time: Whole
    binding: Whole
    """The edge that decided a node's time; −1 for the first node."""
    weight: Whole
    """Of each edge, without what is unexplained."""
    unexplained: Whole
    sink: int

    @property
    def length_ns(self) -> int:
        return int(self.time[self.sink])


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
    total = own + rest
    nodes = len(graph.node_time)
    if graph.is_large:
        from stepscope.analyze.native.critical import pass_forward

        time = np.full(nodes, loops.UNREACHED, np.int64)
        binding = np.full(nodes, -1, np.int64)
        time[graph.source] = 0
        pass_forward(graph.edges.source, graph.edges.target, total, time, binding)
    else:
        times, edges = [loops.UNREACHED] * nodes, [-1] * nodes
        times[graph.source] = 0
        loops.pass_forward(*graph.edge_lists, total.tolist(), times, edges)
        time, binding = np.array(times, np.int64), np.array(edges, np.int64)
    return Schedule(time=time, binding=binding, weight=own, unexplained=rest, sink=graph.sink)


def find_slack(graph: StepGraph, schedule: Schedule) -> Whole:
    """By how much each node could be later without moving the end (ns)."""
    total = schedule.weight + schedule.unexplained
    end = schedule.length_ns
    if graph.is_large:
        from stepscope.analyze.native.critical import pass_backward

        latest = np.full(len(graph.node_time), end, np.int64)
        pass_backward(graph.edges.source, graph.edges.target, total, latest)
    else:
        listed = [end] * len(graph.node_time)
        loops.pass_backward(*graph.edge_lists, total.tolist(), listed)
        latest = np.array(listed, np.int64)
    return latest - schedule.time


def path_edges(graph: StepGraph, schedule: Schedule) -> Whole:
    """The binding edges from the window's start to its end."""
    if graph.is_large:
        from stepscope.analyze.native.critical import walk_back

        edges = np.zeros(len(graph.node_time), np.int64)
        count = walk_back(graph.edges.source, schedule.binding, graph.sink, edges)
        return edges[:count][::-1]
    listed = [0] * len(graph.node_time)
    count = loops.walk_back(graph.edge_lists[0], schedule.binding.tolist(), graph.sink, listed)
    return np.array(listed[:count][::-1], np.int64)


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
        device_events=graph.counts.get("device_events", 0),
        without_launch=graph.counts.get("without_launch", 0),
        loose=graph.counts.get("loose", 0),
        inferred={GRAPH_EDGE_KINDS[kind]: int(count) for kind, count in enumerate(inferred.tolist()) if count},
        contradicted={
            name.removeprefix(prefix): count for name, count in graph.counts.items() if name.startswith(prefix)
        },
        cycles_cut=graph.counts.get("cycles_cut", 0),
        meetings=graph.counts.get("meetings", 0),
        meetings_skipped=graph.counts.get("meetings_skipped", 0),
        failures=failures,
    )
