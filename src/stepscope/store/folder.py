"""Names and places inside a store and a run folder, locks, and append-only files of lines."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from stepscope.core.errors import CorruptRunError, RunBusyError, StoreNotWritableError, StoreWriteError, UsageError
from stepscope.core.files import open_regular, sync_folder

STORE_VARIABLE = "STEPSCOPE_STORE"
DEFAULT_STORE = "stepscope-runs"

RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
SYSTEM_FILE = "system.json"
COMMUNICATION_FILE = "communication.json"
JOURNAL_FILE = "journal.jsonl"
FAILURES_FILE = "failures.jsonl"
LOCK_FILE = "writer.lock"
RUNNER_LOCK_FILE = "runner.lock"
"""Locked by the process that was told to measure the run, from before there is a plan until all its parts are done."""
BEGUN_FILE = "begun.json"
"""The case that is being measured; there only while it is, or after the process was killed in the middle of it."""
SAMPLES_FOLDER = "samples"
RANKS_FOLDER = "ranks"
"""What each rank wrote to its terminal, and its heartbeat."""
TRACES_FOLDER = "traces"
"""Recordings of cases; results name theirs relative to the run."""

NAME_LIMIT = 255
"""Characters of a file name on every file system in use."""

LOCK_WAIT_S = 5.0
"""How long a resume waits for the last writer to let go: ranks need a moment to die after their parent."""


def resolve_store(option: str | Path | None) -> Path:
    """`--store`, else the variable, else a folder beside the work."""
    return Path(option or os.environ.get(STORE_VARIABLE) or DEFAULT_STORE)


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def make_run_folder(store: Path, name: str) -> Path:
    """A new folder that no other process has: two writers may share one store."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    try:
        store.mkdir(parents=True, exist_ok=True)
        while True:
            folder = store / f"{stamp}-{name}-{os.urandom(3).hex()}"
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise StoreNotWritableError(
            f"cannot write into the store {store}: {error.strerror}",
            hint="choose another folder with --store DIR or $STEPSCOPE_STORE",
            where=str(store),
        ) from error


def read_evidence(path: Path, *, where: str, offset: int = 0, length: int | None = None) -> bytes | None:
    """The content of a regular file, or a slice of it; None where there is none.

    A folder may come from somebody else: what is no regular file (a FIFO would wait for ever, a device has no end) is
    refused, and a length is believed only as far as the file reaches.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(min(offset, size))
            return file.readall() if length is None else file.read(min(length, max(0, size - offset)))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorruptRunError(f"cannot read {path.name}: {error.strerror}", where=where) from error


def require_plain_folder(folder: Path) -> None:
    """Refuse to write into a run folder that could lead the writing elsewhere, or is somebody else's.

    Its own place may be reached by a link; inside it are only folders and files, each with one name.
    """
    from tempfile import TemporaryFile

    try:
        with TemporaryFile(dir=folder) as mine:  # file systems may give files another owner than the user
            reason = _find_odd(folder, os.fstat(mine.fileno()).st_uid)
    except OSError as error:
        raise _not_writable(folder, error) from error
    if reason is not None:
        raise UsageError(
            f"run {folder.name} is not written to: {reason}",
            hint="reading it is safe; to go on with it, copy its files to a store of your own",
            where=str(folder),
        )


def _not_writable(folder: Path, error: OSError) -> StoreNotWritableError:
    return StoreNotWritableError(
        f"cannot write into {folder}: {error.strerror}",
        hint="copy the run to a place that is yours",
        where=str(folder),
    )


def _find_odd(folder: Path, owner: int) -> str | None:
    for place, folders, files in os.walk(folder):
        for name in ("", *folders, *files):
            path = Path(place, name)
            found = path.stat() if path == folder else path.lstat()
            told = f"{path.relative_to(folder)} " if path != folder else "the folder "
            if found.st_uid != owner:
                return f"{told}belongs to another user (number {found.st_uid})"
            if stat.S_ISLNK(found.st_mode):
                return f"{told}is a symbolic link"
            if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
                return f"{told}is neither a file nor a folder"
            if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
                return f"{told}has a second name elsewhere (a hard link)"
    return None


def is_locked(folder: Path) -> bool:
    """Whether some process is measuring or writing this run just now."""
    return any(_is_file_locked(folder / name) for name in (RUNNER_LOCK_FILE, LOCK_FILE))


def _is_file_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks, or no file to lock
        return False
    finally:
        os.close(descriptor)
    return False


@contextmanager
def hold_lock(folder: Path, wait_s: float = LOCK_WAIT_S, *, name: str = LOCK_FILE) -> Iterator[None]:
    """The kernel drops the lock with the process, so a killed writer never leaves a stale one."""
    try:
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise _not_writable(folder, error) from error
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunBusyError(
                        f"run {folder.name} is being written by another process",
                        hint="wait for it to end, or stop it, then resume again",
                        where=str(folder),
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


_held: dict[Path, AbstractContextManager[None]] = {}


def hold_run(folder: Path) -> None:
    """From now on the run is listed as running and cannot be removed, until `release_run` or the end of this process.

    Raises RunBusyError where another process holds it. Holding it twice is holding it once.
    """
    if folder.resolve() not in _held:
        lock = hold_lock(folder, name=RUNNER_LOCK_FILE)
        lock.__enter__()
        _held[folder.resolve()] = lock


def release_run(folder: Path) -> None:
    lock = _held.pop(folder.resolve(), None)
    if lock is not None:
        lock.__exit__(None, None, None)


def cannot_write(path: Path, error: OSError) -> StoreWriteError:
    return StoreWriteError(
        f"cannot write {path.name}: {error.strerror}; every finished case is kept",
        hint="make room (or fix the disk), then continue with --resume",
        where=str(path),
    )


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
            raise cannot_write(self.path, error) from error
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
