"""Worker functions that end badly, for test_local."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import time
from pathlib import Path

import torch

from stepscope.bench.comms.torch_group import TorchWorld
from stepscope.launch import RankSession


def finish(session: RankSession) -> None:
    print(f"rank {session.context.rank} of {session.context.world_size} was here")  # noqa: T201


def join(session: RankSession) -> TorchWorld:
    group = TorchWorld(session, "gloo")
    session.heartbeat.beat("measuring", "the-case")
    group.barrier()
    return group


def kill_rank_1(session: RankSession) -> None:
    group = join(session)
    if session.context.rank == 1:
        print("rank 1 is about to die", flush=True)  # noqa: T201
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()


def kill_at_once(session: RankSession) -> None:
    if session.context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def raise_on_rank_1(session: RankSession) -> None:
    group = join(session)
    if session.context.rank == 1:
        raise RuntimeError("the network is down")
    group.barrier()


def raise_and_abort_on_the_way_out(session: RankSession) -> None:
    """As threads of a process group do now and then when Python takes itself apart."""
    atexit.register(os.abort)
    raise RuntimeError("the disk is full")


def raise_in_a_group_that_aborts(session: RankSession) -> None:
    join(session)
    raise_and_abort_on_the_way_out(session)


def crash_rank_0(session: RankSession) -> None:
    if session.context.rank == 0:
        ctypes.string_at(0)
    time.sleep(60)


def oversleep() -> None:
    time.sleep(120)


def hang_rank_1(session: RankSession) -> None:
    group = join(session)
    if session.context.rank == 1:
        oversleep()
    group.barrier()


def stop_rank_1(session: RankSession) -> None:
    group = join(session)
    if session.context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.barrier()


def wait_long(session: RankSession) -> None:
    session.heartbeat.beat("waiting")
    time.sleep(120)


def stop_before_joining(session: RankSession) -> None:
    if session.context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    join(session)


def tell_whose_child(session: RankSession) -> None:
    with Path(f"/proc/{os.getppid()}/cmdline").open() as file:
        command = file.read().split("\0")
    own = Path("/proc/self/cmdline").read_text().split("\0")
    print("forked" if own == command else "started", torch.__version__)  # noqa: T201
