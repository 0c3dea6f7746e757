"""A timeline as a Chakra graph that can be run again: every event, its time, and what it waited for.

What is written, and how it is to be read:

- Host threads are cut into pieces without holes (see `host_tiles`). A call's node holds the time until the first call
  inside it; the rest of its own time, and the gaps between calls, are compute nodes of their own. So the nodes of a
  thread follow each other and their durations add up to its time. `call_duration_ns` is the whole call.
- Every device event is a node. It waits for the piece of host time that ended before it began, up to the end of its
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

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.errors import BadInputError, UsageError
from stepscope.traces.chakra.collectives import SIZE_CONVENTION, Communication, CommunicationReader
from stepscope.traces.chakra.files import VERSION, ChakraTrace, encode_metadata, set_attribute, write_frames
from stepscope.traces.chakra.host_tiles import HostTiles, cut_host_time
from stepscope.traces.chakra.schema import COMPUTE, METADATA, messages
from stepscope.traces.chakra.waits import ScheduledNodes, Sources, schedule
from stepscope.traces.chakra.wire import (
    CTRL_DEPS,
    DATA_DEPS,
    DURATION,
    ID,
    INPUTS,
    NAME,
    OUTPUTS,
    START,
    TYPE,
    arguments_field,
    encode_numbers,
    number_attributes,
    packed_field,
    text_field,
)
from stepscope.traces.classify import CATEGORIES, COMMUNICATION
from stepscope.traces.dependencies import RowEdges
from stepscope.traces.gc_pause import gc_paused
from stepscope.traces.graphs.graph import Node, wrong_arguments
from stepscope.traces.graphs.operator_work import bytes_of_node, count_of_node, count_operations
from stepscope.traces.timeline import ANNOTATION, DEVICE_KINDS, OPERATOR, PYTHON, RUNTIME, Timeline

if TYPE_CHECKING:
    from stepscope.traces.link import Link
    from stepscope.traces.timeline import Integers

MINIMUM_SHARE = 0.5
_KIND_NAMES = {OPERATOR: "operator", RUNTIME: "runtime", ANNOTATION: "annotation"}


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the timeline is in the graph, and how firmly."""

    host_events: int
    device_events: int
    device_events_with_launch: int
    device_events_with_operator: int
    """Of the graph that was linked; 0 without one."""
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
    """Of the dependencies that follow, those that only the order in time speaks for."""
    dependencies: dict[str, int]
    """By kind."""
    dropped: dict[str, int]
    """Dependencies that were not written, and events that are in no node of their own."""

    @property
    def launch_share(self) -> float | None:
        """Share of device events whose launch is known; None without device events."""
        return self.device_events_with_launch / self.device_events if self.device_events else None


@dataclass(frozen=True)
class Conversion:
    """A Chakra graph, ready to be written."""

    metadata: dict[str, Any]
    coverage: Coverage
    node_count: int
    _parts: _Parts

    def frames(self) -> Iterator[bytes]:
        """Nodes as encoded messages, in an order of execution."""
        return _encode(self._parts)

    def write(self, path: Path) -> None:
        """The file, complete or not at all."""
        with gc_paused():
            write_frames(Path(path), encode_metadata(VERSION, self.metadata), self.frames())

    def trace(self) -> ChakraTrace:
        """The same in memory."""
        from stepscope.traces.chakra.files import parse_node

        return ChakraTrace(attributes=self.metadata, nodes=[parse_node(frame) for frame in self.frames()])


