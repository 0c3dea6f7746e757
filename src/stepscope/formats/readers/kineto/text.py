"""The text of a Chrome trace: the list of its events, whole records at a time, and what stands around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from stepscope.core.errors import BadInputError
from stepscope.formats.source import INVALID_EVENTS, INVALID_SECTIONS, PIECE_BYTES, Source

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding text of unknown origin may raise; nesting of thousands of brackets is the third."""

DEEPEST = 512
"""Brackets inside brackets that a record may have; msgspec, which decodes them, gives up at less than twice as many."""
RECORD_LIMIT = 32 << 20
"""What has no end within this much text is damage."""
PATIENCE_BYTES = 4 << 20
PATIENCE_TIMES = 3

_BOM = b"\xef\xbb\xbf"
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_OPEN = rb'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+'
_STRING = _OPEN + rb'"(?=[ \t\r\n,:\]}]|\Z)'
"""What follows a string shows within a few bytes that a quote is too many or too few: else the text between strings
would be read as strings, to the end of the file."""
_BETWEEN = rb'[^{}\[\]",]++'
_INNER = rb'[^{}\[\]"]++|' + _STRING
_FOLLOWED = 6
"""Brackets inside brackets that one expression follows; deeper ones are counted one by one."""
_OPENED = rb",[ \t\r\n]*+[{\[]"
"""An object or list behind a comma: never a part of a record itself, but the next record after one without an end."""


def _nested(depth: int) -> bytes:
    inner = b"|" + _nested(depth - 1) if depth else b""
    return rb"[\[{](?:" + _INNER + inner + rb")*+[\]}]"


# Nothing in these can be matched in two ways, and `+` behind a repetition says so: no input makes them slow or large.
_RECORD = rb"\{(?:" + _BETWEEN + b"|" + _STRING + rb"|(?!" + _OPENED + rb"),|" + _nested(_FOLLOWED) + rb")*+\}"
_RECORDS = re.compile(rb"(?:[ \t\r\n,]*+" + _RECORD + rb")*+", re.DOTALL)
_ONE_RECORD = re.compile(_RECORD, re.DOTALL)
_TOKENS = re.compile(_OPENED + b"|" + _STRING + rb'|[{}\[\]"]', re.DOTALL)
_OPEN_STRING = re.compile(_OPEN, re.DOTALL)
_SEPARATORS = b" \t\r\n,"
_SEPARATED = re.compile(rb"[ \t\r\n,]*+")
_NEW_RECORD = re.compile(rb'\n[ \t]*+\{|\{[ \t\r\n]*+"(?:ph|name|cat|pid|tid|ts|args)"')
"""Where a record may begin again after damage."""

_HEAD_LIMIT = 64 << 20
"""Events must begin within this much text: device tables and log lines stand before them, not hundreds of megabytes."""
_LOOK_AHEAD = 1 << 16


class Reached(NamedTuple):
    """How far whole records go."""

    end: int
    """Behind the last whole one."""
    looked: int
    """How far the end of the record that follows was looked for; the end of the text where it may go on behind it."""


class Patience:
    """Bounds what damage costs: a record without an end is looked at anew from every place inside of it where one may
    begin, which for hostile text is the square of its size. Once more than three times the text so far (and 4 MiB) was
    looked through in vain, reading goes on behind what was looked through."""

    def __init__(self) -> None:
        self._in_vain = 0

    def next_beginning(self, text: bytes, offset: int, begin: int, looked: int) -> int | None:
        """Where a record may begin behind the one at `begin` that cannot be read."""
        self._in_vain += looked - begin
        lost = self._in_vain > PATIENCE_BYTES + PATIENCE_TIMES * (offset + begin)
        found = _NEW_RECORD.search(text, max(looked, begin + 1) if lost else begin + 1)
        return None if found is None else text.index(b"{", found.start())


class Piece(NamedTuple):
    """Text of whole events, separated by commas, and where it stands in the unpacked file."""

    text: bytes
    offset: int
    patience: Patience


