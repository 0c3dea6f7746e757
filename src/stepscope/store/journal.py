"""An append-only file of lines. A line is there wholly or not at all, whatever stops the writer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from stepscope.core.errors import StoreWriteError
from stepscope.core.files import sync_folder


class AppendFile:
    """Appends whole lines and flushes them to disk; a line that does not fit on the disk is taken back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        existed = path.exists()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        self.size = os.lseek(self._descriptor, 0, os.SEEK_END)
        if not existed:
            sync_folder(path.parent)

    def append(self, line: bytes) -> int:
        """The offset the line begins at. On failure the file is as before and StoreWriteError says why."""
        offset, data = self.size, line + b"\n"
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], offset + written)
            os.fdatasync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, offset)
            raise StoreWriteError(
                f"cannot write {self.path.name}: {error.strerror}; every finished case is kept",
                hint="make room (or mend the disk), then continue with --resume",
                where=str(self.path),
            ) from error
        self.size += len(data)
        return offset

    def cut(self, size: int) -> None:
        """Drop what a crash left behind the last whole line."""
        if size < self.size:
            os.ftruncate(self._descriptor, size)
            self.size = size

    def close(self) -> None:
        os.close(self._descriptor)


def whole_lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and content of each line that ends; a torn last line is not one."""
    yield from enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1)
