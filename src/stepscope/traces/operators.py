"""What recorded operators do: floating-point operations and bytes, and which memory they read and write."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from stepscope.core.errors import BadInputError
from stepscope.formats.graph import RECORD_COLLECTIVE, Graph, Node
from stepscope.formats.tensors import Arguments, Tensor, Value, flatten_tensors
from stepscope.formats.timeline import DEVICE_KINDS, EDGE_KINDS, Integers, RowEdges
from stepscope.traces.link import GraphLink

Shape = Sequence[int]


def _matmul(dimensions: int) -> Callable[[Sequence[Shape]], int | None]:
    """Products of matrices, one or a batch of them."""

    def count(shapes: Sequence[Shape]) -> int | None:
        first, second = shapes[0], shapes[1]
        fits = len(first) == len(second) == dimensions and first[:-2] == second[:-2] and first[-1] == second[-2]
        return 2 * prod(first) * second[-1] if fits else None

    return count


def _after_bias(rule: Callable[[Sequence[Shape]], int | None]) -> Callable[[Sequence[Shape]], int | None]:
    return lambda shapes: rule(shapes[1:]) if len(shapes) > 2 else None


def _attention(factor: int, *, length_first: bool = False) -> Callable[[Sequence[Shape]], int | None]:
    """Two products of every query with every key; the backward pass has five.

    Shapes are [batch, heads, length, size], or [batch, length, heads, size] in operators without "scaled_dot_product".
    Keys may have fewer heads than queries, which share them.
    """
    length_at, heads_at = (1, 2) if length_first else (2, 1)

    def count(shapes: Sequence[Shape]) -> int | None:
        query, key = (shapes[0], shapes[1]) if factor == 2 else (shapes[1], shapes[2])
        if len(query) != 4 or len(key) != 4:
            return None
        return 2 * factor * query[0] * query[heads_at] * query[length_at] * key[length_at] * query[3]

    return count


_BY_INPUTS: dict[str, Callable[[Sequence[Shape]], int | None]] = {
    "aten::mm": _matmul(2),
    "aten::addmm": _after_bias(_matmul(2)),
    "aten::_addmm_activation": _after_bias(_matmul(2)),
    "aten::bmm": _matmul(3),
    "aten::baddbmm": _after_bias(_matmul(3)),
    "aten::_scaled_dot_product_flash_attention": _attention(2),
    "aten::_scaled_dot_product_efficient_attention": _attention(2),
    "aten::_scaled_dot_product_cudnn_attention": _attention(2),
    "aten::_flash_attention_forward": _attention(2, length_first=True),
    "aten::_efficient_attention_forward": _attention(2, length_first=True),
    "aten::_scaled_dot_product_flash_attention_backward": _attention(5),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention(5),
    "aten::_flash_attention_backward": _attention(5, length_first=True),
    "aten::_efficient_attention_backward": _attention(5, length_first=True),
}
_CONVOLUTIONS = frozenset(
    ("aten::cudnn_convolution", "aten::miopen_convolution", "aten::mkldnn_convolution", "aten::_slow_conv2d_forward")
)
_CONVOLUTION_BACKWARD = "aten::convolution_backward"
_COUNTED = frozenset((*_BY_INPUTS, *_CONVOLUTIONS, _CONVOLUTION_BACKWARD))


def count_operations(name: str, shapes: Sequence[Shape], out: Shape | None = None) -> int | None:
    """Multiplications and additions of one call. A convolution needs the shape of its result; `out` gives it."""
    try:
        rule = _BY_INPUTS.get(name)
        if rule is not None:
            return rule(shapes)
        if name in _CONVOLUTIONS and out:
            return 2 * prod(out) * prod(shapes[1][1:])
    except (IndexError, TypeError):
        pass
    return None


def count_of_node(node: Node) -> int | None:
    """The same of a node of a graph, convolutions' backward pass included."""
    if node.name not in _COUNTED:  # arguments need not be decoded
        return None
    try:
        shapes = node.inputs.shapes
        if node.name == _CONVOLUTION_BACKWARD:
            transposed, wanted = node.inputs.values[7], node.inputs.values[-1]
            if transposed is not False or not isinstance(wanted, list):
                return None
            return sum(map(bool, wanted[:2])) * int(2 * prod(shapes[0]) * prod(shapes[2][1:]))
        results = node.outputs.shapes
        return count_operations(node.name, shapes, results[0] if results else None)
    except (IndexError, TypeError, ValueError):
        return None


