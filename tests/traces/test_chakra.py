"""Chakra files: messages, framing, cut and damaged files, circles."""

from __future__ import annotations

import gzip
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import damage
import pytest
from graph_examples import check_refusal, document, shared_graph, small_nodes
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.errors import BadInputError
from stepscope.formats.chakra import (
    ATTRIBUTE_FIELDS,
    COLLECTIVE,
    COMPUTE,
    METADATA,
    SCALARS,
    ChakraNode,
    ChakraReader,
    ChakraTrace,
    NumbersEncoder,
    TextArguments,
    earliest_ns,
    encode_arguments,
    encode_fields,
    encode_node,
    messages,
    parse_node,
    read_chakra,
    topological_order,
    write_chakra,
)
from stepscope.formats.execution_trace import parse_execution_trace
from stepscope.formats.tensors import NO_ARGUMENTS, Arguments, Tensor
from stepscope.traces.chakra_graphs import chakra_of_graph, graph_of_chakra


def small_trace() -> ChakraTrace:
    nodes = [
        ChakraNode(id=1, name="begin", type=METADATA),
        ChakraNode(
            id=2,
            name="aten::mm",
            ctrl_deps=(1,),
            data_deps=(1,),
            start_us=10,
            duration_us=5,
            inputs=TextArguments("[1]", "[[]]", '["Int"]'),
            attributes={"is_cpu_op": True, "op_schema": "x", "flags": [True, False], "share": 0.5, "none": []},
        ),
        ChakraNode(
            id=3,
            name="ncclKernel",
            type=COLLECTIVE,
            data_deps=(1, 2),
            start_us=20,
            duration_us=7,
            attributes={"is_cpu_op": False, "comm_type": 0, "comm_size": 1 << 40, "pg_name": "0", "start_ns": 20_100},
        ),
    ]
    return ChakraTrace(attributes={"writer": "test", "rank": 3}, nodes=nodes)


def test_files_keep_everything(tmp_path: Path) -> None:
    path = tmp_path / "rank.3.et"
    write_chakra(path, small_trace())
    back = read_chakra(path)
    assert back.nodes == small_trace().nodes
    assert back.attributes == small_trace().attributes
    assert back.version == "0.0.4"
    assert not back.warnings
    assert [one.name for one in tmp_path.iterdir()] == ["rank.3.et"]


def test_field_numbers_are_those_of_the_published_schema() -> None:
    found = {field.name: field.number for field in messages().node.DESCRIPTOR.fields}
    assert found == {
        "id": 1, "name": 2, "type": 3, "ctrl_deps": 4, "data_deps": 5, "start_time_micros": 6, "duration_micros": 7,
        "inputs": 8, "outputs": 9, "attr": 10,
    }  # fmt: skip
    attribute = {field.name: field.number for field in messages().attribute.DESCRIPTOR.fields}
    assert [attribute[name] for name in ("double_val", "int64_val", "bool_val", "bytes_list")] == [3, 9, 27, 32]
    assert len(attribute) == 2 + 2 * len(SCALARS)
    assert set(ATTRIBUTE_FIELDS.values()) <= set(attribute)


def test_attributes_in_other_fields_keep_them() -> None:
    node = ChakraNode(id=1, attributes={"comm_size": 7, "x": 3}, fields={"comm_size": "uint64_val", "x": "sint32_val"})
    assert parse_node(encode_node(node)) == node


@given(
    st.integers(0, (1 << 63) - 1),
    st.text(max_size=200),
    st.lists(st.integers(0, 1 << 40), max_size=60),
    st.dictionaries(
        st.text(max_size=9),
        st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.text(max_size=300),
    ),
)
def test_nodes_come_back_as_they_were(number: int, name: str, deps: list[int], attributes: dict[str, Any]) -> None:
    node = ChakraNode(
        id=number,
        name=name,
        ctrl_deps=tuple(deps[:1]),
        data_deps=tuple(deps),
        start_us=number // 3,
        inputs=TextArguments(name, "[]", "[]"),
        attributes={key: value for key, value in attributes.items() if key not in ATTRIBUTE_FIELDS},
    )
    assert parse_node(encode_node(node)) == node


