"""What else a case was measured beside: load of other processes, and how fast the machine itself was just then.

A hypervisor may move virtual processors between cores while nothing inside the machine changes. What then gets slower
is not arithmetic but threads waiting for each other; a short parallel operation shows it, a loop on one core does not.
On a GPU the host's speed in launching decides how long short kernels take, and differs between processes.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import psutil

from stepscope.core.units import format_share
from stepscope.measure.device import Device
from stepscope.records import Notice
from stepscope.stats import quantile_time

NOTABLE_SHARE = 0.05
"""Others that use less are not mentioned. Threads that fill the cores wait for the one that is busy."""
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


class CoRunningLoad(NamedTuple):
    """Cores' worth of time that others took while something was measured."""

    other_cores: float
    """By other processes of this host."""
    stolen_cores: float
    """By the hypervisor, for other machines."""
    cores: int
    idle_cores: float

    @property
    def share(self) -> float:
        """Fraction of all core time of the host."""
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
            kind="co_running_load",
            message=" and ".join(parts) + " while this was measured",
            hint="stop them, or leave them a core: threads that fill all cores (OMP_NUM_THREADS) wait for the busy one",
        )


def find_co_running_load(
    before: CpuUse, after: CpuUse, cores: int, *, own_s: float | None = None
) -> CoRunningLoad | None:
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
    return CoRunningLoad(max(0.0, others), max(0.0, stolen), cores, round(max(0.0, idle), 4))


ELEMENTS = {"cpu": 1 << 16, "cuda": 1}
"""On the CPU just enough for torch to use its threads, whose meeting takes nearly all of the time; on a GPU just
enough to launch a kernel, which takes the host longer than the device."""
CALLS = {"cpu": 10, "cuda": 50}
SAMPLES = 20
REST_S = 0.25
"""A reading is used again for this long, so that short cases are not delayed by it."""


class SpeedProbe:
    """Reads take some 3 ms."""

    def __init__(self, device: Device) -> None:
        import torch

        kind = device.name.partition(":")[0]
        self._device = device
        self._values = torch.ones(ELEMENTS[kind], device=device.name)
        self._calls = CALLS[kind]
        self._read_at_s = -1.0
        self._last_s = 0.0

    def read(self) -> float:
        """Seconds of the reference operation, comparable between processes of one machine and setting."""
        now_s = time.monotonic()
        if self._read_at_s < 0 or now_s - self._read_at_s > REST_S:
            self._last_s = quantile_time([self._take() for _ in range(SAMPLES)], 0.1)
            self._read_at_s = time.monotonic()
        return self._last_s

    def _take(self) -> float:
        self._device.synchronize()
        start_ns = time.perf_counter_ns()
        for _ in range(self._calls):
            self._values.mul_(1.0)
        self._device.synchronize()
        return (time.perf_counter_ns() - start_ns) * 1e-9 / self._calls


def open_probe(device: Device) -> SpeedProbe | None:
    """None for devices that are not real."""
    return SpeedProbe(device) if device.name.partition(":")[0] in ELEMENTS else None
