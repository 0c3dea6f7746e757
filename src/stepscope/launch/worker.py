"""The worker contract: whoever starts the ranks, each calls one function with one session."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stepscope.launch.context import ALONE, RankContext, detect_rank_context, export_rendezvous
from stepscope.launch.watchdog import (
    Heartbeat,
    NoHeartbeat,
    enable_stack_dumps,
    failure_path,
    log_path,
    write_rank_failure,
)
from stepscope.records import Request
from stepscope.store import RANKS_FOLDER

BACKSTOP_S = 15.0
"""A rank's own alarm rings this much after its supervisor's or companion's, which knows more."""


class Session:
    """One process that measures: which rank it is, what is asked of it, and where its evidence goes.

    As it is, a process that nobody else waits for: it has no heartbeat, no log of its own and no alarm.
    """

    heartbeat: Heartbeat | NoHeartbeat
    hang_limit_s: float = math.inf

    def __init__(
        self, *, verb: str, request: Request, world_size: int = 1, folder: Path | None = None, cases: str = ""
    ) -> None:
        self.context: RankContext = ALONE
        self.verb = verb
        self.request = request
        """How to measure, as the plan stores it."""
        self.cases = cases
        """What tells the cases of this rank's command from others; empty where the plan has them."""
        self.world_size = world_size
        """Ranks of the run; with the fake process group this process stands for all of them."""
        self.folder = folder
        """The run folder; None on a rank that rank 0 has not told yet."""
        self.heartbeat = NoHeartbeat()

    def use_folder(self, folder: Path) -> None:
        self.folder = folder

    def keep_failure(self, error: BaseException) -> None:
        """Whoever waits for this process reads it; here nobody does."""

    def forget_failure(self) -> None:
        """It was one case's, and the run goes on."""


class RankSession(Session):
    """One of several ranks, which others wait for: it beats, logs, and leaves behind what ended it."""

    heartbeat: Heartbeat

    def __init__(self, *, verb: str, request: Request, hang_limit_s: float, supervised: bool, cases: str = "") -> None:
        context = detect_rank_context()
        super().__init__(verb=verb, request=request, world_size=context.world_size, cases=cases)
        self.context = context
        self.hang_limit_s = hang_limit_s
        self._supervised = supervised
        self._has_failed = False
        self.heartbeat = Heartbeat(rank=self.context.rank, limit_s=hang_limit_s + BACKSTOP_S, log=sys.stderr)

    def use_folder(self, folder: Path) -> None:
        """From now on evidence goes there. A host that does not share the folder keeps its ranks' words to itself."""
        if not folder.is_dir():
            return
        self.folder = folder
        ranks_folder, rank = folder / RANKS_FOLDER, self.context.rank
        ranks_folder.mkdir(exist_ok=True)
        failure_path(ranks_folder, rank).unlink(missing_ok=True)
        # Kept open for the life of the process: the crash handlers write into it.
        log = log_path(ranks_folder, rank).open("a", buffering=1)
        if self._supervised:
            _redirect_output(log.fileno())
        enable_stack_dumps(log)
        self.heartbeat.move_to(ranks_folder, log)

    def keep_failure(self, error: BaseException) -> None:
        """The first is kept: what follows, follows from it."""
        if self.folder is not None and not self._has_failed:
            self._has_failed = True
            write_rank_failure(self.folder / RANKS_FOLDER, self.context.rank, error)

    def forget_failure(self) -> None:
        """It was one case's, and the run goes on."""
        self._has_failed = False
        if self.folder is not None:
            failure_path(self.folder / RANKS_FOLDER, self.context.rank).unlink(missing_ok=True)


@contextmanager
def rank_session(
    folder: Path | None, *, verb: str, request: Request, hang_limit_s: float, supervised: bool = False, cases: str = ""
) -> Iterator[RankSession]:
    """Prepare this process to be a rank: rendezvous variables, stack dumps, signs of life, evidence of failure."""
    session = RankSession(verb=verb, request=request, hang_limit_s=hang_limit_s, supervised=supervised, cases=cases)
    export_rendezvous(session.context)
    if folder is not None:
        session.use_folder(folder)
    session.heartbeat.beat("starting")
    try:
        yield session
    except BaseException as error:
        session.keep_failure(error)
        raise
    finally:
        session.heartbeat.disarm()
    session.heartbeat.stop()


def _redirect_output(descriptor: int) -> None:
    """Below Python, so that what native libraries print is kept too."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def leave_group_behind(code: int, *, after_s: float = 0.0) -> None:
    """End a failed process at once where it is still in a process group of torch; otherwise do nothing.

    The group's threads run on while Python takes itself apart, and now and then abort the process: launchers then see
    a SIGABRT instead of the exit code. Closing the group could wait for ranks that hang. `after_s`: time in which a
    launcher passes on what was printed last.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        with suppress(OSError):  # a full disk, a closed pipe
            sys.stdout.flush()
            sys.stderr.flush()
        time.sleep(after_s)
        os._exit(code)
