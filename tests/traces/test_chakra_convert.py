"""A timeline as a Chakra graph: times, waits, communication, coverage."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from graph_examples import SHARED, pairs, shared_graph, shared_timeline

from stepscope.core.errors import BadInputError, UsageError
from stepscope.formats.chakra import (
    COLLECTIVE,
    RECEIVE,
    SEND,
    ChakraNode,
    earliest_ns,
    read_chakra,
    topological_order,
)
from stepscope.formats.timeline import (
    ANNOTATION,
    COPY,
    EDGE_KINDS,
    KERNEL,
    OPERATOR,
    RUNTIME,
    SET,
    RowEdges,
    Timeline,
    TimelineBuilder,
)
from stepscope.traces.chakra_convert import Conversion, convert
from stepscope.traces.chakra_graphs import comm_type, graph_of_chakra
from stepscope.traces.finish import finish
from stepscope.traces.link import link
from stepscope.traces.operators import count_operations, data_dependencies, data_edges
from stepscope.traces.read import read_timeline


class Example:
    """A timeline row by row."""

    def __init__(self) -> None:
        self.builder = TimelineBuilder()
        self.edges: list[tuple[int, int, str]] = []

    def host(self, name: str, start: int, end: int, *, thread: int = 1, kind: int = OPERATOR, **values: Any) -> int:
        return self.builder.add(kind, name, start, end, thread=(1, thread), event_index=len(self.builder), **values)

    def launched(
        self, call: tuple[int, int], work: tuple[int, int], *, stream: int = 7, kind: int = KERNEL, **values: Any
    ) -> int:
        """A call and the device work it launched; returns the row of the work."""
        correlation = len(self.builder) + 1000
        thread = values.pop("thread", 1)
        name = values.pop("name", "gemm_kernel")
        self.host("cudaLaunchKernel", *call, kind=RUNTIME, correlation=correlation, thread=thread)
        return self.builder.add(kind, name, *work, device=0, stream=stream, correlation=correlation, **values)

    def edge(self, before: int, after: int, kind: str) -> None:
        self.edges.append((before, after, kind))

    def timeline(self, **values: Any) -> Timeline:
        return finish(self.builder.build(**values))

    def row_edges(self) -> RowEdges:
        before, after, kinds = zip(*self.edges, strict=True) if self.edges else ((), (), ())
        return RowEdges(
            before=np.array(before, np.int64),
            after=np.array(after, np.int64),
            kind=np.array([EDGE_KINDS.index(kind) for kind in kinds], np.int64),
            inferred=np.zeros(len(before), np.int64),
        )


def by_name(found: Conversion) -> dict[str, ChakraNode]:
    return {node.name: node for node in found.trace().nodes}


def check(found: Conversion) -> list[ChakraNode]:
    """Nodes in order, each beginning when the trace says; each device event but a stream's last is waited for."""
    nodes = found.trace().nodes
    origin = min(node.start_ns for node in nodes)
    assert [node.id for node in nodes] == list(range(1, len(nodes) + 1))
    assert all(other < node.id for node in nodes for other in (*node.data_deps, *node.ctrl_deps))
    assert all(len(set(node.data_deps)) == len(node.data_deps) for node in nodes)
    assert sum(not node.data_deps for node in nodes) == 1
    topological_order(nodes)
    for node, (start, _) in zip(nodes, earliest_ns(nodes), strict=True):
        assert start + origin == node.start_ns
    waited_for = {other for node in nodes for other in node.data_deps}
    streams = defaultdict(list)
    for node in nodes:
        if not node.is_cpu_op:
            streams[node.attributes["device"], node.attributes["stream"]].append(node.id)
    assert all(number in waited_for for stream in streams.values() for number in stream[:-1])
    return nodes


