"""The form of a graph: who calls whom, which nodes are operators, steps, collectives."""

from __future__ import annotations

import pytest
from graph_examples import document, nested, operator, roots, shared_graph, small_nodes, tensor
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.errors import BadInputError, UsageError
from stepscope.formats.execution_trace import parse_execution_trace
from stepscope.formats.graph import CommunicationRecord, Graph, Node


def ids(nodes: list[Node]) -> list[int]:
    return [node.id for node in nodes]


def test_calls_and_operators() -> None:
    graph = parse_execution_trace(document(small_nodes()))
    assert ids(list(graph)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert ids(graph.operators()) == [5, 6, 7, 8]
    assert ids(graph.topmost_operators()) == [5, 6]
    assert ids(graph.leaf_operators()) == [5, 7, 8]
    assert ids(graph.labels()) == [3, 4]
    assert ids(graph.children(graph.node(6))) == [7, 8]
    assert ids(list(graph.ancestors(graph.node(8)))) == [6, 3, 2, 1]
    assert ids(list(graph.subtree(graph.node(3)))) == [3, 4, 5, 6, 7, 8]
    assert graph.parent(graph.node(1)) is None
    assert 8 in graph
    assert 9 not in graph
    with pytest.raises(UsageError, match="no node 9"):
        graph.node(9)


@given(st.lists(st.tuples(st.integers(-1, 20), st.booleans()), max_size=20))
def test_order_and_topmost_operators_against_walking_the_tree(drawn: list[tuple[int, bool]]) -> None:
    """Parents may stand before or behind what they call; what would be a circle is none here."""
    parents = [above if above < here else -1 for here, (above, _) in enumerate(drawn)]
    turned = [len(drawn) if above < 0 else len(drawn) - 1 - above for above in reversed(parents)]
    for above, flags in ((parents, [flag for _, flag in drawn]), (turned, [flag for _, flag in reversed(drawn)])):
        nodes = tuple(
            Node(id=here + 1, name="x", parent=parent + 1 if 0 <= parent < len(drawn) else 0, op_schema="x" * flag)
            for here, (parent, flag) in enumerate(zip(above, flags, strict=True))
        )
        graph = Graph(nodes=nodes)
        walked = [node for root in nodes if not root.parent for node in graph.subtree(root)]
        assert [nodes[here] for here in graph.preorder] == walked
        assert graph.topmost_operators() == [
            node for node in graph.operators() if not any(one.is_operator for one in graph.ancestors(node))
        ]


def test_the_rule_for_operators() -> None:
    nodes = [
        nested(5, "record_param_comms", 4),
        operator(4, "c10d::allreduce_", 3, "c10d::allreduce_(Tensor[] x) -> int", given=[], got=[]),
        nested(6, "triton_poi_fused_0", 3, kernel_backend="triton", kernel_file="hash.py"),
        nested(3, "ProfilerStep#0", 2, scope=7),
        *roots(),
    ]
    graph = parse_execution_trace(document(nodes))
    assert ids(graph.topmost_operators()) == [5, 6]
    assert graph.node(6).kernel_file == "hash.py"


def test_steps_of_the_autograd_thread_follow_the_counter() -> None:
    nodes = [
        nested(4, "a", 3),
        nested(3, "ProfilerStep#6", 2, scope=7),
        nested(6, "backward of 6", 5, tid=2),
        nested(8, "b", 7),
        nested(7, "ProfilerStep#7", 2, scope=7),
        nested(9, "backward of 7", 5, tid=2),
        nested(10, "after all steps", 2),
        nested(5, "[pytorch|profiler|execution_trace|thread]", 1, tid=2, rf_id=0),
        *roots(),
    ]
    graph = parse_execution_trace(document(nodes))
    assert [step.number for step in graph.steps] == [6, 7]
    assert ids(graph.in_step(6)) == [3, 4, 6]
    assert ids(graph.in_step(7)) == [7, 8, 9]
    assert graph.step_of(graph.node(10)) is None


def test_parents_in_a_circle_are_an_error() -> None:
    graph = Graph(nodes=(Node(id=1, name="a", parent=2), Node(id=2, name="b", parent=1)), where="x.json")
    with pytest.raises(BadInputError, match="its own ancestor"):
        graph.topmost_operators()


def test_collectives_by_attributes_and_by_arguments() -> None:
    values = [[tensor(5, 6, 10)], [3, True], ["pp", "pipeline"], 1, "send", [], [], 4, 2, 2]
    shapes = [[[10]], [[], []], [[], []], [], [], [], [], [], [], []]
    types = ["GenericList[Tensor(float)]", "Tuple[Int,Bool]", "Tuple[String,String]", "Int", "String"]
    types += ["GenericList[]", "GenericList[]", "Int", "Int", "Int"]
    said = {"collective_name": "allreduce", "dtype": "BFloat16", "in_msg_nelems": 6, "pg_name": "0", "pg_size": 2}
    wait = ([7, ["", ""], 0, "wait", [], [], -1, -1, 1], [[]] * 9, ["Int", *types[2:5], *types[5:]])
    nodes = [
        nested(3, "record_param_comms", 2, inputs=(values, shapes, types)),
        nested(4, "record_param_comms", 2, **said),
        nested(5, "record_param_comms", 2, inputs=wait),
        *roots(),
    ]
    (_, send), (_, reduce), (_, waited) = parse_execution_trace(document(nodes)).collectives()
    assert send == CommunicationRecord(
        name="send",
        group="pp",
        group_description="pipeline",
        group_size=2,
        rank=1,
        sequence=3,
        is_point_to_point=True,
        dtype="float32",
        in_elements=10,
        in_bytes=40,
        rank_start=4,
        rank_stride=2,
    )
    assert send.ranks() == (4, 6)
    assert (reduce.name, reduce.in_bytes, reduce.group, reduce.ranks()) == ("allreduce", 12, "0", None)
    assert (waited.name, waited.sequence, waited.group, waited.moves_data) == ("wait", 7, None, False)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("h200/dlrm_26t_b2048/et.json.gz", (1405, 1177, 213)),
        ("h200/dlrm_8t_pool32_b4096/et.json.gz", (685, 547, 141)),
        ("h200/resnet50_b64/et.json.gz", (2512, 1667, 579)),
        ("h200/bert_base_b16_s128/et.json.gz", (6709, 5096, 1870)),
        ("h200/gpt2_bf16_b8_s1024/et.json.gz", (5388, 3971, 1806)),
        ("h200/vit_b_16_b32/et.json.gz", (6123, 4557, 1422)),
    ],
)
def test_counts_of_real_traces(name: str, counts: tuple[int, int, int]) -> None:
    graph = shared_graph(name)
    assert (len(graph), len(graph.operators()), len(graph.topmost_operators())) == counts
    assert not graph.warnings
    assert [step.number for step in graph.steps] == [3]


def test_collectives_of_real_traces() -> None:
    graph = shared_graph("public/param/resnet_2gpu_et.json.gz")
    assert [group.ranks for group in graph.groups] == [(0, 1)]
    first_step = graph.in_step(4)
    sizes = [
        node.collective.in_elements for node in first_step if node.collective and node.collective.name == "allreduce"
    ]
    assert sizes == [2_049_000, 7_875_584, 6_563_840, 6_637_568, 2_431_040]
    old = shared_graph("public/param/dlrm8_et/dlrm_eg_0.json.gz")
    moved = [found for _, found in old.collectives() if found.moves_data]
    assert [found.name for found in moved[:3]] == ["all_to_allv", "all_to_all", "all_to_allv"]
    assert moved[0].in_bytes == 24_576
    assert {found.group for found in moved} == {"pointer 94594108284448"}
