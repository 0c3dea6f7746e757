"""Who is late, lost or to blame: what can be told of ranks from what they leave in the run folder."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from msgspec.structs import replace

from stepscope.core.errors import LostRankError, RankDiedError, RankHungError
from stepscope.launch.join import describe_ranks, is_peer_disconnect
from stepscope.launch.watchdog import (
    STACK_SIGNAL,
    TERMINATED,
    Beat,
    describe_activity,
    failure_path,
    log_path,
    read_beat,
    read_rank_failure,
)
from stepscope.records import Failure
from stepscope.store import RANKS_FOLDER, StoredRun

JOINING = ("starting", "joining")
"""Phases in which a rank that waits for others still beats."""
POLL_S = 0.05
STACK_WAIT_S = 5.0
"""The most that ranks are waited for to write their stacks: on a busy machine that takes more than a second."""
SETTLE_S = 1.0
"""In which the other ranks leave what they met with after one is lost."""
LAST_LINES = 20
KEPT = "finished cases are kept: continue with --resume"


class RankWatch:
    """The heartbeats of one run."""

    def __init__(self, folder: Path, hang_limit_s: float) -> None:
        self.folder, self._ranks_folder = folder, folder / RANKS_FOLDER
        self._hang_limit_s = hang_limit_s
        self.beats: dict[int, Beat] = {}
        """The last of each rank, also of one that has finished since."""

    def find_late(self, running: Sequence[int], started_s: float) -> list[int]:
        """Those that have sent no heartbeat for too long, once that cannot be because they wait for another rank."""
        self.beats |= {rank: beat for rank in running if (beat := read_beat(self._ranks_folder, rank)) is not None}
        heard_s = {rank: self.beats[rank].at_s if rank in self.beats else started_s for rank in running}
        late = [rank for rank in running if time.time() - heard_s[rank] > self._hang_limit_s]
        # In an exchange nobody beats, and the last one to come to it is the last to be late; while ranks join, those
        # that wait for others do beat.
        joining = all(rank in late or (rank in self.beats and self.beats[rank].phase in JOINING) for rank in running)
        return late if len(late) == len(running) or joining else []

    def find_hung(self, late: Sequence[int]) -> list[int]:
        """The ranks that do not wait for another one, of those that all stand still: their stack is not in a
        collective. Those on other hosts are named where no other one is to blame."""
        here = [rank for rank in late if rank not in self.beats or self.beats[rank].host == socket.gethostname()]
        sizes = {rank: _size(log_path(self._ranks_folder, rank)) for rank in here}
        for rank in here:
            # Before its first heartbeat a rank cannot write its stack: the signal would end it.
            if rank in self.beats:
                with suppress(ProcessLookupError):
                    os.kill(self.beats[rank].pid, STACK_SIGNAL)
        deadline_s = time.monotonic() + STACK_WAIT_S
        dumps: dict[int, str] = {}
        while time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            # A dump that did not grow since the last look is whole.
            before, dumps = dumps, {r: read_from(log_path(self._ranks_folder, r), sizes[r]) for r in here}
            if dumps == before and all(dumps.values()):
                break
        # The main thread's stack comes last, behind those of the libraries' threads.
        main = {rank: dump.rpartition("Current thread")[2] or dump for rank, dump in dumps.items()}
        waiting = [rank for rank, stack in main.items() if "torch/distributed" in stack]
        return [rank for rank in here if rank not in waiting] or [r for r in late if r not in waiting] or list(late)

    def describe_hang(self, hung: Sequence[int]) -> Failure:
        rank = hung[0]
        beat = self.beats.get(rank)
        lines = last_lines(log_path(self._ranks_folder, rank), 60)
        several = len({one.host for one in self.beats.values()}) > 1
        names, they = describe_ranks(
            [f"{one} on {self.beats[one].host}" if several and one in self.beats else str(one) for one in hung]
        )
        activity = f"last seen in {describe_activity(beat, StoredRun(self.folder))}" if beat else f"{they} never joined"
        return Failure(
            kind="rank_hung",
            message=f"{names} sent no heartbeat for {self._hang_limit_s:.0f} s ({activity})",
            hint=f"the stack of rank {rank} is in {log_path(self._ranks_folder, rank)}; {KEPT} {self.folder.name}, or "
            "allow more with --hang-timeout",
            where=describe_ranks(hung)[0],
            rank=rank,
            case=beat.case if beat else None,
            last_lines=lines[-LAST_LINES:],
            stack=[line for line in lines if "File " in line or "hread" in line],
        )


def clear_evidence(folder: Path) -> None:
    """What an earlier attempt left explains nothing of this one. To be called before there are ranks."""
    ranks_folder = folder / RANKS_FOLDER
    ranks_folder.mkdir(exist_ok=True)
    for stale in [*ranks_folder.glob("*.beat"), *ranks_folder.glob("*.failure.json")]:
        stale.unlink()


def as_error(failure: Failure) -> LostRankError:
    kind = RankHungError if failure.kind == "rank_hung" else RankDiedError
    return kind(failure.message, hint=failure.hint, where=failure.where, rank=failure.rank, case=failure.case)


def find_causes(ranks_folder: Path, ranks: int, exit_codes: dict[int, int]) -> tuple[list[int], list[int]]:
    """The ranks that failed of themselves, and those that another one may have made fail; the likeliest first.

    A rank ended by a signal explains the connection errors of its peers, not the reverse. One that left an error failed
    of that, whatever ended its process afterwards. One that aborted and left none may have been made to by a library
    that missed another rank.
    """
    # The first error comes first: what libraries say when another rank is gone has no fixed words.
    order = sorted(range(ranks), key=lambda rank: changed_s(failure_path(ranks_folder, rank), math.inf))
    errors = {rank: failure for rank in order if (failure := read_rank_failure(ranks_folder, rank))}
    signals = {rank: -code for rank, code in exit_codes.items() if code < 0 and rank not in errors}
    killed = [rank for rank, number in signals.items() if number not in {signal.SIGTERM, signal.SIGABRT}]
    original = [rank for rank, failure in errors.items() if not _follows(failure)]
    aborted = [rank for rank, number in signals.items() if number == signal.SIGABRT]
    return [*killed, *original], [*aborted, *errors, *(rank for rank, code in exit_codes.items() if code)]


def describe_lost_rank(folder: Path, ranks: int) -> Failure:
    """Why ranks that another launcher started cannot go on: one that left an error, else one that is gone."""
    ranks_folder = folder / RANKS_FOLDER
    deadline_s = time.monotonic() + SETTLE_S
    original: list[int] = []
    lost: list[int] = []
    while not original and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        original = find_causes(ranks_folder, ranks, {})[0]
        lost = [rank for rank in range(ranks) if _is_gone(ranks_folder, rank)]
    for rank in [*original, *lost]:
        failure = describe_dead_rank(folder, rank)
        return replace(failure, hint=failure.hint or f"{KEPT} {folder.name}")
    if all(read_rank_failure(ranks_folder, rank) is not None for rank in range(ranks)):
        return Failure(kind="interrupted", message="all ranks were ended by SIGTERM", hint=f"{KEPT} {folder.name}")
    return Failure(
        kind="rank_died",
        message="another rank ended without leaving an error",
        hint=f"look at what the ranks on other hosts printed; {KEPT} {folder.name}",
    )


def describe_dead_rank(
    folder: Path, rank: int, otherwise: str = "it was killed, or left no error", *, name: str | None = None
) -> Failure:
    """By the error that it left; `otherwise` is said where it left none."""
    beat, error = read_beat(folder / RANKS_FOLDER, rank), read_rank_failure(folder / RANKS_FOLDER, rank)
    activity = f" in {describe_activity(beat, StoredRun(folder))}" if beat else ""
    return Failure(
        kind="rank_died",
        message=f"{name or f'rank {rank}'} died{activity}: {error.message if error else otherwise}",
        hint=error.hint if error else None,
        rank=rank,
        case=beat.case if beat else None,
        stack=error.stack if error else [],
    )


def _follows(failure: Failure) -> bool:
    """Whether an error only says that something else had ended the run before."""
    return failure.kind == TERMINATED or is_peer_disconnect(failure.message)


def _is_gone(ranks_folder: Path, rank: int) -> bool:
    """Whether the rank's process, on this host, has ended without leaving an error."""
    beat = read_beat(ranks_folder, rank)
    if beat is None or beat.host != socket.gethostname() or read_rank_failure(ranks_folder, rank) is not None:
        return False
    return process_status(beat.pid) in {None, psutil.STATUS_ZOMBIE}


def process_status(pid: int) -> str | None:
    """As psutil names it; None where there is no such process."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status()
    return None


def changed_s(path: Path, otherwise: float = 0.0) -> float:
    """When a file was last written, by the clock of the machine that keeps it; `otherwise` where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return otherwise


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def read_from(path: Path, offset: int) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def read_tail(path: Path) -> str:
    return read_from(path, max(0, _size(path) - 65536))


def last_lines(path: Path, count: int) -> list[str]:
    return read_tail(path).splitlines()[-count:]
