"""A Chakra file with times as a timeline: protobuf (.et) or JSON, of Stepscope's own converter or of another writer.

Stepscope's own files give back the calls and the device events that were converted, at their nanosecond; nodes that
stand for gaps, waits and delays between them are left out. In files of others a node is an event as it stands.
"""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from stepscope.core.dtypes import dtype_bytes
from stepscope.core.errors import BadInputError, MissingDependencyError
from stepscope.formats.chakra import (
    COLLECTIVE,
    COLLECTIVE_TYPES,
    MEMORY_LOAD,
    MEMORY_STORE,
    RECEIVE,
    SEND,
    ChakraNode,
    ChakraReader,
    ChakraTrace,
    TextArguments,
    has_times,
    is_chakra_json,
    looks_like_chakra,
    read_chakra,
)
from stepscope.formats.classify import CATEGORIES
from stepscope.formats.readers import TraceFormat
from stepscope.formats.source import WHOLE_LIMIT, describe_group, rank_in_name, text_of, whole_of
from stepscope.formats.timeline import ANNOTATION, COPY, KERNEL, OPERATOR, RUNTIME, SET, Timeline, TimelineBuilder

_NODES_TRIED = 256
_HOST_KINDS = {"operator": OPERATOR, "runtime": RUNTIME, "annotation": ANNOTATION}
_FILLINGS = frozenset(("host gap", "after wait", "delay", "begin"))
"""Kinds of nodes that the converter puts between events."""
_RUNTIME_CALL = re.compile(r"(cuda|cu|hip|musa|ze|ur)[A-Z]")
_STEP = re.compile(r"ProfilerStep\s*#?\d")
_TENSOR_TYPE = re.compile(r"Tensor\(([^()]*(?:<[^<>]*>)?)\)")


def sniff(head: bytes, path: Path) -> bool:
    """Whether it is a Chakra file whose first nodes have times. Without times it is a graph, no timeline."""
    if not looks_like_chakra(head, path):
        return False
    if is_chakra_json(head):
        return has_times(head)
    try:
        return any(node.has_times for node in islice(ChakraReader(path), _NODES_TRIED))
    except (BadInputError, MissingDependencyError):
        return True  # reading it says what is wrong, and where


def read(path: Path) -> list[Timeline]:
    """The one rank that a Chakra file holds, as an unfinished timeline."""
    return [_Reader(read_chakra(path), path).read()]