Consume = Callable[[bytes, int, int], Reached]
"""Takes text, a place in it and where the text stands in the unpacked file; reads whole records from that place on."""


class ChromeText:
    """Walks through a file once. Afterwards `header` holds every other key of the document, wherever it stood."""

    def __init__(self, source: Source, piece_bytes: int = PIECE_BYTES) -> None:
        self.source = source
        self.header: dict[str, Any] = {}
        self.cut_short: str | None = None
        """Why the text ended before its document did; None when it was whole."""
        self.patience = Patience()
        self._piece_bytes = piece_bytes
        self._text = b""
        self._offset = 0
        """Where that text stands in the file."""
        self._ended = False

    def pieces(self) -> Iterator[Piece]:
        """Whole records, for readers that decode them; damaged sections come as pieces too."""
        found: list[Piece] = []

        def take(text: bytes, begin: int, offset: int) -> Reached:
            reached = read_records(text, begin)
            if reached.end > begin:
                found.append(Piece(text[begin : reached.end], offset + begin, self.patience))
            return reached

        for _ in self._walk(take, found.append):
            yield from found
            found.clear()
        yield from found

    def feed(self, consume: Consume, damaged: Callable[[Piece], None]) -> None:
        """All text through `consume`; sections of which it takes nothing go to `damaged`."""
        for _ in self._walk(consume, damaged):
            pass

    def _walk(self, consume: Consume, damaged: Callable[[Piece], None]) -> Iterator[None]:
        """One step for each section of text that was read."""
        stream = self.source.pieces(self._piece_bytes)
        head, self._text, self._offset = self._find_events(stream)
        place = 0
        while True:
            reached = consume(self._text, place, self._offset)
            yield
            place = _skip_separators(self._text, reached.end)
            first = self._text[place : place + 1]
            if not first or (first == b"{" and self._may_go_on(place, reached)):
                if self._ended:
                    break
                place = self._read_more(stream, place)
                continue
            if first == b"]":
                if len(self._text) - place < _LOOK_AHEAD and not self._ended:
                    place = self._read_more(stream, place)
                if self._text.find(b'"ph"', place, place + _LOOK_AHEAD) < 0:
                    self._read_header(head, self._text[place + 1 :], stream)
                    return
                # More events follow: this bracket is damage, not the end of the list.
            looked = max(place + 1, reached.looked if first == b"{" else 0)
            begin = self.patience.next_beginning(self._text, self._offset, place, looked)
            if begin is None and self._ended:
                break  # inside a record: what there is of it cannot be read
            begin = self._keep_beginning(place) if begin is None else begin
            damaged(Piece(self._text[place:begin], self._offset + place, self.patience))
            place = begin
            yield
        self.cut_short = self.source.cut_short or "the list of events has no end"
        self._read_header(head, b"", stream)

    def _keep_beginning(self, place: int) -> int:
        """The end of the text, or where the first characters of a record may stand before it."""
        last = max(self._text.rfind(mark, max(place + 1, len(self._text) - 64)) for mark in (b"{", b"\n"))
        return len(self._text) if last < 0 else last

    def _may_go_on(self, place: int, reached: Reached) -> bool:
        """Whether a record that is not whole may be so with more text."""
        held = len(self._text) - place
        return reached.looked >= len(self._text) and not self._ended and held <= RECORD_LIMIT

    def _read_more(self, stream: Iterator[bytes], place: int) -> int:
        """Text from `place` on and as much again, so that what is looked at twice is never more than all; its new
        place."""
        parts = [self._text[place:]]
        wanted = max(2 * len(parts[0]), 1)
        while sum(map(len, parts)) < wanted and not self._ended:
            more = next(stream, None)
            self._ended = more is None
            parts.append(more or b"")
        self._offset += place
        self._text = b"".join(parts)
        return 0

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
            "there is no list of trace events in it" + (f" ({self.source.cut_short})" if self.source.cut_short else ""),
            hint="a Chrome trace has a key traceEvents with a list; see docs/trace-formats.md for what can be read",
            where=f"{self.source.path}, looked through {len(text)} bytes",
        )

    def _read_header(self, head: bytes, tail: bytes, stream: Iterator[bytes]) -> None:
        parts, size = [tail], len(tail)
        for more in stream:
            # The rest of a packed file is unpacked in any case: its checksum stands at its end.
            size += len(more)
            parts = [*parts, more] if size <= _HEAD_LIMIT else []
        tail = b"".join(parts)
        self.cut_short = self.cut_short or self.source.cut_short
        if not head:
            return
        if size > _HEAD_LIMIT:
            self.cut_short = "what follows the list of events is too long"
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


