"""Chakra as JSON: the messages of a .et file as protobuf writes them in JSON, in a list or one after the other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from json import JSONDecodeError, JSONDecoder
from pathlib import Path
from typing import Any

from stepscope.core.errors import BadInputError, first_line
from stepscope.formats.chakra.files import ChakraNode, ChakraTrace, make_trace, parse_attributes, parse_message
from stepscope.formats.chakra.schema import NODE_TYPES, messages
from stepscope.formats.source import read_bounded

_NODE = re.compile(rb'"type"\s*:\s*"(%s)"' % "|".join(NODE_TYPES).encode())
_TIME = re.compile(rb'"(?:start_?time_?micros|duration_?micros)"\s*:\s*"?[1-9]', re.IGNORECASE)
_BETWEEN = re.compile(r"[\s,\[\]]*")
"""What stands between two messages, in a list or without one."""


def looks_like_chakra_json(head: bytes) -> bool:
    return head.lstrip()[:1] in (b"{", b"[") and b'"traceEvents"' not in head and _NODE.search(head) is not None


def has_times(head: bytes) -> bool:
    """Whether a node among the first bytes has a time; zeros are left out of this form."""
    return _TIME.search(head) is not None


def read_chakra_json(path: Path) -> ChakraTrace:
    """The whole file in memory; `warnings` of the result say where it was cut."""
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