def test_calls_gaps_launches_and_streams() -> None:
    example = Example()
    example.host("aten::mm", 1000, 9000)
    example.launched((2000, 4000), (5000, 8000))
    example.launched((6000, 7000), (9500, 9900), kind=SET, name="Memset (Device)", bytes=64)
    example.host("aten::add", 12_400, 13_000)
    found = convert(example.timeline(rank=2))
    nodes = check(found)
    # The second launch is inside aten::mm as well; work goes on after its piece of it.
    assert [(node.name, node.start_us, node.duration_us) for node in nodes] == [
        ("begin", 1, 0),
        ("aten::mm", 1, 1),
        ("cudaLaunchKernel", 2, 2),
        ("delay", 4, 1),
        ("host gap", 4, 2),
        ("gemm_kernel", 5, 3),
        ("cudaLaunchKernel", 6, 1),
        ("host gap", 7, 2),
        ("delay", 8, 2),
        ("host gap", 9, 3),
        ("Memset (Device)", 10, 0),
        ("aten::add", 12, 1),
    ]
    named = {node.id: node for node in nodes}
    memset = nodes[10]
    assert {named[other].name for other in memset.data_deps} == {"cudaLaunchKernel", "gemm_kernel", "delay"}
    assert named[memset.ctrl_deps[0]].name == "aten::mm"
    assert (memset.attributes["tensor_size"], memset.attributes["duration_ns"]) == (64, 400)
    assert nodes[1].attributes["call_duration_ns"] == 8000
    assert found.metadata["rank"] == 2
    assert (found.coverage.device_events, found.coverage.launch_share) == (2, 1.0)


def test_what_a_node_has_no_room_for_is_refused_by_its_name() -> None:
    example = Example()
    example.host("aten::mm", 0, 900, shapes="[[1099511627776, 1099511627776], [1099511627776, 1099511627776]]")
    example.launched((100, 200), (300, 800))
    with pytest.raises(BadInputError, match=r"node \d+ \(gemm_kernel\) cannot be written as Chakra") as caught:
        convert(example.timeline()).trace()
    assert caught.value.hint


def test_a_call_that_waits_for_the_device_loses_its_wait() -> None:
    example = Example()
    kernel = example.launched((0, 10), (20, 500))
    call = example.host("cudaDeviceSynchronize", 50, 520, kind=RUNTIME)
    example.host("aten::after", 530, 540)
    for edges in (None, [(kernel, call, "sync")]):
        example.edges = edges or []
        found = convert(example.timeline(), edges=example.row_edges() if edges else None)
        check(found)
        named = by_name(found)
        assert found.coverage.waits_cut == 1
        sync, rest = named["cudaDeviceSynchronize"], named["after wait"]
        assert (sync.duration_ns, sync.attributes["call_duration_ns"]) == (0, 470)
        assert (rest.start_ns, rest.duration_ns) == (500, 20)
        assert set(rest.data_deps) == {sync.id, named["gemm_kernel"].id}


