"""The text of a Chrome trace, cut into pieces of whole events, and what stands around them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from stepscope.errors import BadInputError
from stepscope.traces.source import PIECE_BYTES, Source

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_BORDERS = (b"\n  },\n  {", b"},\n{", b"}, {", b"},{", b"}\n,{", b"},\n  {", b"},\r\n")
_HEAD_LIMIT = 64 << 20
"""Events must begin within this much text: device tables and log lines stand before them, not hundreds of megabytes."""
_RECORD_LIMIT = 256 << 20
"""A record without an end within this much text is no record."""


class Piece:
    """Text of whole events, separated by commas, and where it stands in the unpacked file."""

    __slots__ = ("offset", "text")

    def __init__(self, text: bytes, offset: int) -> None:
        self.text = text
        self.offset = offset


class ChromeText:
    """Walks through a file once. After `pieces` is exhausted, `header` holds every other key of the document."""

    def __init__(self, source: Source, piece_bytes: int = PIECE_BYTES) -> None:
        self.source = source
        self.header: dict[str, Any] = {}
        self.cut_short: str | None = None
        """Why the text ended before its document did; None when it was whole."""
        self._piece_bytes = piece_bytes

    def pieces(self) -> Iterator[Piece]:
        stream = self.source.pieces(self._piece_bytes)
        head, rest, offset = self._find_events(stream)
        tail = b""
        for text in stream:
            rest += text
            cut = _last_border(rest)
            if cut is None:
                if len(rest) > _RECORD_LIMIT:
                    raise BadInputError(
                        "one event is longer than 256 MB, or its end is missing",
                        hint="the file is damaged from here on; cut it before this place",
                        where=f"{self.source.path}, byte {offset}",
                    )
                continue
            yield Piece(rest[:cut], offset)
            # The comma after the record goes with it.
            offset += cut + 1
            rest = rest[cut + 1 :]
        end = _end_of_list(rest)
        if end is None:
            self.cut_short = self.source.cut_short or "the list of events has no end"
            yield Piece(_whole_records(rest), offset)
        else:
            yield Piece(rest[:end], offset)
            tail = rest[end + 1 :]
        self._read_header(head, tail)

    def _find_events(self, stream: Iterator[bytes]) -> tuple[bytes, bytes, int]:
        """Text before the list of events, the first of it, and where that begins."""
        text = b""
        for piece in stream:
            text += piece
            if text.lstrip()[:1] == b"[":
                begin = text.index(b"[") + 1
                return b"", text[begin:], begin
            found = _EVENTS_KEY.search(text)
            if found:
                return text[: found.start()], text[found.end() :], found.end()
            if len(text) > _HEAD_LIMIT:
                break
        raise BadInputError(
            "there is no list of trace events in it",
            hint="a Chrome trace has a key traceEvents with a list; see docs/trace-formats.md for what can be read",
            where=f"{self.source.path}, looked through {len(text)} bytes",
        )

    def _read_header(self, head: bytes, tail: bytes) -> None:
        if not head:
            return
        document = head + b'"traceEvents":[]' + (tail if tail.strip() else b"}")
        try:
            self.header = msgspec.json.decode(document, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # Sampled and cut files: what stands before the events is often still whole.
            self.cut_short = self.cut_short or "what follows the list of events is no JSON"
            try:
                self.header = msgspec.json.decode(head.rstrip().rstrip(b",") + b"}", type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self.cut_short = "what stands before the list of events is no JSON"


def _last_border(text: bytes) -> int | None:
    """Place of the last comma between two events, as far as layout tells: decoding proves it, or it is mended."""
    best = -1
    for border in _BORDERS:
        found = text.rfind(border)
        if found >= 0:
            best = max(best, found + border.index(b","))
        if best >= 0 and border is _BORDERS[0]:
            return best  # JSON strings hold no raw line breaks: this one cannot be inside a string
    return best if best >= 0 else None


def _end_of_list(text: bytes) -> int | None:
    """Place of the `]` that closes the list of events in the last stretch of text."""
    depth = 0
    for found in _TOKENS.finditer(text):
        token = found[0]
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            if depth == 0:
                return found.start() if token == b"]" else None
            depth -= 1
    return None


def _whole_records(text: bytes) -> bytes:
    """All records of a cut text but the unfinished last."""
    end = 0
    for begin_end in split_records(text):
        end = begin_end[1]
    return text[:end]


def split_records(text: bytes) -> Iterator[tuple[int, int]]:
    """Begin and end of each complete object at the top of `text`, whatever the layout; slow, so only used on damage."""
    depth = 0
    begin = 0
    for found in _TOKENS.finditer(text):
        token = found[0]
        if token == b"{" or (token == b"[" and depth):
            if depth == 0:
                begin = found.start()
            depth += 1
        elif token in (b"}", b"]") and depth:
            depth -= 1
            if depth == 0:
                yield begin, found.end()
