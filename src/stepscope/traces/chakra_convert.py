"""A timeline as a Chakra graph that can be run again: every event, its time, and what it waited for.

Host threads are cut into segments without holes (see `cut_host_time`), every device event is a node, and where a node
began later than all it waits for had ended, another one stands for the delay. Every dependency points from something
that ended to something that began later: the order of the file is an order of execution, there are no circles, and a
schedule that starts each node as soon as it may has the trace's times. docs/graphs-and-links.md says what each node
and attribute means.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stepscope.core.errors import BadInputError, UsageError
from stepscope.formats.chakra import (
    COMPUTE,
    METADATA,
    ChakraNode,
    ChakraTrace,
    NumbersEncoder,
    encode_arguments,
    encode_fields,
    parse_node,
    unfit_node,
    write_nodes,
)
from stepscope.formats.classify import CATEGORIES, COMMUNICATION
from stepscope.formats.graph import wrong_arguments
from stepscope.formats.nesting import climb
from stepscope.formats.source import gc_paused
from stepscope.formats.timeline import (
    ANNOTATION,
    DEVICE_KINDS,
    KINDS,
    OPERATOR,
    PYTHON,
    RUNTIME,
    Integers,
    RowEdges,
    Timeline,
)
from stepscope.traces.chakra_graphs import SIZE_CONVENTION, ChakraCommunication, CommunicationReader
from stepscope.traces.chakra_schedule import (
    DELAY,
    DEVICE,
    FORMS,
    GAP,
    HEAD,
    ROOT,
    ScheduledNodes,
    Sources,
    cut_host_time,
    schedule,
)
from stepscope.traces.link import GraphLink, count_reason
from stepscope.traces.operators import bytes_of_node, count_of_node, count_operations

MINIMUM_SHARE = 0.5
_MOST_KEPT = 1 << 16
_GRAPH_FIELDS = ("scope", "fw_tid", "op_schema", "kernel_file")
"""Taken from the execution trace under the same names, as are the last three numbers of its calls."""
_DEVICE_FIELDS = ("stream", "device", "category", "num_ops", "tensor_size")
_COLUMNS = ("name", "kind", "start_ns", "end_ns", "correlation", "stream", "device", "category")
_CALL_NUMBERS = ("call_duration_ns",)
_LAUNCH_NUMBERS = ("call_duration_ns", "correlation")
_GRAPH_NUMBERS = ("call_duration_ns", "et_id", "rf_id", "seq_id", "fw_parent")
_DEVICE_NUMBERS = ("correlation",)
_GRAPH_DEVICE_NUMBERS = ("correlation", "et_id")


class ConversionCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the timeline is in the graph, and how firmly."""

    host_events: int
    device_events: int
    device_events_with_launch: int
    device_events_without_launch: int
    """Independent nodes: they wait for their stream and for what the given edges say, not for a launch."""
    device_events_with_operator: int
    """Device events whose operator the linked graph holds; 0 without a graph."""
    communication: int
    communication_with_type: int
    communication_with_size: int
    communication_with_group: int
    calls_with_node: int
    """Host events that the linked graph knows, with their arguments."""
    gaps: int
    """Nodes for host time outside every call, or after the first call inside one."""
    delays: int
    """Nodes for time between the last thing waited for and the beginning."""
    waits_cut: int
    """Calls and gaps from which waiting was cut out."""
    inferred: int
    """Dependencies, among those that follow, for which the order in time is the only evidence."""
    dependencies: dict[str, int]
    """By kind."""
    dropped: dict[str, int]
    """Dependencies that were not written, and events that are in no node of their own."""

    @property
    def launch_share(self) -> float | None:
        """Share of device events whose launch is known; None without device events."""
        return self.device_events_with_launch / self.device_events if self.device_events else None


