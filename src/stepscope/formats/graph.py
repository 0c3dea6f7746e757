"""Operators and what they depend on: the one form of a graph, whatever file it came from.

A graph has no times of its own; `link` joins it to a timeline. Graphs that come from Chakra files may carry times and
dependencies, which their nodes then show.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from stepscope.core.dtypes import dtype_bytes, dtype_name
from stepscope.core.errors import BadInputError, UsageError
from stepscope.formats.nesting import Nesting, climb, nest, order_calls
from stepscope.formats.tensors import NO_ARGUMENTS, Arguments, Schema, flatten_tensors, parse_schema
from stepscope.formats.timeline import Integers

FUNCTION, BACKWARD, ANNOTATION = 0, 1, 7
"""Scopes that traces use most; 2 to 6, 8 and 9 are TorchScript, static runtime and the like."""

RECORD_COLLECTIVE = "record_param_comms"
GROUPS_LABEL = "## process_group:init ##"
PROFILER_STEP = re.compile(r"ProfilerStep\s*#?(\d+)$")
NO_TRANSFER = ("wait", "init", "barrier", "startcoalescing", "endcoalescing", "")

_ROOT = re.compile(r"\[pytorch\|profiler\|execution_(?:graph|trace)\|(process|thread)\]$")


class ProcessGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that talk to each other."""

    name: str
    description: str = ""
    backend: str = ""
    size: int
    ranks: tuple[int, ...]
    """Global numbers, in the order of the group's own numbering."""


class CommunicationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a communication record says. None: the record does not say it."""

    name: str
    """As recorded: allreduce, all_to_allv, broadcast, send, wait …"""
    group: str | None = None
    """Name of the process group. Before schema 1.0.3 only its address was known: `pointer 9459…`."""
    group_description: str | None = None
    group_size: int | None = None
    rank: int | None = None
    """Number in the group: of this rank, of the root, or of the peer of a send or receive."""
    sequence: int | None = None
    is_point_to_point: bool = False
    dtype: str | None = None
    in_elements: int | None = None
    out_elements: int | None = None
    in_bytes: int | None = None
    """What this rank puts in."""
    out_bytes: int | None = None
    in_splits: tuple[int, ...] = ()
    out_splits: tuple[int, ...] = ()
    rank_start: int | None = None
    rank_stride: int | None = None

    @property
    def moves_data(self) -> bool:
        return self.name.lower() not in NO_TRANSFER

    def ranks(self) -> tuple[int, ...] | None:
        """Global ranks of the group from start, stride and size; None where they are not recorded."""
        if self.rank_start is None or self.rank_start < 0 or not self.group_size:
            return None
        stride = self.rank_stride if self.rank_stride and self.rank_stride > 0 else 1
        return tuple(range(self.rank_start, self.rank_start + self.group_size * stride, stride))


class Node(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One call: an operator, a label, a collective record, or a root. What a file does not say keeps its default."""

    id: int
    name: str
    parent: int = 0
    """Id of the enclosing call on the same thread; 0 at the top."""
    rf_id: int = 0
    """Handle of the call; Kineto's record function id."""
    seq_id: int = -1
    """Autograd's sequence number: pairs forward and backward."""
    fw_parent: int = 0
    """Top of the forward thread's stack while a backward node ran; says nothing about the forward operator."""
    scope: int = FUNCTION
    tid: int = 0
    fw_tid: int = 0
    op_schema: str = ""
    kernel_backend: str = ""
    kernel_file: str = ""
    tensor_range: str = ""
    """JSON: {input: [smallest, largest]} of integer inputs, where it was recorded."""
    inputs: Arguments = NO_ARGUMENTS
    outputs: Arguments = NO_ARGUMENTS
    attributes: Mapping[str, Any] = {}
    """Whatever else the file says of this node, by the file's names."""
    data_deps: tuple[int, ...] = ()
    """Ids it waits for, where the file says so (Chakra)."""
    start_ns: int | None = None
    duration_ns: int | None = None

    @property
    def is_root(self) -> bool:
        """Stands for a process or a thread, not for a call."""
        return _ROOT.match(self.name) is not None

    @property
    def is_operator(self) -> bool:
        """A call that does work and can be run again; all else is a label.

        The rule of PARAM's replay: a collective record, a call with a schema outside c10d, or a Triton kernel.
        """
        if self.name == RECORD_COLLECTIVE or self.kernel_backend == "triton":
            return True
        return bool(self.op_schema) and not self.name.startswith("c10d::")

    @property
    def schema(self) -> Schema | None:
        """The operator's schema, taken apart; None for labels."""
        return parse_schema(self.op_schema) if self.op_schema else None

    @property
    def collective(self) -> CommunicationRecord | None:
        """What a communication record says; None for every other node."""
        return read_collective(self) if self.name == RECORD_COLLECTIVE else None

    def __repr__(self) -> str:
        return f"Node({self.id}, {self.name!r})"


