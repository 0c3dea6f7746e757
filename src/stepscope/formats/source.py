"""Bytes of a trace file, whatever it is packed in. The first bytes decide, not the name."""

from __future__ import annotations

import gc
import hashlib
import io
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from stepscope.core.errors import BadInputError, MissingDependencyError, first_line
from stepscope.core.files import NotRegularError, open_regular, user_cache
from stepscope.core.units import format_bytes

LONGEST_TEXT = 4096
WHOLE_LIMIT = 1 << 62
_LONGEST_IDENTITY = 256
_BYTE = re.compile(r"\(byte (\d+)\)")


def text_of(value: object, longest: int = LONGEST_TEXT) -> str | None:
    return value[:longest] if isinstance(value, str) else None


def whole_of(value: object) -> int | None:
    """A whole number from 0 that fits a column."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < WHOLE_LIMIT else None


def list_of(value: object, most: int | None = None) -> list[Any]:
    """Items of a list or tuple, the first `most` of them; nothing of anything else."""
    return list(value[:most]) if isinstance(value, list | tuple) else []


def describe_group(name: str, ranks: Sequence[int], description: str = "") -> dict[str, Any]:
    """A process group as the header of a Kineto trace lists it."""
    return {"pg_name": name, "pg_desc": description, "pg_size": len(ranks), "ranks": ranks}


def identity_of(value: int | str | float | None) -> str:
    """A process or thread as text: 7 and 7.0 are the same."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)[:_LONGEST_IDENTITY]


def damaged_byte(error: BaseException, size: int) -> int:
    """Where a decoder of JSON stopped; a text of this size that simply ends is damaged at its end."""
    found = _BYTE.search(str(error))
    return int(found[1]) if found else size


INVALID_EVENTS = "events that are no valid JSON were left out"
INVALID_SECTIONS = "sections between events that are no JSON were left out"
_ENDS_EARLY = "ends too early"
_FIRST_DAMAGE = "(the first damage is at byte"


def ends_early(why: str) -> str:
    return f"the file is damaged or {_ENDS_EARLY} ({why}): the events before were read"


def first_damage(offset: int) -> str:
    return f"{_FIRST_DAMAGE} {offset})"


def describe_damage(repairs: Mapping[str, int]) -> str | None:
    """One sentence on what is missing of a trace; None where nothing is."""
    lost = [
        f"{count:,} {what}" if what in (INVALID_EVENTS, INVALID_SECTIONS) else what
        for what, count in repairs.items()
        if what in (INVALID_EVENTS, INVALID_SECTIONS) or _ENDS_EARLY in what
    ]
    if not lost:
        return None
    place = next((f" {what}" for what in repairs if what.startswith(_FIRST_DAMAGE)), "")
    return f"{'; '.join(lost)}{place}"


GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
SKIPPED_FRAME = b"\x2a\x4d\x18"
"""Behind a byte from 0x50 to 0x5f: a part of a zstd file that holds no content."""
PIECE_BYTES = 4 << 20
MOST_BYTES = 2 << 30
"""Unpacked size of files that are read as a whole."""


BESIDE = ".stepscope"
CACHE_VARIABLE = "STEPSCOPE_TRACE_CACHE"
"""A folder for all caches of traces, instead of the places beside them."""