@dataclass(frozen=True)
class _Parts:
    """What nodes are made from."""

    timeline: Timeline
    link: GraphLink | None
    nodes: ScheduledNodes
    origin_ns: int
    communications: dict[int, ChakraCommunication]
    """By row."""
    work: dict[int, tuple[int | None, int | None]]
    """By device row: operations and bytes of its operator."""


@dataclass(frozen=True)
class Conversion:
    """A Chakra graph, ready to be written."""

    metadata: dict[str, Any]
    coverage: ConversionCoverage
    node_count: int
    _parts: _Parts

    def nodes(self) -> Iterator[ChakraNode]:
        """In an order of execution."""
        return map(parse_node, _NodeEncoder(self._parts).encode())

    def write(self, path: Path) -> None:
        """The file, complete or not at all."""
        with gc_paused():
            write_nodes(path, self.metadata, _NodeEncoder(self._parts).encode())

    def trace(self) -> ChakraTrace:
        """The same in memory."""
        return ChakraTrace(attributes=self.metadata, nodes=list(self.nodes()))


def convert(
    timeline: Timeline,
    *,
    link: GraphLink | None = None,
    edges: RowEdges | None = None,
    step: int | None = None,
    minimum_share: float = MINIMUM_SHARE,
) -> Conversion:
    """A finished timeline, whole or one step of it, as a Chakra graph.

    `link` adds what the execution trace knows: arguments, schemas, data dependencies, collectives of old traces.
    `edges` are the waits that analysis found; without them only those that need no analysis are there (launches,
    streams, calls that return when device work ends). BadInputError where less than `minimum_share` of the device
    events have a launch; 0 keeps all of them, those without a launch as independent nodes.
    """
    host, devices = _select(timeline, step)
    if not len(host) and not len(devices):
        raise UsageError(f"there is nothing to convert in step {step}" if step is not None else "the timeline is empty")
    reader = CommunicationReader(timeline, link)
    with gc_paused():
        segments = cut_host_time(timeline, host)
        sources = Sources(timeline=timeline, segments=segments, devices=devices, link=link, edges=edges)
        nodes, counts, dropped = schedule(sources)
        parts = _Parts(
            timeline=timeline,
            link=link,
            nodes=nodes,
            origin_ns=min(0, int(nodes.start_ns.min())),
            communications=_communications(timeline, reader, host, devices),
            work=_work(timeline, link, devices),
        )
    python = (timeline.core["kind"] == PYTHON) & (True if step is None else timeline.core["step"] == step)
    count_reason(dropped, "Python calls, whose time is in gaps and in the calls around them", int(python.sum()))
    count_reason(dropped, "calls cut where the call they began in ended", segments.clipped)
    coverage = _cover(parts, host, devices, counts, dropped)
    share = coverage.launch_share
    if share is not None and share < minimum_share:
        raise BadInputError(
            f"only {coverage.device_events_with_launch} of {coverage.device_events} device events have a launch in the "
            f"trace, at least {minimum_share:.0%} are needed: their place in the graph would be a guess",
            hint="record with ProfilerActivity.CPU and ProfilerActivity.CUDA together, or keep them as independent "
            "nodes: --keep-unlinked on the command line, minimum_share=0 in Python",
            where=str(timeline.metadata.get("source") or "timeline"),
        )
    return Conversion(
        metadata=_metadata(parts, reader, coverage, step),
        coverage=coverage,
        node_count=len(nodes.start_ns),
        _parts=parts,
    )


def _select(timeline: Timeline, step: int | None) -> tuple[Integers, Integers]:
    core = timeline.core
    if step is not None and step not in {span.number for span in timeline.steps}:
        known = ", ".join(str(span.number) for span in timeline.steps[:20])
        raise UsageError(f"the timeline has no step {step}", hint=f"steps: {known}")
    wanted = np.ones(len(timeline), bool) if step is None else core["step"] == step
    host = np.flatnonzero(wanted & np.isin(core["kind"], (OPERATOR, RUNTIME, ANNOTATION)) & (core["thread"] >= 0))
    devices = np.flatnonzero(wanted & np.isin(core["kind"], DEVICE_KINDS))
    return host, devices[np.lexsort((core["end_ns"][devices], core["start_ns"][devices]))]


