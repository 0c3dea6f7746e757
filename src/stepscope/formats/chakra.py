"""Chakra files (.et): a row of messages, each behind its length, read and written one by one.

The format has no count, no index and no checksum. A file that was cut ends inside a message; that is told with the
byte, and the nodes before it are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from json import JSONDecodeError, JSONDecoder
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from stepscope.core.errors import BadInputError, MissingDependencyError, first_line
from stepscope.core.files import output_file
from stepscope.formats.source import Source, gc_paused, read_bounded, read_head
from stepscope.formats.tensors import Arguments

INVALID, METADATA, MEMORY_LOAD, MEMORY_STORE, COMPUTE, SEND, RECEIVE, COLLECTIVE = range(8)
NODE_TYPES = (
    "INVALID", "METADATA", "MEM_LOAD", "MEM_STORE", "COMP", "COMM_SEND", "COMM_RECV", "COMM_COLL", "STORAGE", "BATCH",
    "CHECKPOINT",
)  # fmt: skip
"""Without the `_NODE` that each ends in."""
COLLECTIVE_TYPES = (
    "ALL_REDUCE", "REDUCE", "ALL_GATHER", "GATHER", "SCATTER", "BROADCAST", "ALL_TO_ALL", "REDUCE_SCATTER",
    "REDUCE_SCATTER_BLOCK", "BARRIER",
)  # fmt: skip
SCALARS = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32",
    "sfixed64", "bool", "string", "bytes",
)  # fmt: skip
"""Kinds of an attribute in the order of their field numbers: a value from 3 on, its list one further."""

ATTRIBUTE_FIELDS = {
    "is_cpu_op": "bool_val",
    "num_ops": "int64_val",
    "tensor_size": "uint64_val",
    "tensor_loc": "int32_val",
    "comm_type": "int64_val",
    "comm_priority": "int32_val",
    "comm_size": "int64_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
    "pg_name": "string_val",
}
"""The field each attribute must be written to: feeders read that one and no other."""


class Messages(NamedTuple):
    """Classes of the messages that a file is made of."""

    metadata: Any
    node: Any
    attribute: Any


@cache
def messages() -> Messages:
    """The classes, made on first use."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise MissingDependencyError(
            "reading and writing Chakra files needs protobuf", hint="pip install 'stepscope[read]'"
        ) from None
    file = _describe(descriptor_pb2)
    # A pool of its own: the default one may hold Chakra's own definition under the same names.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)

    def made(name: str) -> Any:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))

    return Messages(made("GlobalMetadata"), made("Node"), made("AttributeProto"))


def _describe(descriptor_pb2: Any) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="chakra_et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    types = file.enum_type.add(name="NodeType")
    for number, name in enumerate(NODE_TYPES):
        types.value.add(name=f"{name}_NODE", number=number)
    field_type = descriptor_pb2.FieldDescriptorProto

    def add(message: str, /, **fields: str) -> Any:
        """A message of fields numbered in their order; a star stands behind the kind of those that are lists."""
        made = file.message_type.add(name=message)
        for number, (name, starred) in enumerate(fields.items(), 1):
            kind = starred.removesuffix("*")
            field = made.field.add(name=name, number=number)
            field.label = field_type.LABEL_OPTIONAL if kind == starred else field_type.LABEL_REPEATED
            if kind in SCALARS:
                field.type = getattr(field_type, f"TYPE_{kind.upper()}")
            else:
                field.type = field_type.TYPE_ENUM if kind == types.name else field_type.TYPE_MESSAGE
                field.type_name = f".ChakraProtoMsg.{kind}"
        return made

    values: dict[str, str] = {}
    for scalar in SCALARS:
        values |= {f"{scalar}_val": scalar, f"{scalar}_list": f"{scalar.capitalize()}List"}
        add(f"{scalar.capitalize()}List", values=f"{scalar}*")
    attribute = add("AttributeProto", name="string", doc_string="string", **values)
    attribute.oneof_decl.add(name="value")
    for field in attribute.field[2:]:
        field.oneof_index = 0
    add("GlobalMetadata", version="string", attr="AttributeProto*")
    add("IOInfo", values="string", shapes="string", types="string")
    add(
        "Node", id="uint64", name="string", type=types.name, ctrl_deps="uint64*", data_deps="uint64*",
        start_time_micros="uint64", duration_micros="uint64", inputs="IOInfo", outputs="IOInfo", attr="AttributeProto*",
    )  # fmt: skip
    return file