class Source:
    """One file, read forward in pieces. A packed file that ends too early gives what it holds; `cut_short` says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut_short: str | None = None
        self.bytes_read = 0

    def pieces(self, size: int = PIECE_BYTES) -> Iterator[bytes]:
        with open_bytes(self.path) as stream:
            while True:
                piece, error = _read_some(stream, size)
                if piece:
                    self.bytes_read += len(piece)
                    yield piece
                if error is not None:
                    self.cut_short = str(error) or type(error).__name__
                if error is not None or not piece:
                    return


def open_bytes(path: Path) -> BinaryIO:
    """The unpacked content as a stream."""
    file = open_trace(path)
    magic = file.read(4)
    file.seek(0)
    if magic.startswith(GZIP):
        return _unpack_gzip(file)
    if magic.startswith(ZSTD):
        return _unpack_zstd(file, path)
    return file


def open_trace(path: Path) -> BinaryIO:
    """The file as it lies on the disk. Pipes and devices are refused: they may never answer, or never end."""
    try:
        return io.BufferedReader(open_regular(path))
    except NotRegularError as error:
        hint = "folders are read with read_traces" if path.is_dir() else "write the content to a file first"
        raise BadInputError(str(error.strerror), hint=hint, where=str(path)) from error
    except OSError as error:
        hint = "give a trace file; folders are read with read_traces"
        raise BadInputError(f"cannot be read: {error.strerror}", hint=hint, where=str(path)) from error


def _read_some(stream: BinaryIO, size: int) -> tuple[bytes, Exception | None]:
    """Up to `size` bytes, and the error that ended them: asked again, some unpackers say that all is well."""
    parts: list[bytes] = []
    left = size
    while left:
        try:
            part = stream.read1(left) if hasattr(stream, "read1") else stream.read(left)
        except Exception as error:  # noqa: BLE001 - each unpacker has an error class of its own
            return b"".join(parts), error
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts), None


def read_bounded(path: Path, limit: int = MOST_BYTES) -> tuple[bytes, str | None]:
    """All of it, unpacked, and why a packed file ended too early; None where it was whole.

    BadInputError for more than `limit` bytes: a few packed ones can hold any number.
    """
    source = Source(path)
    pieces: list[bytes] = []
    for piece in source.pieces():
        pieces.append(piece)
        if source.bytes_read > limit:
            raise BadInputError(
                f"holds more than {format_bytes(limit)} unpacked, the most that is read at once of such a file "
                f"({format_bytes(path.stat().st_size)} on the disk)",
                hint="record fewer steps, or cut the file into several",
                where=str(path),
            )
    return b"".join(pieces), source.cut_short


def decode_json(data: bytes, *, what: str, hint: str, path: Path, cut_short: str | None, kind: Any = Any) -> Any:
    """The content of a whole file; BadInputError, which begins with `what`, names the byte where it is damaged."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        packed = f" (the packed file ends early: {cut_short})" if cut_short else ""
        raise BadInputError(
            f"{what}: {first_line(error)}{packed}",
            hint=hint,
            where=f"{path}: byte {damaged_byte(error, len(data))}",
        ) from error


def read_head(path: Path, size: int = 1 << 16) -> bytes:
    """The first unpacked bytes, enough to tell what a file is."""
    source = Source(path)
    head = next(source.pieces(size), b"")
    if not head and source.cut_short:
        raise BadInputError(
            f"is packed but cannot be unpacked: {source.cut_short}", hint="copy the file again", where=str(path)
        )
    return head


def _unpack_gzip(file: BinaryIO) -> BinaryIO:
    library: Any = zlib
    if find_spec("isal") is not None:
        from isal import isal_zlib as library  # three times as fast
    return cast(BinaryIO, io.BufferedReader(_Gunzip(file, library), 1 << 20))


class _Unpacked(io.RawIOBase):
    """The content of a packed file as a stream; closing it closes the file."""

    def __init__(self, file: BinaryIO, library: Any) -> None:
        self._file = file
        self._library = library
        self._unpacker: Any = None
        self._packed = b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


class _Unzstd(_Unpacked):
    """Of zstd, whose own stream reports no error where a file was cut. Input goes in in small steps, since
    each may unpack to any size up to some thousand times its own."""

    _STEP = 1 << 12

    def __init__(self, file: BinaryIO, library: Any) -> None:
        super().__init__(file, library)  # no unpacker: between frames
        self._text = memoryview(b"")

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            packed = self._packed or self._file.read(self._STEP)
            if self._unpacker is None:
                packed += self._file.read(4 - len(packed)) if len(packed) < 4 else b""
                if not packed.startswith(ZSTD) and packed[1:4] != SKIPPED_FRAME:
                    return 0
                self._unpacker = self._library.ZstdDecompressor().decompressobj()
            elif not packed:
                raise EOFError("the packed file ends before its end marker")
            self._text = memoryview(self._unpacker.decompress(packed))
            self._packed = self._unpacker.unused_data
            if self._unpacker.eof:
                self._unpacker = None
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count


