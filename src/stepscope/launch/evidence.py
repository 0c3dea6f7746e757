"""After ranks on several hosts ended: the run they left, and who stopped where.

A rank whose alarm rang could write its stack, but not what it means for the run: its own process was what hung. Whoever
started the ranks reads their last signs of life and completes the record, where it can see the store.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stepscope.core.errors import StepscopeError
from stepscope.launch.hosts import Cluster
from stepscope.launch.join import describe_ranks
from stepscope.launch.watch import changed_s, describe_dead_rank, read_tail
from stepscope.launch.watchdog import Beat, describe_activity, log_path, read_beat, read_rank_failure
from stepscope.records import Failure
from stepscope.store import RANKS_FOLDER, StoredRun, record_failure, resolve_store, run_folders
from stepscope.store.folder import FAILURES_FILE

_ALARM = re.compile(r"^Timeout \((\d+):(\d+):(\d+)", re.MULTILINE)
"""How Python's faulthandler begins a dump when nobody wound up its clock again."""


class BrokenRun(NamedTuple):
    stored: StoredRun
    failure: Failure


class Evidence:
    """What the ranks of one launch write, seen from the process that started them.

    `arguments` are those of `stepscope` on every rank, `folder` is where they run. On a machine that does not see the
    store there is nothing to see, and nothing is said.
    """

    def __init__(self, arguments: Sequence[str], cluster: Cluster, folder: Path) -> None:
        self._store = store_of(arguments, folder)
        self._cluster = cluster
        # A little early: a file server's clock may be behind this machine's.
        self._since_s = time.time() - 1.0
        self._stored: StoredRun | None = None

    def has_failed(self) -> bool:
        """Whether a rank has said that it is lost; cheap enough to ask every second."""
        if self._stored is None:
            self._stored = find_open_run(self._store, self._cluster.ranks, self._since_s)
        if self._stored is None:
            return False
        recorded = changed_s(self._stored.folder / FAILURES_FILE) >= self._since_s
        return recorded or self._describe(self._stored) is not None

    def complete_record(self) -> BrokenRun | None:
        """What ended the run, now also kept with it; call it when all ranks have ended.

        None where no such run can be seen from here, where rank 0 could still tell it itself, or where the ranks left
        nothing to tell.
        """
        stored = find_open_run(self._store, self._cluster.ranks, self._since_s)
        if stored is None or changed_s(stored.folder / FAILURES_FILE) >= self._since_s:
            return None
        failure = self._describe(stored)
        if failure is None:
            return None
        record_failure(stored.folder, failure)
        return BrokenRun(stored, failure)

    def _describe(self, stored: StoredRun) -> Failure | None:
        """Ranks whose alarm rang, with the case they were in; else the first rank that left an error."""
        ranks_folder = stored.folder / RANKS_FOLDER
        beats = {
            rank: beat
            for rank in range(self._cluster.ranks)
            if (beat := read_beat(ranks_folder, rank)) is not None and beat.at_s >= self._since_s
        }
        limits = {
            rank: limit_s
            for rank, beat in beats.items()
            if (limit_s := _rung_alarm_s(log_path(ranks_folder, rank), beat)) is not None
        }
        if limits:
            first = min(limits, key=lambda rank: beats[rank].number)
            return Failure(
                kind="rank_hung",
                message=f"{_name_ranks(list(limits), self._cluster)} sent no heartbeat for {limits[first]:.0f} s "
                f"(last seen in {describe_activity(beats[first], stored)})",
                hint="a lost link or a host that stopped looks like this",
                where=str(ranks_folder),
                rank=first,
                case=beats[first].case,
            )
        failed = next((rank for rank in beats if read_rank_failure(ranks_folder, rank) is not None), None)
        if failed is None:
            return None
        return describe_dead_rank(stored.folder, failed, name=_name_ranks([failed], self._cluster))


def store_of(arguments: Sequence[str], folder: Path) -> Path:
    """Where ranks that were started in `folder` keep their runs."""
    chosen = None
    for position, word in enumerate(arguments):
        if word == "--store" and position + 1 < len(arguments):
            chosen = arguments[position + 1]
        elif word.startswith("--store="):
            chosen = word.partition("=")[2]
    return folder / resolve_store(chosen)


def find_open_run(store: Path, ranks: int, since_s: float) -> StoredRun | None:
    """The unfinished run of so many ranks that gave signs of life after `since_s`; the last of several."""
    found: list[tuple[float, StoredRun]] = []
    for folder in run_folders(store):
        last_s = max((changed_s(beat) for beat in (folder / RANKS_FOLDER).glob("rank-*.beat")), default=0.0)
        if last_s < since_s:
            continue
        try:
            stored = StoredRun(folder)
            if stored.run is None and stored.plan.world_size == ranks:
                found.append((last_s, stored))
        except StepscopeError:
            continue
    return max(found, key=lambda one: one[0])[1] if found else None


def _name_ranks(ranks: Sequence[int], cluster: Cluster) -> str:
    return describe_ranks([f"{rank} on {cluster.host_of_rank(rank).name}" for rank in ranks])[0]


def _rung_alarm_s(log: Path, beat: Beat) -> float | None:
    """The limit that passed after the beat, where the rank's log ends with the stacks of an alarm."""
    rung = _ALARM.findall(read_tail(log))
    if not rung:
        return None
    hours, minutes, seconds = (int(part) for part in rung[-1])
    limit_s = 3600.0 * hours + 60 * minutes + seconds
    # The log of a continued run may still end with the alarm of the last time.
    return limit_s if changed_s(log) > beat.at_s + limit_s / 2 else None