def _communications(
    timeline: Timeline, reader: CommunicationReader, host: Integers, devices: Integers
) -> dict[int, ChakraCommunication]:
    """By row. Where no device row communicates (gloo, CPU only), the host's records do."""
    core = timeline.core
    records = reader.records_of(devices)
    is_kernel = core["category"][devices] == COMMUNICATION
    rows = devices[is_kernel]
    record_rows = records[is_kernel]
    if not len(rows):
        own = reader.records_of(host)
        moved = (own == host) & np.isin(core["kind"][host], (OPERATOR,))
        rows, record_rows = host[moved], own[moved]
    found: dict[int, ChakraCommunication] = {}
    for row, record in zip(rows.tolist(), record_rows.tolist(), strict=True):
        described = reader.describe(row, record)
        if core["kind"][row] != OPERATOR or described.has_size:
            found[row] = described
    return found


def _work(timeline: Timeline, link: GraphLink | None, devices: Integers) -> dict[int, tuple[int | None, int | None]]:
    """Operations and bytes, on the longest of the rows that one call launched: they are the call's, not a kernel's."""
    core = timeline.core
    computing = devices[core["category"][devices] != COMMUNICATION]
    is_operator = np.where(core["kind"] == OPERATOR, np.arange(len(timeline)), -1)
    owner = climb(is_operator, core["parent"].astype(np.int64), core["parent"][computing].astype(np.int64))
    computing, owner = computing[owner >= 0], owner[owner >= 0]
    length = core["end_ns"][computing] - core["start_ns"][computing]
    order = np.lexsort((-length, owner))
    computing, owner = computing[order], owner[order]
    first = np.concatenate([[True], owner[1:] != owner[:-1]]) if len(owner) else np.zeros(0, bool)
    by_shapes: dict[tuple[int, int], int | None] = {}
    found: dict[int, tuple[int | None, int | None]] = {}
    for row, operator in zip(computing[first].tolist(), owner[first].tolist(), strict=True):
        place = -1 if link is None else int(link.node_of_row[operator])
        if link is not None and place >= 0:
            node = link.graph.nodes[place]
            found[row] = (count_of_node(node), bytes_of_node(node))
            continue
        key = (int(core["name"][operator]), int(core["shapes"][operator]))
        if key not in by_shapes:
            by_shapes[key] = _operations_of(timeline, *key)
        found[row] = (by_shapes[key], None)
    return found


def _operations_of(timeline: Timeline, name: int, shapes: int) -> int | None:
    if shapes < 0:
        return None
    try:
        return count_operations(timeline.texts[name], msgspec.json.decode(timeline.texts[shapes], type=list[Any]))
    except msgspec.DecodeError:
        return None


def _cover(
    parts: _Parts, host: Integers, devices: Integers, counts: dict[str, int], dropped: dict[str, int]
) -> ConversionCoverage:
    communications = parts.communications.values()
    nodes, link = parts.nodes, parts.link
    launched = int((parts.timeline.core["parent"][devices] >= 0).sum())
    return ConversionCoverage(
        host_events=len(host),
        device_events=len(devices),
        device_events_with_launch=launched,
        device_events_without_launch=len(devices) - launched,
        device_events_with_operator=0 if link is None else int((link.node_of_row[devices] >= 0).sum()),
        communication=len(communications),
        communication_with_type=sum(
            "comm_type" in one.attributes or "comm_src" in one.attributes for one in communications
        ),
        communication_with_size=sum(one.has_size for one in communications),
        communication_with_group=sum(one.ranks is not None for one in communications),
        calls_with_node=0 if link is None else int(np.isin(host, link.host_row).sum()),
        gaps=int((nodes.form == GAP).sum()),
        delays=int((nodes.form == DELAY).sum()),
        waits_cut=counts.pop("cut", 0),
        inferred=counts.pop("inferred", 0),
        dependencies=counts,
        dropped=dropped,
    )


