"""PyTorch execution traces of every schema, packed or not, whole or cut short.

Fields are read by presence: files of one schema string differ in what they hold. Of a file whose process was killed,
the nodes that were written whole are kept; parents are written after their children, so outer calls may be missing.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepscope.core.errors import BadInputError
from stepscope.formats.graph import GROUPS_LABEL, Graph, Node, ProcessGroup, read_groups
from stepscope.formats.source import gc_paused, read_bounded
from stepscope.formats.tensors import Arguments

KNOWN_SCHEMAS = ("1.0.1", "1.0.2", "1.0.3", "1.0.4", "1.1.0", "1.1.1")
KNOWN_MAJOR = "1"

_RECORD_AGAIN = "record it again; torch.profiler.ExecutionTraceObserver writes such files"
_ABSENT = msgspec.Raw()
_HEAD_BYTES = 1 << 16


_HALF = 1 << 63
_Number = Annotated[int, msgspec.Meta(ge=-_HALF, le=_HALF - 1)]


class _Attribute(msgspec.Struct, gc=False):
    name: str
    value: int | float | str | bool | list[Any] | dict[str, Any] | None = None


class _FileNode(msgspec.Struct, gc=False):
    """Both forms of a node: flat (1.0.1) and nested with attributes (since 1.0.2)."""

    id: _Number
    name: str
    ctrl_deps: _Number | list[_Number] | None = None
    attrs: list[_Attribute] | None = None
    inputs: msgspec.Raw = _ABSENT
    outputs: msgspec.Raw = _ABSENT
    input_shapes: msgspec.Raw = _ABSENT
    input_types: msgspec.Raw = _ABSENT
    output_shapes: msgspec.Raw = _ABSENT
    output_types: msgspec.Raw = _ABSENT
    parent: _Number = 0
    rf_id: _Number = 0
    fw_parent: _Number = 0
    seq_id: _Number = -1
    scope: _Number = 0
    tid: _Number = 0
    fw_tid: _Number = 0
    op_schema: str = ""


class _File(msgspec.Struct, gc=False):
    nodes: list[_FileNode]
    schema: str | None = None
    pid: int | None = None
    time: str = ""
    start_ts: int | None = None
    finish_ts: int | None = None


_DECODE_FILE = msgspec.json.Decoder(_File)
_DECODE_NODE = msgspec.json.Decoder(_FileNode)
_BARE_NUMBER = re.compile(rb"(?<=[\[,: \n])(-?(?:inf|nan|NaN|Infinity))(?=\s*[,\]}])")
_NO_TEXT = re.compile("[\udc80-\udcff]")
_NODES = re.compile(rb'"nodes"\s*:\s*\[')
_NUMBERS = frozenset(("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid"))
_TEXTS = frozenset(("op_schema", "kernel_backend", "kernel_file", "tensor_range"))


def sniff(head: bytes) -> bool:
    """Whether a file that begins so may be an execution trace."""
    return b'"schema"' in head and b'"nodes"' in head and b'"traceEvents"' not in head


def read_execution_trace(path: Path) -> Graph:
    """The graph of one rank. `warnings` of the result say what was cut off or is not known."""
    path = Path(path)
    data, cut_short = read_bounded(path)
    if not data:
        raise BadInputError(f"is empty{f' ({cut_short})' if cut_short else ''}", hint=_RECORD_AGAIN, where=str(path))
    with gc_paused():
        return parse_execution_trace(data, where=str(path), cut_short=cut_short)


def parse_execution_trace(data: bytes, *, where: str = "", cut_short: str | None = None) -> Graph:
    """The same from bytes that are in memory already."""
    warnings: list[str] = []
    return _parse(_as_utf8(data, warnings), warnings, where=where, cut_short=cut_short)


def _as_utf8(data: bytes, warnings: list[str]) -> bytes:
    """Arguments are decoded when they are asked for; bytes that are no text are found before. Places stay the same."""
    if data.isascii():
        return data
    try:
        data.decode()
    except UnicodeDecodeError as error:
        text, count = _NO_TEXT.subn("?", data.decode(errors="surrogateescape"))
        warnings.append(f"{count} bytes that are no UTF-8, the first at byte {error.start}, are read as question marks")
        return text.encode()
    return data


def _parse(data: bytes, warnings: list[str], *, where: str, cut_short: str | None) -> Graph:
    try:
        file = _DECODE_FILE.decode(data)
        if cut_short:
            warnings.append(f"the packed file ends early: {cut_short}; its list of nodes is whole")
    except msgspec.ValidationError as error:
        raise _wrong_form(data, error, where) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        repaired, count = _BARE_NUMBER.subn(rb'"\1"', data)
        if count:
            warnings.append(f"{count} numbers written as inf or nan, which JSON does not know, are read as such")
            return _parse(repaired, warnings, where=where, cut_short=cut_short)
        file = _recover(data, error, where, cut_short, warnings)
    if file.schema is None:
        raise _bad("has nodes but no schema: it is no execution trace", where, "give the file of an observer")
    _check_schema(file.schema, warnings, where)
    try:
        nodes = _nodes(file.nodes, warnings)
    except ValueError as error:
        raise _bad(str(error), where) from error
    groups = _groups(nodes, warnings)
    return Graph(
        nodes=nodes,
        source="pytorch",
        schema=file.schema,
        process_id=file.pid,
        recorded_at=file.time,
        groups=groups,
        metadata={"start_ms": file.start_ts, "finish_ms": file.finish_ts},
        warnings=tuple(warnings),
        where=where,
    )


def _nodes(found: list[_FileNode], warnings: list[str]) -> tuple[Node, ...]:
    seen: dict[bytes, Arguments] = {}
    nodes = [_flat(node) if node.attrs is None else _nested(node, node.attrs, seen) for node in found]
    nodes.sort(key=attrgetter("id"))
    doubled = sum(first.id == second.id for first, second in pairwise(nodes))
    if doubled:
        warnings.append(f"{doubled} nodes have the id of another; look-ups by id find one of them")
    known = {node.id for node in nodes}
    lost = sum(1 for node in nodes if node.parent and node.parent not in known)
    if lost:
        warnings.append(f"{lost} nodes have a parent that is not in the file; they count as outermost calls")
    return tuple(nodes)


def _flat(node: _FileNode) -> Node:
    return Node(
        inputs=Arguments((node.inputs, node.input_shapes, node.input_types)),
        outputs=Arguments((node.outputs, node.output_shapes, node.output_types)),
        **{name: getattr(node, name) for name in ("id", "name", "parent", "op_schema", *_NUMBERS)},
    )


def _nested(node: _FileNode, attributes: list[_Attribute], seen: dict[bytes, Arguments]) -> Node:
    plain: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for attribute in attributes:
        name = attribute.name
        value = attribute.value
        if name in _NUMBERS:
            if not isinstance(value, int):
                raise _wrong_attribute(node, name, value, "a whole number")
            plain[name] = value if -_HALF <= value < _HALF else _signed(value)
        elif name in _TEXTS:
            if not isinstance(value, str):
                raise _wrong_attribute(node, name, value, "a text")
            plain[name] = value
        else:
            rest[name] = value
    parent = node.ctrl_deps
    if isinstance(parent, list):
        parent = parent[0] if parent else 0
    return Node(
        id=node.id,
        name=node.name,
        parent=parent or 0,
        inputs=_shared(node.inputs, seen),
        outputs=_shared(node.outputs, seen),
        attributes=rest,
        **plain,
    )


def _shared(raw: msgspec.Raw, seen: dict[bytes, Arguments]) -> Arguments:
    """One object for all arguments that are written alike: more than half are, and each is decoded once."""
    text = bytes(raw)
    found = seen.get(text)
    if found is None:
        found = seen[text] = Arguments(raw)
    return found


def _signed(value: int) -> int:
    """64 bits as a number with a sign: −1 may be written as 2⁶⁴ − 1."""
    value %= 2 * _HALF
    return value - 2 * _HALF if value >= _HALF else value


def _wrong_attribute(node: _FileNode, name: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"node {node.id} ({node.name[:80]}) has {str(value)[:40]!r} as {name}, which must be {wanted}")


def _groups(nodes: tuple[Node, ...], warnings: list[str]) -> tuple[ProcessGroup, ...]:
    """From the label that the observer, or the user, writes at its start."""
    groups: dict[str, ProcessGroup] = {}
    for node in nodes:
        if node.name != GROUPS_LABEL:
            continue
        try:
            values = node.inputs.values
            for group in read_groups(values[0]) if values and isinstance(values[0], str) else ():
                groups[group.name] = group
        except (ValueError, msgspec.DecodeError) as error:
            warnings.append(f"the process groups of node {node.id} cannot be read: {error}")
    return tuple(groups.values())


def _check_schema(schema: str, warnings: list[str], where: str) -> None:
    version = schema.partition("-")[0]
    major = version.partition(".")[0]
    if major != KNOWN_MAJOR:
        known = f"schemas 1.x are read (known: {', '.join(KNOWN_SCHEMAS)})"
        raise _bad(f"has schema {schema!r}; {known}", where, "a newer Stepscope may read it")
    if version not in KNOWN_SCHEMAS:
        warnings.append(
            f"schema {schema!r} is newer than those known ({KNOWN_SCHEMAS[-1]}): fields are read by their names"
        )


def _recover(data: bytes, error: Exception, where: str, cut_short: str | None, warnings: list[str]) -> _File:
    """The complete nodes of a file that ends inside its list of nodes; damage before the end is an error."""
    head = _header(data, where)
    begin = _NODES.search(data)
    if begin is None:
        raise _wrong_form(data, error, where) from error
    nodes, stopped, at_end = _complete_nodes(data, begin.end(), where)
    if not at_end:
        what = f"is damaged at byte {stopped}, after {len(nodes)} nodes: {error}"
        raise _bad(what, f"{where}, byte {stopped}", "copy or record the file again") from error
    if not nodes:
        raise _bad(f"ends at byte {len(data)}, before its first node is complete", where)
    packed = f" (the packed file ends early: {cut_short})" if cut_short else ""
    warnings.append(
        f"the file ends inside the node at byte {stopped} of {len(data)}{packed}; {len(nodes)} complete nodes are kept"
    )
    head.nodes = nodes
    return head


def _header(data: bytes, where: str) -> _File:
    """What stands before the nodes."""
    begin = _NODES.search(data, 0, _HEAD_BYTES)
    if begin is None:
        raise _bad('is no execution trace: there is no list "nodes" in its beginning', where)
    try:
        return _DECODE_FILE.decode(data[: begin.end()] + b"]}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"cannot be read: {error}", where) from error


_SPACE = re.compile(r"[\s,]*")


def _complete_nodes(data: bytes, begin: int, where: str) -> tuple[list[_FileNode], int, bool]:
    """Nodes one by one until one is broken; the byte where it begins; whether the file simply ends there."""
    text = data[begin:].decode("utf-8", errors="surrogateescape")
    decoder = json.JSONDecoder()
    nodes: list[_FileNode] = []
    place = _end_of_space(text, 0)
    spent = begin + len(text[:place].encode("utf-8", errors="surrogateescape"))
    while place < len(text) and text[place] == "{":
        try:
            _, end = decoder.raw_decode(text, place)
        except RecursionError:
            return nodes, spent, False
        except json.JSONDecodeError as error:
            # The decoder stops at the end of the text, or inside a word or string that the end cut off.
            cut = error.pos >= len(text) - 8 or error.msg.startswith("Unterminated")
            return nodes, spent, cut
        raw = text[place:end].encode("utf-8", errors="surrogateescape")
        try:
            nodes.append(_DECODE_NODE.decode(raw))
        except msgspec.ValidationError as error:
            raise _bad(f"node {len(nodes)} of the list: {error}", f"{where}, byte {spent}") from error
        except (msgspec.DecodeError, UnicodeDecodeError):
            return nodes, spent, False
        after = _end_of_space(text, end)
        spent += len(raw) + (after - end)
        place = after
    return nodes, spent, place >= len(text) or text[place] == "]"


def _end_of_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    assert found is not None
    return found.end()


def _wrong_form(data: bytes, error: Exception, where: str) -> BadInputError:
    head = data[:_HEAD_BYTES]
    if b'"traceEvents"' in head or b'"schemaVersion"' in head:
        hint = "give the file that the ExecutionTraceObserver wrote"
        return _bad("is a timeline (a Kineto trace), not an execution trace", where, hint)
    if b'"nodes"' not in head:
        return _bad('is no execution trace: it has no list "nodes"', where)
    return _bad(f"does not have the form of an execution trace: {error}", where)


def _bad(what: str, where: str, hint: str = _RECORD_AGAIN) -> BadInputError:
    return BadInputError(what, hint=hint, where=where or None)