class GraphStep(NamedTuple):
    """A step as the profiler labelled it."""

    number: int
    node: Node


@dataclass(frozen=True)
class Graph:
    """The calls of one rank, in order of id, which is the order in which they began."""

    nodes: tuple[Node, ...]
    source: str = "pytorch"
    """pytorch (an execution trace) or chakra."""
    schema: str = ""
    process_id: int | None = None
    recorded_at: str = ""
    groups: tuple[ProcessGroup, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """What was repaired or is missing; to be shown to whoever reads the graph."""
    where: str = ""
    """The file, for messages."""

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._place

    @cached_property
    def _place(self) -> dict[int, int]:
        return {node.id: place for place, node in enumerate(self.nodes)}

    def place(self, node_id: int) -> int:
        """Index into `nodes`."""
        try:
            return self._place[node_id]
        except KeyError:
            raise UsageError(f"the graph has no node {node_id}", where=self.where or None) from None

    def node(self, node_id: int) -> Node:
        return self.nodes[self.place(node_id)]

    # Who calls whom ------------------------------------------------------------------------------------------------

    @cached_property
    def parent_places(self) -> list[int]:
        """Place of each node's parent, −1 at the top. Parents that a cut file has lost count as absent."""
        place_of = self._place.get
        found = [place_of(node.parent, -1) for node in self.nodes]
        return [-1 if above == here else above for here, above in enumerate(found)]

    @cached_property
    def _children(self) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in self.nodes]
        for here, above in enumerate(self.parent_places):
            if above >= 0:
                children[above].append(here)
        return children

    @cached_property
    def nesting(self) -> Nesting:
        """Depth and size of the call at each place; BadInputError where parents lead to no root."""
        parent = np.array(self.parent_places, np.int64)
        nesting = nest(parent)
        if sum(map(len, nesting.levels)) < len(parent):
            lost = int(np.setdiff1d(np.arange(len(parent)), np.concatenate(nesting.levels))[0])
            raise BadInputError(
                f"node {self.nodes[lost].id} is its own ancestor: parents must lead to a root",
                hint="record the trace again",
                where=self.where or None,
            )
        return nesting

    @cached_property
    def preorder(self) -> list[int]:
        """Places, each call before what it calls."""
        order: list[int] = order_calls(np.array(self.parent_places, np.int64), self.nesting).tolist()
        return order

    @cached_property
    def position(self) -> Integers:
        """By place: where the call stands in the pre-order."""
        position = np.empty(len(self.nodes), np.int64)
        position[self.preorder] = np.arange(len(self.nodes))
        return position

    def parent(self, node: Node) -> Node | None:
        above = self.parent_places[self.place(node.id)]
        return None if above < 0 else self.nodes[above]

    def ancestors(self, node: Node) -> Iterator[Node]:
        """From the enclosing call outwards."""
        seen = 0
        above = self.parent(node)
        while above is not None and seen <= len(self.nodes):
            yield above
            above = self.parent(above)
            seen += 1

    def children(self, node: Node) -> list[Node]:
        return [self.nodes[here] for here in self._children[self.place(node.id)]]

    def subtree(self, node: Node) -> Iterator[Node]:
        """The node and all it calls, each call before what it calls."""
        stack = [self.place(node.id)]
        while stack:
            here = stack.pop()
            yield self.nodes[here]
            stack.extend(reversed(self._children[here]))

    # Which nodes matter --------------------------------------------------------------------------------------------

    @cached_property
    def operator_flags(self) -> list[bool]:
        """By place: whether the node is an operator."""
        if self.source == "chakra":
            return [node.is_operator or bool(node.attributes.get("is_device_work")) for node in self.nodes]
        return [node.is_operator for node in self.nodes]

    def operators(self) -> list[Node]:
        """Calls that do work; see `Node.is_operator`."""
        return [node for node, wanted in zip(self.nodes, self.operator_flags, strict=True) if wanted]

    def topmost_operators(self) -> list[Node]:
        """Operators that no other operator calls: the units of a replay."""
        return [self.nodes[here] for here in self._topmost]

    @cached_property
    def _topmost(self) -> list[int]:
        if not self.nesting.levels[0].size:  # asking also finds calls that are their own ancestors
            return []
        wanted, parent = np.array(self.operator_flags), np.array(self.parent_places, np.int64)
        operators = np.flatnonzero(wanted)
        around = climb(np.where(wanted, 0, -1), parent, parent[operators])
        topmost: list[int] = operators[around < 0].tolist()
        return topmost

    def leaf_operators(self) -> list[Node]:
        """Operators that call no other operator: those that launch the work."""
        callers: set[int] = set()
        for here in reversed(self.preorder):
            if self.operator_flags[here] or here in callers:
                callers.add(self.parent_places[here])
        flags = enumerate(zip(self.nodes, self.operator_flags, strict=True))
        return [node for here, (node, wanted) in flags if wanted and here not in callers]

    def labels(self) -> list[Node]:
        """Annotations and wrappers: neither operators nor roots."""
        return [
            node
            for node, wanted in zip(self.nodes, self.operator_flags, strict=True)
            if not wanted and not node.is_root
        ]

    def collectives(self) -> list[tuple[Node, CommunicationRecord]]:
        """Communication records in order, waits included."""
        return [(node, read_collective(node)) for node in self.nodes if node.name == RECORD_COLLECTIVE]

    def group(self, name: str) -> ProcessGroup | None:
        return next((group for group in self.groups if group.name == name), None)

    # Steps ---------------------------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> tuple[GraphStep, ...]:
        """Labels of the profiler, in order; empty where it was not told of steps."""
        found = ((PROFILER_STEP.match(node.name), node) for node in self.nodes)
        return tuple(GraphStep(int(match[1]), node) for match, node in found if match)

    @cached_property
    def step_numbers(self) -> list[int | None]:
        """The step of each node, in the order of `nodes`.

        A label that encloses a node decides. On threads that no label reaches (autograd's) ids decide: they come from
        one counter, so a node with an id after a step's began after it.
        """
        numbers: list[int | None] = [None] * len(self.nodes)
        if not self.steps:
            return numbers
        own = {step.node.id: step.number for step in self.steps}
        labelled = {step.node.tid for step in self.steps}
        begins = [step.node.id for step in self.steps]
        for here in self.preorder:
            node = self.nodes[here]
            above = self.parent_places[here]
            if node.id in own:
                numbers[here] = own[node.id]
            elif above >= 0 and numbers[above] is not None:
                numbers[here] = numbers[above]
            elif node.tid not in labelled and not node.is_root:
                latest = bisect_right(begins, node.id) - 1
                numbers[here] = self.steps[latest].number if latest >= 0 else None
        return numbers

    def step_of(self, node: Node) -> int | None:
        return self.step_numbers[self.place(node.id)]

    def in_step(self, number: int, nodes: Sequence[Node] | None = None) -> list[Node]:
        """Nodes of one step, among those given (all by default)."""
        wanted = self.nodes if nodes is None else nodes
        return [node for node in wanted if self.step_of(node) == number]

    # Columns -------------------------------------------------------------------------------------------------------

    def column(self, name: str) -> Integers:
        """A whole-number field of all nodes as an array, e.g. `rf_id`."""
        return np.fromiter(map(attrgetter(name), self.nodes), np.int64, len(self.nodes))