def bytes_of_node(node: Node) -> int | None:
    """Bytes of all tensors that go in and come out; None where the node has none."""
    try:
        tensors = [*node.inputs.tensors(), *node.outputs.tensors()]
    except ValueError:
        return None
    return sum(tensor.size_bytes for tensor in tensors) or None


class DataDependency(NamedTuple):
    """`reader` needs `size_bytes` that `writer` wrote."""

    writer: int
    """Node ids."""
    reader: int
    size_bytes: int
    is_assumed: bool
    """The writer may not have written it: a Triton kernel's trace does not say which of its arguments it writes."""


class Accesses(NamedTuple):
    """Tensors that a node reads and writes."""

    reads: list[Tensor]
    writes: list[Tensor]
    are_writes_known: bool


def accesses(node: Node) -> Accesses:
    """What a node does to memory. Undefined tensors, empty ones and those without a storage are left out."""
    inputs = node.inputs.parsed()
    given = list(flatten_tensors(inputs))
    results = list(node.outputs.tensors())
    if node.kernel_backend == "triton" and not results:
        return Accesses(_solid(given), _solid(given), False)
    written, only_written = _written_arguments(node, inputs)
    if node.name == RECORD_COLLECTIVE:
        return Accesses(_solid(given), _solid([*written, *results]), True)
    schema = node.schema
    if schema is None or not any(result.alias and not result.is_written for result in schema.returns):
        fresh = results
    else:
        shared = {(tensor.device, tensor.storage) for tensor in given}
        fresh = [tensor for tensor in results if (tensor.device, tensor.storage) not in shared]
    reads = [tensor for tensor in given if tensor not in only_written] if only_written else given
    return Accesses(_solid(reads), _solid([*written, *fresh]), True)


