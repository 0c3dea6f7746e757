"""Bytes of a trace file, whatever it is packed in. The first bytes decide, not the name."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from stepscope.errors import BadInputError, MissingDependencyError

GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
PIECE_BYTES = 8 << 20


class Source:
    """One file, read forward in pieces. A packed file that ends too early gives what it holds; `cut_short` says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut_short: str | None = None
        self.bytes_read = 0

    def pieces(self, size: int = PIECE_BYTES) -> Iterator[bytes]:
        with open_bytes(self.path) as stream:
            while True:
                try:
                    piece = stream.read(size)
                except (EOFError, zlib.error, OSError, ValueError) as error:
                    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
                        raise
                    self.cut_short = str(error) or type(error).__name__
                    return
                if not piece:
                    return
                self.bytes_read += len(piece)
                yield piece


def open_bytes(path: Path) -> BinaryIO:
    """The unpacked content as a stream."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadInputError(
            f"cannot be read: {error.strerror}",
            hint="give a trace file; folders are read with read_traces",
            where=str(path),
        ) from error
    magic = file.read(4)
    file.seek(0)
    if magic.startswith(GZIP):
        return _unpack_gzip(file)
    if magic.startswith(ZSTD):
        return _unpack_zstd(file, path)
    return file


def read_bytes(path: Path) -> bytes:
    """All of it, unpacked. Of a packed file that ends too early: what it holds."""
    return b"".join(Source(path).pieces())


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
    try:
        from isal.igzip import IGzipFile
    except ImportError:
        import gzip

        return cast(BinaryIO, _Tolerant(gzip.GzipFile(fileobj=file)))
    packed = IGzipFile(fileobj=file)  # type: ignore[no-untyped-call]
    return cast(BinaryIO, _Tolerant(packed))


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
    return cast(BinaryIO, _Tolerant(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)))


class _Tolerant(io.RawIOBase):
    """Hands out what an unpacker has before its error, then the error: a cut file keeps its beginning."""

    _STEP = 1 << 18

    def __init__(self, inner: object) -> None:
        self._inner = cast(BinaryIO, inner)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        parts: list[bytes] = []
        left = size
        while left:
            try:
                part = self._inner.read(self._STEP if left < 0 else min(left, self._STEP))
            except Exception as error:  # each unpacker has an error class of its own
                if parts:
                    return b"".join(parts)
                raise EOFError(f"{type(error).__name__}: {error}") from error
            if not part:
                break
            parts.append(part)
            left -= len(part) if left > 0 else 0
        return b"".join(parts)

    def close(self) -> None:
        self._inner.close()
        super().close()


def is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4).startswith((GZIP, ZSTD))
