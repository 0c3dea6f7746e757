"""Heartbeats: each rank writes what it is doing, so that a supervisor knows which one stopped, where and since when."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import msgspec

from stepscope.records import Failure, describe_exception, encode_document
from stepscope.store import StoredRun

TERMINATED = "terminated"
"""The kind of failure that a rank notes when its launcher ends it."""
STACK_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stacks of all its threads into its log."""

_PR_SET_PDEATHSIG = 1
_REARM_S = 0.2
_REWRITE_S = 1.0


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank last said of itself."""

    rank: int
    pid: int
    host: str
    number: int
    """Grows with each beat; a rank that is behind the others has a smaller one."""
    phase: str
    case: str | None
    at_s: float
    """Seconds since the epoch."""


class Heartbeat:
    """One rank's side. Beats come between timed regions, at most some a second; writing one takes 50 to 250 µs.

    A beat also winds up an alarm clock inside this process: if none follows within `limit_s`, the stacks of all
    threads are written into the log and the process ends, whatever holds it.
    """

    def __init__(self, *, rank: int, limit_s: float, log: TextIO) -> None:
        self._rank = rank
        self._path: Path | None = None
        self._limit_s = limit_s
        self._log = log
        self._number = 0
        self._said: tuple[str, str | None] = ("starting", None)
        self._written_at_s = 0.0
        self._armed_at_s = 0.0

    def move_to(self, ranks_folder: Path, log: TextIO) -> None:
        """Beats are written there from now on; before, only the alarm clock runs."""
        self._path = beat_path(ranks_folder, self._rank)
        self._log = log
        self._armed_at_s = 0.0

    def beat(self, phase: str, case: str | None = None) -> None:
        self._number += 1
        self._said = (phase, case)
        self._write()
        self._rearm()

    def tick(self) -> None:
        """Still at it: cheap enough for every iteration of a slow loop. The number stays, so that ranks compare."""
        if time.monotonic() - self._written_at_s > _REWRITE_S:
            self._write()
        self._rearm()

    def _write(self) -> None:
        self._written_at_s = time.monotonic()
        if self._path is None:
            return
        phase, case = self._said
        beat = Beat(
            rank=self._rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            number=self._number,
            phase=phase,
            case=case,
            at_s=time.time(),
        )
        _write_whole(self._path, encode_document(beat))

    def _rearm(self) -> None:
        now_s = time.monotonic()
        if now_s - self._armed_at_s > _REARM_S:
            self._armed_at_s = now_s
            faulthandler.dump_traceback_later(self._limit_s, exit=True, file=self._log)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def stop(self) -> None:
        """The rank is done: nobody needs to look for it any more."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class NoHeartbeat:
    """For a process that nobody waits for."""

    def beat(self, phase: str, case: str | None = None) -> None:
        return

    def tick(self) -> None:
        return


def _write_whole(path: Path, content: bytes) -> None:
    """By rename: whoever looks at any moment, or after a kill, finds all of it or nothing."""
    aside = path.with_suffix(".tmp")
    aside.write_bytes(content)
    aside.rename(path)


def beat_path(ranks_folder: Path, rank: int) -> Path:
    return ranks_folder / f"rank-{rank}.beat"


def log_path(ranks_folder: Path, rank: int) -> Path:
    return ranks_folder / f"rank-{rank}.log"


def failure_path(ranks_folder: Path, rank: int) -> Path:
    return ranks_folder / f"rank-{rank}.failure.json"


def read_beat(ranks_folder: Path, rank: int) -> Beat | None:
    """None where the rank has not said anything yet, or has finished."""
    try:
        return msgspec.json.decode(beat_path(ranks_folder, rank).read_bytes(), type=Beat)
    except FileNotFoundError:
        return None


def describe_activity(beat: Beat, stored: StoredRun) -> str:
    """The phase, and the case as the plan names it."""
    if beat.case is None:
        return beat.phase
    labels = {case.key: case.label for case in stored.plan.cases}
    return f"{beat.phase} of {labels.get(beat.case, f'case {beat.case}')}"


def write_rank_failure(ranks_folder: Path, rank: int, error: BaseException) -> Failure:
    """What a rank leaves behind when it ends by an exception."""
    failure = msgspec.structs.replace(describe_exception(error), rank=rank)
    _write_whole(failure_path(ranks_folder, rank), encode_document(failure))
    return failure


def read_rank_failure(ranks_folder: Path, rank: int) -> Failure | None:
    path = failure_path(ranks_folder, rank)
    return msgspec.json.decode(path.read_bytes(), type=Failure) if path.exists() else None


def enable_stack_dumps(log: TextIO) -> None:
    """Crashes in native code and the stack signal leave a trace in the log."""
    faulthandler.enable(file=log, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=log, all_threads=True)


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """A process that does not outlive this one, however this one ends."""
    return subprocess.Popen(
        command,
        preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - only calls prctl
        **options,
    )


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when its parent, the process of that id, ends.

    Linux only; elsewhere a rank ends at its own time limit.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the kernel was asked
            os.kill(os.getpid(), signal.SIGKILL)
