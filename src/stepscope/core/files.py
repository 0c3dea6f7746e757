"""Files written whole or not at all: evidence inside a store, and what a user asks for; and files of others, opened."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stepscope.core.errors import StoreWriteError

LINK_LIMIT = 40
"""Links behind each other that Linux follows."""
_NAME_PART = 100
"""Characters of a name that a scratch file beside it repeats: together they must stay below the file system's limit."""
_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_DESCRIPTOR = re.compile(r"/(?:dev|proc/(?:self|thread-self|(?P<pid>\d+)))/fd/(?P<number>\d+)")


class NotRegularError(OSError):
    """Something else than a regular file; says what."""


def open_regular(path: Path) -> io.FileIO:
    """A regular file, to read. A FIFO would wait for ever and a device has no end: NotRegularError; else OSError."""
    _require_regular(os.stat(path).st_mode)  # opening a device may already do something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor).st_mode)  # another one may have taken the name since
    except NotRegularError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb", buffering=0)


def hash_file(path: Path) -> str:
    """SHA-256 of the content."""
    from hashlib import file_digest  # loads OpenSSL, which help needs nothing of

    with open_regular(path) as file:
        return file_digest(file, "sha256").hexdigest()


def _require_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
        raise NotRegularError(errno.EINVAL, f"is {kind}, not a file")


def write_file_atomically(path: Path, data: bytes) -> None:
    """The file is either as it was or complete: written aside, flushed to disk, renamed. A link is replaced."""
    aside = _beside(path)
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise
    sync_folder(path.parent)


def user_cache() -> Path:
    """The user's folder for what can be made anew."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepscope"


def sync_folder(folder: Path) -> None:
    """Make a rename or a new name last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def output_file(path: Path, *, hint: str = "choose another file", make_folders: bool = False) -> Iterator[Path]:
    """A scratch file whose content becomes that of `path`, a file named by the user, when the block ends well.

    A regular file appears whole or stays as it was; a symbolic link stays and its target is written. What is not a
    regular file (a device, a FIFO, /dev/stdout) is never replaced: the content is written through it.
    Raises StoreWriteError where that cannot be done.
    """
    try:
        descriptor = _open_special(path)
        target = Path(os.path.realpath(path))
        if descriptor is None and make_folders:
            target.parent.mkdir(parents=True, exist_ok=True)
        scratch = _beside(target) if descriptor is None else _somewhere()
        try:
            yield scratch
            if descriptor is None:
                if target.exists():
                    shutil.copymode(target, scratch)
                scratch.replace(target)
            else:
                _copy_into(descriptor, scratch)
        finally:
            with suppress(OSError):
                scratch.unlink()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StoreWriteError(f"cannot be written: {error.strerror or error}", hint=hint, where=str(path)) from error


def write_output(path: Path, data: bytes, *, hint: str = "choose another file", make_folders: bool = False) -> None:
    """`data` as the content of a file that the user named; see `output_file`."""
    with output_file(path, hint=hint, make_folders=make_folders) as scratch:
        scratch.write_bytes(data)


def is_stdout(path: Path) -> bool:
    """Whether a file that the user named is this process's standard output."""
    return _find_descriptor(path) == 1


def _beside(path: Path) -> Path:
    """In the same folder, so that a rename is all that is left to do."""
    return path.with_name(f".{path.name[:_NAME_PART]}.{os.getpid()}.tmp")


def _somewhere() -> Path:
    from tempfile import mkstemp

    handle, name = mkstemp(prefix="stepscope-output-")
    os.close(handle)
    return Path(name)


def _open_special(path: Path) -> int | None:
    """A descriptor to write through; None for a regular file, there or not."""
    number = _find_descriptor(path)
    if number is not None:
        return os.dup(number)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    return None if stat.S_ISREG(mode) else os.open(path, os.O_WRONLY)


def _find_descriptor(path: Path) -> int | None:
    """Which open file of this process a name like /dev/stdout means: opened anew it would have a place of its own."""
    name = os.path.abspath(path)
    for _ in range(LINK_LIMIT):
        if name in _STREAMS:
            return _STREAMS[name]
        found = _DESCRIPTOR.fullmatch(name)
        if found is not None and found["pid"] in {None, str(os.getpid())}:
            return int(found["number"])
        if not os.path.islink(name):
            return None
        name = os.path.normpath(os.path.join(os.path.dirname(name), os.readlink(name)))
    return None


def _copy_into(descriptor: int, scratch: Path) -> None:
    sys.stdout.flush()
    with scratch.open("rb") as content, open(descriptor, "wb") as file:
        shutil.copyfileobj(content, file)
