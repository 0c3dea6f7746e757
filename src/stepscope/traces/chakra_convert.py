"""A timeline as a Chakra graph that can be run again: every event, its time, and what it waited for.

What is written, and how it is to be read:

- Host threads are cut into segments without holes (see `cut_host_time`). A call's node holds the time until the first
  call inside it; the rest of its own time, and the gaps between calls, are compute nodes of their own. So the nodes of
  a thread follow each other and their durations add up to its time. `call_duration_ns` is the whole call.
- Every device event is a node. It waits for the segment of host time that ended before it began, up to the end of its
  launch, for its stream, and for what the given edges say.
- Where a node began later than all it waits for had ended, a compute node stands for the delay.
- A call that waited for device work, or for another thread, has that time cut out of it: the wait is in the dependency.
- Every dependency points from something that ended to something that began later. So the order of the file is an order
  of execution, there are no circles, and a schedule that starts each node as soon as it may has the trace's times.
- `start_time_micros` and `duration_micros` are rounded; `start_ns` and `duration_ns` are exact. Host durations are
  differences of rounded times, so that a chain of short calls neither gains nor loses.
- `comm_size` is what one rank puts in, in bytes. Members of the groups are in the metadata.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stepscope.core.errors import BadInputError, UsageError
from stepscope.formats.chakra import COMPUTE, EMPTY_LISTS, METADATA, ChakraNode, ChakraTrace, TextArguments, write_nodes
from stepscope.formats.classify import CATEGORIES, COMMUNICATION
from stepscope.formats.graph import Node
from stepscope.formats.nesting import climb
from stepscope.formats.source import gc_paused
from stepscope.formats.tensors import Arguments
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
from stepscope.traces.chakra_graphs import SIZE_CONVENTION, Communication, CommunicationReader, texts_of
from stepscope.traces.chakra_schedule import HostSegments, ScheduledNodes, Sources, cut_host_time, schedule
from stepscope.traces.link import Link
from stepscope.traces.operators import bytes_of_node, count_of_node, count_operations

MINIMUM_SHARE = 0.5
_MOST_KEPT = 1 << 16
_NODE_FIELDS = ("rf_id", "seq_id", "fw_parent", "scope", "fw_tid", "op_schema")
"""Taken from the execution trace under the same names."""


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
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
    link: Link | None
    nodes: ScheduledNodes
    origin_ns: int
    communications: dict[int, Communication]
    """By row."""
    work: dict[int, tuple[int | None, int | None]]
    """By device row: operations and bytes of its operator."""


@dataclass(frozen=True)
class Conversion:
    """A Chakra graph, ready to be written."""

    metadata: dict[str, Any]
    coverage: Coverage
    node_count: int
    _parts: _Parts

    def nodes(self) -> Iterator[ChakraNode]:
        """In an order of execution."""
        return _NodeMaker(self._parts).nodes()

    def write(self, path: Path) -> None:
        """The file, complete or not at all."""
        with gc_paused():
            write_nodes(path, self.metadata, self.nodes())

    def trace(self) -> ChakraTrace:
        """The same in memory."""
        return ChakraTrace(attributes=self.metadata, nodes=list(self.nodes()))


def convert(
    timeline: Timeline,
    *,
    link: Link | None = None,
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
    _count_left_out(timeline, step, segments, dropped)
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
) -> dict[int, Communication]:
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
    found: dict[int, Communication] = {}
    for row, record in zip(rows.tolist(), record_rows.tolist(), strict=True):
        described = reader.describe(row, record)
        if core["kind"][row] != OPERATOR or described.has_size:
            found[row] = described
    return found


def _work(timeline: Timeline, link: Link | None, devices: Integers) -> dict[int, tuple[int | None, int | None]]:
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


def _count_left_out(timeline: Timeline, step: int | None, segments: HostSegments, dropped: dict[str, int]) -> None:
    core = timeline.core
    here = np.ones(len(timeline), bool) if step is None else core["step"] == step
    for what, count in (
        (
            "Python calls, whose time is in gaps and in the calls around them",
            int((here & (core["kind"] == PYTHON)).sum()),
        ),
        ("calls cut where the call they began in ended", segments.clipped),
    ):
        if count:
            dropped[what] = count


def _cover(
    parts: _Parts, host: Integers, devices: Integers, counts: dict[str, int], dropped: dict[str, int]
) -> Coverage:
    communications = parts.communications.values()
    nodes, link = parts.nodes, parts.link
    launched = int((parts.timeline.core["parent"][devices] >= 0).sum())
    return Coverage(
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
        calls_with_node=0 if link is None else _count_known(host, link),
        gaps=int((nodes.form == ScheduledNodes.GAP).sum()),
        delays=int((nodes.form == ScheduledNodes.DELAY).sum()),
        waits_cut=counts.pop("cut", 0),
        inferred=counts.pop("inferred", 0),
        dependencies=counts,
        dropped=dropped,
    )


def _count_known(host: Integers, link: Link) -> int:
    """Host rows that are a call of the graph."""
    is_call = np.zeros(len(link.timeline), bool)
    is_call[link.host_row[link.host_row >= 0]] = True
    return int(is_call[host].sum())


def _metadata(parts: _Parts, reader: CommunicationReader, coverage: Coverage, step: int | None) -> dict[str, Any]:
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


class _NodeMaker:
    """Scheduled nodes as Chakra's, numbered from 1 in their order."""

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        self._core = parts.timeline.core
        self._threads = _thread_numbers(parts)
        self._moved = _bytes_moved(parts.timeline)
        self._texts: dict[Arguments, TextArguments | None] = {}

    def nodes(self) -> Iterator[ChakraNode]:
        nodes, origin = self._parts.nodes, self._parts.origin_ns
        start, end = nodes.start_ns - origin, nodes.end_ns - origin
        start_us, end_us = (start + 500) // 1000, (end + 500) // 1000
        duration_us = np.where(nodes.form == ScheduledNodes.DEVICE, (end - start + 500) // 1000, end_us - start_us)
        bounds = np.searchsorted(nodes.after, np.arange(len(nodes.form) + 1)).tolist()
        before = (nodes.before + 1).tolist()
        columns = (nodes.form, nodes.row, nodes.thread, nodes.call_parent, start, end - start, start_us, duration_us)
        for place, (form, row, thread, above, start_ns, length_ns, begun_us, took_us) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            described = self._describe(form, row)
            described["attributes"] |= {"start_ns": start_ns, "duration_ns": length_ns}
            if thread >= 0:
                described["attributes"]["tid"] = self._threads[thread]
            yield ChakraNode(
                id=place + 1,
                ctrl_deps=(above + 1,) if above >= 0 else (),
                data_deps=tuple(before[bounds[place] : bounds[place + 1]]),
                start_us=begun_us,
                duration_us=took_us,
                **described,
            )

    def _describe(self, form: int, row: int) -> dict[str, Any]:
        """Name, type, arguments and attributes."""
        if form not in (ScheduledNodes.HEAD, ScheduledNodes.DEVICE):
            name = ScheduledNodes.NAMES[form]
            kind = METADATA if form == ScheduledNodes.ROOT else COMPUTE
            return {"name": name, "type": kind, "attributes": {"is_cpu_op": True, "kind": name}}
        communication = self._parts.communications.get(row)
        described = self._describe_call(row) if form == ScheduledNodes.HEAD else self._describe_device_event(row)
        described["name"] = self._parts.timeline.texts[self._core["name"][row]]
        described["type"] = COMPUTE if communication is None else communication.type
        if communication is not None:
            described["attributes"] |= communication.attributes
        elif form == ScheduledNodes.DEVICE:
            operations, size = self._parts.work.get(row, (None, None))
            size = self._moved.get(row) if size is None else size
            found = {"num_ops": operations, "tensor_size": size}
            described["attributes"] |= {name: value for name, value in found.items() if value is not None}
        return described

    def _describe_call(self, row: int) -> dict[str, Any]:
        """What the timeline and the execution trace know of a call on the host."""
        core, link = self._core, self._parts.link
        kind, correlation = int(core["kind"][row]), int(core["correlation"][row])
        attributes: dict[str, Any] = {"is_cpu_op": True, "kind": KINDS[kind]}
        attributes["call_duration_ns"] = int(core["end_ns"][row] - core["start_ns"][row])
        place = -1 if link is None or kind == RUNTIME else link.node_of_row[row]
        if link is None or place < 0:
            if kind == RUNTIME and correlation >= 0:
                attributes["correlation"] = correlation
            return {"attributes": attributes}
        node = link.graph.nodes[place]
        attributes["et_id"] = node.id
        attributes |= {name: getattr(node, name) for name in _NODE_FIELDS}
        if node.kernel_file:
            attributes["kernel_file"] = node.kernel_file
        inputs, outputs = self._text_arguments(node, node.inputs), self._text_arguments(node, node.outputs)
        if inputs is None and outputs is None:
            return {"attributes": attributes}
        return {"attributes": attributes, "inputs": inputs or EMPTY_LISTS, "outputs": outputs or EMPTY_LISTS}

    def _text_arguments(self, node: Node, arguments: Arguments) -> TextArguments | None:
        """Decoded once for all nodes that share them."""
        if arguments not in self._texts:
            if len(self._texts) >= _MOST_KEPT:
                self._texts.clear()
            self._texts[arguments] = texts_of(node, arguments)
        return self._texts[arguments]

    def _describe_device_event(self, row: int) -> dict[str, Any]:
        core, link = self._core, self._parts.link
        numbers = {name: int(core[name][row]) for name in ("correlation", "stream", "device")}
        category = CATEGORIES[core["category"][row]]
        attributes = {"is_cpu_op": False, "kind": "device", **numbers, "category": category}
        if link is not None and link.node_of_row[row] >= 0:
            attributes["et_id"] = link.graph.nodes[link.node_of_row[row]].id
        return {"attributes": attributes}


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