def test_half_the_kernel_time_moves_the_end_when_the_host_waits() -> None:
    example = Example()
    kernel = example.launched((0, 10_000), (20_000, 500_000))
    call = example.host("cudaDeviceSynchronize", 50_000, 520_000, kind=RUNTIME)
    example.edge(kernel, call, "sync")
    nodes = convert(example.timeline(), edges=example.row_edges()).trace().nodes
    faster = [
        msgspec.structs.replace(node, attributes={**node.attributes, "duration_ns": node.duration_ns // 2})
        if not node.is_cpu_op
        else node
        for node in nodes
    ]
    ends = [max(end for _, end in earliest_ns(one)) for one in (nodes, faster)]
    assert ends == [520_000, 280_000]


def test_work_handed_to_another_thread_and_back() -> None:
    example = Example()
    forward = example.host("forward", 0, 100)
    backward = example.host("backward", 110, 900)
    first = example.host("evaluate", 150, 800, thread=2)
    example.host("later", 950, 960)
    example.edge(forward, first, "thread")
    example.edge(first, backward, "thread")
    found = convert(example.timeline(), edges=example.row_edges())
    nodes = check(found)
    named = {node.name: node for node in nodes}
    before = [node for node in nodes if node.id < named["evaluate"].id]
    assert named["forward"].id in {other for node in before for other in node.data_deps}
    rest = named["after wait"]
    assert (rest.start_ns, rest.duration_ns) == (800, 100)
    assert named["evaluate"].id in rest.data_deps
    assert named["backward"].duration_ns == 0


def test_an_idle_thread_waits_for_what_it_is_handed() -> None:
    example = Example()
    example.host("early", 0, 100, thread=2)
    source = example.host("main", 50, 500)
    target = example.host("late", 600, 700, thread=2)
    example.edge(source, target, "thread")
    found = convert(example.timeline(), edges=example.row_edges())
    nodes = check(found)
    named = {node.name: node for node in nodes}
    late = named["late"]
    (gap,) = (node for node in nodes if node.id in late.data_deps)
    assert (gap.name, gap.start_ns, gap.duration_ns) == ("host gap", 500, 100)
    assert {named["early"].id, named["main"].id} == set(gap.data_deps)


def test_events_between_streams_and_edges_that_cannot_be() -> None:
    example = Example()
    first = example.launched((0, 10), (20, 100), stream=7)
    second = example.launched((30, 40), (150, 200), stream=8, name="other_kernel")
    example.edge(first, second, "event")
    example.edge(second, first, "event")
    example.edge(first, second, "queue")
    example.edge(first, second, "stream")
    found = convert(example.timeline(), edges=example.row_edges())
    check(found)
    named = by_name(found)
    assert named["gemm_kernel"].id in named["other_kernel"].data_deps
    assert found.coverage.dependencies["event"] == 1
    assert found.coverage.dropped == {
        "full launch queues and peers' arrivals, which no node can wait for": 1,
        "dependencies that the times contradict": 1,
    }


def test_kernels_that_overlap_on_one_stream_keep_successors() -> None:
    example = Example()
    example.launched((0, 10), (20, 100))
    example.launched((10, 20), (90, 150))
    example.launched((20, 30), (160, 170))
    example.launched((30, 40), (165, 200))
    nodes = convert(example.timeline()).trace().nodes
    kernels = [node.id for node in nodes if not node.is_cpu_op]
    waited_for = {other for node in nodes for other in node.data_deps}
    assert set(kernels[:-1]) <= waited_for


def test_a_call_that_has_not_returned_when_its_kernel_begins() -> None:
    example = Example()
    example.host("aten::mm", 0, 100)
    example.launched((20, 80), (50, 70))
    check(convert(example.timeline()))


def test_device_work_without_a_launch() -> None:
    example = Example()
    example.host("aten::mm", 0, 100)
    example.builder.add(KERNEL, "lost_kernel", 50, 60, device=0, stream=3, correlation=5)
    timeline = example.timeline(metadata={"source": "t.json"})
    with pytest.raises(BadInputError, match="only 0 of 1 device events have a launch") as caught:
        convert(timeline)
    assert caught.value.where == "t.json"
    found = convert(timeline, minimum_share=0)
    check(found)
    # Nothing had ended when it began: it is placed by the delay since the beginning.
    named = by_name(found)
    assert named["delay"].duration_ns == 50


COLLECTIVE_COLUMNS = {"group": "0", "group_size": 2, "group_ranks": "[4, 6]", "dtype": "Float"}


def test_collectives_and_messages() -> None:
    example = Example()
    gathered = {"collective": "_allgather_base", "in_elements": 10, "out_elements": 20, **COLLECTIVE_COLUMNS}
    example.launched((0, 10), (20, 100), name="ncclDevKernel_AllGather_RING", **gathered)
    for start, kind in ((200, "send"), (300, "send"), (400, "recv")):
        message = {"collective": kind, "in_elements": 5, "peer": 1, **COLLECTIVE_COLUMNS}
        example.launched((start, start + 10), (start + 20, start + 60), name="ncclDevKernel_SendRecv", **message)
    example.launched((500, 510), (520, 560), name="ncclDevKernel_SendRecv(ncclDevKernelArgs)")
    found = convert(example.timeline(rank=4, world_size=8))
    nodes = [node for node in check(found) if node.type in (SEND, RECEIVE, COLLECTIVE)]
    gather, first, second, received, unknown = nodes
    assert [node.type for node in nodes] == [COLLECTIVE, SEND, SEND, RECEIVE, COLLECTIVE]
    assert [gather.attributes[name] for name in ("comm_type", "comm_size", "comm_out_size")] == [2, 40, 80]
    assert gather.attributes["pg_name"] == "0"
    names = ("comm_src", "comm_dst", "comm_tag")
    ends = [tuple(node.attributes[name] for name in names) for node in (first, second, received)]
    assert ends == [(4, 6, 0), (4, 6, 1), (6, 4, 0)]
    assert unknown.attributes["comm_type"] == 6
    assert "comm_size" not in unknown.attributes
    assert msgspec.json.decode(found.metadata["process_groups"]) == {"0": [4, 6]}
    assert (found.coverage.communication, found.coverage.communication_with_size) == (5, 4)
    assert graph_of_chakra(found.trace()).groups[0].ranks == (4, 6)


def test_without_device_the_records_are_the_collectives() -> None:
    example = Example()
    example.host("record_param_comms", 0, 100, collective="allreduce", in_elements=7, **COLLECTIVE_COLUMNS)
    example.host("record_param_comms", 110, 120, collective="wait", **COLLECTIVE_COLUMNS)
    found = convert(example.timeline())
    nodes = [node for node in check(found) if node.type == COLLECTIVE]
    (node,) = nodes
    assert (node.attributes["comm_type"], node.attributes["comm_size"], node.is_cpu_op) == (0, 28, True)
    assert found.coverage.launch_share is None


def test_one_step() -> None:
    example = Example()
    example.host("ProfilerStep#3", 0, 100, kind=ANNOTATION)
    example.launched((10, 20), (30, 150))
    example.host("ProfilerStep#4", 100, 200, kind=ANNOTATION)
    example.launched((110, 120), (160, 260), name="late_kernel")
    timeline = example.timeline()
    found = convert(timeline, step=4)
    check(found)
    named = by_name(found)
    assert "late_kernel" in named
    assert "gemm_kernel" not in named
    assert found.metadata["step"] == 4
    with pytest.raises(UsageError, match="no step 9"):
        convert(timeline, step=9)


def test_clocks_before_zero_are_shifted() -> None:
    example = Example()
    example.host("aten::mm", -5000, -1000)
    found = convert(example.timeline())
    assert by_name(found)["aten::mm"].start_us == 0
    assert found.metadata["clock_shift_ns"] == 5000


def test_blocking_copies() -> None:
    example = Example()
    example.launched((0, 200), (20, 180), kind=COPY, name="Memcpy DtoH (Device -> Pageable)", bytes=4)
    found = convert(example.timeline())
    check(found)
    assert by_name(found)["after wait"].duration_ns == 20


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("allreduce", 0), ("all_reduce_coalesced", 0), ("reduce", 1), ("_allgather_base", 2), ("all_gather", 2),
        ("gather", 3), ("scatter", 4), ("broadcast", 5), ("all_to_allv", 6), ("_reduce_scatter_base", 7),
        ("barrier", 9), ("wait", None),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", 0), ("ncclDevKernel_ReduceScatter_Sum_f32", 7),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgs)", 6), ("nccl:all_reduce", 0), ("oneShotAllReduce", 0),
    ],
)  # fmt: skip
def test_types_of_collectives(name: str, number: int | None) -> None:
    assert comm_type(name) == number


