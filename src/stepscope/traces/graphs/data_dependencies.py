"""Who reads what somebody else wrote: from storages and byte ranges, not from tensor ids, which are used again.

An operator depends on the last writer of every byte it reads. Results are writes, unless the schema says that a result
shares memory with an argument and it does; arguments that the schema marks with `!` are writes as well.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from stepscope.errors import BadInputError
from stepscope.traces.graphs.graph import RECORD_COLLECTIVE, Graph, Node
from stepscope.traces.graphs.tensors import Tensor, Value, flatten_tensors

if TYPE_CHECKING:
    from stepscope.traces.dependencies import RowEdges
    from stepscope.traces.link import Link


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

    def read(self, begin: int, end: int) -> Iterator[tuple[tuple[int, bool], int]]:
        """Writers of the bytes between, and how many of them."""
        for here in range(bisect_right(self.ends, begin), bisect_left(self.begins, end)):
            yield self.writers[here], min(end, self.ends[here]) - max(begin, self.begins[here])


def data_dependencies(graph: Graph, nodes: Sequence[Node] | None = None) -> list[DataDependency]:
    """Dependencies between nodes that do not enclose each other; the outermost operators by default.

    In order of the reader. What was written before the recording began has no writer here.
    """
    storages: dict[tuple[str, int], _Storage] = {}
    found: list[DataDependency] = []
    for node in sorted(graph.topmost_operators() if nodes is None else nodes, key=lambda node: node.id):
        try:
            found.extend(_follow(storages, node))
        except (ValueError, TypeError) as error:
            raise BadInputError(
                f"the arguments of node {node.id} ({node.name}) contradict each other: {error}",
                hint="record the trace again",
                where=graph.where or None,
            ) from error
    return found


def _follow(storages: dict[tuple[str, int], _Storage], node: Node) -> Iterator[DataDependency]:
    """What a node reads, then what it writes."""
    reads, writes, known = accesses(node)
    needed: dict[tuple[int, bool], int] = {}
    for tensor in reads:
        storage = storages.get((tensor.device, tensor.storage))
        if storage is not None:
            for writer, size in storage.read(*tensor.storage_range()):
                needed[writer] = needed.get(writer, 0) + size
    for (writer_id, is_assumed), size in needed.items():
        if writer_id != node.id:
            yield DataDependency(writer_id, node.id, size, is_assumed)
    for tensor in writes:
        storage = storages.setdefault((tensor.device, tensor.storage), _Storage())
        storage.write(*tensor.storage_range(), (node.id, not known))


def data_edges(link: Link, dependencies: Sequence[DataDependency] | None = None) -> tuple[RowEdges, int]:
    """The same between rows of the linked timeline: last device row of the writer → first of the reader.

    A node without device rows is represented by its host row; it waits for no device work. Also returns how many
    dependencies the times contradict: the writer's work ended after the reader's began, so an id was used again between
    them, or the order is kept elsewhere.
    """
    import numpy as np

    from stepscope.traces.dependencies import EDGE_KINDS, RowEdges

    core = link.timeline.core
    start, end = core["start_ns"], core["end_ns"]
    before: list[int] = []
    after: list[int] = []
    contradicted = 0
    spans: dict[int, tuple[int, int, bool]] = {}

    def span(node_id: int) -> tuple[int, int, bool]:
        """First and last row, and whether they are the device's."""
        if node_id not in spans:
            place = link.graph.place(node_id)
            rows = link.rows_under(place)
            if len(rows):
                spans[node_id] = (int(rows[np.argmin(start[rows])]), int(rows[np.argmax(end[rows])]), True)
            else:
                host = int(link.host_row[place])
                spans[node_id] = (host, host, False)
        return spans[node_id]

    for dependency in data_dependencies(link.graph) if dependencies is None else dependencies:
        (_, source, on_device), (target, _, needs_device) = span(dependency.writer), span(dependency.reader)
        # A view of device memory is made on the host without waiting for what will be in it.
        if source < 0 or target < 0 or (on_device and not needs_device):
            continue
        if end[source] > start[target]:
            contradicted += 1
            continue
        before.append(source)
        after.append(target)
    count = len(before)
    edges = RowEdges(
        before=np.array(before, np.int64),
        after=np.array(after, np.int64),
        kind=np.full(count, EDGE_KINDS.index("data"), np.int8),
        inferred=np.zeros(count, np.int8),
    )
    return edges, contradicted
