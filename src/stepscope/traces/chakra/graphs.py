"""Between Chakra's nodes and the one form of a graph, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stepscope.formats.chakra.files import ChakraNode, ChakraTrace, TextArguments
from stepscope.formats.chakra.schema import COLLECTIVE, COMPUTE, INVALID, METADATA, RECEIVE, SEND
from stepscope.formats.graph import Graph, Node, ProcessGroup, wrong_arguments
from stepscope.formats.tensors import NO_ARGUMENTS, Arguments
from stepscope.traces.chakra.collectives import SIZE_CONVENTION, comm_type
from stepscope.traces.data_dependencies import data_dependencies

_FIELDS = (
    "rf_id",
    "seq_id",
    "fw_parent",
    "scope",
    "tid",
    "fw_tid",
    "op_schema",
    "kernel_backend",
    "kernel_file",
    "tensor_range",
)
_OWN = frozenset((*_FIELDS, "start_ns", "duration_ns"))


def graph_of_chakra(trace: ChakraTrace) -> Graph:
    """A Chakra file as a graph. Nodes keep their ids; the first control dependency is the enclosing call.

    Device work and communication count as operators, whoever wrote the file; so does whatever has a schema.
    """
    warnings = list(trace.warnings)
    nodes = sorted((_node_of(node) for node in trace.nodes), key=lambda node: node.id)
    known = {node.id for node in nodes}
    lost = sum(1 for node in nodes for other in node.data_deps if other not in known)
    if lost:
        warnings.append(f"{lost} dependencies are on nodes that are not in the file")
    return Graph(
        nodes=tuple(nodes),
        source="chakra",
        schema=f"chakra {trace.version}",
        groups=_groups_of(trace.attributes, warnings),
        metadata=dict(trace.attributes),
        warnings=tuple(warnings),
        where=trace.where,
    )


def _node_of(node: ChakraNode) -> Node:
    said = node.attributes
    plain = {name: said[name] for name in _FIELDS if name in said}
    rest: dict[str, Any] = {name: value for name, value in said.items() if name not in _OWN}
    rest["chakra_type"] = node.type
    communicates = node.type in (SEND, RECEIVE, COLLECTIVE)
    rest["is_device_work"] = communicates or (node.type not in (INVALID, METADATA) and not node.is_cpu_op)
    return Node(
        id=node.id,
        name=node.name,
        parent=node.ctrl_deps[0] if node.ctrl_deps else 0,
        inputs=_arguments_of(node.inputs),
        outputs=_arguments_of(node.outputs),
        attributes=rest,
        data_deps=node.data_deps,
        start_ns=node.start_ns if node.has_times else None,
        duration_ns=node.duration_ns if node.has_times else None,
        **plain,
    )


def _arguments_of(texts: TextArguments | None) -> Arguments:
    if texts is None or not texts.types:
        return NO_ARGUMENTS
    parts = (texts.values, texts.shapes, texts.types)
    return Arguments(tuple(msgspec.Raw(part.encode()) for part in parts))


def _groups_of(said: Mapping[str, Any], warnings: list[str]) -> tuple[ProcessGroup, ...]:
    text = said.get("process_groups")
    if not isinstance(text, str):
        return ()
    try:
        members = msgspec.json.decode(text, type=dict[str, list[int]])
    except msgspec.DecodeError as error:
        warnings.append(f"the process groups in the metadata cannot be read: {error}")
        return ()
    return tuple(ProcessGroup(name=name, size=len(ranks), ranks=tuple(ranks)) for name, ranks in members.items())


def chakra_of_graph(graph: Graph) -> ChakraTrace:
    """A graph without a timeline as Chakra nodes: calls, arguments, order on each thread, data dependencies; no times.

    Times and device work need a timeline: see `chakra_convert`.
    """
    waits = _waits(graph)
    nodes = [_chakra_node(graph, node, waits.get(node.id, ())) for node in graph.nodes]
    members = {group.name: list(group.ranks) for group in graph.groups}
    return ChakraTrace(
        attributes={
            "writer": "stepscope",
            "node_count": len(nodes),
            "schema": graph.schema,
            "process_groups": msgspec.json.encode(members).decode(),
            "comm_size_convention": SIZE_CONVENTION,
        },
        nodes=nodes,
        where=graph.where,
    )


def _waits(graph: Graph) -> dict[int, tuple[int, ...]]:
    """By id: the outermost operator before it on its thread, and the last writers of what it reads."""
    if graph.source == "chakra":
        return {node.id: node.data_deps for node in graph.nodes}
    waits: dict[int, dict[int, None]] = {}
    latest: dict[int, int] = {}
    for node in graph.topmost_operators():
        waits[node.id] = {}
        if node.tid in latest:
            waits[node.id][latest[node.tid]] = None
        latest[node.tid] = node.id
    for dependency in data_dependencies(graph):
        waits[dependency.reader][dependency.writer] = None
    return {reader: tuple(sorted(writers)) for reader, writers in waits.items()}


def _chakra_node(graph: Graph, node: Node, waits: tuple[int, ...]) -> ChakraNode:
    attributes: dict[str, Any] = {name: getattr(node, name) for name in _FIELDS if getattr(node, name) != ""}
    attributes["is_cpu_op"] = True
    attributes.update((name, value) for name, value in node.attributes.items() if _can_be_written(name, value))
    kind = COMPUTE if node.is_operator else METADATA
    collective = node.collective
    if "chakra_type" in node.attributes:
        kind = node.attributes["chakra_type"]
    elif collective is not None and collective.moves_data:
        kind = {"send": SEND, "recv": RECEIVE}.get(collective.name.lower(), COLLECTIVE)
        number = comm_type(collective.name)
        if kind == COLLECTIVE and number is not None:
            attributes["comm_type"] = number
        if collective.in_bytes is not None:
            attributes["comm_size"] = collective.in_bytes
        if collective.group:
            attributes["pg_name"] = collective.group
    if node.start_ns is not None and node.duration_ns is not None:
        attributes |= {"start_ns": node.start_ns, "duration_ns": node.duration_ns}
    above = node.parent if node.parent != node.id and node.parent in graph else 0
    return ChakraNode(
        id=node.id,
        name=node.name,
        type=kind,
        ctrl_deps=(above,) if above else (),
        data_deps=waits,
        start_us=((node.start_ns or 0) + 500) // 1000,
        duration_us=((node.duration_ns or 0) + 500) // 1000,
        inputs=_texts_of(graph, node, node.inputs),
        outputs=_texts_of(graph, node, node.outputs),
        attributes=attributes,
    )


def _can_be_written(name: str, value: Any) -> bool:
    if name in ("chakra_type", "is_device_work"):
        return False
    return isinstance(value, bool | int | float | str | bytes) or (isinstance(value, list) and bool(value))


def _texts_of(graph: Graph, node: Node, arguments: Arguments) -> TextArguments | None:
    try:
        texts = arguments.texts()
    except ValueError as error:
        raise wrong_arguments(node, error, graph.where) from error
    return TextArguments(*texts) if len(texts[2]) > 2 else None