def test_operations_of_products() -> None:
    assert count_operations("aten::mm", [[2, 3], [3, 5]]) == 60
    assert count_operations("aten::addmm", [[5], [2, 3], [3, 5]]) == 60
    assert count_operations("aten::bmm", [[7, 2, 3], [7, 3, 5]]) == 420
    assert count_operations("aten::cudnn_convolution", [[1, 3, 8, 8], [4, 3, 3, 3]], [1, 4, 6, 6]) == 2 * 4 * 36 * 27
    attention = count_operations("aten::_scaled_dot_product_flash_attention", [[2, 4, 8, 16], [2, 4, 8, 16]])
    assert attention == 4 * 2 * 4 * 64 * 16
    assert count_operations("aten::mm", [[2, 3]]) is None
    assert count_operations("aten::relu", [[2, 3]]) is None


@pytest.mark.parametrize(("graph_name", "timeline_name"), [pairs()[place] for place in (1, 4, 7)])
def test_real_pairs(graph_name: str, timeline_name: str, tmp_path: Path) -> None:
    joined = link(shared_graph(graph_name), shared_timeline(timeline_name))
    found = convert(joined.timeline, link=joined)
    nodes = check(found)
    found.write(tmp_path / "x.et")
    assert read_chakra(tmp_path / "x.et").nodes == nodes
    on_device = [node for node in nodes if not node.is_cpu_op]
    assert len(on_device) == found.coverage.device_events == joined.summary.device_events
    assert found.coverage.calls_with_node == joined.summary.nodes
    assert not found.coverage.dropped
    assert sum("et_id" in node.attributes for node in on_device) == joined.summary.device_events_linked
    if "dlrm8" in graph_name:
        moved = [node.attributes for node in nodes if node.type == COLLECTIVE]
        assert [one["comm_type"] for one in moved] == [6, 6, 6, 6, 0, 6, 0, 0]
        assert all(one["comm_size"] > 0 for one in moved)
        assert list(msgspec.json.decode(found.metadata["process_groups"]).values()) == [list(range(8))]
    back = graph_of_chakra(read_chakra(tmp_path / "x.et"))
    original = joined.graph.topmost_operators()
    kept = {node.attributes.get("et_id"): node for node in back if node.op_schema}
    assert all(list(kept[node.id].inputs.values) == list(node.inputs.values) for node in original if node.op_schema)