class _Reader:
    def __init__(self, trace: ChakraTrace, path: Path) -> None:
        self.trace = trace
        self.path = path
        self.builder = TimelineBuilder()
        self.members: dict[str, list[int]] = _decoded(trace, "process_groups", dict[str, list[int]]) or {}
        self.shift_ns = whole_of(trace.attributes.get("clock_shift_ns")) or 0
        self.kinds = {node.id: self._kind(node) for node in trace.nodes}

    def read(self) -> Timeline:
        for warning in self.trace.warnings:
            self.builder.count_repair(warning)
        for node in self.trace.nodes:
            if self.kinds[node.id] is not None:
                self._add(node)
        if not len(self.builder):
            raise BadInputError(
                "has no node with a usable time",
                hint="convert a timeline to Chakra, or give the Kineto trace of the same steps",
                where=str(self.path),
            )
        said = self.trace.attributes
        rank, world = whole_of(said.get("rank")), whole_of(said.get("world_size"))
        groups = [describe_group(*group) for group in self.members.items()]
        metadata: dict[str, Any] = {
            "format": "chakra",
            "source": str(self.path),
            "rank_from": "name" if rank is None else "content",
            "devices": _decoded(self.trace, "devices", list[dict[str, Any]]) or [],
            "versions": {"chakra": self.trace.version},
            "distributed": {"rank": rank, "world_size": world, "pg_config": groups},
        }
        return self.builder.build(
            rank=rank_in_name(self.path) if rank is None else rank, world_size=world, metadata=metadata
        )

    def _kind(self, node: ChakraNode) -> int | None:
        """None for what is no event."""
        said = node.attributes.get("kind")
        if said in _FILLINGS and "writer" in self.trace.attributes:
            return None
        if said in _HOST_KINDS:
            return _HOST_KINDS[said]
        if not node.is_cpu_op or (node.type in (SEND, RECEIVE, COLLECTIVE) and "is_cpu_op" not in node.attributes):
            category = node.attributes.get("category")
            if node.type in (MEMORY_LOAD, MEMORY_STORE) or category == "copy" or node.name.startswith("Memcpy"):
                return COPY
            return SET if category == "set" or node.name.startswith("Memset") else KERNEL
        if _STEP.match(node.name):
            return ANNOTATION
        return RUNTIME if _RUNTIME_CALL.match(node.name) else OPERATOR

    def _add(self, node: ChakraNode) -> None:
        kind, said = self.kinds[node.id], node.attributes
        duration_ns = whole_of(said.get("call_duration_ns"))
        duration_ns = node.duration_ns if duration_ns is None else duration_ns
        if not node.has_times or not 0 <= node.start_ns < WHOLE_LIMIT or not 0 <= duration_ns < WHOLE_LIMIT:
            self.builder.count_repair("nodes without a usable time were left out")
            return
        assert kind is not None
        start_ns = node.start_ns - self.shift_ns
        values: dict[str, Any] = {"correlation": self._correlation(node, kind), "event_index": node.id}
        if kind in (KERNEL, COPY, SET):
            values |= self._device_values(node, kind)
        else:
            values |= {
                "thread": ("chakra", whole_of(said.get("tid")) or 0),
                "record_function_id": whole_of(said.get("rf_id")),
                "sequence": whole_of(said.get("seq_id")),
                "forward_thread": whole_of(said.get("fw_tid")),
                **_inputs(node.inputs),
            }
        if node.type in (SEND, RECEIVE, COLLECTIVE):
            values |= self._communication(node)
        self.builder.add(kind, node.name, start_ns, start_ns + duration_ns, **values)

    def _device_values(self, node: ChakraNode, kind: int) -> dict[str, Any]:
        said = node.attributes
        category = said.get("category")
        return {
            "device": whole_of(said.get("device")) or 0,
            "stream": whole_of(said.get("stream")),
            "category": CATEGORIES.index(category) if category in CATEGORIES else None,
            "bytes": whole_of(said.get("tensor_size")) if kind != KERNEL else None,
        }

    def _correlation(self, node: ChakraNode, kind: int) -> int | None:
        """As written; else the id of the runtime call that the device work depends on, which launched it."""
        said = whole_of(node.attributes.get("correlation"))
        if said is not None or "writer" in self.trace.attributes or kind in (OPERATOR, ANNOTATION):
            return said
        if kind == RUNTIME:
            return node.id
        return next((one for one in (*node.ctrl_deps, *node.data_deps) if self.kinds.get(one) == RUNTIME), None)

    def _communication(self, node: ChakraNode) -> dict[str, Any]:
        said = node.attributes
        name, number = text_of(said.get("collective")), whole_of(said.get("comm_type"))
        if not name:
            known = number is not None and number < len(COLLECTIVE_TYPES)
            name = COLLECTIVE_TYPES[number or 0].lower() if known else None
            name = {SEND: "send", RECEIVE: "recv"}.get(node.type, name)
        group = text_of(said.get("pg_name"))
        members = self.members.get(group or "")
        sizes = {"in_elements": whole_of(said.get("comm_size")), "out_elements": whole_of(said.get("comm_out_size"))}
        # Sizes are bytes; without the type of the elements, each byte counts as one.
        dtype = text_of(said.get("comm_dtype"))
        each = dtype_bytes(dtype) if dtype else None
        if each is None:
            dtype = "uint8" if any(sizes.values()) else None
        peer = whole_of(said.get("comm_dst" if node.type == SEND else "comm_src"))
        return {
            "collective": name,
            "group": group,
            "group_ranks": str(members) if members else None,
            "group_size": len(members) if members else None,
            "dtype": dtype,
            **{column: size and size // (each or 1) for column, size in sizes.items()},
            "peer": members.index(peer) if members and peer in members else peer,
        }


def _decoded(trace: ChakraTrace, name: str, kind: Any) -> Any:
    """An attribute of the metadata that holds JSON; None where it is not there or not as it should be."""
    text = trace.attributes.get(name)
    try:
        return msgspec.json.decode(text, type=kind) if isinstance(text, str) else None
    except msgspec.DecodeError:
        return None


def _inputs(arguments: TextArguments | None) -> dict[str, str]:
    """Sizes and types as the profiler writes them: `float` where the execution trace says `Tensor(float)`."""
    if arguments is None or not arguments.shapes.startswith("["):
        return {}
    return {"shapes": arguments.shapes, "types": _TENSOR_TYPE.sub(r"\1", arguments.types)}


FORMAT = TraceFormat("chakra", sniff, read)