def read_records(text: bytes, begin: int = 0) -> Reached:
    """How far the whole records at `begin` go; strings and brackets inside are followed."""
    while True:
        found = _RECORDS.match(text, begin)
        begin = found.end() if found else begin
        opened = _skip_separators(text, begin)
        if text[opened : opened + 1] != b"{":
            return Reached(begin, begin)
        # It goes on behind the end of the text, is damaged, or is nested too deep for the expression.
        end, looked = _end_of_deep(text, opened)
        if end is None:
            return Reached(begin, looked)
        begin = end


def _skip_separators(text: bytes, place: int) -> int:
    found = _SEPARATED.match(text, place)
    return found.end() if found else place


def _end_of_deep(text: bytes, begin: int) -> tuple[int | None, int]:
    """Behind the record at `begin` (None: it has no end here), and how far that was looked for."""
    depth = 0
    for found in _TOKENS.finditer(text, begin):
        token = found[0]
        if token in (b"}", b"]"):
            depth -= 1
            if depth <= 0:
                return found.end(), found.end()
        elif token[-1] in b"{[":
            if depth == DEEPEST or (depth == 1 and len(token) > 1):
                return None, found.end()
            depth += 1
        elif token == b'"':
            return None, _end_of_open_string(text, found.start())
    return None, len(text)


def _end_of_open_string(text: bytes, begin: int) -> int:
    """Where a string without an end, or with the wrong one, breaks off; the end of the text where it may go on."""
    found = _OPEN_STRING.match(text, begin)
    end = found.end() if found else begin
    return len(text) if end >= len(text) or text[end] == ord("\\") else end + 1


Decoded = TypeVar("Decoded")


def salvage(
    piece: Piece, decode: Callable[[bytes], Decoded | None], on_damage: Callable[[str, int], None]
) -> Iterator[Decoded]:
    """Records of a damaged text, one by one; `on_damage` hears what was left out and where in the file.

    `decode` gives None for what is no record. A bracket too few makes many records look like one: the search then goes
    on inside of it.
    """
    text, offset, patience = piece
    place = 0
    while (begin := text.find(b"{", place)) >= 0:
        if text[place:begin].strip(_SEPARATORS):
            on_damage(INVALID_SECTIONS, offset + place)
        found = _ONE_RECORD.match(text, begin)
        end, looked = (found.end(), found.end()) if found else _end_of_deep(text, begin)
        record = None if end is None else decode(text[begin:end])
        if record is not None and end is not None:
            yield record
            place = end
            continue
        on_damage(INVALID_EVENTS, offset + begin)
        again = patience.next_beginning(text, offset, begin, looked)
        if again is None:
            return
        place = again
    if text[place:].strip(_SEPARATORS):
        on_damage(INVALID_SECTIONS, offset + place)


def decode_events(
    piece: Piece,
    decoder: msgspec.json.Decoder[list[Decoded]],
    decode: Callable[[bytes], Decoded | None],
    on_damage: Callable[[str, int], None],
) -> list[Decoded]:
    """All events of a piece at once; where that fails one by one, so that a bad record costs only itself."""
    try:
        return decoder.decode(b"[" + piece.text + b"]")
    except UNREADABLE:
        return list(salvage(piece, decode, on_damage))