def test_nodes_in_pieces_are_nodes_as_a_whole() -> None:
    encoder = NumbersEncoder(["rf_id", "seq_id"])
    for number, (before, beyond) in enumerate([((), 5), ((1,), (1 << 64) - 1), ((1, 2), -3), ((), 0)], 1):
        node = ChakraNode(
            id=number,
            name="aten::mm",
            ctrl_deps=before[:1],
            data_deps=before,
            start_us=7,
            duration_us=number,
            inputs=TextArguments("[1]", "[[]]", '["Int"]'),
            outputs=TextArguments("[]", "[]", "[]"),
            attributes={"kind": "operator", "start_ns": 7001, "duration_ns": number, "rf_id": beyond, "seq_id": -1},
        )
        numbers = encoder.encode(number, before[:1], before, (7, number, 7001, number), (beyond, -1))
        arguments = encode_arguments(Arguments.of([1], [[]], ["Int"]), NO_ARGUMENTS)
        shared = encode_fields({"kind": "operator"}, name="aten::mm", type=COMPUTE)
        assert parse_node(shared + arguments + numbers) == node
    assert encode_arguments(NO_ARGUMENTS, NO_ARGUMENTS) == b""


def test_a_cut_file_keeps_its_complete_nodes_and_says_where(tmp_path: Path) -> None:
    path = tmp_path / "x.et"
    write_chakra(path, small_trace())
    data = path.read_bytes()
    silent = []
    for place in range(len(data)):
        path.write_bytes(data[:place])
        try:
            trace = read_chakra(path)
        except BadInputError as error:
            check_refusal(error, str(path))
            assert place < 40  # inside the metadata
            continue
        assert trace.nodes == small_trace().nodes[: len(trace.nodes)]
        assert len(trace.nodes) < 3
        if not trace.warnings:
            silent.append(len(trace.nodes))
    # Exactly between two nodes the format does not show a cut.
    assert silent == [1, 2]
    path.write_bytes(data[:-1])
    begins = len(data) - len(encode_node(small_trace().nodes[2])) - 1
    assert f"begins at byte {begins};" in read_chakra(path).warnings[0]


def test_files_of_our_own_say_how_many_nodes_they_have(tmp_path: Path) -> None:
    path = tmp_path / "x.et"
    trace = chakra_of_graph(parse_execution_trace(document(small_nodes())))
    write_chakra(path, trace)
    path.write_bytes(path.read_bytes()[: -len(encode_node(trace.nodes[-1])) - 2])
    assert read_chakra(path).warnings == ["the file ends after 7 of 8 nodes"]


def test_packed_and_streamed(tmp_path: Path) -> None:
    path = tmp_path / "x.et.gz"
    plain = tmp_path / "x.et"
    write_chakra(plain, small_trace())
    path.write_bytes(gzip.compress(plain.read_bytes()))
    reader = ChakraReader(path)
    assert reader.attributes["rank"] == 3
    assert [node.id for node in reader] == [1, 2, 3]


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.et"
    write_chakra(path, small_trace())
    data = path.read_bytes()
    dice = random.Random(5)
    for change in (damage.flipped_bytes, damage.inserted_bytes, damage.removed_section, damage.repeated_section):
        for _ in range(100):
            path.write_bytes(change(data, dice))
            try:
                topological_order(read_chakra(path).nodes)
            except BadInputError as error:
                check_refusal(error, "")


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.et"
    for text in (b"", b'{"schema": "1.1.1", "nodes": []}' * 9, b"\xff" * 64):
        path.write_bytes(text)
        with pytest.raises(BadInputError) as caught:
            read_chakra(path)
        assert caught.value.hint


