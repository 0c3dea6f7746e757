"""Self-launch: start ranks on this machine through torch's elastic launcher, and watch them until they end."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import psutil

from stepscope.core.errors import InterruptedRunError, LaunchError, MissingDependencyError, RankDiedError, RankHungError
from stepscope.launch.context import SELF_LAUNCH_VARIABLE
from stepscope.launch.join import is_peer_disconnect
from stepscope.launch.watchdog import (
    STACK_SIGNAL,
    Beat,
    die_with_parent,
    failure_path,
    log_path,
    read_beat,
    read_rank_failure,
)
from stepscope.records import Failure
from stepscope.store import RANKS_FOLDER, record_failure

POLL_S = 0.05
JOIN_EXTRA_S = 30.0
"""Before the first sign of life a rank has to import torch: this much longer than the hang limit is allowed."""
STACK_WAIT_S = 5.0
"""The most that ranks are waited for to write their stacks: on a busy machine that takes more than a second."""
STOP_WAIT_S = 3.0
LAST_LINES = 20
LAUNCHER_LOG = "launcher.log"

_ELASTIC_FAILURE = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s+exitcode\s*:\s*(-?\d+)")


def launch_local(
    *,
    folder: Path,
    target: str,
    ranks: int,
    hang_limit_s: float,
    on_poll: Callable[[], None] = lambda: None,
) -> None:
    """Run `target` (module:function) on `ranks` local ranks of the run in `folder`; returns when all are done.

    A rank that dies ends the others at once; one that gives no sign of life for `hang_limit_s` ends all. Either is
    recorded in the folder and raised; what was finished stays and can be resumed.
    """
    ranks_folder = folder / RANKS_FOLDER
    ranks_folder.mkdir(exist_ok=True)
    for stale in [*ranks_folder.glob("*.beat"), *ranks_folder.glob("*.failure.json")]:
        stale.unlink()
    with (ranks_folder / LAUNCHER_LOG).open("ab") as log:
        log_start = log.tell()
        launcher = _start(folder, target, ranks, hang_limit_s, log)
        supervisor = _Supervisor(launcher, ranks_folder, ranks, hang_limit_s, on_poll)
        try:
            supervisor.watch()
        except KeyboardInterrupt:
            record_failure(folder, Failure(kind="interrupted", message="stopped by the user"))
            raise InterruptedRunError(
                "stopped by the user; every finished case is kept", hint=f"continue with --resume {folder.name}"
            ) from None
        except RankHungError:
            record_failure(folder, supervisor.describe_hang())
            raise
        finally:
            supervisor.stop_all()
    if launcher.returncode != 0:
        failure = _describe_death(ranks_folder, ranks, _read_from(ranks_folder / LAUNCHER_LOG, log_start))
        record_failure(folder, failure)
        advice = [
            failure.hint,
            f"the end of its output is in {log_path(ranks_folder, failure.rank or 0)}",
            f"finished cases are kept: continue with --resume {folder.name}",
        ]
        raise RankDiedError(
            failure.message,
            hint="; ".join(filter(None, advice)),
            where=f"rank {failure.rank}" if failure.rank is not None else str(ranks_folder / LAUNCHER_LOG),
        )


def _start(folder: Path, target: str, ranks: int, hang_limit_s: float, log: IO[bytes]) -> subprocess.Popen[bytes]:
    if not _torch_is_installed():
        raise MissingDependencyError("starting ranks needs torch", hint="pip install 'stepscope[produce]'")
    threads = max(1, len(os.sched_getaffinity(0)) // ranks) if hasattr(os, "sched_getaffinity") else 1
    environment = {
        # More threads than cores turn a microsecond into milliseconds; the setting is stored with the run.
        "OMP_NUM_THREADS": str(threads),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(STOP_WAIT_S)),
        **os.environ,
        SELF_LAUNCH_VARIABLE: "1",
        "PYTHONFAULTHANDLER": "1",
    }
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1", f"--nproc-per-node={ranks}",
        "--max-restarts=0", "--monitor-interval=0.1",
        "-m", "stepscope.launch.worker", str(folder.resolve()), target, repr(hang_limit_s),
    ]  # fmt: skip
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - only calls prctl
        )
    except OSError as error:
        raise LaunchError(f"cannot start the ranks: {error.strerror}", where=sys.executable) from error


def _torch_is_installed() -> bool:
    from importlib.util import find_spec

    return find_spec("torch") is not None


class _Supervisor:
    """Watches the launcher and the ranks' beats; knows who is late and stops everything it started."""

    def __init__(
        self,
        launcher: subprocess.Popen[bytes],
        ranks_folder: Path,
        ranks: int,
        hang_limit_s: float,
        on_poll: Callable[[], None],
    ) -> None:
        self._launcher = launcher
        self._ranks_folder = ranks_folder
        self._ranks = range(ranks)
        self._hang_limit_s = hang_limit_s
        self._on_poll = on_poll
        self._started_s = time.time()
        self._known: dict[int, psutil.Process] = {}
        self._hung: list[int] = []

    def watch(self) -> None:
        while self._launcher.poll() is None:
            self._on_poll()
            self._remember_processes()
            late = self._late_ranks()
            if late:
                self._hung = self._ask_for_stacks(late)
                names = ", ".join(str(rank) for rank in self._hung)
                raise RankHungError(
                    f"rank {names} gave no sign of life for {self._hang_limit_s:.0f} s ({self._doing(self._hung[0])})",
                    hint=f"its stack is in {log_path(self._ranks_folder, self._hung[0])}; finished cases are kept: "
                    f"continue with --resume {self._ranks_folder.parent.name}, or allow more with --hang-timeout",
                    where=f"rank {names}",
                )
            time.sleep(POLL_S)
        self._on_poll()

    def _remember_processes(self) -> None:
        """While the launcher lives its children are known; afterwards they would be nobody's."""
        try:
            for process in psutil.Process(self._launcher.pid).children(recursive=True):
                self._known.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            return

    def _late_ranks(self) -> list[int]:
        now_s = time.time()
        beats = {rank: read_beat(self._ranks_folder, rank) for rank in self._ranks}
        if not any(beats.values()):
            joined = any(log_path(self._ranks_folder, rank).exists() for rank in self._ranks)
            waited = now_s - self._started_s > self._hang_limit_s + JOIN_EXTRA_S
            return list(self._ranks) if waited and not joined else []
        spoken = {rank: beat for rank, beat in beats.items() if beat is not None}
        newest_s = max(beat.at_s for beat in spoken.values())
        if now_s - newest_s <= self._hang_limit_s:
            return self._absent(beats, now_s)
        return list(spoken)

    def _absent(self, beats: dict[int, Beat | None], now_s: float) -> list[int]:
        """Ranks that never joined although others wait for them."""
        if now_s - self._started_s <= self._hang_limit_s + JOIN_EXTRA_S:
            return []
        return [r for r, beat in beats.items() if beat is None and not log_path(self._ranks_folder, r).exists()]

    def _ask_for_stacks(self, late: Sequence[int]) -> list[int]:
        """Of ranks that all stand still, those that do not wait for another: their stack is not in a collective."""
        sizes = {rank: _size(log_path(self._ranks_folder, rank)) for rank in late}
        for rank in late:
            beat = read_beat(self._ranks_folder, rank)
            if beat is not None and beat.pid in self._known:
                self._signal(self._known[beat.pid], STACK_SIGNAL)
        deadline_s = time.monotonic() + STACK_WAIT_S
        dumps: dict[int, str] = {}
        while time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            # A dump that did not grow since the last look is whole.
            before, dumps = dumps, {r: _read_from(log_path(self._ranks_folder, r), sizes[r]) for r in late}
            if dumps == before and all(dumps.values()):
                break
        guilty = []
        for rank, dump in dumps.items():
            main_thread = dump.rpartition("Current thread")[2] or dump
            if "torch/distributed" not in main_thread:
                guilty.append(rank)
        return guilty or list(late)

    def _doing(self, rank: int) -> str:
        beat = read_beat(self._ranks_folder, rank)
        if beat is None:
            return "it never joined"
        return f"last seen in {beat.phase}" + (f" of case {beat.case}" if beat.case else "")

    def describe_hang(self) -> Failure:
        rank = self._hung[0]
        beat = read_beat(self._ranks_folder, rank)
        lines = _last_lines(log_path(self._ranks_folder, rank), 60)
        return Failure(
            kind="rank_hung",
            message=f"rank {', '.join(map(str, self._hung))} gave no sign of life for {self._hang_limit_s:.0f} s "
            f"({self._doing(rank)})",
            rank=rank,
            case=beat.case if beat else None,
            last_lines=lines[-LAST_LINES:],
            stack=[line for line in lines if "File " in line or "hread" in line],
        )

    def stop_all(self) -> None:
        """Ask, then force; the ranks are in sessions of their own, so each is ended by its own id."""
        self._remember_processes()
        if self._launcher.poll() is None:
            self._launcher.send_signal(signal.SIGTERM)
        for process in self._known.values():
            self._signal(process, signal.SIGKILL)
        try:
            self._launcher.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()

    @staticmethod
    def _signal(process: psutil.Process, number: int) -> None:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return