@dataclass(frozen=True)
class _Parts:
    """What the encoder needs, by node where it says so."""

    timeline: Timeline
    link: Link | None
    tiles: HostTiles
    nodes: ScheduledNodes
    origin_ns: int
    communications: dict[int, Communication]
    work: dict[int, tuple[int | None, int | None]]
    """By device row: operations and bytes of its operator."""


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
    events have a launch.
    """
    host, devices = _select(timeline, step)
    if not len(host) and not len(devices):
        raise UsageError(f"there is nothing to convert in step {step}" if step is not None else "the timeline is empty")
    reader = CommunicationReader(timeline, link)
    with gc_paused():
        tiles = cut_host_time(timeline, host)
        sources = Sources(timeline=timeline, tiles=tiles, devices=devices, link=link, edges=edges)
        nodes, counts, dropped = schedule(sources)
        parts = _Parts(
            timeline=timeline,
            link=link,
            tiles=tiles,
            nodes=nodes,
            origin_ns=min(0, int(nodes.start_ns.min())),
            communications=_communications(timeline, reader, host, devices),
            work=_work(timeline, link, devices),
        )
    _count_left_out(timeline, step, tiles, dropped)
    coverage = _cover(parts, host, devices, counts, dropped)
    share = coverage.launch_share
    if share is not None and share < minimum_share:
        raise BadInputError(
            f"only {coverage.device_events_with_launch} of {coverage.device_events} device events have a launch in the "
            f"trace, at least {minimum_share:.0%} are needed: their place in the graph would be a guess",
            hint="record with ProfilerActivity.CPU and ProfilerActivity.CUDA together",
            where=str(timeline.metadata.get("source") or "timeline"),
        )
    return Conversion(
        metadata=_metadata(parts, reader, coverage, step),
        coverage=coverage,
        node_count=len(nodes.start_ns),
        _parts=parts,
    )


def _select(timeline: Timeline, step: int | None) -> tuple[Integers, Integers]:
    import numpy as np

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
    import numpy as np

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
    import numpy as np

    from stepscope.traces.enclosing import climb

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


def _count_left_out(timeline: Timeline, step: int | None, tiles: HostTiles, dropped: dict[str, int]) -> None:
    import numpy as np

    core = timeline.core
    here = np.ones(len(timeline), bool) if step is None else core["step"] == step
    for what, count in (
        (
            "Python calls, whose time is in gaps and in the calls around them",
            int((here & (core["kind"] == PYTHON)).sum()),
        ),
        ("calls cut where the call they began in ended", tiles.clipped),
    ):
        if count:
            dropped[what] = count


def _cover(
    parts: _Parts, host: Integers, devices: Integers, counts: dict[str, int], dropped: dict[str, int]
) -> Coverage:
    import numpy as np

    communications = parts.communications.values()
    nodes, link = parts.nodes, parts.link
    return Coverage(
        host_events=len(host),
        device_events=len(devices),
        device_events_with_launch=int((parts.timeline.core["parent"][devices] >= 0).sum()),
        device_events_with_operator=0 if link is None else int((link.node_of_row[devices] >= 0).sum()),
        communication=len(communications),
        communication_with_type=sum(
            "comm_type" in one.attributes or "comm_src" in one.attributes for one in communications
        ),
        communication_with_size=sum(one.has_size for one in communications),
        communication_with_group=sum(one.ranks is not None for one in communications),
        calls_with_node=0 if link is None else len(np.intersect1d(host, link.host_row)),
        gaps=int((nodes.form == ScheduledNodes.GAP).sum()),
        delays=int((nodes.form == ScheduledNodes.DELAY).sum()),
        waits_cut=counts.pop("cut", 0),
        inferred=counts.pop("inferred", 0),
        dependencies=counts,
        dropped=dropped,
    )


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


class _Encoder:
    """Nodes as bytes. Attributes that many nodes have alike are encoded once: a message is the row of its fields."""

    def __init__(self, parts: _Parts) -> None:
        self.parts = parts
        self._node = messages().node
        self._one: dict[tuple[str, Any], bytes] = {}
        self._several: dict[tuple[Any, ...], bytes] = {}
        core = parts.timeline.core
        # Lists: reading single cells of arrays is slow.
        self._kind = core["kind"].tolist()
        self._place = [-1] * len(self._kind) if parts.link is None else parts.link.node_of_row.tolist()
        self._device = {name: core[name].tolist() for name in ("stream", "device", "category")}
        self._correlation = number_attributes("correlation", encode_numbers(core["correlation"]))
        self._moved = _bytes_moved(parts.timeline)
        self._ids: dict[str, list[bytes]] = {}
        if parts.link is not None:
            graph = parts.link.graph
            for name, column in (("et_id", "id"), ("rf_id", "rf_id"), ("seq_id", "seq_id")):
                self._ids[name] = number_attributes(name, encode_numbers(graph.column(column)))

    def one(self, name: str, value: Any) -> bytes:
        """An attribute."""
        key = (name, value)
        found = self._one.get(key)
        if found is None:
            message = self._node()
            set_attribute(message.attr.add(), name, value)
            found = self._one[key] = bytes(message.SerializeToString())
        return found

    def several(self, **attributes: Any) -> bytes:
        """Attributes that come together."""
        key = tuple(attributes.values())
        found = self._several.get(key)
        if found is None:
            found = self._several[key] = b"".join(self.one(name, value) for name, value in attributes.items())
        return found

    def head(self, row: int) -> bytes:
        """A call on the host: its attributes, and what the execution trace knows of it."""
        kind, place = self._kind[row], self._place[row]
        fields = self.several(kind=_KIND_NAMES.get(kind, "host"), is_cpu_op=True) + self._communication(row)
        link = self.parts.link
        if link is None or place < 0 or kind == RUNTIME:
            return fields
        node = link.graph.nodes[place]
        ids = self._ids
        if node.kernel_file:
            fields += self.one("kernel_file", node.kernel_file)
        return b"".join(
            (
                _arguments(node),
                fields,
                ids["et_id"][place],
                ids["rf_id"][place],
                ids["seq_id"][place],
                self.several(fw_parent=node.fw_parent, scope=node.scope, fw_tid=node.fw_tid, op_schema=node.op_schema),
            )
        )

    def device(self, row: int) -> bytes:
        """Work on a device."""
        device = self._device
        fields = self._correlation[row] + self.several(
            is_cpu_op=False,
            kind="device",
            stream=device["stream"][row],
            device=device["device"][row],
            category=CATEGORIES[device["category"][row]],
        )
        if self._place[row] >= 0:
            fields += self._ids["et_id"][self._place[row]]
        if row in self.parts.communications:
            return fields + self._communication(row)
        operations, size = self.parts.work.get(row, (None, None))
        size = self._moved.get(row) if size is None else size
        if operations is not None:
            fields += self.one("num_ops", operations)
        if size is not None:
            fields += self.one("tensor_size", size)
        return fields

    def _communication(self, row: int) -> bytes:
        found = self.parts.communications.get(row)
        return b"" if found is None else b"".join(self.one(*pair) for pair in found.attributes.items())


def _bytes_moved(timeline: Timeline) -> dict[int, int]:
    """By row, of copies and fills."""
    block = timeline.blocks.get("transfer")
    if block is None or "bytes" not in block.columns:
        return {}
    pairs = zip(block.rows.tolist(), block.columns["bytes"].tolist(), strict=True)
    return {row: size for row, size in pairs if size >= 0}


def _arguments(node: Node) -> bytes:
    try:
        inputs, outputs = node.inputs.raw_texts(), node.outputs.raw_texts()
    except ValueError as error:
        raise wrong_arguments(node, error) from error
    if len(inputs[2]) <= 2 and len(outputs[2]) <= 2:
        return b""
    return arguments_field(INPUTS, *inputs) + arguments_field(OUTPUTS, *outputs)


def _thread_numbers(parts: _Parts) -> dict[int, int]:
    """The execution trace's numbers of the threads; others get free ones."""
    numbers: dict[int, int] = {}
    link = parts.link
    if link is not None:
        import numpy as np

        places = np.flatnonzero(link.host_row >= 0)
        threads, first = np.unique(parts.timeline.core["thread"][link.host_row[places]], return_index=True)
        for thread, place in zip(threads.tolist(), places[first].tolist(), strict=True):
            numbers[thread] = link.graph.nodes[place].tid
    free = max(numbers.values(), default=0) + 1
    for thread in range(len(parts.timeline.threads)):
        if thread not in numbers:
            numbers[thread] = free
            free += 1
    return numbers


