"""A graph joined to its timeline: three generations of ids, and files that are no pair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_examples import ADD, document, nested, operator, pairs, roots, shared_graph, shared_timeline, tensor

from stepscope.core.errors import BadInputError
from stepscope.formats.execution_trace import parse_execution_trace
from stepscope.formats.graph import Graph
from stepscope.formats.timeline import KERNEL, OPERATOR, RUNTIME, Timeline, TimelineBuilder
from stepscope.traces.finish import finish
from stepscope.traces.link import EXTERNAL_ID, NONE, ORDER, RECORD_FUNCTION, link

CALLS = [(3, "outer", 2), (4, "aten::mm", 3), (5, "aten::add", 3)]


def small_graph(process: int = 77) -> Graph:
    x = tensor(20, 30)
    nodes = [
        operator(number, name, parent, ADD, given=[x, x], got=[tensor(40 + number, 50 + number)])
        for number, name, parent in CALLS
    ]
    return parse_execution_trace(document([*nodes, *roots()], pid=process), where="et.json")


def small_timeline(ids: str, *, names: tuple[str, ...] = ("outer", "aten::mm", "aten::add")) -> Timeline:
    """outer{mm{launch}, add{launch}} and two kernels; `ids` says which generation's."""
    builder = TimelineBuilder()
    thread = (77, 77)
    spans = [(0, 100), (10, 40), (50, 90)]
    for place, (name, (start, end)) in enumerate(zip(names, spans, strict=True)):
        number = place + 103  # rf_id of the graph's nodes
        values: dict[str, Any] = {"event_index": place, "external_id": place + 1}
        if ids == "record":
            values["record_function_id"] = number
        elif ids == "external":
            values["external_id"] = number
        builder.add(OPERATOR, name, start, end, thread=thread, **values)
    for place, (start, owner) in enumerate(((20, 1), (60, 2))):
        correlation = 900 + place
        external = {"record": owner + 1, "external": owner + 103}.get(ids, correlation)
        builder.add(RUNTIME, "cudaLaunchKernel", start, start + 5, thread=thread, correlation=correlation)
        ids_of_work = {"correlation": correlation, "external_id": external}
        builder.add(KERNEL, f"kernel{place}", start + 10, start + 30, device=0, stream=7, **ids_of_work)
    return finish(builder.build(metadata={"source": "kineto.json"}))


GENERATIONS = [("record", RECORD_FUNCTION), ("external", EXTERNAL_ID), ("none", ORDER)]


@pytest.mark.parametrize(("ids", "generation"), GENERATIONS)
def test_three_generations(ids: str, generation: str) -> None:
    graph = small_graph()
    joined = link(graph, small_timeline(ids))
    assert joined.generation == generation
    assert joined.linked_share == 1.0
    assert not joined.reasons
    assert joined.host_row.tolist() == [-1, -1, 0, 1, 2]
    outer, product, addition = graph.nodes[2:]
    assert joined.rows_of(product).tolist() == [4]
    assert joined.rows_of(outer).tolist() == []
    assert joined.rows_under(outer).tolist() == [4, 6]
    assert joined.node_for(6) is addition
    assert joined.node_for(5) is addition
    assert joined.device_s(outer) == pytest.approx(40e-9)
    assert joined.host_s(product) == pytest.approx(30e-9)
    assert joined.device_ns().tolist() == [40, 40, 40, 20, 20]
    assert joined.device_ns(inclusive=False).tolist() == [0, 0, 0, 20, 20]
    assert joined.summary.nodes == joined.summary.nodes_linked == 3


def test_ids_that_coincide_by_accident_are_no_link() -> None:
    other = small_timeline("record", names=("other", "aten::bmm", "aten::add"))
    with pytest.raises(BadInputError, match="do not belong together") as caught:
        link(small_graph(), other)
    assert "2 calls whose id belongs to an event of another name" in caught.value.message
    assert caught.value.where == "et.json and kineto.json"
    assert caught.value.hint
    assert link(small_graph(), other, minimum_share=0).generation == NONE


def test_order_needs_the_same_process() -> None:
    timeline = small_timeline("none")
    with pytest.raises(BadInputError, match="of another process"):
        link(small_graph(process=78), timeline)
    by_id = link(small_graph(process=78), small_timeline("record"))
    assert by_id.warnings == ("the graph was recorded in process 78, the timeline in 77",)