def wrong_arguments(node: Node, error: ValueError, where: str = "") -> BadInputError:
    """For arguments that turn out to be none when they are asked for."""
    return BadInputError(
        f"the arguments of node {node.id} ({node.name[:80]}) cannot be read: {error}",
        hint="copy or record the execution trace again",
        where=f"{where + ', ' if where else ''}node {node.id}",
    )


def read_collective(node: Node) -> CommunicationRecord:
    """The content of a `record_param_comms` node, from its attributes where it has them, else from its inputs.

    Arguments stand as [tensors,] sequence, group, rank, name, splits…; the name is the first plain text among them.
    """
    try:
        values, types = node.inputs.values, node.inputs.types
        place = next((here for here, kind in enumerate(types) if kind == "String"), None)
    except ValueError:
        values, place = [], None
    said = node.attributes
    name = said.get("collective_name")
    if place is None or place < 3:
        return CommunicationRecord(name=str(name or ""), **_from_attributes(said))
    sequence, is_point_to_point = _sequence_number(values[place - 3])
    fields: dict[str, Any] = {
        "sequence": sequence,
        "is_point_to_point": is_point_to_point,
        "rank": values[place - 1] if isinstance(values[place - 1], int) else None,
        **_group_of(values[place - 2]),
        **_ranks_of(values[place + 3 :]),
    }
    # A record whose tensors are damaged still says what it is.
    with suppress(ValueError, TypeError):
        fields.update(_sizes_of(node, place))
    for key, value in _from_attributes(said).items():
        # Waits carry empty groups and zero sizes as attributes; the inputs then say no more.
        if value not in (None, "", ()):
            fields[key] = value
    return CommunicationRecord(name=str(name or values[place]), **fields)


