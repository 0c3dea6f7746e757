"""Real traces: what must hold on every one of them, and some dependencies checked by hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from stepscope.analyze.critical.kinds import GRAPH_EDGE_KINDS
from stepscope.analyze.critical.model import build_graph, build_graph_of_ranks, row_edges
from stepscope.analyze.critical.path import critical_path, describe_path
from stepscope.analyze.critical.schedule import order_edges
from stepscope.analyze.critical.what_if import find_limits, what_if
from stepscope.formats.classify import COMMUNICATION
from stepscope.formats.timeline import Timeline
from stepscope.traces.read import read_timeline

TRACES = Path(__file__).parents[3].parent / "shared" / "data" / "traces"
CASES = [
    ("h200/resnet50_b64/kineto.json.gz", 3),
    ("h200/dlrm_8t_pool32_b4096/kineto.json.gz", 3),
    ("h200/vit_b_16_b32/kineto.json.gz", None),
    ("public/hta/critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz", None),
    ("public/hta/critical_path/cuda_event_sync/event_sync_trace.json.gz", None),
    ("public/hta/critical_path/cuda_event_sync_multi_stream/event_sync_trace.json.gz", None),
    ("public/hta/critical_path/simple_add/benchmark_result_493459_1694039959_trace.json.gz", None),
    ("public/hta/nccl_parser_config/nccl_data.json.gz", 5),
    ("public/hta/timeline_analysis/sampled_rank-0.json.gz", 552),
    ("public/param/dlrm8_kineto/worker1_step_12.1694128201556.pt.trace.json.gz", 10),
    ("public/param/resnet_kineto.json.gz", None),
    ("public/param/resnet_kineto.json.gz", 1),
    ("public/param/linear_kineto.json.gz", 1),
]

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the shared traces are not here")


@cache
def read(name: str) -> Timeline:
    return read_timeline(TRACES / name)


@pytest.mark.parametrize(("name", "step"), CASES, ids=lambda value: str(value).split("/")[-1])
def test_every_trace_comes_out_exactly(name: str, step: int | None) -> None:
    timeline = read(name)
    path = critical_path(timeline, step)
    assert path.checks.failures == []
    assert path.checks.largest_error_ns == 0
    assert path.checks.path_ns == path.checks.window_ns > 0
    assert abs(path.checks.unexplained_on_path_ns) < 0.002 * path.checks.window_ns
    assert path.checks.cycles_cut == 0
    assert path.checks.contradicted == {}
    graph = build_graph(timeline, step)
    lengths = [what_if(graph, f"kernels={factor}").after_s for factor in (2, 1, 0.5)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[1] == path.length_s
    bound = next(limit for limit in find_limits(graph) if limit.name == "host-bound")
    assert bound.step_s <= lengths[2]


@pytest.mark.parametrize(
    ("name", "step"), [CASES[0], CASES[7], CASES[9], CASES[11]], ids=lambda value: str(value)[-20:]
)
def test_edges_between_rows_have_no_cycle(name: str, step: int | None) -> None:
    timeline = read(name)
    found = row_edges(timeline, step)
    parent = np.asarray(timeline.core["parent"])
    children = np.flatnonzero(parent >= 0)
    before, after = np.append(found.before, parent[children]), np.append(found.after, children)
    order, _ = order_edges(before, after, len(timeline))
    assert order is not None


def test_a_gpu_bound_step_follows_its_kernels() -> None:
    """ResNet on a slow GPU: the host is ahead and the copy from pageable memory makes it wait."""
    graph = build_graph(read("public/param/resnet_kineto.json.gz"), 1)
    path = critical_path(read("public/param/resnet_kineto.json.gz"), 1)
    assert path.device_s > 0.98 * path.length_s
    half = what_if(graph, "kernels=0.5")
    assert half.saved_s == pytest.approx(path.by_kind_s["compute"] / 2, rel=0.01)
    assert what_if(graph, "copies=0").saved_s == pytest.approx(path.by_kind_s["copy"], rel=0.02)


def named(timeline: Timeline, kind: str, step: int | None = None) -> list[tuple[str, str, bool]]:
    """Edges of a kind by the names of their rows."""
    graph = build_graph(timeline, step)
    mine = graph.edges.kind == GRAPH_EDGE_KINDS.index(kind)
    rows = [graph.node_row[column[mine]].tolist() for column in (graph.edges.source, graph.edges.target)]
    names = [[timeline.text("name", row) or "" for row in column] for column in rows]
    return list(zip(*names, (graph.edges.inferred[mine] > 0).tolist(), strict=True))


def test_event_waits_of_a_small_trace_by_hand() -> None:
    """Three streams with a fill and a product each; the second stream waits for the first."""
    timeline = read("public/hta/critical_path/cuda_event_sync_multi_stream/event_sync_trace.json.gz")
    found = named(timeline, "event")
    assert [(before, inferred) for before, _, inferred in found] == [("ampere_sgemm_128x64_nn", False)]
    graph = build_graph(timeline)
    edge = np.flatnonzero(graph.edges.kind == GRAPH_EDGE_KINDS.index("event"))[0]
    streams = [
        timeline.core["stream"][graph.node_row[column[edge]]] for column in (graph.edges.source, graph.edges.target)
    ]
    assert streams == [20, 24]
    waits = named(timeline, "sync")
    assert {call for _, call, _ in waits} == {"cudaDeviceSynchronize"}
    assert len(waits) == 3  # one a stream


def test_host_waits_of_a_small_trace_by_hand() -> None:
    timeline = read("public/hta/critical_path/cuda_event_sync/event_sync_trace.json.gz")
    calls = sorted(call for _, call, inferred in named(timeline, "sync", 100) if not inferred)
    assert calls == ["cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamSynchronize"]


def test_what_looks_like_communication_was_waiting_for_a_late_rank() -> None:
    """Eight ranks, one step; their clocks agree to a few µs. Collectives are matched by order."""
    files = sorted((TRACES / "public/param/dlrm8_kineto").glob("worker*"))
    timelines = [read_timeline(file) for file in files]
    rows = []
    for timeline in timelines:
        found = np.flatnonzero(timeline.core["category"] == COMMUNICATION)
        rows.append(found[np.argsort(timeline.core["start_ns"][found])])
    matches = [[(rank, int(rows[rank][place])) for rank in range(8)] for place in range(8)]
    ends = np.array([timeline.core["end_ns"][found] for timeline, found in zip(timelines, rows, strict=True)])
    offsets = np.median(ends[0] - ends, axis=1).astype(int).tolist()
    alone = critical_path(timelines[1])
    together = describe_path(build_graph_of_ranks(timelines, matches, offsets_ns=offsets))
    assert together.checks.failures == []
    assert together.checks.meetings == 8
    assert alone.by_kind_s["communication"] > 0.4 * alone.length_s
    assert together.by_kind_s["communication"] < 0.01 * together.length_s
    assert max(range(8), key=lambda rank: together.by_rank_s[rank]) == 7
