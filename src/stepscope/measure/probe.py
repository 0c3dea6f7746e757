"""How fast the machine itself is just now: a fixed operation, timed around each case.

A hypervisor may move virtual processors between cores while nothing inside the machine changes. What then gets slower
is not arithmetic but threads waiting for each other; a short parallel operation shows it, a loop on one core does not.
On a GPU the host's speed in launching decides how long short kernels take, and differs between processes.
"""

from __future__ import annotations

import time

from stepscope.measure.device import Device
from stepscope.stats import quantile_time

ELEMENTS = {"cpu": 1 << 16, "cuda": 1}
"""On the CPU just enough for torch to use its threads, whose meeting takes nearly all of the time; on a GPU just
enough to launch a kernel, which takes the host longer than the device."""
CALLS = {"cpu": 10, "cuda": 50}
SAMPLES = 20
REST_S = 0.25
"""A reading is used again for so long: short cases are not held up by it."""


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

    def read(self) -> list[float]:
        """One reading: seconds of the reference operation, comparable between processes of one machine and setting."""
        now_s = time.monotonic()
        if self._read_at_s < 0 or now_s - self._read_at_s > REST_S:
            self._last_s = quantile_time([self._take() for _ in range(SAMPLES)], 0.1)
            self._read_at_s = time.monotonic()
        return [self._last_s]

    def _take(self) -> float:
        self._device.synchronize()
        start_ns = time.perf_counter_ns()
        for _ in range(self._calls):
            self._values.mul_(1.0)
        self._device.synchronize()
        return (time.perf_counter_ns() - start_ns) * 1e-9 / self._calls


class NoProbe:
    """For devices that are not real."""

    def read(self) -> list[float]:
        return []


def open_probe(device: Device) -> SpeedProbe | NoProbe:
    return SpeedProbe(device) if device.name.partition(":")[0] in ELEMENTS else NoProbe()
