"""Between Chakra's nodes and the one form of a graph, both ways; communication in Chakra's words."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np

from stepscope.core import collectives
from stepscope.core.dtypes import dtype_bytes, dtype_name
from stepscope.formats.chakra import (
    COLLECTIVE,
    COMPUTE,
    INVALID,
    METADATA,
    RECEIVE,
    SEND,
    ChakraNode,
    ChakraTrace,
    TextArguments,
)
from stepscope.formats.graph import (
    RECORD_COLLECTIVE,
    CommunicationRecord,
    Graph,
    Node,
    ProcessGroup,
    read_collective,
    read_groups,
    wrong_arguments,
)
from stepscope.formats.nesting import climb
from stepscope.formats.tensors import NO_ARGUMENTS, Arguments
from stepscope.formats.timeline import MISSING, Integers, Timeline
from stepscope.traces.link import GraphLink
from stepscope.traces.operators import data_dependencies

SIZE_CONVENTION = "bytes that one rank puts in"

_COMM_TYPES = {
    collectives.ALL_REDUCE: 0,
    collectives.REDUCE: 1,
    collectives.ALL_GATHER: 2,
    collectives.GATHER: 3,
    collectives.SCATTER: 4,
    collectives.BROADCAST: 5,
    collectives.ALL_TO_ALL: 6,
    collectives.REDUCE_SCATTER: 7,
    collectives.BARRIER: 9,
    # A kernel's name alone: NCCL runs all-to-all as sends and receives.
    collectives.SEND_RECV: 6,
}
"""Chakra's numbers of collectives."""


class ChakraCommunication(NamedTuple):
    """A node's type and its attributes."""

    type: int
    attributes: dict[str, Any]
    ranks: tuple[int, ...] | None
    has_size: bool


def comm_type(name: str) -> int | None:
    """Chakra's number of a collective, from the record's name or the kernel's; None where it is none of them."""
    return _COMM_TYPES.get(collectives.find_collective(name.replace(" ", "")))


class CommunicationReader:
    """Says of each device row what it communicates, from the timeline's records where it has them, else the graph's."""

    def __init__(self, timeline: Timeline, link: GraphLink | None) -> None:
        self.timeline = timeline
        self.link = link
        self._groups = {group.name: group for group in _known_groups(timeline, link)}
        self._messages: dict[tuple[str, int, int], int] = {}
        self.members: dict[str, tuple[int, ...]] = {group.name: group.ranks for group in self._groups.values()}

    def records_of(self, rows: Integers) -> Integers:
        """For each device row the row with its record: itself, or the call around its launch; −1: none."""
        block = self.timeline.blocks.get("collective")
        has_record = np.full(len(self.timeline), MISSING, np.int64)
        if block is not None and "collective" in block.columns:
            known = block.rows[block.columns["collective"] != MISSING]
            has_record[known] = known
        return climb(has_record, self.timeline.core["parent"].astype(np.int64), rows)

    def describe(self, row: int, record_row: int) -> ChakraCommunication:
        """Type and attributes of one device row's node."""
        collective = self._collective(row, record_row)
        name = self.timeline.texts[int(self.timeline.core["name"][row])]
        attributes: dict[str, Any] = {}
        ranks = self._ranks(collective)
        kind = collective.name.lower() if collective else ""
        size = collective.in_bytes if collective else None
        if kind in ("send", "recv") and collective is not None:
            node_type = SEND if kind == "send" else RECEIVE
            size = size if size else collective.out_bytes
            attributes.update(self._ends(kind, collective, ranks))
        else:
            node_type = COLLECTIVE
            number = comm_type(kind) if kind else None
            if number is None:
                number = comm_type(name)
            if number is not None:
                attributes["comm_type"] = number
        if size is not None:
            attributes["comm_size"] = size
        if collective is not None:
            attributes["collective"] = collective.name
            if collective.out_bytes is not None:
                attributes["comm_out_size"] = collective.out_bytes
            if collective.dtype:
                attributes["comm_dtype"] = collective.dtype
            if collective.group:
                attributes["pg_name"] = collective.group
                if ranks:
                    self.members.setdefault(collective.group, ranks)
        return ChakraCommunication(node_type, attributes, ranks, size is not None)

    def _collective(self, row: int, record_row: int) -> CommunicationRecord | None:
        if record_row >= 0:
            return self._from_timeline(record_row)
        if self.link is None:
            return None
        place = int(self.link.node_of_row[row])
        graph = self.link.graph
        while place >= 0:
            if graph.nodes[place].name == RECORD_COLLECTIVE:
                return read_collective(graph.nodes[place])
            place = graph.parent_places[place]
        return None

    def _from_timeline(self, row: int) -> CommunicationRecord:
        timeline = self.timeline
        dtype = timeline.text("dtype", row)
        each = dtype_bytes(dtype) if dtype else None
        columns = {"rank": "peer", "sequence": "collective_sequence"}
        columns |= {name: name for name in ("group_size", "in_elements", "out_elements", "rank_start", "rank_stride")}
        numbers: dict[str, Any] = {field: _whole(timeline.at(column, row)) for field, column in columns.items()}
        return CommunicationRecord(
            name=timeline.text("collective", row) or "",
            group=timeline.text("group", row),
            group_description=timeline.text("group_description", row),
            dtype=dtype_name(dtype) if dtype else None,
            in_bytes=_product(numbers["in_elements"], each),
            out_bytes=_product(numbers["out_elements"], each),
            **numbers,
        )

    def _ranks(self, collective: CommunicationRecord | None) -> tuple[int, ...] | None:
        if collective is None:
            return None
        if collective.group and collective.group in self.members:
            return self.members[collective.group]
        if ranks := collective.ranks():
            return ranks
        world = self.timeline.world_size
        size = collective.group_size or len(collective.in_splits) or len(collective.out_splits)
        return tuple(range(world)) if world and size == world else None

    def _ends(self, kind: str, collective: CommunicationRecord, ranks: tuple[int, ...] | None) -> dict[str, Any]:
        """Source, destination and tag. Peers are numbered within the group; the tag is the number of the message
        between the two in this group, which both ends count alike."""
        here, peer = self.timeline.rank, collective.rank
        if here is None or peer is None:
            return {}
        other = ranks[peer] if ranks and peer < len(ranks) else peer
        source, target = (here, other) if kind == "send" else (other, here)
        key = (collective.group or "", source, target)
        tag = self._messages.get(key, 0)
        self._messages[key] = tag + 1
        return {"comm_src": source, "comm_dst": target, "comm_tag": tag}


