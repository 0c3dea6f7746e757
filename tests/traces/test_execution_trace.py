"""Reading execution traces: schemas, packing, cut and damaged files."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import damage
import pytest
from graph_examples import SHARED, check_refusal, document, flat, nested, roots, small_nodes

from stepscope.core.errors import BadInputError
from stepscope.formats.execution_trace import parse_execution_trace, read_execution_trace, sniff
from stepscope.formats.graph import Graph
from stepscope.traces.chakra_graphs import chakra_of_graph
from stepscope.traces.operators import data_dependencies


def look_at(graph: Graph) -> list[object]:
    return [
        (node.id, node.name, node.parent, node.rf_id, node.tid, node.op_schema, list(node.inputs), list(node.outputs))
        for node in graph
    ]


def test_flat_and_nested_nodes_give_the_same_graph() -> None:
    nodes = small_nodes()
    new = parse_execution_trace(document(nodes, "1.1.0-chakra.0.0.4"))
    old = parse_execution_trace(document([flat(node) for node in nodes], "1.0.1"))
    assert look_at(new) == look_at(old)
    assert (new.process_id, new.recorded_at, new.metadata["start_ms"]) == (77, "2026-11-15 10:00:00", 1)
    assert not new.warnings


@pytest.mark.parametrize(
    "schema", ["1.0.1", "1.0.2-chakra.0.0.4", "1.0.3-chakra.0.0.4", "1.0.4-chakra.0.0.4", "1.1.1-chakra.1.0.0"]
)
def test_known_schemas_are_read_without_a_word(schema: str) -> None:
    assert not parse_execution_trace(document(small_nodes(), schema)).warnings


def test_a_newer_minor_is_read_with_one_warning_and_another_major_is_refused() -> None:
    assert len(parse_execution_trace(document(small_nodes(), "1.2.0-chakra.0.0.4")).warnings) == 1
    with pytest.raises(BadInputError, match="has schema '2"):
        parse_execution_trace(document(small_nodes(), "2.0.0"))


def test_process_groups() -> None:
    table = '[{"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "ranks": [], "group_size": 4}, \
{"pg_name": "tp group", "pg_desc": "", "backend_config": "", "ranks": [1, 3], "group_size": 2}]'
    label = nested(3, "## process_group:init ##", 2, inputs=([table], [[]], ["String"]))
    graph = parse_execution_trace(document([label, *roots()]))
    assert [(group.name, group.ranks) for group in graph.groups] == [("0", (0, 1, 2, 3)), ("tp group", (1, 3))]
    broken = nested(3, "## process_group:init ##", 2, inputs=(["{"], [[]], ["String"]))
    assert "process groups of node 3" in parse_execution_trace(document([broken, *roots()])).warnings[0]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, "zstd"])
def test_packed_files(pack: Any, tmp_path: Path) -> None:
    text = document(small_nodes())
    text = pytest.importorskip("zstandard").compress(text) if pack == "zstd" else pack(text)
    path = tmp_path / "et.json"
    path.write_bytes(text)
    assert len(read_execution_trace(path)) == 8


def test_a_cut_file_keeps_its_complete_nodes(tmp_path: Path) -> None:
    text = document(small_nodes())
    cut = text.index(b'"aten::add_"') + 20
    path = tmp_path / "et.json"
    path.write_bytes(text[:cut])
    graph = read_execution_trace(path)
    # Written when they end: the inner calls of the first two labels, not the labels' parents.
    assert [node.id for node in graph] == [4, 5, 7]
    begins = text.rindex(b"  {", 0, cut) + 2
    assert f"at byte {begins} of {cut}" in graph.warnings[0]
    assert "3 complete nodes" in graph.warnings[0]
    assert "2 nodes have a parent that is not in the file" in graph.warnings[1]
    assert [node.id for node in graph.topmost_operators()] == [5, 7]


def test_a_cut_packed_file_keeps_its_complete_nodes(tmp_path: Path) -> None:
    many = [nested(number, f"aten::op{number * 7919 % 1000}", 2) for number in range(3, 3000)]
    path = tmp_path / "et.json.gz"
    packed = gzip.compress(document([*many, *roots()]))
    path.write_bytes(packed[: len(packed) // 2])
    graph = read_execution_trace(path)
    assert 500 < len(graph) < 2990
    assert "packed file ends early" in graph.warnings[0]


def test_every_cut_is_recovered_or_refused() -> None:
    text = document(small_nodes())
    counts = []
    for place in range(len(text)):
        try:
            counts.append(len(parse_execution_trace(text[:place], where="x")))
        except BadInputError as error:
            check_refusal(error, "x")
            counts.append(0)
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for text, message in (
        (b'{"schemaVersion": 1, "traceEvents": []}', "a timeline"),
        (b'{"hello": 1}', "no list"),
        (b"[1, 2]", "no list"),
        (b"", "empty"),
        (b'{"nodes": []}', "no schema"),
    ):
        path.write_bytes(text)
        with pytest.raises(BadInputError, match=message) as caught:
            read_execution_trace(path)
        assert str(path) in (caught.value.where or "")
    assert not sniff(b'{"schemaVersion": 1, "traceEvents": []}')
    assert sniff(document(small_nodes()))


def test_damage_in_the_middle_names_the_place() -> None:
    text = document(small_nodes())
    place = text.index(b'"aten::view"')
    with pytest.raises(BadInputError, match=r"damaged at byte \d+, after 2 nodes"):
        parse_execution_trace(text[:place] + b"?" + text[place:], where="x.json")
    wrong = document([nested(3, "a", 2, rf_id="x"), *roots()])
    with pytest.raises(BadInputError, match=r"node 3 .* rf_id, which must be a whole number"):
        parse_execution_trace(wrong)
    with pytest.raises(BadInputError, match=r"nodes\[0\].id"):
        parse_execution_trace(text.replace(b'"id": 5', b'"id": "5"'))


@pytest.mark.parametrize("name", [name for name in damage.DAMAGES if name != "deep nesting"])
def test_damaged_files_are_read_or_refused(name: str) -> None:
    text = document(small_nodes())
    change, count = damage.DAMAGES[name]
    dice = random.Random(name)
    for _ in range(count // 3):
        try:
            graph = parse_execution_trace(change(text, dice), where="x.json")
            graph.topmost_operators()
            graph.column("rf_id")
            graph.collectives()
            data_dependencies(graph)
        except BadInputError as error:
            check_refusal(error, "x.json")


def test_all_shared_execution_traces_load() -> None:
    if not SHARED.exists():
        pytest.skip("no traces at hand")
    names = ("h200/*/et.json.gz", "public/param/*et.json.gz", "public/param/dlrm8_et/*")
    paths = [path for name in names for path in SHARED.glob(name)]
    assert len(paths) == 17
    for path in paths:
        graph = read_execution_trace(path)
        assert not graph.warnings
        assert sum(len(list(node.inputs)) for node in graph.topmost_operators()) > 100


def test_numbers_that_json_does_not_know() -> None:
    node = nested(3, "aten::clamp", 2, inputs=([1.5, 2.5], [[], []], ["Double", "Double"]))
    text = document([node, *roots()]).replace(b"1.5", b"-inf").replace(b"2.5", b"nan")
    graph = parse_execution_trace(text)
    low, high = graph.node(3).inputs
    assert low == float("-inf")
    assert high != high  # noqa: PLR0124
    assert graph.warnings == ("2 numbers written as inf or nan, which JSON does not know, are read as such",)


def test_bytes_that_are_no_text_are_replaced_and_told() -> None:
    node = nested(5, "aten::one", 2, inputs=(["some text"], [[]], ["String"]))
    data = document([node, *roots()])
    data = data.encode() if isinstance(data, str) else data
    place = data.index(b"some text") + 4
    graph = parse_execution_trace(data[:place] + b"\xff" + data[place + 1 :])
    assert graph.node(5).inputs.values == ["some?text"]
    assert graph.warnings == (f"1 bytes that are no UTF-8, the first at byte {place}, are read as question marks",)
    assert chakra_of_graph(graph).nodes


def test_arguments_that_are_none_are_refused_by_name() -> None:
    data = document([{**nested(5, "aten::one", 2), "inputs": 7}, *roots()])
    with pytest.raises(BadInputError, match="node 5"):
        chakra_of_graph(parse_execution_trace(data))


def test_a_packed_file_without_its_end_is_told(tmp_path: Path) -> None:
    data = document(small_nodes())
    path = tmp_path / "et.json.gz"
    path.write_bytes(gzip.compress(data.encode() if isinstance(data, str) else data)[:-4])
    (warning,) = read_execution_trace(path).warnings
    assert "ends early" in warning
