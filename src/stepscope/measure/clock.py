"""Clocks. The loop takes its clock as an argument, so that its logic can be tested in fake time."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Never goes back; its zero means nothing."""

    @property
    def resolution_s(self) -> float:
        """The smallest step two readings can differ by, as seen, not as promised."""


class WallClock:
    """The monotonic clock with the finest step Python has."""

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    @cached_property
    def resolution_s(self) -> float:
        """The smallest difference seen between two readings: on most machines the cost of reading, ~50 ns."""
        smallest = 1_000_000_000
        for _ in range(2000):
            first = time.perf_counter_ns()
            while (second := time.perf_counter_ns()) == first:
                pass
            smallest = min(smallest, second - first)
        return smallest * 1e-9


class FakeClock:
    """A clock that moves only when told; shipped for tests, here and in code that plugs into Stepscope."""

    def __init__(self, resolution_s: float = 1e-9) -> None:
        self._now_ns = 0
        self._resolution_s = resolution_s

    def now_ns(self) -> int:
        step_ns = max(1, round(self._resolution_s * 1e9))
        return self._now_ns // step_ns * step_ns

    @property
    def resolution_s(self) -> float:
        return self._resolution_s

    def advance(self, seconds: float) -> None:
        self._now_ns += round(seconds * 1e9)
