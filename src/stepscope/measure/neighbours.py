"""Who else used the processors while a case was measured."""

from __future__ import annotations

import os
from typing import NamedTuple

import psutil

from stepscope.records import Notice
from stepscope.units import format_share

NOTABLE_CORES = 0.1
NOTABLE_SHARE = 0.02
"""A tenth of one core, or a fiftieth of all, taken by others is worth a word: threads that fill the cores wait."""


class CpuUse(NamedTuple):
    """Core-seconds since the machine (or the process) began."""

    idle_s: float
    total_s: float
    own_s: float
    stolen_s: float
    """Given by the hypervisor to other machines."""


def read_cpu_use() -> CpuUse:
    """Takes some 0.1 ms."""
    host, own = psutil.cpu_times(), psutil.Process(os.getpid()).cpu_times()
    stolen = getattr(host, "steal", 0.0)
    # guest time is already counted in user time
    total = sum(value for name, value in host._asdict().items() if not name.startswith("guest"))
    idle = host.idle + getattr(host, "iowait", 0.0)
    return CpuUse(idle_s=idle, total_s=total, own_s=own.user + own.system, stolen_s=stolen)


def find_neighbours(before: CpuUse, after: CpuUse, cores: int) -> Notice | None:
    """A notice with the cores' worth of time that others took between two readings, or None.

    The kernel counts in ticks of some milliseconds: short spans tell nothing and give None.
    """
    span_s = (after.total_s - before.total_s) / cores
    if span_s < 0.05:
        return None
    stolen = (after.stolen_s - before.stolen_s) / span_s
    busy = (after.total_s - before.total_s - (after.idle_s - before.idle_s)) / span_s
    others = busy - stolen - (after.own_s - before.own_s) / span_s
    notable = max(NOTABLE_CORES, NOTABLE_SHARE * cores)
    parts = [f"other processes used {others:.1f} of {cores} cores"] if others >= notable else []
    parts += [f"the hypervisor took {format_share(stolen / cores)} of the cores away"] if stolen >= notable else []
    if not parts:
        return None
    return Notice(
        kind="neighbours",
        message=" and ".join(parts) + " while this was measured",
        hint="stop them, or leave them a core: with OMP_NUM_THREADS below the number of cores no thread waits for one",
    )
