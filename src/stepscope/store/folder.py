"""Names and places inside a store and a run folder; one place that knows them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from stepscope.errors import RunBusyError, StoreNotWritableError

STORE_VARIABLE = "STEPSCOPE_STORE"
DEFAULT_STORE = "stepscope-runs"

RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
SYSTEM_FILE = "system.json"
COMMUNICATION_FILE = "communication.json"
JOURNAL_FILE = "journal.jsonl"
FAILURES_FILE = "failures.jsonl"
LOCK_FILE = "writer.lock"
BEGUN_FILE = "begun.json"
"""The case that is being measured; there only while it is, or after the process was killed in the middle of it."""
SAMPLES_FOLDER = "samples"
RANKS_FOLDER = "ranks"
"""What each rank wrote to its terminal, and its heartbeat."""
TRACES_FOLDER = "traces"
"""Recordings of cases; results name theirs relative to the run."""

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


def write_file_atomically(path: Path, data: bytes) -> None:
    """The file is either as it was or complete: written aside, flushed to disk, renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename or a new name last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether some process is writing this run just now."""
    import fcntl

    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def hold_lock(folder: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """The kernel drops the lock with the process, so a killed writer never leaves a stale one."""
    import fcntl
    import time

    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
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