def _metadata(
    parts: _Parts, reader: CommunicationReader, coverage: ConversionCoverage, step: int | None
) -> dict[str, Any]:
    timeline, link, origin_ns = parts.timeline, parts.link, parts.origin_ns
    found: dict[str, Any] = {
        "writer": "stepscope",
        "node_count": len(parts.nodes.form),
        "schema": link.graph.schema if link is not None else "",
        "process_groups": msgspec.json.encode(reader.members).decode(),
        "comm_size_convention": SIZE_CONVENTION,
        "duration_convention": "host nodes last until the next node of their thread; call_duration_ns is the call",
        "coverage": msgspec.json.encode(coverage).decode(),
        "clock": "nanoseconds of the timeline's clock in start_ns and duration_ns; microseconds rounded",
    }
    if devices := timeline.metadata.get("devices"):
        found["devices"] = msgspec.json.encode(devices).decode()
    if timeline.rank is not None:
        found["rank"] = timeline.rank
    if timeline.world_size is not None:
        found["world_size"] = timeline.world_size
    if step is not None:
        found["step"] = step
    if origin_ns:
        found["clock_shift_ns"] = -origin_ns
    if link is not None:
        found["link"] = msgspec.json.encode(link.summary).decode()
    return found


class _NodeEncoder:
    """Encodes scheduled nodes, numbered from 1 in their order.

    What many nodes have alike (names, threads, arguments) is encoded once, the numbers in which they differ for each.
    """

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        self._threads = _thread_numbers(parts)
        self._moved = _bytes_moved(parts.timeline)
        self._nodes = [] if parts.link is None else parts.link.node_of_row.tolist()
        core = parts.timeline.core
        self._core = {name: core[name].tolist() for name in _COLUMNS}
        self._shared = lru_cache(_MOST_KEPT)(self._encode_shared)
        self._arguments = lru_cache(_MOST_KEPT)(encode_arguments)
        self._numbers = cache(NumbersEncoder)

    def encode(self) -> Iterator[bytes]:
        nodes, origin = self._parts.nodes, self._parts.origin_ns
        start, end = nodes.start_ns - origin, nodes.end_ns - origin
        start_us, end_us = (start + 500) // 1000, (end + 500) // 1000
        duration_us = np.where(nodes.form == DEVICE, (end - start + 500) // 1000, end_us - start_us)
        bounds = np.searchsorted(nodes.after, np.arange(len(nodes.form) + 1)).tolist()
        before = (nodes.before + 1).tolist()
        columns = (nodes.form, nodes.row, nodes.thread, nodes.call_parent, start, end - start, start_us, duration_us)
        for place, (form, row, thread, above, start_ns, length_ns, begun_us, took_us) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            name = FORMS[form]
            try:
                if form == HEAD:
                    shared, names, numbers = self._encode_call(row, thread)
                elif form == DEVICE:
                    shared, names, numbers = self._encode_device_event(row)
                else:
                    node_type = METADATA if form == ROOT else COMPUTE
                    shared, names, numbers = self._shared(name, node_type, name, thread), (), ()
                message = shared + self._numbers(names).encode(
                    place + 1,
                    (above + 1,) if above >= 0 else (),
                    before[bounds[place] : bounds[place + 1]],
                    (begun_us, took_us, start_ns, length_ns),
                    numbers,
                )
            except (ValueError, TypeError) as error:
                own = self._parts.timeline.text("name", row) if row >= 0 else None
                raise unfit_node(place + 1, own or name, error) from error
            yield message

    def _encode_shared(
        self, name: str, node_type: int, kind: str, thread: int, names: tuple[str, ...] = (), *values: Any
    ) -> bytes:
        """Name, type and those attributes that have a value."""
        attributes = {"is_cpu_op": kind != "device", "kind": kind}
        attributes |= {name: value for name, value in zip(names, values, strict=True) if value is not None}
        if thread >= 0:
            attributes["tid"] = self._threads[thread]
        return encode_fields(attributes, name=name, type=node_type)

    def _encode_call(self, row: int, thread: int) -> tuple[bytes, tuple[str, ...], tuple[int, ...]]:
        """What the timeline and the execution trace know of a call on the host; names and values of its own numbers."""
        core, link = self._core, self._parts.link
        kind, length_ns = core["kind"][row], core["end_ns"][row] - core["start_ns"][row]
        name, node_type, more = self._describe(row)
        place = -1 if link is None or kind == RUNTIME else self._nodes[row]
        if link is None or place < 0:
            shared = self._shared(name, node_type, KINDS[kind], thread) + more
            if kind == RUNTIME and core["correlation"][row] >= 0:
                return shared, _LAUNCH_NUMBERS, (length_ns, core["correlation"][row])
            return shared, _CALL_NUMBERS, (length_ns,)
        node = link.graph.nodes[place]
        known = (node.scope, node.fw_tid, node.op_schema, node.kernel_file or None)
        shared = self._shared(name, node_type, KINDS[kind], thread, _GRAPH_FIELDS, *known) + more
        try:
            shared += self._arguments(node.inputs, node.outputs)
        except ValueError as error:
            raise wrong_arguments(node, error) from error
        return shared, _GRAPH_NUMBERS, (length_ns, node.id, node.rf_id, node.seq_id, node.fw_parent)

    def _encode_device_event(self, row: int) -> tuple[bytes, tuple[str, ...], tuple[int, ...]]:
        core, link = self._core, self._parts.link
        operations = size = None
        if row not in self._parts.communications:
            operations, size = self._parts.work.get(row, (None, None))
            size = self._moved.get(row) if size is None else size
        known = (core["stream"][row], core["device"][row], CATEGORIES[core["category"][row]], operations, size)
        name, node_type, more = self._describe(row)
        shared = self._shared(name, node_type, "device", -1, _DEVICE_FIELDS, *known) + more
        correlation = core["correlation"][row]
        if link is None or self._nodes[row] < 0:
            return shared, _DEVICE_NUMBERS, (correlation,)
        return shared, _GRAPH_DEVICE_NUMBERS, (correlation, link.graph.nodes[self._nodes[row]].id)

    def _describe(self, row: int) -> tuple[str, int, bytes]:
        """Name, type, and what it communicates."""
        name = self._parts.timeline.texts[self._core["name"][row]]
        communication = self._parts.communications.get(row)
        if communication is None:
            return name, COMPUTE, b""
        return name, communication.type, encode_fields(communication.attributes)


def _thread_numbers(parts: _Parts) -> dict[int, int]:
    """The execution trace's numbers of the threads; others get free ones."""
    numbers: dict[int, int] = {}
    link = parts.link
    if link is not None:
        places = np.flatnonzero(link.host_row >= 0)
        threads, first = np.unique(parts.timeline.core["thread"][link.host_row[places]], return_index=True)
        for thread, place in zip(threads.tolist(), places[first].tolist(), strict=True):
            numbers[thread] = link.graph.nodes[place].tid
    others = (thread for thread in range(len(parts.timeline.threads)) if thread not in numbers)
    return numbers | dict(zip(others, itertools.count(max(numbers.values(), default=0) + 1), strict=False))


def _bytes_moved(timeline: Timeline) -> dict[int, int]:
    """By row, of copies and fills."""
    block = timeline.blocks.get("transfer")
    if block is None or "bytes" not in block.columns:
        return {}
    pairs = zip(block.rows.tolist(), block.columns["bytes"].tolist(), strict=True)
    return {row: size for row, size in pairs if size >= 0}
