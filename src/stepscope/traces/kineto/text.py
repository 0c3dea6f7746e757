"""The text of a Chrome trace: the list of its events, whole records at a time, and what stands around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from stepscope.errors import BadInputError
from stepscope.traces.source import PIECE_BYTES, Source

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding text from strangers may raise; nesting of thousands of brackets is the third."""

_BOM = b"\xef\xbb\xbf"
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_STRING = rb'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+"'
_FLAT = rb'[^{}\[\]"]++|' + _STRING
_DEEPEST = 6
"""Brackets inside brackets that one expression follows; deeper ones are counted one by one."""


def _nested(depth: int) -> bytes:
    inner = b"|" + _nested(depth - 1) if depth else b""
    return rb"[\[{](?:" + _FLAT + inner + rb")*+[\]}]"


# Nothing in these can be matched in two ways, and `+` behind a repetition says so: no input makes them slow or large.
_RECORD = rb"\{(?:" + _FLAT + b"|" + _nested(_DEEPEST) + rb")*+\}"
_RECORDS = re.compile(rb"(?:[\s,]*+" + _RECORD + rb")*+", re.DOTALL)
_ONE_RECORD = re.compile(_RECORD, re.DOTALL)
_TOKENS = re.compile(_STRING + rb'|[{}\[\]"]', re.DOTALL)
_SEPARATORS = b" \t\r\n,"
_NEW_RECORD = re.compile(rb'\n\s*\{|\{\s*"(?:ph|name|cat|pid|tid|ts|args)"')
"""Where a record may begin again after damage."""

_HEAD_LIMIT = 64 << 20
"""Events must begin within this much text: device tables and log lines stand before them, not hundreds of megabytes."""
_LOOK_AHEAD = 1 << 16
_RECORD_LIMIT = 32 << 20
"""What has no end within this much text is damage."""

Consume = Callable[[bytes, int], int]
"""Takes text and where it stands in the unpacked file; reads whole records at its beginning, tells how far they go."""


class Piece:
    """Text of whole events, separated by commas, and where it stands in the unpacked file."""

    __slots__ = ("offset", "text")

    def __init__(self, text: bytes, offset: int) -> None:
        self.text = text
        self.offset = offset


class ChromeText:
    """Walks through a file once. Afterwards `header` holds every other key of the document, wherever it stood."""

    def __init__(self, source: Source, piece_bytes: int = PIECE_BYTES) -> None:
        self.source = source
        self.header: dict[str, Any] = {}
        self.cut_short: str | None = None
        """Why the text ended before its document did; None when it was whole."""
        self._piece_bytes = piece_bytes

    def pieces(self) -> Iterator[Piece]:
        """Whole records, for readers that decode them; damaged stretches come as pieces too."""
        found: list[Piece] = []

        def take(text: bytes, offset: int) -> int:
            end = end_of_records(text)
            if end:
                found.append(Piece(text[:end], offset))
            return end

        for _ in self._walk(take, lambda text, offset: found.append(Piece(text, offset))):
            yield from found
            found.clear()
        yield from found

    def feed(self, consume: Consume, damaged: Callable[[bytes, int], None]) -> None:
        """All text through `consume`; stretches of which it takes nothing go to `damaged`."""
        for _ in self._walk(consume, damaged):
            pass

    def _walk(self, consume: Consume, damaged: Callable[[bytes, int], None]) -> Iterator[None]:
        """One step for each stretch of text that was read."""
        stream = self.source.pieces(self._piece_bytes)
        head, rest, offset = self._find_events(stream)
        ended = False
        while True:
            taken = consume(rest, offset)
            left = rest[taken:].lstrip(_SEPARATORS)
            offset += len(rest) - len(left)
            rest = left
            yield
            if rest[:1] == b"]":
                if len(rest) < _LOOK_AHEAD and not ended:
                    more = next(stream, None)
                    ended = more is None
                    rest += more or b""
                if b'"ph"' not in rest[:_LOOK_AHEAD]:
                    self._read_header(head, rest[1:], stream)
                    return
                # More events follow: this bracket is damage, not the end of the list.
            if rest and (ended or rest[:1] != b"{" or len(rest) > _RECORD_LIMIT):
                skipped = _damaged_bytes(rest)
                if skipped < len(rest):
                    damaged(rest[:skipped], offset)
                    rest, offset = rest[skipped:], offset + skipped
                    yield
                    continue
            if ended:
                break  # inside a record: what there is of it cannot be read
            more = next(stream, None)
            ended = more is None
            rest += more or b""
        self.cut_short = self.source.cut_short or "the list of events has no end"
        self._read_header(head, b"", stream)

    def _find_events(self, stream: Iterator[bytes]) -> tuple[bytes, bytes, int]:
        """Text before the list of events, the first of it, and where that begins."""
        text = b""
        for piece in stream:
            text += piece
            shift = len(_BOM) if text.startswith(_BOM) else 0
            if text[shift:].lstrip()[:1] == b"[":
                begin = text.index(b"[") + 1
                return b"", text[begin:], begin
            found = _EVENTS_KEY.search(text)
            if found:
                return text[shift : found.start()], text[found.end() :], found.end()
            if len(text) > _HEAD_LIMIT:
                break
        raise BadInputError(
            "there is no list of trace events in it",
            hint="a Chrome trace has a key traceEvents with a list; see docs/trace-formats.md for what can be read",
            where=f"{self.source.path}, looked through {len(text)} bytes",
        )

    def _read_header(self, head: bytes, tail: bytes, stream: Iterator[bytes]) -> None:
        if not head:
            return
        for more in stream:
            tail += more
            if len(tail) > _HEAD_LIMIT:
                self.cut_short = "what follows the list of events is too long"
                tail = b""
                break
        document = head + b'"traceEvents":[]' + (tail if tail.strip() else b"}")
        try:
            self.header = msgspec.json.decode(document, type=dict[str, Any])
        except UNREADABLE:
            # Sampled and cut files: what stands before the events is often still whole.
            self.cut_short = self.cut_short or "what follows the list of events is no JSON"
            try:
                self.header = msgspec.json.decode(head.rstrip().rstrip(b",") + b"}", type=dict[str, Any])
            except UNREADABLE:
                self.cut_short = "what stands before the list of events is no JSON"