def test_what_is_written_is_what_is_in_memory(tmp_path: Path) -> None:
    folder = "h200/dlrm_26t_b2048"
    graph, timeline = shared_graph(f"{folder}/et.json.gz"), shared_timeline(f"{folder}/kineto.json.gz")
    found = convert(timeline, link=link(graph, timeline))
    found.write(tmp_path / "x.et")
    back = read_chakra(tmp_path / "x.et")
    assert back.nodes == found.trace().nodes
    assert back.attributes == found.metadata
    assert [node.id for node in back.nodes] == list(range(1, found.node_count + 1))


@pytest.mark.parametrize("model", ["gpt2_bf16_b8_s1024", "resnet50_b64"])
def test_data_edges_join_the_last_work_of_the_writer_to_the_first_of_the_reader(model: str) -> None:
    graph, timeline = (shared_graph(f"h200/{model}/et.json.gz"), shared_timeline(f"h200/{model}/kineto.json.gz"))
    joined = link(graph, timeline)
    start, end = timeline.core["start_ns"], timeline.core["end_ns"]
    expected, contradicted = [], 0
    for one in data_dependencies(graph):
        writer, reader = graph.place(one.writer), graph.place(one.reader)
        before, after = joined.rows_under(writer), joined.rows_under(reader)
        if len(before) and not len(after):
            continue
        source = before[np.argmax(end[before])] if len(before) else joined.host_row[writer]
        target = after[np.argmin(start[after])] if len(after) else joined.host_row[reader]
        if source < 0 or target < 0:
            continue
        if end[source] > start[target]:
            contradicted += 1
        else:
            expected.append((int(source), int(target)))
    edges, left_out = data_edges(joined)
    assert expected
    assert list(zip(edges.before.tolist(), edges.after.tolist(), strict=True)) == expected
    assert left_out == contradicted


def test_every_timeline_at_hand_replays_to_its_own_end() -> None:
    if not SHARED.exists():
        pytest.skip("no traces at hand")
    small = [*SHARED.glob("public/hta/*/*/*.json.gz"), *SHARED.glob("public/hta/timeline_analysis/*.json.gz")]
    assert len(small) == 5
    for path in small:
        check(convert(read_timeline(path)))


def test_memsets_and_metadata_of_a_real_data_parallel_step() -> None:
    timeline = shared_timeline("public/hta/nccl_parser_config/nccl_data.json.gz")
    found = convert(timeline, step=4)
    nodes = found.trace().nodes
    rows = np.flatnonzero((timeline.core["step"] == 4) & np.isin(timeline.core["kind"], (KERNEL, COPY, SET)))
    assert sum(not node.is_cpu_op for node in nodes) == len(rows) == 1258
    moved = [node for node in nodes if node.type == COLLECTIVE]
    assert [node.attributes["comm_size"] for node in moved] == [
        212_480, 424, 8_196_000, 31_502_336, 26_255_360, 26_550_272, 9_724_160,
    ]  # fmt: skip
    assert found.metadata["process_groups"] == '{"0":[0,1]}'
