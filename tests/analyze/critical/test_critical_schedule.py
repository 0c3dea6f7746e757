"""The passes over the graph against definitions that are slow and obvious."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.critical import rows
from stepscope.analyze.critical.kinds import C_GAP, HOST
from stepscope.analyze.critical.schedule import Settled, StepGraph, find_slack, order_edges, path_edges, retime


@st.composite
def dags(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """Node 0 leads to every node, every node to the last one; edges in any order."""
    nodes = draw(st.integers(2, 9))
    pairs = [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True))
    borders = {(0, node) for node in range(1, nodes)} | {(node, nodes - 1) for node in range(nodes - 1)}
    edges = [(a, b, draw(st.integers(0, 50))) for a, b in sorted({*chosen, *borders})]
    return nodes, draw(st.permutations(edges))


def make_graph(nodes: int, edges: list[tuple[int, int, int]]) -> StepGraph:
    source, target, weight = (np.array(column, np.int64) for column in zip(*edges, strict=True))
    order, _ = order_edges(source, target, nodes)
    assert order is not None
    zeros = np.zeros(len(edges), np.int64)
    settled = Settled(
        source[order], target[order], weight[order], zeros, zeros + HOST, zeros + C_GAP, zeros - 1, zeros, zeros
    )
    empty = np.zeros(nodes, np.int64)
    return StepGraph(
        timelines=(), step=None, start_ns=0, length_ns=0, source=0, sink=nodes - 1, node_time=empty,
        node_rank=empty, node_row=empty - 1, edges=settled, constants=(), counts={},
    )  # fmt: skip


def longest(nodes: int, edges: list[tuple[int, int, int]]) -> list[int]:
    """The longest way from node 0 to each, by trying all."""

    def best(node: int) -> int:
        return max((best(a) + weight for a, b, weight in edges if b == node), default=0)

    return [best(node) for node in range(nodes)]


@settings(max_examples=60, deadline=None)
@given(drawn=dags())
def test_times_are_longest_paths_and_the_path_is_one(drawn: tuple[int, list[tuple[int, int, int]]]) -> None:
    nodes, edges = drawn
    graph = make_graph(nodes, edges)
    schedule = retime(graph)
    assert schedule.time.tolist() == longest(nodes, edges)
    path = path_edges(graph, schedule)
    assert graph.edges.source[path[0]] == 0
    assert graph.edges.target[path[-1]] == nodes - 1
    assert (graph.edges.target[path[:-1]] == graph.edges.source[path[1:]]).all()
    assert graph.edges.weight[path].sum() == schedule.length_ns


@settings(max_examples=60, deadline=None)
@given(drawn=dags())
def test_slack_is_what_a_node_can_wait(drawn: tuple[int, list[tuple[int, int, int]]]) -> None:
    nodes, edges = drawn
    graph = make_graph(nodes, edges)
    schedule = retime(graph)
    slack = find_slack(graph, schedule)
    assert (slack >= 0).all()
    assert (slack[graph.edges.target[path_edges(graph, schedule)]] == 0).all()
    for node in range(1, nodes):
        for more, longer in ((int(slack[node]), 0), (int(slack[node]) + 1, 1)):
            later = [(a, b, weight + (more if a == node else 0)) for a, b, weight in edges]
            added = more if node == nodes - 1 else 0
            assert longest(nodes, later)[-1] + added == schedule.length_ns + (added or longer)


@settings(max_examples=30, deadline=None)
@given(drawn=dags())
def test_compiled_and_plain_loops_agree(drawn: tuple[int, list[tuple[int, int, int]]]) -> None:
    nodes, edges = drawn
    plain = make_graph(nodes, edges)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "COMPILED_FROM", 0)
        fast = make_graph(nodes, edges)
        assert all((a == b).all() for a, b in zip(plain.edges, fast.edges, strict=True))
        schedule = retime(fast)
        slack, path = find_slack(fast, schedule), path_edges(fast, schedule)
    expected = retime(plain)
    assert (schedule.time == expected.time).all()
    assert (schedule.binding == expected.binding).all()
    assert (slack == find_slack(plain, expected)).all()
    assert (path == path_edges(plain, expected)).all()


def test_a_cycle_is_found_and_named() -> None:
    source, target = np.array([0, 1, 2, 3, 2]), np.array([1, 2, 3, 2, 4])
    order, waiting = order_edges(source, target, 5)
    assert order is None
    assert waiting.tolist() == [0, 0, 1, 1, 1]


def test_points_come_in_the_order_of_nesting() -> None:
    """A row with two children on one thread, one row on another."""
    points = [0] * 8
    assert rows.emit_points([0, 0, 0, 1], [-1, 0, 0, -1], points, [0] * 5) == 8
    assert points == [0, 2, 3, 4, 5, 1, 6, 7]
