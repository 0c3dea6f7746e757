"""When each rank began: clocks of different hosts are compared, so that arrivals can be."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stepscope.run.control import Control

PINGS = 15
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ClockOffset(NamedTuple):
    """Offset of one rank's clock from rank 0's."""

    offset_ns: int
    """What to take off that rank's readings."""
    error_ns: int
    """Half the fastest round trip; 0 where both ranks read the same clock."""


def name_clock() -> str:
    """The same for processes that read the same clock: those of one running kernel."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def compare_clocks(world: Control) -> list[ClockOffset] | None:
    """Every rank calls this together; rank 0 gets one offset a rank, the others None."""
    names = world.broadcast_value(world.gather_values(name_clock()))
    other_machines = [rank for rank, name in enumerate(names) if name != names[0]]
    if world.rank != 0:
        if world.rank in other_machines:
            answer_pings(world)
        return None
    return [ask_clock(world, rank) if rank in other_machines else ClockOffset(0, 0) for rank in range(len(names))]


def ask_clock(world: Control, rank: int) -> ClockOffset:
    """The fastest of some round trips was held up least: its middle is when the other clock was read."""
    best: tuple[int, int] | None = None
    for _ in range(PINGS):
        sent = time.perf_counter_ns()
        world.send_value(sent, rank)
        theirs = world.receive_value(rank)
        received = time.perf_counter_ns()
        if best is None or received - sent < best[0]:
            best = (received - sent, theirs - (sent + received) // 2)
    assert best is not None
    return ClockOffset(best[1], best[0] // 2)


def answer_pings(world: Control) -> None:
    for _ in range(PINGS):
        world.receive_value(0)
        world.send_value(time.perf_counter_ns(), 0)


def find_arrivals(starts_ns: Sequence[Sequence[int]], offsets: Sequence[ClockOffset]) -> list[list[float]]:
    """By rank and iteration: seconds after the first rank began. Ranks' lists must be equally long."""
    moved = [[start - offset.offset_ns for start in starts] for starts, offset in zip(starts_ns, offsets, strict=True)]
    firsts = [min(column) for column in zip(*moved, strict=True)]
    return [[(start - first) * 1e-9 for start, first in zip(row, firsts, strict=True)] for row in moved]
