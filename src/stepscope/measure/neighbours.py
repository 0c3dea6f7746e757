"""Who else used the processors while a case was measured."""

from __future__ import annotations

import os
from typing import NamedTuple

import psutil

from stepscope.core.units import format_share
from stepscope.records import Notice

NOTABLE_SHARE = 0.05
"""From here on others are worth a word: threads that fill the cores wait for the one that is busy."""
SHORTEST_SPAN_S = 0.05


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


class Neighbours(NamedTuple):
    """Cores' worth of time that others took while something was measured."""

    other_cores: float
    """By other processes of this host."""
    stolen_cores: float
    """By the hypervisor, for other machines."""
    cores: int
    idle_cores: float

    @property
    def share(self) -> float:
        """Of all core time of the host."""
        return round((self.other_cores + self.stolen_cores) / self.cores, 4)

    def as_notice(self) -> Notice | None:
        """None where they took too little to matter."""
        notable = NOTABLE_SHARE * self.cores
        parts = []
        if self.other_cores >= notable:
            parts.append(f"other processes used {self.other_cores:.1f} of {self.cores} cores")
        if self.stolen_cores >= notable:
            parts.append(f"the hypervisor took {format_share(self.stolen_cores / self.cores)} of the cores away")
        if not parts:
            return None
        return Notice(
            kind="neighbours",
            message=" and ".join(parts) + " while this was measured",
            hint="stop them, or leave them a core: threads that fill all cores (OMP_NUM_THREADS) wait for the busy one",
        )


def find_neighbours(before: CpuUse, after: CpuUse, cores: int, *, own_s: float | None = None) -> Neighbours | None:
    """What others took between two readings; None for spans too short for the kernel's ticks to tell.

    `own_s` is what the measuring processes of this host used together, where there are several.
    """
    span_s = (after.total_s - before.total_s) / cores
    if span_s < SHORTEST_SPAN_S:
        return None
    stolen = (after.stolen_s - before.stolen_s) / span_s
    idle = (after.idle_s - before.idle_s) / span_s
    busy = (after.total_s - before.total_s) / span_s - idle
    others = busy - stolen - (after.own_s - before.own_s if own_s is None else own_s) / span_s
    return Neighbours(max(0.0, others), max(0.0, stolen), cores, round(max(0.0, idle), 4))
