"""One case on one rank, as the measuring loop sees it; and what all kinds of cases have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from stepscope.comms.group import Group, Waitable, World
from stepscope.launch import Heartbeat
from stepscope.measure import Device
from stepscope.records import Case, Notice, Scalar, Score

T = TypeVar("T")
Check = Literal["all", "sample", "off"]
CHECKS: tuple[Check, ...] = ("all", "sample", "off")


BURST, LARGEST_BURST_BYTES = 16, 1 << 18
"""Small messages are sent so many times in a row; large ones take long enough for a pause not to matter."""


class Traces(NamedTuple):
    """Which cases are recorded by the profiler after they were timed, and where."""

    folder: Path
    """Of the run; on a rank that does not see it, what is recorded is thrown away."""
    sizes: frozenset[int]

    def take(self, case: Case) -> bool:
        return case.parameters.get("size_bytes") in self.sizes


class Room:
    """What trials share in one process: the world, its groups, the device."""

    def __init__(self, world: World, device: Device, heartbeat: Heartbeat, check: Check = "sample") -> None:
        self.world, self.device, self.heartbeat, self.check = world, device, heartbeat, check
        self.traces: Traces | None = None
        self._groups: dict[tuple[tuple[int, ...], int], Group] = {}
        self._answers: dict[str, Any] = {}

    def ask_everybody(self, question: str, answer: Callable[[], T]) -> list[T]:
        """Every rank's answer, by rank, on every rank; asked once. All ranks must ask the same at the same time."""
        if question not in self._answers:
            everybody = self.world.gather_values(answer())
            self._answers[question] = self.world.broadcast_value(everybody)
        found: list[T] = self._answers[question]
        return found

    def group(self, ranks: Sequence[int], number: int = 0) -> Group:
        """Made once: a group costs memory and connections. All ranks ask for the same groups in the same order.

        Groups of the same ranks with other numbers can be used at the same time.
        """
        key = (tuple(ranks), number)
        if key not in self._groups:
            self._groups[key] = self.world.join(key[0], fresh=number > 0)
        return self._groups[key]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank knows of a case without measuring it; rank 0's go into the result."""

    score: Score | None = None
    observed: dict[str, Scalar] = {}
    notices: list[Notice] = []


class Trial(Protocol):
    judge: int
    """The rank whose times decide when there are enough samples."""
    active: bool
    """Whether this rank takes part; the others only keep step."""
    iterations: int
    """Calls of `body` that make one sample."""
    operations: int
    """What one call of `body` does so many of, one after the other: the case's time is that of one."""
    device: Device
    synchronises: bool
    """Whether a call of `body` leaves all active ranks in step."""
    burst: int
    """How many calls may follow each other directly where it does."""

    def needed_bytes(self) -> int:
        """Memory of this rank, before anything is allocated."""

    def open(self) -> None:
        """Allocate and bind; raises UnsupportedCallError."""

    def body(self) -> object: ...

    def refresh(self) -> None:
        """Before each sample, outside the timed region: fresh inputs, spoiled outputs."""

    def count_wrong(self) -> int | None:
        """Wrong elements that the last sample left; None where nothing can be checked."""

    def facts(self) -> Facts: ...

    def further_s(self) -> dict[str, list[float]]:
        """Times of parts by name, one value for each call of `body` since `forget`."""

    def own_s(self) -> list[float] | None:
        """The case's own times, one for each call of `body` since `forget`, where that does more than what counts."""

    def forget(self) -> None:
        """Drop what was recorded so far: it was a rehearsal."""

    def close(self) -> None: ...


def idle() -> None:
    """The body of a rank that only keeps step."""


class WithoutParts:
    """For trials whose only times are the loop's."""

    def further_s(self) -> dict[str, list[float]]:
        return {}

    def own_s(self) -> list[float] | None:
        return None

    def forget(self) -> None:
        return


class WaitingDevice:
    """A device that is done when what was started on it has also been waited for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.name, self.has_events = device.name, device.has_events
        self.started: list[Waitable] = []

    def synchronize(self) -> None:
        self._wait()
        self._device.synchronize()

    def mark(self) -> Any:
        # On a device with a queue, waiting puts the end of the work into the queue: before the mark.
        if self.has_events:
            self._wait()
        return self._device.mark()

    def _wait(self) -> None:
        for work in self.started:
            work.wait()
        self.started.clear()

    def elapsed_s(self, start: Any, stop: Any) -> float:
        return self._device.elapsed_s(start, stop)

    def hold(self, seconds: float) -> None:
        self._device.hold(seconds)

    def has_reached(self, mark: Any) -> bool:
        return self._device.has_reached(mark)

    def allocations(self) -> int:
        return self._device.allocations()


class Steps:
    """How the ranks walk through the loop together, checking on the way.

    What disturbs the ranks (an agreement, a check) must not be in the next time: they meet again, and where an
    operation leaves them in step, they make one call that nobody times. Between two such calls nothing happens.
    """

    def __init__(self, trial: Trial, room: Room, case: Case) -> None:
        self._trial, self._room, self._case = trial, room, case
        self._taken = 0
        self._disturbed = True
        self._looks = False
        self.wrong = 0
        self.checked = 0

    def agree(self, value: int) -> int:
        self._disturbed = True
        self._room.heartbeat.beat("measuring", self._case.key)
        return self._room.world.broadcast_value(value, self._trial.judge)

    def align(self) -> int:
        self._room.heartbeat.tick()
        if self._looks:
            self.look()
        self._taken += 1
        self._looks = self._is_looked_at(self._taken)
        if not self._trial.synchronises:
            self._refresh()
            self._room.world.barrier()
        else:
            if self._disturbed:
                self._room.world.barrier()
                self._call()
            self._refresh()
        self._disturbed = False
        return 1 if self._looks else self._trial.burst

    def _is_looked_at(self, number: int) -> bool:
        """`sample`: the 1st, 2nd, 4th, 8th … sample; and, by `verify`, one call behind the last."""
        return self._room.check == "all" or (self._room.check == "sample" and number & (number - 1) == 0)

    def _refresh(self) -> None:
        """Only before what is looked at: data is put in by each rank at its own pace, and waited for."""
        if self._looks and self._trial.active:
            self._trial.refresh()
            self._room.device.synchronize()

    def _call(self) -> None:
        if self._trial.active:
            for _ in range(self._trial.iterations):
                self._trial.body()
            self._trial.device.synchronize()

    def look(self) -> None:
        """Compare what the last call left."""
        self._disturbed = True
        if not self._trial.active:
            return
        found = self._trial.count_wrong()
        if found is not None:
            self.wrong += found
            self.checked += 1

    def verify(self) -> None:
        """After the last sample: look at it where it was prepared for that, else at one call more."""
        if self._room.check == "off":
            return
        if not self._looks:
            self._looks = True
            self._refresh()
            self._room.world.barrier()
            self._call()
        self.look()