def _written_arguments(node: Node, inputs: tuple[Value, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Arguments marked `!`, and those of them that are `out` alone and are not read."""
    schema = node.schema
    if schema is None or not any(argument.is_written for argument in schema.arguments):
        return [], []
    written: list[Tensor] = []
    only: list[Tensor] = []
    for argument, value in zip(schema.arguments, inputs, strict=False):
        if argument.is_written:
            tensors = list(flatten_tensors((value,)))
            written.extend(tensors)
            if argument.keyword_only and argument.name.startswith("out"):
                only.extend(tensors)
    return written, only


def _solid(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.elements and tensor.storage]


class _Storage:
    """Which bytes of a storage were last written by whom: pieces that do not overlap, in order."""

    __slots__ = ("begins", "ends", "writers")

    def __init__(self) -> None:
        self.begins: list[int] = []
        self.ends: list[int] = []
        self.writers: list[tuple[int, bool]] = []

    def write(self, begin: int, end: int, writer: tuple[int, bool]) -> None:
        first = bisect_right(self.ends, begin)
        last = bisect_left(self.begins, end)
        if last - first == 1 and self.begins[first] == begin and self.ends[first] == end:  # the usual case
            self.writers[first] = writer
            return
        begins, ends, writers = [begin], [end], [writer]
        if first < last:
            if self.begins[first] < begin:
                begins.insert(0, self.begins[first])
                ends.insert(0, begin)
                writers.insert(0, self.writers[first])
            if self.ends[last - 1] > end:
                begins.append(end)
                ends.append(self.ends[last - 1])
                writers.append(self.writers[last - 1])
        self.begins[first:last] = begins
        self.ends[first:last] = ends
        self.writers[first:last] = writers

    def read(self, begin: int, end: int) -> list[tuple[tuple[int, bool], int]]:
        """Writers of the bytes between, and how many of them."""
        begins, ends, writers = self.begins, self.ends, self.writers
        return [
            (writers[here], min(end, ends[here]) - max(begin, begins[here]))
            for here in range(bisect_right(ends, begin), bisect_left(begins, end))
        ]


_Touched = list[tuple[_Storage, int, int]]
"""Storages with the first byte, and the one after the last."""


class _Memory:
    """All storages of a graph, and what its calls do to them."""

    def __init__(self) -> None:
        self._storages: dict[tuple[str, int], _Storage] = {}
        self._known: dict[tuple[Arguments, Arguments, str, str, str], tuple[_Touched, _Touched, bool]] = {}

    def follow(self, node: Node) -> dict[tuple[int, bool], int]:
        """What a node reads, by writer; then what it writes."""
        # Steps call alike: arguments that a file repeats are one object.
        key = (node.inputs, node.outputs, node.op_schema, node.name, node.kernel_backend)
        known = self._known.get(key)
        if known is None:
            found = accesses(node)
            known = (self._touched(found.reads), self._touched(found.writes), found.are_writes_known)
            self._known[key] = known
        reads, writes, are_known = known
        needed: dict[tuple[int, bool], int] = {}
        for storage, begin, end in reads:
            if storage.begins:
                for writer, size in storage.read(begin, end):
                    needed[writer] = needed.get(writer, 0) + size
        if writes:
            me = (node.id, not are_known)
            for storage, begin, end in writes:
                storage.write(begin, end, me)
        return needed

    def _touched(self, tensors: list[Tensor]) -> _Touched:
        touched: _Touched = []
        for tensor in tensors:
            key = (tensor.device, tensor.storage)
            storage = self._storages.get(key)
            if storage is None:
                storage = self._storages[key] = _Storage()
            touched.append((storage, *tensor.storage_range()))
        return touched


def data_dependencies(graph: Graph, nodes: Sequence[Node] | None = None) -> list[DataDependency]:
    """Dependencies between nodes that do not enclose each other; the outermost operators by default.

    In order of the reader. What was written before the recording began has no writer here.
    """
    memory = _Memory()
    found: list[DataDependency] = []
    for node in sorted(graph.topmost_operators() if nodes is None else nodes, key=lambda node: node.id):
        try:
            needed = memory.follow(node)
        except (ValueError, TypeError) as error:
            raise BadInputError(
                f"the arguments of node {node.id} ({node.name}) contradict each other: {error}",
                hint="record the trace again",
                where=graph.where or None,
            ) from error
        reader = node.id
        for (writer, is_assumed), size in needed.items():
            if writer != reader:
                found.append(DataDependency(writer, reader, size, is_assumed))
    return found


def data_edges(link: GraphLink, dependencies: Sequence[DataDependency] | None = None) -> tuple[RowEdges, int]:
    """The same between rows of the linked timeline: last device row of the writer → first of the reader.

    A node without device rows is represented by its host row; it waits for no device work. Also returns how many
    dependencies the times contradict: the writer's work ended after the reader's began, so an id was used again between
    them, or the order is kept elsewhere.
    """
    if dependencies is None:
        dependencies = data_dependencies(link.graph)
    core, place, count = link.timeline.core, link.graph.place, len(dependencies)
    writer = np.fromiter((place(one.writer) for one in dependencies), np.int64, count)
    reader = np.fromiter((place(one.reader) for one in dependencies), np.int64, count)
    first, last = _device_spans(link)
    on_device, needs_device = last[writer] >= 0, first[reader] >= 0
    source = np.where(on_device, last[writer], link.host_row[writer])
    target = np.where(needs_device, first[reader], link.host_row[reader])
    # A view of device memory is made on the host without waiting for what will be in it.
    usable = (source >= 0) & (target >= 0) & ~(on_device & ~needs_device)
    source, target = source[usable], target[usable]
    in_time = core["end_ns"][source] <= core["start_ns"][target]
    before, after = source[in_time], target[in_time]
    edges = RowEdges(
        before=before,
        after=after,
        kind=np.full(len(before), EDGE_KINDS.index("data"), np.int8),
        inferred=np.zeros(len(before), np.int8),
    )
    return edges, int((~in_time).sum())


def _device_spans(link: GraphLink) -> tuple[Integers, Integers]:
    """By place: the device row that began first, and the one that ended last, of the call and all inside it; −1: none.

    Of equals, that of the call which comes first decides.
    """
    graph, core = link.graph, link.timeline.core
    rows = np.flatnonzero(np.isin(core["kind"], DEVICE_KINDS) & (link.node_of_row >= 0))
    rows = rows[np.argsort(graph.position[link.node_of_row[rows]], kind="stable")]
    by_start = rows[np.argsort(core["start_ns"][rows], kind="stable")]
    # Turned round, so that the first of equals is the last of all.
    by_end = rows[::-1][np.argsort(core["end_ns"][rows[::-1]], kind="stable")]
    parent = np.array(graph.parent_places, np.int64)
    first, last = np.full(len(graph), len(rows), np.int64), np.full(len(graph), -1, np.int64)
    for ordered, best, choose in ((by_start, first, np.minimum), (by_end, last, np.maximum)):
        place, rank = link.node_of_row[ordered].astype(np.int64), np.arange(len(ordered))
        while len(place):
            choose.at(best, place, rank)
            place = parent[place]
            place, rank = place[place >= 0], rank[place >= 0]
    nothing = np.full(1, -1, np.int64)
    return np.append(by_start, nothing)[first], np.append(by_end, nothing)[last]