def test_an_operator_that_the_graph_lacks_is_counted_or_taken_by_its_caller() -> None:
    nodes = [operator(4, "aten::mm", 2, ADD, given=[], got=[]), *roots()]
    graph = parse_execution_trace(document(nodes))
    joined = link(graph, small_timeline("record"))
    assert joined.summary.device_events_linked == 1
    assert joined.reasons == {"device events of operators that the graph does not hold": 1}
    outer_only = parse_execution_trace(document([operator(3, "outer", 2, ADD, given=[], got=[]), *roots()]))
    assert link(outer_only, small_timeline("record")).rows_of(2).tolist() == [4, 6]


def test_a_timeline_without_device_events() -> None:
    builder = TimelineBuilder()
    builder.add(OPERATOR, "aten::mm", 0, 10, thread=(77, 1), record_function_id=104)
    graph = parse_execution_trace(document([operator(4, "aten::mm", 2, ADD, given=[], got=[]), *roots()]))
    summary = link(graph, finish(builder.build())).summary
    assert (summary.device_share, summary.operator_share, summary.linked_share) == (None, 1.0, 1.0)


def test_a_graph_without_operators_and_an_empty_file_do_not_divide_by_zero() -> None:
    labels = parse_execution_trace(document([nested(3, "label", 2, scope=7), *roots()]))
    summary = link(labels, small_timeline("record"), minimum_share=0).summary
    assert summary.operator_share is None
    json.dumps(summary.linked_share)


@pytest.mark.parametrize(("graph_name", "timeline_name"), pairs())
def test_true_pairs_join_completely(graph_name: str, timeline_name: str) -> None:
    graph = shared_graph(graph_name)
    joined = link(graph, shared_timeline(timeline_name))
    summary = joined.summary
    assert summary.nodes_linked == summary.nodes
    assert summary.operator_share == 1.0
    assert summary.generation == (RECORD_FUNCTION if graph_name.startswith("h200") else ORDER)
    without_launch = summary.reasons.pop("device events without a launch in the file", 0)
    assert without_launch == (64 if graph_name.endswith(("_1.json.gz", "_3.json.gz")) else 0)
    assert summary.device_events_linked == summary.device_events - without_launch
    assert not summary.reasons
    core = joined.timeline.core
    rows = joined.host_row[joined.host_row >= 0]
    assert len(np.unique(rows)) == len(rows)
    assert {joined.timeline.texts[code] for code in core["name"][rows].tolist()} == {
        node.name for node in graph if not node.is_root
    }


def test_the_six_runs_have_the_number_of_ids_that_was_counted_by_hand() -> None:
    total = 0
    for graph_name, _ in pairs()[:6]:
        total += sum(not node.is_root for node in shared_graph(graph_name))
    assert total == 22_804


@pytest.mark.parametrize(
    ("graph_name", "timeline_name"),
    [
        ("public/param/resnet_et.json.gz", "public/param/resnet_kineto.json.gz"),
        ("public/param/linear_et.json.gz", "public/param/linear_kineto.json.gz"),
        ("public/param/resnet_2gpu_et.json.gz", "public/hta/nccl_parser_config/nccl_data.json.gz"),
        ("public/param/dlrm8_et/dlrm_eg_1.json.gz", "public/param/dlrm8_kineto/worker0"),
        ("h200/bert_base_b16_s128/et.json.gz", "h200/gpt2_bf16_b8_s1024/kineto.json.gz"),
    ],
)
def test_files_of_other_runs_are_refused(graph_name: str, timeline_name: str) -> None:
    graph, timeline = shared_graph(graph_name), shared_timeline(timeline_name)
    with pytest.raises(BadInputError, match=r"0 of \d+ device events and 0 of \d+ operators"):
        link(graph, timeline)
    anyway = link(graph, timeline, minimum_share=0)
    assert anyway.linked_share == 0
    assert anyway.reasons
    assert (anyway.node_of_row < 0).all()


def test_reading_and_linking_need_numpy_and_msgspec_alone() -> None:
    """On a machine that has torch and little else."""
    code = (
        "import sys\n"
        "for name in ('polars', 'numba', 'torch', 'google', 'duckdb', 'isal', 'zstandard'): sys.modules[name] = None\n"
        "import test_link as here\n"
        "assert here.link(here.small_graph(), here.small_timeline('record')).linked_share == 1.0\n"
    )
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=here, check=False)
    assert done.returncode == 0, done.stderr
