"""Self-launch: start ranks on this machine through the rank server, and watch them until they end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import msgspec
import psutil
from msgspec.structs import replace

from stepscope.core.errors import InterruptedRunError, LaunchError, MissingDependencyError
from stepscope.core.processes import name_signal
from stepscope.launch.context import SELF_LAUNCH_VARIABLE
from stepscope.launch.server import RankEvent
from stepscope.launch.watch import (
    KEPT,
    LAST_LINES,
    RankWatch,
    as_error,
    clear_evidence,
    describe_dead_rank,
    find_causes,
    last_lines,
    read_from,
)
from stepscope.launch.watchdog import log_path, start_child
from stepscope.records import Failure
from stepscope.store import RANKS_FOLDER, record_failure

POLL_S = 0.05
BEATS_POLL_S = 0.5
LOAD_EXTRA_S = 30.0
"""Before there are ranks torch is imported: this much longer than the hang limit is allowed."""
SETTLE_S = 2.0
"""How long to wait for further ranks to end after one that only says that another one is gone."""
LAUNCHER_LOG = "launcher.log"


def launch_local(
    *, folder: Path, target: str, ranks: int, hang_limit_s: float, on_poll: Callable[[], None] = lambda: None
) -> None:
    """Run `target` (module:function) on `ranks` local ranks of the run in `folder`; returns when all are done.

    A rank that dies ends the others at once; one that sends no heartbeat for `hang_limit_s` ends all. Either is
    recorded in the folder and raised; what was finished stays and can be resumed.
    """
    ranks_folder = folder / RANKS_FOLDER
    clear_evidence(folder)
    with (ranks_folder / LAUNCHER_LOG).open("ab") as log:
        log_start = log.tell()
        supervisor = _Supervisor(_start(folder, target, ranks, hang_limit_s, log), folder, ranks, hang_limit_s, on_poll)
        try:
            supervisor.watch()
        except KeyboardInterrupt:
            record_failure(folder, Failure(kind="interrupted", message="stopped by the user"))
            raise InterruptedRunError(
                "stopped by the user; every finished case is kept", hint=f"continue with --resume {folder.name}"
            ) from None
        finally:
            supervisor.stop_all()
    if not supervisor.all_succeeded:
        output = read_from(ranks_folder / LAUNCHER_LOG, log_start)
        failure = describe_death(folder, ranks, supervisor.exit_codes, supervisor.server.returncode, output)
        record_failure(folder, failure)
        place = f"the end of its output is in {log_path(ranks_folder, failure.rank or 0)}"
        hint = "; ".join(filter(None, [failure.hint, place, f"{KEPT} {folder.name}"]))
        where = str(ranks_folder / LAUNCHER_LOG) if failure.rank is None else None
        raise as_error(replace(failure, hint=hint, where=where))


def _start(folder: Path, target: str, ranks: int, hang_limit_s: float, log: IO[bytes]) -> subprocess.Popen[bytes]:
    if find_spec("torch") is None:
        raise MissingDependencyError("starting ranks needs torch", hint="pip install 'stepscope[produce]'")
    threads = max(1, len(os.sched_getaffinity(0)) // ranks) if hasattr(os, "sched_getaffinity") else 1
    environment = {
        # More threads than cores turn a microsecond into milliseconds; the setting is stored with the run.
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        SELF_LAUNCH_VARIABLE: "1",
        "PYTHONFAULTHANDLER": "1",
    }
    command = [
        sys.executable, "-m", "stepscope.launch.server", str(folder.resolve()), target, repr(hang_limit_s), str(ranks)
    ]  # fmt: skip
    try:
        return start_child(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"cannot start the ranks: {error.strerror}", where=sys.executable) from error


class _Supervisor:
    """Reads what the rank server says of its ranks, watches their heartbeats, and ends everything it started."""

    def __init__(
        self,
        server: subprocess.Popen[bytes],
        folder: Path,
        ranks: int,
        hang_limit_s: float,
        on_poll: Callable[[], None],
    ) -> None:
        assert server.stdout is not None
        self.server, self._events = server, server.stdout
        self._folder, self._ranks_folder = folder, folder / RANKS_FOLDER
        self._ranks = ranks
        self._hang_limit_s, self._watch = hang_limit_s, RankWatch(folder, hang_limit_s)
        self._on_poll = on_poll
        self._unread = b""
        self._pids: dict[int, int] = {}
        self.exit_codes: dict[int, int] = {}
        """By rank, in the order in which they ended."""
        self._started_s = self._looked_s = time.time()

    @property
    def all_succeeded(self) -> bool:
        return list(self.exit_codes.values()) == [0] * self._ranks

    def watch(self) -> None:
        """Returns when all ranks have ended, or when one has failed and it is known which one was the first."""
        while self._read_events(POLL_S) and not any(self.exit_codes.values()):
            self._on_poll()
            late = self._late_ranks()
            if late:
                failure = self._watch.describe_hang(self._watch.find_hung(late))
                record_failure(self._folder, failure)
                raise as_error(failure)
        deadline_s = time.monotonic() + SETTLE_S
        while not find_causes(self._ranks_folder, self._ranks, self.exit_codes)[0] and time.monotonic() < deadline_s:
            if not self._read_events(POLL_S):
                break
        self._on_poll()

    def _read_events(self, wait_s: float) -> bool:
        """False: the server has ended, and with it all ranks."""
        if not select.select([self._events], [], [], wait_s)[0]:
            return True
        said = self._events.read(65536)
        *lines, self._unread = (self._unread + said).split(b"\n")
        for line in lines:
            event = msgspec.json.decode(line, type=RankEvent)
            self._pids[event.rank] = event.pid
            if event.exit_code is None:
                self._started_s = time.time()
            else:
                self.exit_codes[event.rank] = event.exit_code
        return bool(said)

    def _late_ranks(self) -> list[int]:
        now_s = time.time()
        if now_s - self._looked_s < BEATS_POLL_S:
            return []
        self._looked_s = now_s
        if not self._pids and now_s - self._started_s > self._hang_limit_s + LOAD_EXTRA_S:
            raise LaunchError(
                f"torch could not be imported within {now_s - self._started_s:.0f} s",
                hint="a slow file system looks like this; allow more with --hang-timeout",
                where=str(self._ranks_folder / LAUNCHER_LOG),
            )
        running = [rank for rank in self._pids if rank not in self.exit_codes]
        return self._watch.find_late(running, self._started_s)

    def stop_all(self) -> None:
        """The server leads a session of its own, and what its ranks start may have left that."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.server.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()
        self._events.close()


def describe_death(
    folder: Path, ranks: int, exit_codes: dict[int, int], server_code: int, launcher_output: str
) -> Failure:
    """The rank that failed first, with what is known of it."""
    ranks_folder = folder / RANKS_FOLDER
    certain, possible = find_causes(ranks_folder, ranks, exit_codes)
    rank = next(iter([*certain, *possible]), None)
    if rank is None:
        return Failure(
            kind="rank_died",
            message=f"the process that starts the ranks ended: {_describe_exit(server_code)}",
            last_lines=launcher_output.splitlines()[-LAST_LINES:],
        )  # fmt: skip
    code, lines = exit_codes.get(rank), last_lines(log_path(ranks_folder, rank), LAST_LINES)
    return replace(describe_dead_rank(folder, rank, _describe_exit(code)), exit_code=code, last_lines=lines)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "it left no error"
    return f"exit code {code}" if code >= 0 else f"killed by {name_signal(-code)}"