def test_circles_are_named() -> None:
    nodes = [
        ChakraNode(id=1),
        ChakraNode(id=2, data_deps=(1, 4)),
        ChakraNode(id=3, data_deps=(2,)),
        ChakraNode(id=4, ctrl_deps=(3,)),
    ]
    with pytest.raises(BadInputError, match=r"circle: nodes 2 → 4 → 3 → 2"):
        topological_order(nodes)


def test_long_chains_need_no_stack() -> None:
    nodes = [ChakraNode(id=number, data_deps=(number + 1,), duration_us=2) for number in range(1, 50_000)]
    assert topological_order(nodes)[0] == 49_998
    assert earliest_ns(nodes)[0] == (49_998 * 2000, 49_999 * 2000)


def test_from_a_graph_and_back(tmp_path: Path) -> None:
    graph = parse_execution_trace(document(small_nodes()))
    path = tmp_path / "x.et"
    write_chakra(path, chakra_of_graph(graph))
    back = graph_of_chakra(read_chakra(path))
    assert [node.id for node in back.operators()] == [node.id for node in graph.operators()]
    assert [node.id for node in back.topmost_operators()] == [5, 6]
    assert back.node(6).data_deps == (5,)
    assert back.node(5).seq_id == 7
    assert list(back.node(5).inputs) == list(graph.node(5).inputs)
    assert back.node(5).start_ns is None
    assert back.steps[0].number == 4
    again = chakra_of_graph(back)
    assert [node.data_deps for node in again.nodes] == [node.data_deps for node in read_chakra(path).nodes]


def test_files_of_other_writers() -> None:
    """Without our attributes, with lists as Python prints them."""
    texts = TextArguments("[[1, 2, 0, 3, 4, 'cuda:0']]", "[[3]]", "['Tensor(float)']")
    nodes = [
        ChakraNode(id=0, name="COMP_NODE_0", attributes={"is_cpu_op": False, "num_ops": 5}),
        ChakraNode(id=7, name="coll", type=COLLECTIVE, ctrl_deps=(0,), data_deps=(0, 99), attributes={"comm_size": 8}),
        ChakraNode(id=8, name="aten::mm", inputs=texts, attributes={"op_schema": "aten::mm(Tensor self) -> Tensor"}),
    ]
    graph = graph_of_chakra(ChakraTrace(nodes=nodes))
    assert [node.id for node in graph.operators()] == [0, 7, 8]
    assert graph.warnings == ("1 dependencies are on nodes that are not in the file",)
    (tensor,) = graph.node(8).inputs
    assert isinstance(tensor, Tensor)


def test_collectives_of_a_real_graph() -> None:
    trace = chakra_of_graph(shared_graph("public/param/resnet_2gpu_et.json.gz"))
    topological_order(trace.nodes)
    moved = [node for node in trace.nodes if node.type == COLLECTIVE]
    assert len(moved) == 21
    assert [node.attributes["comm_type"] for node in moved[:3]] == [5, 5, 0]
    assert moved[2].attributes["comm_size"] == 2_049_000 * 4
    assert trace.attributes["process_groups"] == '{"0":[0,1]}'


def test_without_protobuf_the_error_says_what_to_install() -> None:
    code: Any = (
        "import sys\nsys.modules['google'] = sys.modules['google.protobuf'] = None\n"
        "from stepscope.core.errors import MissingDependencyError\n"
        "from stepscope.formats.chakra import read_chakra\n"
        "from pathlib import Path\n"
        "try:\n    read_chakra(Path('x.et'))\n"
        "except MissingDependencyError as error:\n    print(error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "pip install 'stepscope[read]'"


@pytest.mark.parametrize("change", [{"id": -16}, {"data_deps": (1 << 70,)}, {"attributes": {"odd": [1, "x"]}}])
def test_what_chakra_has_no_room_for_is_refused_by_node(change: dict[str, Any]) -> None:
    node = ChakraNode(**({"id": 3, "name": "aten::mm"} | change))
    with pytest.raises(BadInputError, match="cannot be written as Chakra") as caught:
        encode_node(node)
    assert caught.value.hint
