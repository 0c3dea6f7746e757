"""Scheduled nodes as bytes: pieces of many nodes at a time, each made as a column and put together once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from stepscope.formats.chakra import COMPUTE, METADATA, encode_number, messages, set_attribute
from stepscope.formats.classify import CATEGORIES
from stepscope.formats.graph import Node, wrong_arguments
from stepscope.formats.tensors import Arguments
from stepscope.formats.timeline import ANNOTATION, OPERATOR, RUNTIME, Integers, Timeline
from stepscope.traces.chakra_graphs import Communication
from stepscope.traces.chakra_schedule import HostTiles, ScheduledNodes
from stepscope.traces.link import Link

ID, TYPE, START, DURATION = b"\x08", b"\x18", b"\x30", b"\x38"
"""Tags of fields that hold one number: 1, 3, 6 and 7."""
NAME, CTRL_DEPS, DATA_DEPS, INPUTS, OUTPUTS, ATTRIBUTE = b"\x12", b"\x22", b"\x2a", b"\x42", b"\x4a", b"\x52"
"""Tags of fields that hold a text, packed numbers or a message: 2, 4, 5, 8, 9 and 10."""
_INT64_VALUE = b"\x48"


class Ragged(NamedTuple):
    """A column of fields: the bytes of each from the left, and how many of them count."""

    data: Integers
    length: Integers

    def only(self, wanted: Integers) -> Ragged:
        """Nothing where it is not wanted."""
        return Ragged(self.data, self.length * wanted)


def encode_numbers(values: Integers) -> Ragged:
    """`encode_number` of a whole column; negative numbers as 64-bit two's complement."""
    left = np.asarray(values, np.int64).astype(np.uint64)
    length = np.ones(len(left), np.int64)
    width = max(1, -(-int(left.max()).bit_length() // 7)) if len(left) else 1
    data = np.empty((len(left), width), np.uint8)
    for place in range(width):
        data[:, place] = left & np.uint64(0x7F)
        left = left >> np.uint64(7)
        more = left > 0
        data[:, place] |= more.view(np.uint8) << np.uint8(7)
        length += more
    return Ragged(data, length)


def behind(prefix: bytes, column: Ragged) -> Ragged:
    """The same bytes before each."""
    head = np.broadcast_to(np.frombuffer(prefix, np.uint8), (len(column.length), len(prefix)))
    return Ragged(np.concatenate((head, column.data), axis=1), column.length + len(prefix))


def with_length(tag: bytes, column: Ragged) -> Ragged:
    """Fields of less than 128 bytes, each behind the tag and its length."""
    data = np.empty((len(column.length), column.data.shape[1] + 2), np.uint8)
    data[:, 0], data[:, 1], data[:, 2:] = ord(tag), column.length, column.data
    return Ragged(data, column.length + 2)


def number_attributes(name: str, values: Integers) -> Ragged:
    """An int64 attribute of this (short) name for each number."""
    inner = b"\x0a" + encode_number(len(name)) + name.encode() + _INT64_VALUE
    return with_length(ATTRIBUTE, behind(inner, encode_numbers(values)))


def pick(texts: list[bytes], which: Integers) -> Ragged:
    """A column of a few short texts that come again and again."""
    data = np.zeros((len(texts), max(map(len, texts))), np.uint8)
    for row, text in zip(data, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return Ragged(data[which], np.array([len(text) for text in texts])[which])


def joined(*columns: Ragged) -> tuple[list[bytes], Integers]:
    """The fields that stand side by side in one piece, and its length."""
    data = np.concatenate([column.data for column in columns], axis=1)
    counting = np.concatenate([_counting(column) for column in columns], axis=1)
    length = np.sum([column.length for column in columns], axis=0)
    return cut(data[counting], length), length


def packed(column: Ragged, bounds: Integers) -> tuple[Integers, Integers]:
    """The bytes of all numbers in a row, and how many lie between each bound and the next."""
    end = np.concatenate(([0], np.cumsum(column.length)))[bounds]
    return column.data[_counting(column)], end[1:] - end[:-1]


def spread(data: Integers, length: Integers) -> Ragged:
    """Bytes in a row as a column, by the length of each field; for short ones."""
    column = Ragged(np.zeros((len(length), max(1, int(length.max(initial=0)))), np.uint8), length)
    column.data[_counting(column)] = data
    return column


def _counting(column: Ragged) -> Integers:
    """Which of the bytes count."""
    return np.arange(column.data.shape[1]) < column.length[:, None]


def cut(data: Integers, length: Integers) -> list[bytes]:
    """Bytes in a row as pieces of these lengths."""
    row, ends = data.tobytes(), length.cumsum().tolist()
    return [row[begin:end] for begin, end in pairwise((0, *ends))]


def text_field(tag: bytes, text: bytes) -> bytes:
    return tag + encode_number(len(text)) + text


def arguments_field(tag: bytes, values: Any, shapes: Any, types: Any) -> bytes:
    """Inputs or outputs: three texts, given as anything that holds bytes."""
    first, second, third = len(values), len(shapes), len(types)
    head, middle, last = b"\x0a" + encode_number(first), b"\x12" + encode_number(second), b"\x1a" + encode_number(third)
    size = len(head) + first + len(middle) + second + len(last) + third
    return b"".join((tag, encode_number(size), head, values, middle, shapes, last, types))


BLOCK = 1 << 15
"""Nodes that are encoded together: what one of them needs stays in the processor's caches."""
_MOST_KEPT = 1 << 16
_MUCH_BYTES = 64
_KIND_NAMES = {OPERATOR: "operator", RUNTIME: "runtime", ANNOTATION: "annotation"}
_COMPUTE, _METADATA = TYPE + bytes([COMPUTE]), TYPE + bytes([METADATA])


@dataclass(frozen=True)
class Parts:
    """What the encoder needs, by node where it says so."""

    timeline: Timeline
    link: Link | None
    tiles: HostTiles
    nodes: ScheduledNodes
    origin_ns: int
    communications: dict[int, Communication]
    work: dict[int, tuple[int | None, int | None]]
    """By device row: operations and bytes of its operator."""


class Encoder:
    """Nodes in their order, numbered from 1. Attributes that many nodes have alike are encoded once."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._attributes = _Attributes()
        self._fields = _Fields(parts, self._attributes)

    def blocks(self) -> Iterator[bytes]:
        """Many nodes each, every one behind its length."""
        for columns in self._columns(framed=True):
            count = len(columns)
            pieces = [b""] * (count * len(columns[0]))
            for place, column in enumerate(columns):
                pieces[place::count] = column
            yield b"".join(pieces)

    def frames(self) -> Iterator[bytes]:
        """Node by node."""
        for columns in self._columns(framed=False):
            yield from map(b"".join, zip(*columns, strict=True))

    def _columns(self, *, framed: bool) -> Iterator[list[list[bytes]]]:
        """What nodes consist of, in the order in which it is written. `framed`: behind their length."""
        for begin in range(0, len(self.parts.nodes.form), BLOCK):
            yield self._block(slice(begin, begin + BLOCK), framed=framed)

    def _block(self, part: slice, *, framed: bool) -> list[list[bytes]]:
        """Id (behind the length if `framed`); name and type; dependencies and times; attributes in two pieces."""
        nodes, origin = self.parts.nodes, self.parts.origin_ns
        form = nodes.form[part]
        start, end = nodes.start_ns[part] - origin, nodes.end_ns[part] - origin
        start_us, end_us = (start + 500) // 1000, (end + 500) // 1000
        duration_us = np.where(form == ScheduledNodes.DEVICE, (end - start + 500) // 1000, end_us - start_us)
        times = (behind(START, encode_numbers(start_us)), behind(DURATION, encode_numbers(duration_us)))
        pieces, sizes = zip(
            _with_sizes(self._names(part)),
            *_dependencies_and(times, nodes, part),
            _with_sizes(self._fields.of(form, nodes.row[part])),
            joined(
                number_attributes("start_ns", start),
                number_attributes("duration_ns", end - start),
                pick(self._threads, nodes.thread[part]),
            ),
            strict=True,
        )
        number = behind(ID, encode_numbers(np.arange(part.start, part.start + len(form)) + 1))
        size = encode_numbers(np.sum(sizes, axis=0) + number.length)
        first, _ = joined(size, number) if framed else joined(number)
        return [first, *pieces]

    def _names(self, part: slice) -> list[bytes]:
        """With the type, which comes behind."""
        nodes, parts = self.parts.nodes, self.parts
        form, row = nodes.form[part], nodes.row[part]
        is_event = (form == ScheduledNodes.HEAD) | (form == ScheduledNodes.DEVICE)
        known, texts = self._texts, parts.timeline.texts
        name = parts.timeline.core["name"][row] % max(1, len(texts))
        found = [known[code] for code in np.where(is_event, name, len(texts) + form).tolist()]
        if parts.communications:
            moves = np.isin(row, list(parts.communications)) & is_event
            for place in np.flatnonzero(moves).tolist():
                kind = parts.communications[int(row[place])].type
                found[place] = text_field(NAME, texts[int(name[place])].encode()) + TYPE + bytes([kind])
        return found

    @cached_property
    def _texts(self) -> list[bytes]:
        """Names of the timeline, then those of what is no event."""
        names = [text_field(NAME, text.encode()) + _COMPUTE for text in self.parts.timeline.texts]
        for form, text in enumerate(ScheduledNodes.NAMES):
            kind = _METADATA if form == ScheduledNodes.ROOT else _COMPUTE
            names.append(text_field(NAME, text.encode()) + kind)
        return names

    @cached_property
    def _threads(self) -> list[bytes]:
        """By thread; the last, −1, is none."""
        numbers = thread_numbers(self.parts)
        threads = range(len(self.parts.timeline.threads))
        return [*(self._attributes.one("tid", numbers[thread]) for thread in threads), b""]


def _with_sizes(pieces: list[bytes]) -> tuple[list[bytes], Integers]:
    return pieces, np.fromiter(map(len, pieces), np.int64, len(pieces))


def _dependencies_and(
    times: tuple[Ragged, ...], nodes: ScheduledNodes, part: slice
) -> list[tuple[list[bytes], Integers]]:
    """The enclosing call, what is waited for, and the times: in one piece where no node waits for very much."""
    above = nodes.call_parent[part]
    bounds = np.searchsorted(nodes.after, np.arange(part.start, part.start + len(above) + 1))
    waited = encode_numbers(nodes.before[bounds[0] : bounds[-1]] + 1)
    numbers, size = packed(waited, bounds - bounds[0])
    heads = (
        with_length(CTRL_DEPS, encode_numbers(above + 1)).only(above >= 0),
        behind(DATA_DEPS, encode_numbers(size)).only(size > 0),
    )
    if size.max(initial=0) <= _MUCH_BYTES:
        return [joined(*heads, spread(numbers, size), *times)]
    return [joined(*heads), (cut(numbers, size), size), joined(*times)]


def thread_numbers(parts: Parts) -> dict[int, int]:
    """The execution trace's numbers of the threads; others get free ones."""
    numbers: dict[int, int] = {}
    link = parts.link
    if link is not None:
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


class _Attributes:
    """Attributes that come again, encoded once: a message is the row of its fields."""

    def __init__(self) -> None:
        self._node = messages().node
        self._one: dict[tuple[str, Any], bytes] = {}

    def one(self, name: str, value: Any) -> bytes:
        key = (name, value)
        found = self._one.get(key)
        if found is None:
            message = self._node()
            set_attribute(message.attr.add(), name, value)
            found = self._one[key] = bytes(message.SerializeToString())
        return found

    def several(self, **attributes: Any) -> bytes:
        """Attributes that come together."""
        return b"".join(self.one(name, value) for name, value in attributes.items())


class _Fields:
    """Arguments and attributes of nodes, but for their times and threads."""

    def __init__(self, parts: Parts, attributes: _Attributes) -> None:
        self.parts = parts
        self._one = attributes.one
        self._several = attributes.several
        self._others = [attributes.several(is_cpu_op=True, kind=kind) for kind in ScheduledNodes.NAMES]
        self._moved = _bytes_moved(parts.timeline)
        self._kinds = {kind: attributes.several(kind=name, is_cpu_op=True) for kind, name in _KIND_NAMES.items()}
        self._signatures: dict[tuple[int, int, str], bytes] = {}
        self._queues: dict[tuple[int, int, int], bytes] = {}
        self._arguments: dict[tuple[Arguments, Arguments], bytes] = {}

    def of(self, form: Integers, row: Integers) -> list[bytes]:
        others = self._others
        found = [others[one] for one in form.tolist()]
        for wanted, encode in ((ScheduledNodes.HEAD, self._calls), (ScheduledNodes.DEVICE, self._devices)):
            places = np.flatnonzero(form == wanted)
            for place, fields in zip(places.tolist(), encode(row[places]), strict=True):
                found[place] = fields
        return found

    def _calls(self, rows: Integers) -> Iterator[bytes]:
        """Calls on the host: their attributes, and what the execution trace knows of them."""
        core, link, kinds = self.parts.timeline.core, self.parts.link, self._kinds
        kind = core["kind"][rows]
        correlation = core["correlation"][rows]
        durations, _ = joined(
            number_attributes("call_duration_ns", core["end_ns"][rows] - core["start_ns"][rows]),
            number_attributes("correlation", correlation).only((kind == RUNTIME) & (correlation >= 0)),
        )
        if link is None:
            place = np.full(len(rows), -1)
            numbers = durations
        else:
            place = np.where(kind == RUNTIME, -1, link.node_of_row[rows])
            numbers, _ = joined(*(number_attributes(name, column[place]) for name, column in self._ids.items()))
        columns = (rows.tolist(), kind.tolist(), place.tolist(), numbers, durations)
        for row, one_kind, here, ids, duration in zip(*columns, strict=True):
            fields = kinds[one_kind] + self._communication(row)
            if link is None or here < 0:
                yield fields + duration
                continue
            node = link.graph.nodes[here]
            if node.kernel_file:
                fields += self._one("kernel_file", node.kernel_file)
            yield b"".join((self._arguments_of(node), fields, ids, self._signature(node), duration))

    @cached_property
    def _ids(self) -> dict[str, Integers]:
        """Columns of the linked graph, by the name of the attribute."""
        assert self.parts.link is not None
        graph = self.parts.link.graph
        names = (("et_id", "id"), ("rf_id", "rf_id"), ("seq_id", "seq_id"), ("fw_parent", "fw_parent"))
        return {name: graph.column(column) for name, column in names}

    def _signature(self, node: Node) -> bytes:
        key = (node.scope, node.fw_tid, node.op_schema)
        found = self._signatures.get(key)
        if found is None:
            found = self._several(scope=node.scope, fw_tid=node.fw_tid, op_schema=node.op_schema)
            self._signatures[key] = found
        return found

    def _arguments_of(self, node: Node) -> bytes:
        key = (node.inputs, node.outputs)
        found = self._arguments.get(key)
        if found is None:
            if len(self._arguments) >= _MOST_KEPT:
                self._arguments.clear()
            found = self._arguments[key] = encode_arguments(node)
        return found

    def _devices(self, rows: Integers) -> Iterator[bytes]:
        """Work on a device."""
        core, link, communications = self.parts.timeline.core, self.parts.link, self.parts.communications
        place = np.full(len(rows), -1) if link is None else link.node_of_row[rows]
        correlations, _ = joined(number_attributes("correlation", core["correlation"][rows]))
        ids = correlations if link is None else joined(number_attributes("et_id", self._ids["et_id"][place]))[0]
        queue = (core[name][rows].tolist() for name in ("stream", "device", "category"))
        for row, correlation, key, here, number in zip(
            rows.tolist(), correlations, zip(*queue, strict=True), place.tolist(), ids, strict=True
        ):
            fields = correlation + self._queue(key)
            if here >= 0:
                fields += number
            yield fields + (self._communication(row) if row in communications else self._work(row))

    def _queue(self, key: tuple[int, int, int]) -> bytes:
        found = self._queues.get(key)
        if found is None:
            stream, device, category = key
            found = self._queues[key] = self._several(
                is_cpu_op=False, kind="device", stream=stream, device=device, category=CATEGORIES[category]
            )
        return found

    def _work(self, row: int) -> bytes:
        operations, size = self.parts.work.get(row, (None, None))
        size = self._moved.get(row) if size is None else size
        fields = b"" if operations is None else self._one("num_ops", operations)
        return fields if size is None else fields + self._one("tensor_size", size)

    def _communication(self, row: int) -> bytes:
        found = self.parts.communications.get(row)
        return b"" if found is None else b"".join(self._one(*pair) for pair in found.attributes.items())


def _bytes_moved(timeline: Timeline) -> dict[int, int]:
    """By row, of copies and fills."""
    block = timeline.blocks.get("transfer")
    if block is None or "bytes" not in block.columns:
        return {}
    pairs = zip(block.rows.tolist(), block.columns["bytes"].tolist(), strict=True)
    return {row: size for row, size in pairs if size >= 0}


def encode_arguments(node: Node) -> bytes:
    """Inputs and outputs; nothing where it has neither. BadInputError where they cannot be read."""
    try:
        inputs, outputs = node.inputs.raw_texts(), node.outputs.raw_texts()
    except ValueError as error:
        raise wrong_arguments(node, error) from error
    if len(inputs[2]) <= 2 and len(outputs[2]) <= 2:
        return b""
    return arguments_field(INPUTS, *inputs) + arguments_field(OUTPUTS, *outputs)