class _Columns(NamedTuple):
    """Fields of all nodes, encoded."""

    number: list[bytes]
    start: list[bytes]
    duration: list[bytes]
    start_ns: list[bytes]
    duration_ns: list[bytes]
    data_deps: list[bytes]
    ctrl_deps: list[bytes]


def _columns(parts: _Parts) -> _Columns:
    import numpy as np

    nodes = parts.nodes
    count = len(nodes.form)
    start, end = nodes.start_ns - parts.origin_ns, nodes.end_ns - parts.origin_ns
    start_us, end_us = (start + 500) // 1000, (end + 500) // 1000
    on_device = nodes.form == ScheduledNodes.DEVICE
    duration_us = np.where(on_device, (end - start + 500) // 1000, end_us - start_us)
    numbers = encode_numbers(np.arange(1, count + 1))
    bounds = np.searchsorted(nodes.after, np.arange(count + 1)).tolist()
    waited = [numbers[place] for place in nodes.before.tolist()]
    above = nodes.call_parent.tolist()
    return _Columns(
        number=[ID + number for number in numbers],
        start=[START + number for number in encode_numbers(start_us)],
        duration=[DURATION + number for number in encode_numbers(duration_us)],
        start_ns=number_attributes("start_ns", encode_numbers(start)),
        duration_ns=number_attributes("duration_ns", encode_numbers(end - start)),
        data_deps=[packed_field(DATA_DEPS, waited[begin:last]) for begin, last in pairwise(bounds)],
        ctrl_deps=[packed_field(CTRL_DEPS, (numbers[place],)) if place >= 0 else b"" for place in above],
    )


def _encode(parts: _Parts) -> Iterator[bytes]:
    """Nodes in their final order, numbered from 1."""
    nodes, timeline = parts.nodes, parts.timeline
    core = timeline.core
    encoder = _Encoder(parts)
    head, device, root = ScheduledNodes.HEAD, ScheduledNodes.DEVICE, ScheduledNodes.ROOT
    names = core["name"].tolist()
    texts = [text_field(NAME, text.encode()) for text in timeline.texts]
    forms = [text_field(NAME, text.encode()) for text in ScheduledNodes.NAMES]
    others = [encoder.several(is_cpu_op=True, kind=kind) for kind in ScheduledNodes.NAMES]
    threads = {-1: b"", **{thread: encoder.one("tid", number) for thread, number in _thread_numbers(parts).items()}}
    calls = number_attributes("call_duration_ns", encode_numbers(core["end_ns"] - core["start_ns"]))
    rows = zip(nodes.form.tolist(), nodes.row.tolist(), nodes.thread.tolist(), *_columns(parts), strict=True)
    compute, metadata = TYPE + bytes([COMPUTE]), TYPE + bytes([METADATA])
    for form, row, thread, number, start, duration, start_ns, duration_ns, data_deps, ctrl_deps in rows:
        kind = compute
        if form == head:
            name, fields = texts[names[row]], encoder.head(row) + calls[row]
        elif form == device:
            name, fields = texts[names[row]], encoder.device(row)
        else:
            name, fields = forms[form], others[form]
            kind = metadata if form == root else compute
        if row in parts.communications and form in (head, device):
            kind = TYPE + bytes([parts.communications[row].type])
        yield b"".join(
            (number, name, kind, ctrl_deps, data_deps, start, duration, fields, start_ns, duration_ns, threads[thread])
        )
