"""Who wrote what somebody reads."""

from __future__ import annotations

from graph_examples import (
    ADD,
    ADD_IN_PLACE,
    TO,
    VIEW,
    document,
    nested,
    operator,
    roots,
    shared_graph,
    shared_timeline,
    tensor,
)
from hypothesis import given
from hypothesis import strategies as st

from stepscope.formats.execution_trace import parse_execution_trace
from stepscope.traces.link import link
from stepscope.traces.operators import DataDependency, _Storage, accesses, data_dependencies, data_edges


def found(*nodes: dict[str, object]) -> list[tuple[int, int, int]]:
    graph = parse_execution_trace(document([*nodes, *roots()]))
    return [(one.writer, one.reader, one.size_bytes) for one in data_dependencies(graph)]


def test_views_write_nothing_and_in_place_operators_do() -> None:
    x, y, z, view = tensor(20, 30), tensor(21, 31), tensor(22, 32), tensor(23, 32)
    assert found(
        operator(3, "aten::add", 2, ADD, given=[x, y], got=[z]),
        operator(4, "aten::view", 2, VIEW, given=[z], got=[view]),
        operator(5, "aten::add_", 2, ADD_IN_PLACE, given=[view, x], got=[view]),
        operator(6, "aten::add", 2, ADD, given=[z, y], got=[tensor(24, 34)]),
    ) == [(3, 4, 16), (3, 5, 16), (5, 6, 16)]


def test_ids_that_are_used_again_start_anew() -> None:
    x, z = tensor(20, 30), tensor(22, 32)
    assert found(
        operator(3, "aten::add", 2, ADD, given=[x, x], got=[z]),
        operator(4, "aten::add", 2, ADD, given=[x, x], got=[z]),
        operator(5, "aten::add", 2, ADD, given=[z, x], got=[tensor(9, 39)]),
    ) == [(4, 5, 16)]


def test_parts_of_a_storage_have_their_own_writers() -> None:
    x = tensor(20, 30)
    low, high, middle = tensor(40, 50, 4, 0), tensor(41, 50, 4, 4), tensor(42, 50, 4, 2)
    assert found(
        operator(3, "aten::add", 2, ADD, given=[x, x], got=[low]),
        operator(4, "aten::add", 2, ADD, given=[x, x], got=[high]),
        operator(5, "aten::add", 2, ADD, given=[middle, x], got=[tensor(9, 39)]),
    ) == [(3, 5, 8), (4, 5, 8)]


def test_a_result_that_may_share_memory_and_does_not_is_a_write() -> None:
    x, copy = tensor(20, 30), tensor(21, 31)
    assert found(
        operator(3, "aten::to", 2, TO, given=[x], got=[copy]),
        operator(4, "aten::add", 2, ADD, given=[copy, x], got=[tensor(22, 32)]),
    ) == [(3, 4, 16)]


def test_results_alone_are_not_read() -> None:
    out = "aten::add.out(Tensor self, Tensor other, *, Tensor(a!) out) -> Tensor(a!)"
    x, z = tensor(20, 30), tensor(22, 32)
    assert found(
        operator(3, "aten::add", 2, ADD, given=[x, x], got=[z]),
        operator(4, "aten::add", 2, out, given=[x, x, z], got=[z]),
        operator(5, "aten::add", 2, ADD, given=[z, x], got=[tensor(9, 39)]),
    ) == [(4, 5, 16)]


def test_collectives_write_in_place_and_triton_kernels_may_write_anything() -> None:
    x, z = tensor(20, 30), tensor(22, 32)
    both = ([z], [[4]], ["Tensor(float)"])
    nodes = [
        operator(3, "aten::add", 2, ADD, given=[x, x], got=[z]),
        nested(4, "record_param_comms", 2, inputs=both, outputs=both),
        nested(5, "triton_poi", 2, inputs=([z, 7], [[4], []], ["Tensor(float)", "Int"]), kernel_backend="triton"),
        operator(6, "aten::add", 2, ADD, given=[z, x], got=[tensor(9, 39)]),
        *roots(),
    ]
    graph = parse_execution_trace(document(nodes))
    assert data_dependencies(graph) == [
        DataDependency(3, 4, 16, False),
        DataDependency(4, 5, 16, False),
        DataDependency(5, 6, 16, True),
    ]
    assert not accesses(graph.node(5)).are_writes_known


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=25), st.integers(0, 30), st.integers(1, 12))
def test_last_writers_agree_with_a_byte_by_byte_model(writes: list[tuple[int, int]], begin: int, size: int) -> None:
    storage = _Storage()
    model: dict[int, int] = {}
    for number, (start, length) in enumerate(writes):
        storage.write(start, start + length, (number, False))
        model.update(dict.fromkeys(range(start, start + length), number))
    expected: dict[int, int] = {}
    for place in range(begin, begin + size):
        if place in model:
            expected[model[place]] = expected.get(model[place], 0) + 1
    got: dict[int, int] = {}
    for (writer, _), count in storage.read(begin, begin + size):
        got[writer] = got.get(writer, 0) + count
    assert got == expected


def test_a_real_network_flows_from_layer_to_layer() -> None:
    graph = shared_graph("h200/resnet50_b64/et.json.gz")
    dependencies = data_dependencies(graph)
    first = [(graph.node(one.writer).name, graph.node(one.reader).name) for one in dependencies[:4]]
    assert first == [
        ("aten::conv2d", "aten::batch_norm"),
        ("aten::batch_norm", "aten::relu_"),
        ("aten::relu_", "aten::max_pool2d"),
        ("aten::max_pool2d", "aten::conv2d"),
    ]
    assert all(one.writer < one.reader for one in dependencies)


def test_times_of_real_runs_contradict_no_dependency() -> None:
    graph = shared_graph("h200/gpt2_bf16_b8_s1024/et.json.gz")
    timeline = shared_timeline("h200/gpt2_bf16_b8_s1024/kineto.json.gz")
    edges, contradicted = data_edges(link(graph, timeline))
    assert contradicted == 0
    assert len(edges.before) > 1000