def end_of_records(text: bytes) -> int:
    """Where the whole records at the beginning of `text` end; strings and brackets inside are followed."""
    end = 0
    while True:
        found = _RECORDS.match(text, end)
        end = found.end() if found else end
        begin = _first_not(text, end)
        if text[begin : begin + 1] != b"{":
            return end
        # Either it goes on behind the end of the text, or it is nested too deep for the expression.
        deep = _end_of_deep(text, begin)
        if deep is None:
            return end
        end = deep


def _first_not(text: bytes, place: int) -> int:
    while text[place : place + 1] in (b" ", b"\t", b"\r", b"\n", b","):
        place += 1
    return place


def _end_of_deep(text: bytes, begin: int) -> int | None:
    depth = 0
    for found in _TOKENS.finditer(text, begin):
        token = found[0]
        if token == b'"':
            return None  # a string without an end
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            depth -= 1
            if depth <= 0:
                return found.end()
    return None


def _damaged_bytes(text: bytes) -> int:
    """How much of a text that begins with no whole record to give up: to the next place where one may begin."""
    begin = _next_beginning(text, 1)
    return len(text) if begin is None else begin


def _next_beginning(text: bytes, place: int) -> int | None:
    found = _NEW_RECORD.search(text, place)
    return None if found is None else text.index(b"{", found.start())


Decoded = TypeVar("Decoded")


def salvage(
    text: bytes, decode: Callable[[bytes], Decoded | None], on_damage: Callable[[str, int], None]
) -> Iterator[Decoded]:
    """Records of a damaged text, one by one; `on_damage` hears what was left out and where.

    `decode` gives None for what is no record. A bracket too few makes many records look like one: the search then goes
    on inside of it.
    """
    place = 0
    while (begin := text.find(b"{", place)) >= 0:
        if text[place:begin].strip(_SEPARATORS):
            on_damage("stretches between events that are no JSON were left out", place)
        found = _ONE_RECORD.match(text, begin)
        end = found.end() if found else _end_of_deep(text, begin)
        record = None if end is None else decode(text[begin:end])
        if record is not None and end is not None:
            yield record
            place = end
            continue
        on_damage("events that are no valid JSON were left out", begin)
        again = _next_beginning(text, begin + 1)
        if again is None:
            return
        place = again
    if text[place:].strip(_SEPARATORS):
        on_damage("stretches between events that are no JSON were left out", place)
