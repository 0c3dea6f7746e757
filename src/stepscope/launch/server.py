"""The rank server of a self-launched run: it loads torch once, and every rank is a fork of it.

    python -m stepscope.launch.server RUN_FOLDER MODULE:FUNCTION HANG_LIMIT_S RANKS

Its standard output has one RankEvent per line, for the supervisor in `launch.local`. It waits for its ranks, so that
each exit code and signal is known exactly, and it hosts the store in which they meet, which outlives each of them.

Where a fork could differ from a new process (see `can_fork`), each rank is a new process instead.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from stepscope.launch.context import SELF_LAUNCH_VARIABLE, rendezvous_variables
from stepscope.launch.lookups import LOOPBACK
from stepscope.launch.watchdog import die_with_parent
from stepscope.launch.worker import leave_group_behind, rank_session
from stepscope.store import StoredRun

LOADER = "load_before_fork"
"""A worker's module may have a function of this name: called with the plan's verb, it imports what ranks need."""
FIRST_FORK_LIMIT_S = 5.0
SERVER_VARIABLE = "STEPSCOPE_RANK_SERVER"
"""Process id of the server, for a rank that is a new process."""


class RankEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A rank has started, or has ended."""

    rank: int
    pid: int
    exit_code: int | None = None
    """None: it has started. Negative: the signal that ended it."""


def main() -> int:
    folder, target, hang_limit_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    if len(sys.argv) == 4:  # one rank, where the server could not fork
        die_with_parent(int(os.environ.pop(SERVER_VARIABLE)))
        return run_worker(folder, target, hang_limit_s)
    ranks, server = int(sys.argv[4]), os.getpid()
    # What libraries print must not come between the events.
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    load(folder, target)
    listener = socket.create_server((LOOPBACK, 0), backlog=max(128, ranks))
    port, forks = listener.getsockname()[1], can_fork()
    pids: dict[int, int] = {}
    for rank in range(ranks):
        variables = rank_variables(rank, ranks, port)
        pid = os.fork() if forks else _start_process(variables)
        if pid == 0:
            die_with_parent(server)
            listener.close()
            events.close()
            os.environ.update(variables)
            return run_worker(folder, target, hang_limit_s)
        pids[pid] = rank
        _report(events.write, RankEvent(rank=rank, pid=pid))
    store = host_store(listener)
    while pids:
        pid, status = os.waitpid(-1, 0)
        if pid in pids:
            code = os.waitstatus_to_exitcode(status)
            _report(events.write, RankEvent(rank=pids.pop(pid), pid=pid, exit_code=code))
    del store
    return 0


def load(folder: Path, target: str) -> None:
    """Import now what every rank would import. What cannot be imported is left to the ranks, which can say so."""
    with suppress(Exception):
        importlib.import_module("torch")
        module = importlib.import_module(target.partition(":")[0])
        getattr(module, LOADER, lambda verb: None)(StoredRun(folder).plan.verb)
    gc.collect()
    gc.freeze()


def can_fork() -> bool:
    """Whether a fork of this process is as good as a new one: it loses no thread, and CUDA has not been touched.

    A first fork shows both. OpenBLAS, which numpy loads, ends its threads before a fork and begins them again when
    they are needed; threads that are still there afterwards belong to a library that does not. A fork that does not end
    stands still in what a library does after it.
    """
    if sys.platform != "linux":
        return False
    pid = os.fork()
    if pid == 0:
        torch: Any = sys.modules.get("torch")
        os._exit(bool(torch is not None and torch.cuda._is_in_bad_fork()))
    limit_s = time.monotonic() + FIRST_FORK_LIMIT_S
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < limit_s:
        time.sleep(0.001)
    if ended == (0, 0):
        os.kill(pid, signal.SIGKILL)
        ended = os.waitpid(pid, 0)
    return ended[1] == 0 and len(os.listdir("/proc/self/task")) == 1


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        **rendezvous_variables((rank, ranks, rank, ranks), LOOPBACK, port),
        SELF_LAUNCH_VARIABLE: "1",
        # For torch's own `env://`: rank 0 must not host the store.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def host_store(listener: socket.socket) -> object:
    """Kept alive by who holds what this returns. None where torch has no store; the ranks explain that better."""
    import torch.distributed as dist

    if not dist.is_available():
        return None
    store: object = dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK, listener.getsockname()[1], None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store


def run_worker(folder: Path, target: str, hang_limit_s: float) -> int:
    """Be one rank: the exit code."""
    plan = StoredRun(folder).plan
    try:
        with rank_session(
            folder, verb=plan.verb, request=plan.request, hang_limit_s=hang_limit_s, supervised=True
        ) as session:
            module, _, function = target.partition(":")
            getattr(importlib.import_module(module), function)(session)
    except BaseException:  # noqa: BLE001 - the process border
        traceback.print_exc()
        leave_group_behind(1)
        return 1
    return 0


def _start_process(variables: dict[str, str]) -> int:
    """No Python code runs between fork and exec: what libraries do after a fork may stand still."""
    command = [sys.executable, "-m", "stepscope.launch.server", *sys.argv[1:4]]
    return subprocess.Popen(command, env={**os.environ, **variables, SERVER_VARIABLE: str(os.getpid())}).pid


def _report(write: Callable[[bytes], object], event: RankEvent) -> None:
    write(msgspec.json.encode(event) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
