"""How fast the machine itself is just now: a fixed operation, timed around each case.

A hypervisor may move virtual processors between cores while nothing inside the machine changes. What then gets slower
is not arithmetic but threads waiting for each other; a short parallel operation shows it, a loop on one core does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from stepscope.stats import quiet_time

ELEMENTS = 1 << 16
"""Just enough for torch to use its threads: nearly all of the time is their meeting."""
CALLS, SAMPLES = 10, 20
REST_S = 0.25
"""A reading is used again for so long: short cases are not held up by it."""


class SpeedProbe:
    """Reads take some 3 ms; only for cases on the CPU."""

    def __init__(self) -> None:
        import torch

        self._values = torch.ones(ELEMENTS)
        self._read_at_s = -1.0
        self._last_s = 0.0

    def read(self) -> list[float]:
        """One reading: seconds of the reference operation, comparable between processes of one machine and setting."""
        now_s = time.monotonic()
        if self._read_at_s < 0 or now_s - self._read_at_s > REST_S:
            self._last_s = _time(lambda: self._values.mul_(1.0))
            self._read_at_s = time.monotonic()
        return [self._last_s]


def _time(operation: Callable[[], object]) -> float:
    samples = []
    for _ in range(SAMPLES):
        start_ns = time.perf_counter_ns()
        for _ in range(CALLS):
            operation()
        samples.append((time.perf_counter_ns() - start_ns) * 1e-9 / CALLS)
    return quiet_time(samples)


class NoProbe:
    """For devices whose speed does not hang on the host's threads."""

    def read(self) -> list[float]:
        return []


def open_probe(device: str) -> SpeedProbe | NoProbe:
    return SpeedProbe() if device == "cpu" else NoProbe()