def _sequence_number(value: Any) -> tuple[int | None, bool]:
    """A number, in later writers [number, is point to point]."""
    if isinstance(value, list) and value:
        return (value[0] if isinstance(value[0], int) else None), bool(value[1]) if len(value) > 1 else False
    return (value if isinstance(value, int) else None), False


def _group_of(value: Any) -> dict[str, Any]:
    if isinstance(value, list) and value:
        return {"group": str(value[0]) or None, "group_description": str(value[1]) if len(value) > 1 else None}
    if isinstance(value, int):
        return {"group": f"pointer {value}" if value else None}
    return {"group": str(value) or None}


def _ranks_of(rest: list[Any]) -> dict[str, Any]:
    numbers = [value if isinstance(value, int) and value >= 0 else None for value in rest[:3]]
    return dict(zip(("rank_start", "rank_stride", "group_size"), numbers, strict=False))


def _sizes_of(node: Node, place: int) -> dict[str, Any]:
    values = node.inputs.values
    found: dict[str, Any] = {
        "in_splits": _numbers(values[place + 1]) if len(values) > place + 1 else (),
        "out_splits": _numbers(values[place + 2]) if len(values) > place + 2 else (),
    }
    if place == 3:  # no tensors before the sequence number: a wait or a barrier
        return found
    given = list(flatten_tensors(node.inputs.parsed()[: place - 3]))
    got = list(node.outputs.tensors())
    for side, tensors in (("in", given), ("out", got)):
        if tensors:
            found[f"{side}_elements"] = sum(tensor.elements for tensor in tensors)
            found[f"{side}_bytes"] = sum(tensor.size_bytes for tensor in tensors)
    if given or got:
        found["dtype"] = (given or got)[0].dtype
    return found


_ATTRIBUTES: tuple[tuple[str, str, type], ...] = (
    ("rank_start", "global_rank_start", int),
    ("rank_stride", "global_rank_stride", int),
    ("group_size", "pg_size", int),
    ("group", "pg_name", str),
    ("group_description", "pg_desc", str),
)


def _from_attributes(said: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    dtype = said.get("dtype")
    if isinstance(dtype, str):
        found["dtype"] = dtype_name(dtype)
    for side in ("in", "out"):
        elements = said.get(f"{side}_msg_nelems")
        if isinstance(elements, int) and elements > 0:
            found[f"{side}_elements"] = elements
            each = dtype_bytes(dtype) if isinstance(dtype, str) else None
            if each is not None:
                found[f"{side}_bytes"] = elements * each
        found[f"{side}_splits"] = _numbers(said.get(f"{side}_split_size"))
    return found | {key: said[name] for key, name, kind in _ATTRIBUTES if isinstance(said.get(name), kind)}


def _numbers(value: Any) -> tuple[int, ...]:
    """A list of whole numbers, or one written as text; empty for anything else."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            return ()
    if isinstance(value, list) and all(isinstance(part, int) for part in value):
        return tuple(value)
    return ()


class _GroupEntry(msgspec.Struct):
    pg_name: str | int
    pg_desc: str = ""
    backend_config: str = ""
    ranks: list[int] = []
    group_size: int | None = None
    pg_size: int | None = None


def read_groups(entries: str | Sequence[Mapping[str, Any]]) -> tuple[ProcessGroup, ...]:
    """A table of process groups, as execution traces (text) and Kineto (`pg_config`) hold it; ValueError for all else.

    An empty list of ranks means all of them.
    """
    if isinstance(entries, str):
        found = msgspec.json.decode(entries, type=list[_GroupEntry], strict=False)
    else:
        found = msgspec.convert(list(entries), type=list[_GroupEntry], strict=False)
    groups: list[ProcessGroup] = []
    for entry in found:
        size = entry.group_size or entry.pg_size or len(entry.ranks)
        groups.append(
            ProcessGroup(
                name=str(entry.pg_name),
                description=entry.pg_desc,
                backend=entry.backend_config,
                size=size,
                ranks=tuple(entry.ranks) or tuple(range(size)),
            )
        )
    return tuple(groups)
