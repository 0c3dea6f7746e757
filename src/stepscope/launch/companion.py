"""Ranks that another launcher started have no supervisor: a small process beside rank 0 is one for all of them.

It names the rank that hangs, and speaks for rank 0 where that is ended before it could: launchers end every rank as
soon as one is lost. It is forked before torch is loaded, and sleeps nearly all the time.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from stepscope.core.errors import ExitCode, StepscopeError
from stepscope.launch.watch import RankWatch, as_error, clear_evidence, describe_lost_rank, process_status
from stepscope.launch.watchdog import TERMINATED, beat_path, write_rank_failure
from stepscope.launch.worker import RankSession
from stepscope.store import RANKS_FOLDER, record_failure

POLL_S = 0.5
REPORT_S = 3.0
"""How long rank 0 may still take, when it is to end, for the report that it has begun."""
LAST_WORD_S = 0.5
"""In which a launcher passes on what was printed."""
STOPPED_SHARE = 0.5
"""Fraction of the limit that rank 0 may be stopped before it joins. The others give up to reach it after 0.8 of it."""
_DONE = b"."


@contextmanager
def companion(
    folder: Path, ranks: int, hang_limit_s: float, report: Callable[[StepscopeError], object]
) -> Iterator[None]:
    """Beside rank 0 until the block ends: from then on this process reports for itself."""
    clear_evidence(folder)
    reader, writer = os.pipe()
    rank_0 = os.getpid()
    if os.fork() == 0:
        try:
            os.close(writer)
            os.setsid()  # launchers end the whole session of a rank
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            failure = _watch(reader, rank_0, folder, ranks, hang_limit_s)
            if failure is not None:
                report(failure)
                _end(rank_0)
        finally:
            os._exit(0)
    os.close(reader)
    try:
        yield
    finally:
        with suppress(OSError):
            os.write(writer, _DONE)
        os.close(writer)


def _watch(reader: int, rank_0: int, folder: Path, ranks: int, hang_limit_s: float) -> StepscopeError | None:
    """The error that ended the run, now kept with it. None: rank 0 reports what there is."""
    watch, stopped_s = RankWatch(folder, hang_limit_s), 0.0
    while not select.select([reader], [], [], POLL_S)[0]:
        running = [rank for rank in range(ranks) if beat_path(folder / RANKS_FOLDER, rank).exists()]
        late = watch.find_late(running, time.time()) if running else []
        is_stopped = 0 not in watch.beats and process_status(rank_0) == psutil.STATUS_STOPPED
        stopped_s = stopped_s + POLL_S if is_stopped else 0.0
        if stopped_s > hang_limit_s * STOPPED_SHARE:
            failure = watch.describe_hang([0])
            break
        if late:
            unseen = [rank for rank in range(ranks) if rank not in watch.beats and rank not in late]
            hung = watch.find_hung([*late, *unseen] if len(late) == len(running) else late)
            failure = watch.describe_hang(hung)
            break
    else:
        if os.read(reader, 1) == _DONE:
            return None
        failure = describe_lost_rank(folder, ranks)
    record_failure(folder, failure)
    return as_error(failure)


def _end(rank_0: int) -> None:
    """Its launcher ends the others."""
    time.sleep(LAST_WORD_S)
    with suppress(ProcessLookupError):
        os.kill(rank_0, signal.SIGTERM)
        time.sleep(LAST_WORD_S)
        os.kill(rank_0, signal.SIGKILL)


class Termination:
    """What SIGTERM does to a rank of another launcher: it leaves a note that it was ended, and ends.

    So a rank that was killed can be told from those that were ended because of it. It works while the rank waits in
    an exchange: a thread waits for the signal's byte, and costs nothing before.
    """

    def __init__(self) -> None:
        self.session: RankSession | None = None
        self.reports = False
        """Whether this rank is about to say why it ends: it may finish."""
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        while os.read(self._reader, 1)[0] != signal.SIGTERM:
            pass
        if self.reports:
            time.sleep(REPORT_S)
        elif self.session is not None and self.session.folder is not None:
            note = StepscopeError("ended by SIGTERM")
            note.kind = TERMINATED
            with suppress(OSError):
                write_rank_failure(self.session.folder / RANKS_FOLDER, self.session.context.rank, note)
        os._exit(ExitCode.FAILED)
