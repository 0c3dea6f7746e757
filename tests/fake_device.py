"""A device with a queue, in the time of a fake clock."""

from __future__ import annotations

from stepscope.measure import FakeClock


class FakeDevice:
    """A queue in fake time: work given to it runs later, as on a GPU."""

    has_events = True

    def __init__(self, clock: FakeClock, *, launch_s: float = 0.0) -> None:
        self.name = "fake:0"
        self._clock = clock
        self._launch_s = launch_s
        self._free_at_s = 0.0

    def submit(self, duration_s: float) -> None:
        """What a kernel launch does: the host moves on at once, the device works when it is free."""
        self._clock.advance(self._launch_s)
        self._free_at_s = max(self._free_at_s, self._clock.now_ns() * 1e-9) + duration_s

    def synchronize(self) -> None:
        now_s = self._clock.now_ns() * 1e-9
        if self._free_at_s > now_s:
            self._clock.advance(self._free_at_s - now_s)

    def mark(self) -> float:
        return max(self._free_at_s, self._clock.now_ns() * 1e-9)

    def elapsed_s(self, start: float, stop: float) -> float:
        return stop - start

    def hold(self, seconds: float) -> None:
        self._free_at_s = max(self._free_at_s, self._clock.now_ns() * 1e-9) + seconds

    def has_reached(self, mark: float) -> bool:
        return self._clock.now_ns() * 1e-9 >= mark

    def allocations(self) -> int:
        return 0