def _describe_death(ranks_folder: Path, ranks: int, launcher_output: str) -> Failure:
    """Who died first. A rank ended by a signal explains the connection errors of its peers, not the reverse.

    One that could still say what it met with failed of that, whatever ended its process afterwards. One that aborted
    without a word may have been made to by a library that missed another rank.
    """
    ended = {int(rank): int(code) for rank, code in _ELASTIC_FAILURE.findall(launcher_output)}
    # Who spoke first: what libraries say when another rank is gone has no fixed words.
    spoken = sorted(range(ranks), key=lambda rank: _spoke_at_s(failure_path(ranks_folder, rank)))
    own_words = {rank: failure for rank in spoken if (failure := read_rank_failure(ranks_folder, rank))}
    by_signal = {rank: -code for rank, code in ended.items() if code < 0 and rank not in own_words}
    killed = [rank for rank, number in by_signal.items() if number not in {signal.SIGTERM, signal.SIGABRT}]
    aborted = [rank for rank, number in by_signal.items() if number == signal.SIGABRT]
    original = [rank for rank, failure in own_words.items() if not is_peer_disconnect(failure.message)]
    culprit = next(iter([*killed, *original, *aborted, *own_words, *ended]), None)
    if culprit is None:
        return Failure(
            kind="rank_died",
            message="the ranks could not be started",
            last_lines=launcher_output.splitlines()[-LAST_LINES:],
        )
    code, said = ended.get(culprit), own_words.get(culprit)
    beat = read_beat(ranks_folder, culprit)
    how = said.message if said else _how_it_ended(code)
    doing = f" in {beat.phase}" if beat else ""
    return Failure(
        kind="rank_died",
        message=f"rank {culprit} died{doing}: {how}",
        rank=culprit,
        case=beat.case if beat else None,
        exit_code=code,
        last_lines=_last_lines(log_path(ranks_folder, culprit), LAST_LINES),
        stack=said.stack if said else [],
        hint=said.hint if said else None,
    )


def _spoke_at_s(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else math.inf


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "without a word"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read_from(path: Path, offset: int) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def _last_lines(path: Path, count: int) -> list[str]:
    return _read_from(path, max(0, _size(path) - 65536)).splitlines()[-count:]