def _known_groups(timeline: Timeline, link: GraphLink | None) -> list[ProcessGroup]:
    """As the timeline's header says, else the graph's label; then what the records themselves list."""
    groups: dict[str, ProcessGroup] = {}
    if link is not None:
        groups.update((group.name, group) for group in link.graph.groups)
    distributed = timeline.metadata.get("distributed")
    table = distributed.get("pg_config") if isinstance(distributed, Mapping) else None
    if isinstance(table, list):
        # Where the table is not as it should be, the records say the same.
        with suppress(msgspec.ValidationError, ValueError):
            groups.update((group.name, group) for group in read_groups(table))
    block = timeline.blocks.get("collective")
    if block is not None and {"group", "group_ranks"} <= block.columns.keys():
        _add_listed(timeline, block.columns["group"].tolist(), block.columns["group_ranks"].tolist(), groups)
    return list(groups.values())


def _add_listed(timeline: Timeline, names: list[Any], lists: list[Any], groups: dict[str, ProcessGroup]) -> None:
    for name_code, ranks_code in dict.fromkeys(zip(names, lists, strict=True)):
        if name_code < 0 or ranks_code < 0:
            continue
        name = timeline.texts[name_code]
        try:
            ranks = msgspec.json.decode(timeline.texts[ranks_code], type=list[int])
        except msgspec.DecodeError:
            continue  # long lists are shortened with dots
        if name not in groups and ranks:
            groups[name] = ProcessGroup(name=name, size=len(ranks), ranks=tuple(ranks))


def _whole(value: float | int | None) -> int | None:
    return None if value is None else int(value)


def _product(count: int | None, each: int | None) -> int | None:
    return None if count is None or each is None else count * each


_FIELDS = (
    "rf_id", "seq_id", "fw_parent", "scope", "tid", "fw_tid", "op_schema", "kernel_backend", "kernel_file",
    "tensor_range",
)  # fmt: skip
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

    Times and device work need a timeline: see the module chakra_convert.
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
        inputs=texts_of(node, node.inputs, graph.where),
        outputs=texts_of(node, node.outputs, graph.where),
        attributes=attributes,
    )


def _can_be_written(name: str, value: Any) -> bool:
    if name in ("chakra_type", "is_device_work"):
        return False
    return isinstance(value, bool | int | float | str | bytes) or (isinstance(value, list) and bool(value))


def texts_of(node: Node, arguments: Arguments, where: str = "") -> TextArguments | None:
    """None for a side without arguments; BadInputError where they cannot be read."""
    try:
        texts = arguments.texts()
    except ValueError as error:
        raise wrong_arguments(node, error, where) from error
    return TextArguments(*texts) if len(texts[2]) > 2 else None