VERSION = "0.0.4"
"""Version of the schema, as Chakra's own tools write it into the metadata."""

MESSAGE_LIMIT = 64 << 20
"""No node is that long: a longer length means that the file is no Chakra file, or is damaged before this place."""


class TextArguments(msgspec.Struct, frozen=True, gc=False):
    """Inputs or outputs: three texts, each a list. JSON as written here; Chakra's own converter prints Python lists."""

    values: str = ""
    shapes: str = ""
    types: str = ""


class ChakraNode(msgspec.Struct, frozen=True, kw_only=True, eq=True):
    """One message of the file."""

    id: int
    name: str = ""
    type: int = COMPUTE
    """Index into NODE_TYPES."""
    ctrl_deps: tuple[int, ...] = ()
    data_deps: tuple[int, ...] = ()
    start_us: int = 0
    duration_us: int = 0
    inputs: TextArguments | None = None
    outputs: TextArguments | None = None
    attributes: dict[str, Any] = {}
    fields: dict[str, str] = {}
    """Where an attribute was not in the field that its name or its kind calls for: the field it was in."""

    @property
    def is_cpu_op(self) -> bool:
        """Feeders take a node without this attribute for host work."""
        return bool(self.attributes.get("is_cpu_op", True))

    @property
    def has_times(self) -> bool:
        """Files that hold no times at all have zeros everywhere."""
        return self.start_us > 0 or self.duration_us > 0 or type(self.attributes.get("start_ns")) is int

    @property
    def start_ns(self) -> int:
        return self._exact("start_ns", self.start_us)

    @property
    def duration_ns(self) -> int:
        return self._exact("duration_ns", self.duration_us)

    def _exact(self, name: str, rounded_us: int) -> int:
        value = self.attributes.get(name)
        return value if type(value) is int else rounded_us * 1000


class ChakraTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A whole file."""

    version: str = VERSION
    attributes: dict[str, Any] = {}
    nodes: list[ChakraNode] = []
    warnings: list[str] = []
    where: str = ""


def default_field(name: str, value: Any) -> str:
    """The field of the attribute message that a value goes to."""
    if field := ATTRIBUTE_FIELDS.get(name) or _FIELD_OF_KIND.get(type(value)):
        return field
    if isinstance(value, list | tuple):
        return default_field("", value[0]).replace("_val", "_list") if value else "int64_list"
    return "int64_val" if value < 1 << 63 else "uint64_val"


_FIELD_OF_KIND = {bool: "bool_val", float: "double_val", str: "string_val", bytes: "bytes_val"}
_USUAL_FIELDS = frozenset((*_FIELD_OF_KIND.values(), "int64_val"))


def looks_like_chakra(head: bytes, path: Path) -> bool:
    """Whether it is a Chakra file in either form, with times or without."""
    named = path.name.removesuffix(".gz").endswith(".et") and head.lstrip()[:1] not in (b"{", b"[")
    return named or _BINARY.match(head) is not None or is_chakra_json(head)


def read_chakra(path: Path) -> ChakraTrace:
    """The whole file in memory, protobuf or JSON; `warnings` of the result say where it was cut."""
    messages()  # without protobuf neither form can be read
    if is_chakra_json(read_head(path)):
        return _read_json(path)
    reader = ChakraReader(Path(path))
    with gc_paused():
        nodes = list(reader)
    return make_trace(reader.version, reader.attributes, nodes, reader.warnings, where=str(path))


def make_trace(
    version: str, attributes: dict[str, Any], nodes: list[ChakraNode], warnings: list[str], *, where: str
) -> ChakraTrace:
    """A file that was read; what it should hold by its own count and does not becomes a warning."""
    expected = attributes.get("node_count")
    if isinstance(expected, int) and len(nodes) < expected and not warnings:
        warnings.append(f"the file ends after {len(nodes)} of {expected} nodes")
    if not nodes and not warnings:
        warnings.append("the file holds no node")
    return ChakraTrace(version=version, attributes=attributes, nodes=nodes, warnings=warnings, where=where)


class ChakraReader:
    """Nodes of a file one by one, in constant memory. `version` and `attributes` are there from the beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        self._messages = messages()
        self._frames = _frames(Source(path), self.warnings)
        first = next(self._frames, None)
        if first is None:
            raise BadInputError(
                "is empty or ends inside its first message: it is no Chakra file",
                hint="give a .et file; execution traces of PyTorch are JSON and are read as such",
                where=str(path),
            )
        metadata = self._parse(self._messages.metadata, *first)
        self.version: str = metadata.version
        self.attributes, _ = parse_attributes(metadata.attr)

    def __iter__(self) -> Iterator[ChakraNode]:
        parse = self._messages.node
        for count, (offset, frame) in enumerate(self._frames, 1):
            yield parse_message(self._parse(parse, offset, frame, count))

    def _parse(self, message: Any, offset: int, frame: bytes, count: int = 0) -> Any:
        from google.protobuf.message import DecodeError

        try:
            return message.FromString(frame)
        except DecodeError as error:
            what = f"node {count}" if count else "the metadata"
            raise BadInputError(
                f"{what}, {len(frame)} bytes at byte {offset}, cannot be read: {error}",
                hint="check that this is a Chakra file (.et) and copy it again",
                where=f"{self.path}, byte {offset}",
            ) from error