class _Gunzip(_Unpacked):
    """Unpacks as the bytes come, so that a file that was cut gives all it holds before the error. Several packed parts
    one after the other are one file; anything else behind the last one is ignored, as gzip does.

    An unpacker that meets an error keeps what it had unpacked in the same call to itself, and one that ends copies what
    was packed behind it: small steps bound what is lost to the one and what many small parts cost by the other.
    """

    _STEP = 1 << 14
    _MOST_TEXT = 1 << 15

    def __init__(self, file: BinaryIO, library: Any) -> None:
        super().__init__(file, library)
        self._unpacker = library.decompressobj(wbits=31)
        self._whole = False

    def readinto(self, buffer: Any) -> int:
        while not self._whole:
            if not self._packed:
                self._packed = self._file.read(self._STEP)
                # At the end of a cut file the unpacker may still hold what did not fit the buffer before.
            text = self._unpacker.decompress(self._packed, min(len(buffer), self._MOST_TEXT))
            if not text and not self._packed and not self._unpacker.eof:
                raise EOFError("the packed file ends before its end marker")
            self._packed = self._unpacker.unconsumed_tail
            if self._unpacker.eof:
                self._next_part()
            if text:
                buffer[: len(text)] = text
                return len(text)
        return 0

    def _next_part(self) -> None:
        rest = self._unpacker.unused_data or self._packed
        rest = rest or self._file.read(self._STEP)
        self._packed = rest
        if rest.startswith(GZIP):
            self._unpacker = self._library.decompressobj(wbits=31)
        else:
            self._whole = True


def _unpack_zstd(file: BinaryIO, path: Path) -> BinaryIO:
    try:
        import zstandard
    except ImportError:
        file.close()
        raise MissingDependencyError(
            "reading a file packed with zstd needs the package zstandard",
            hint="pip install zstandard, or unpack the file with zstd -d",
            where=str(path),
        ) from None
    return cast(BinaryIO, io.BufferedReader(_Unzstd(file, zstandard), 1 << 20))


def is_packed(path: Path) -> bool:
    with open_trace(path) as file:
        return file.read(4).startswith((GZIP, ZSTD))


_RANK_IN_NAME = (
    re.compile(r"(?:rank|worker|trace_rank)[-_.]?(\d+)", re.IGNORECASE),
    re.compile(r"[-_.](\d+)(?:_\d+)?(?:\.pt)?(?:\.trace)?(?:\.json|\.et|\.sqlite|\.csv)?(?:\.gz|\.zst)?$"),
)


def rank_in_name(path: Path) -> int | None:
    """The rank a file's name speaks of; used only where its content says nothing."""
    for pattern in _RANK_IN_NAME:
        found = pattern.search(path.name)
        if found and int(found[1]) < 1 << 20:
            return int(found[1])
    return None


def cache_folders(path: Path, place: int = 0) -> list[Path]:
    """Where the cache of this file (of its `place`-th rank) may be: beside it, or in the user's cache folder."""
    path = path.resolve()
    named = f"{hashlib.sha256(f'{path}:{place}'.encode()).hexdigest()[:24]}-{path.name}"[:200]
    if chosen := os.environ.get(CACHE_VARIABLE):
        return [Path(chosen) / named]
    beside = f"{path.name}.{place}.cache" if place else f"{path.name}.cache"
    return [path.parent / BESIDE / beside, user_cache() / "traces" / named]


@contextmanager
def gc_paused() -> Iterator[None]:
    """The collector rests inside; as it was afterwards. For work that makes no circles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