def _frames(source: Source, warnings: list[str]) -> Iterator[tuple[int, bytes]]:
    """Offset and content of each message."""
    buffer = b""
    offset = place = 0
    pieces = source.pieces()
    ended = False
    while True:
        length, start = _read_length(buffer, place)
        if length is not None and length > MESSAGE_LIMIT:
            raise BadInputError(
                f"says at byte {offset + place} that a message of {length} bytes follows, more than {MESSAGE_LIMIT}",
                hint="check that this is a Chakra file (.et); it may be damaged before this place",
                where=f"{source.path}, byte {offset + place}",
            )
        if length is not None and start + length <= len(buffer):
            yield offset + place, buffer[start : start + length]
            place = start + length
            continue
        if ended:
            break
        piece = next(pieces, None)
        ended = piece is None
        if piece is not None:
            buffer = buffer[place:] + piece
            offset += place
            place = 0
    if place < len(buffer):
        packed = f" (the packed file ends early: {source.cut_short})" if source.cut_short else ""
        warnings.append(
            f"the file ends inside a message that begins at byte {offset + place}{packed}; the nodes before it are kept"
        )
    elif source.cut_short:
        warnings.append(f"the packed file ends early: {source.cut_short}; the nodes before it are kept")


def _read_length(buffer: bytes, place: int) -> tuple[int | None, int]:
    """A length and where its message begins; None where the buffer ends inside the length."""
    value = shift = 0
    while place < len(buffer):
        byte = buffer[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            return value, place
    return None, place


def parse_node(frame: bytes) -> ChakraNode:
    """One node from its encoded message."""
    return parse_message(messages().node.FromString(frame))


def parse_message(message: Any) -> ChakraNode:
    """One node from its message object."""
    attributes, fields = parse_attributes(message.attr)
    return ChakraNode(
        id=message.id,
        name=message.name,
        type=message.type,
        ctrl_deps=tuple(message.ctrl_deps),
        data_deps=tuple(message.data_deps),
        start_us=message.start_time_micros,
        duration_us=message.duration_micros,
        inputs=_arguments(message.inputs) if message.HasField("inputs") else None,
        outputs=_arguments(message.outputs) if message.HasField("outputs") else None,
        attributes=attributes,
        fields=fields,
    )


def _arguments(message: Any) -> TextArguments:
    return TextArguments(message.values, message.shapes, message.types)


def parse_attributes(found: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Values by name, and the fields of those that are in another one than their name or kind calls for."""
    values: dict[str, Any] = {}
    fields: dict[str, str] = {}
    for attribute in found:
        field = attribute.WhichOneof("value")
        if field is None:
            continue
        name, value = attribute.name, getattr(attribute, field)
        if field in _USUAL_FIELDS:
            is_usual = ATTRIBUTE_FIELDS.get(name, field) == field
        else:
            value = list(value.values) if field.endswith("_list") else value
            is_usual = default_field(name, value) == field
        values[name] = value
        if not is_usual:
            fields[name] = field
    return values, fields


def _attribute(name: str, value: Any, field: str | None = None) -> dict[str, Any]:
    """An attribute as the library takes it."""
    field = field or default_field(name, value)
    return {"name": name, field: {"values": value} if field.endswith("_list") else value}


def encode_node(node: ChakraNode) -> bytes:
    """BadInputError for what Chakra has no room for: ids below zero, numbers beyond 64 bits, lists of several kinds."""
    sides = {"inputs": node.inputs, "outputs": node.outputs}
    try:
        return encode_fields(
            node.attributes,
            node.fields,
            id=node.id,
            name=node.name,
            type=node.type,
            ctrl_deps=node.ctrl_deps,
            data_deps=node.data_deps,
            start_time_micros=node.start_us,
            duration_micros=node.duration_us,
            **{side: msgspec.structs.asdict(texts) for side, texts in sides.items() if texts is not None},
        )
    except (ValueError, TypeError) as error:
        raise unfit_node(node.id, node.name, error) from error


def unfit_node(node: int, name: str, error: Exception) -> BadInputError:
    """What to raise for the library's ValueError or TypeError about a value that a node has no room for."""
    return BadInputError(
        f"node {node} ({name[:80]}) cannot be written as Chakra: {error}",
        hint="copy or record the execution trace again",
        where=f"node {node}",
    )


def encode_fields(
    attributes: Mapping[str, Any] = MappingProxyType({}), kinds: Mapping[str, str] = MappingProxyType({}), **fields: Any
) -> bytes:
    """Some of a node's fields: a message is the sum of its pieces, one behind the other in any order."""
    message = messages().node(attr=[_attribute(*pair, kinds.get(pair[0])) for pair in attributes.items()], **fields)
    return bytes(message.SerializeToString())


def encode_arguments(inputs: Arguments, outputs: Arguments) -> bytes:
    """Inputs and outputs of a node, nothing where it has neither; ValueError where they cannot be read."""
    sides = inputs.raw_texts(), outputs.raw_texts()
    if all(len(types) <= 2 for _, _, types in sides):
        return b""
    message = _arguments_message()
    for side, texts in zip((message.inputs, message.outputs), sides, strict=True):
        side.values, side.shapes, side.types = (bytes(text) or b"[]" for text in texts)
    encoded: bytes = message.SerializeToString()
    return encoded


@cache
def _arguments_message() -> Any:
    """Filled again for each node: making a message takes longer than filling it."""
    return messages().node()


class NumbersEncoder:
    """Encodes the fields in which nodes differ: ids, times, and attributes of the same names, all whole numbers.

    One message is filled again for each node, which takes a tenth of making one.
    """

    def __init__(self, names: Iterable[str]) -> None:
        numbers = [{"name": name, "int64_val": 0} for name in ("start_ns", "duration_ns", *names)]
        self._message = messages().node(attr=numbers)
        self._start, self._duration, *self._attributes = self._message.attr
        self._ctrl_deps, self._data_deps = self._message.ctrl_deps, self._message.data_deps

    def encode(
        self,
        node: int,
        ctrl_deps: Sequence[int],
        data_deps: Sequence[int],
        times: tuple[int, int, int, int],
        numbers: Sequence[int],
    ) -> bytes:
        """The fields of one node. `times`: start and duration, rounded to microseconds and then in nanoseconds."""
        message = self._message
        message.id = node
        self._ctrl_deps[:] = ctrl_deps
        self._data_deps[:] = data_deps
        message.start_time_micros, message.duration_micros, self._start.int64_val, self._duration.int64_val = times
        try:
            for attribute, number in zip(self._attributes, numbers, strict=True):
                attribute.int64_val = number
        except ValueError:  # numbers from 2⁶³ on have a field of their own
            for attribute, number in zip(self._attributes, numbers, strict=True):
                setattr(attribute, default_field("", number), number)
        encoded: bytes = message.SerializeToString()
        return encoded


def write_chakra(path: Path, trace: ChakraTrace) -> None:
    """Write a whole file; it takes its name when it is complete."""
    write_nodes(path, trace.attributes, map(encode_node, trace.nodes), version=trace.version)


def write_nodes(path: Path, attributes: Mapping[str, Any], nodes: Iterable[bytes], *, version: str = VERSION) -> None:
    """The same from nodes that are encoded while they are written."""
    metadata = messages().metadata(version=version, attr=[_attribute(*pair) for pair in attributes.items()])
    with output_file(path) as partial, partial.open("wb", buffering=1 << 20) as file:
        for message in chain([metadata.SerializeToString()], nodes):
            file.write(_encode_length(len(message)) + message)


@lru_cache(1 << 12)
def _encode_length(length: int) -> bytes:
    """Seven bits a byte, lowest first."""
    parts = bytearray()
    while length > 0x7F:
        parts.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes((*parts, length))


def topological_order(nodes: Sequence[ChakraNode], *, where: str = "") -> list[int]:
    """Places of the nodes, each after all it depends on; BadInputError where dependencies run in a circle.

    What depends on absent nodes is free.
    """
    place_of = {node.id: place for place, node in enumerate(nodes)}
    waits = ({place_of[other] for other in (*node.data_deps, *node.ctrl_deps) if other in place_of} for node in nodes)
    try:
        return list(TopologicalSorter(dict(enumerate(waits))).static_order())
    except CycleError as error:
        circle = [str(nodes[place].id) for place in reversed(error.args[1])]
        raise BadInputError(
            f"dependencies run in a circle: nodes {' → '.join(circle[:12])}",
            hint="write the file again with a converter that orders by time",
            where=where or None,
        ) from error


def earliest_ns(nodes: Sequence[ChakraNode], *, where: str = "") -> list[tuple[int, int]]:
    """Start and end of each node when it begins as soon as its data dependencies have ended; the first begin at 0.

    Durations in nanoseconds where the file has them. What a simulator without limits on devices and links would find.
    """
    place_of = {node.id: place for place, node in enumerate(nodes)}
    times: list[tuple[int, int]] = [(0, 0)] * len(nodes)
    for place in topological_order(nodes, where=where):
        node = nodes[place]
        begin = max((times[place_of[other]][1] for other in node.data_deps if other in place_of), default=0)
        times[place] = (begin, begin + node.duration_ns)
    return times


_BINARY = re.compile(rb"[\x80-\xff]{0,4}[\x00-\x7f]\n[\x01-\x20]\d[\d.]*")
"""The length of the first message, then the version of the schema as its first field."""
_NODE = re.compile(rb'"type"\s*:\s*"(%s)_NODE"' % "|".join(NODE_TYPES).encode())
_TIME = re.compile(rb'"(?:start_?time_?micros|duration_?micros)"\s*:\s*"?[1-9]', re.IGNORECASE)
_BETWEEN = re.compile(r"[\s,\[\]]*")
"""What stands between two messages, in a list or without one."""


def is_chakra_json(head: bytes) -> bool:
    return head.lstrip()[:1] in (b"{", b"[") and b'"traceEvents"' not in head and _NODE.search(head) is not None


def has_times(head: bytes) -> bool:
    """Whether a node among the first bytes has a time; zeros are left out of this form."""
    return _TIME.search(head) is not None


def _read_json(path: Path) -> ChakraTrace:
    data, cut_short = read_bounded(path)
    warnings = [f"the packed file ends early: {cut_short}; the nodes before it are kept"] if cut_short else []
    found = _objects(data.decode("utf-8-sig", errors="replace"), path, warnings)
    metadata = messages().metadata()
    nodes: list[ChakraNode] = []
    for place, one in found:
        if not nodes and "id" not in one and "version" in one:
            _fill(metadata, one, path, place)
        else:
            nodes.append(parse_message(_fill(messages().node(), one, path, place)))
    return make_trace(metadata.version, parse_attributes(metadata.attr)[0], nodes, warnings, where=str(path))


def _objects(text: str, path: Path, warnings: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Place and content of each object; a file that was cut gives those before."""
    decode = JSONDecoder().raw_decode
    place = _between(text, 0)
    while place < len(text):
        try:
            found, end = decode(text, place)
        except (JSONDecodeError, RecursionError) as error:
            if text[place] != "{":
                raise BadInputError(
                    f"is no Chakra JSON: an object is missing at character {place}",
                    hint="write it again with chakra_jsonizer, or give the .et file itself",
                    where=f"{path}: character {place}",
                ) from error
            warnings.append(
                f"the node that begins at character {place} cannot be read ({first_line(error)}); "
                "the nodes before it are kept"
            )
            return
        yield place, found
        place = _between(text, end)


def _between(text: str, place: int) -> int:
    found = _BETWEEN.match(text, place)
    return found.end() if found else place


def _fill(message: Any, content: dict[str, Any], path: Path, place: int) -> Any:
    from google.protobuf.json_format import ParseDict, ParseError

    try:
        return ParseDict(content, message, ignore_unknown_fields=True)
    except ParseError as error:
        raise BadInputError(
            f"holds an object that is no Chakra message: {first_line(error)}",
            hint="write it again with chakra_jsonizer, or give the .et file itself",
            where=f"{path}: character {place}",
        ) from error
