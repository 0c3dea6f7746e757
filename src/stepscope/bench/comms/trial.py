"""One case on one rank, as the measuring loop sees it; and what all kinds of cases have in common."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from stepscope.bench.comms.group import Group, Waitable, World
from stepscope.bench.comms.layouts import parse_layout
from stepscope.launch.watchdog import Heartbeat, NoHeartbeat
from stepscope.measure import Device
from stepscope.records import Case, Check, Notice, Observed, Score
from stepscope.records.kinds import WORLD

T = TypeVar("T")
BURST, LONGEST_BURST_S = 16, 0.25
"""Calls follow each other directly up to so many times, and for so long: a pause of some microseconds matters to a call
of milliseconds too, when threads fall asleep in it, and no longer to one that takes a good part of the limit."""


FEWEST_PLACES, PLACES_BYTES = 3, 64 << 20
"""Places in memory that samples use in turn: for one that is timed, one before and one behind it at least, and for a
whole burst where this much memory holds them."""


def count_places(size_bytes: int) -> int:
    """By the memory that a sample moves in one place."""
    return min(BURST + 2, max(FEWEST_PLACES, PLACES_BYTES // max(1, size_bytes)))


class Traces(NamedTuple):
    """Which cases are recorded by the profiler after they were timed, and where."""

    folder: Path
    """The run folder; on a rank that does not see it, what is recorded is thrown away."""
    sizes: frozenset[int]

    def take(self, case: Case) -> bool:
        return case.spec.size_bytes in self.sizes


class Chosen(NamedTuple):
    """Groups of a case, as one rank sees them."""

    mine: Group
    """On a rank that is in none of them, the largest."""
    largest: Group
    """What is said of the case is said of it."""
    at_once: int | None
    """How many; None: the whole world is one."""


class Room:
    """What trials share in one process: the world, its groups, the device."""

    def __init__(
        self, world: World, device: Device, heartbeat: Heartbeat | NoHeartbeat, check: Check = "sample"
    ) -> None:
        self.world, self.device, self.heartbeat, self.check = world, device, heartbeat, check
        self.traces: Traces | None = None
        self._groups: dict[tuple[tuple[int, ...], int], Group] = {}

    @cached_property
    def hosts(self) -> list[tuple[str, str]]:
        """Host and network interface of every rank, on every rank; asked once, by all ranks at the same time."""
        return self.world.broadcast_value(self.world.gather_values((socket.gethostname(), find_interface())))

    def group(self, ranks: Sequence[int], number: int = 0) -> Group:
        """Made once: a group costs memory and connections. All ranks ask for the same groups in the same order.

        Groups of the same ranks with other numbers can be used at the same time.
        """
        key = (tuple(ranks), number)
        if key not in self._groups:
            self._groups[key] = self.world.join(key[0], fresh=number > 0)
        return self._groups[key]

    def choose_groups(self, layout: str, only: int | None = None, *, number: int = 0) -> Chosen:
        """Groups that act at the same time; `only` one of them, in turn."""
        groups = [self.group(ranks, number) for ranks in parse_layout(layout, self.world.size)]
        chosen = groups if only is None else [groups[only]]
        largest = max(chosen, key=lambda group: len(group.ranks))
        mine = next((group for group in chosen if group.me is not None), largest)
        return Chosen(mine, largest, len(chosen) if layout != WORLD else None)

    def forget_groups(self) -> None:
        self._groups.clear()


INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def find_interface() -> str:
    """What the environment names; empty where the library chooses."""
    return next((os.environ[name] for name in INTERFACES if os.environ.get(name)), "")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank knows of a case without measuring it; rank 0's go into the result."""

    score: Score | None = None
    observed: Observed
    notices: list[Notice] = []


def idle() -> None:
    """The body of a rank that only keeps step."""


class TrialPart:
    """One of the things that a case moves or computes on this rank; what is said here is usual."""

    def needed_bytes(self) -> int:
        """Memory of this rank, before anything is allocated."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Outside the timed region: fresh inputs, spoiled results."""

    def count_wrong(self) -> int | None:
        """Wrong elements that the last call left; None where nothing can be checked."""
        return None

    def close(self) -> None:
        """Give the memory back."""


class Trial:
    """A case on this rank. What is set here is usual."""

    judge: int = 0
    """The rank whose times decide when there are enough samples."""
    active: bool = True
    """Whether this rank takes part; the others only keep step."""
    iterations: int = 1
    """Calls of `body` that make one sample."""
    operations: int = 1
    """What one call of `body` does so many of, one after the other: the case's time is that of one."""
    device: Device
    synchronises: bool = False
    """Whether a call of `body` leaves all active ranks in step."""
    burst: int = 1
    """The most calls that may follow each other directly where it does."""
    places: int = 1
    """In memory, which samples use in turn: a sample before those that are timed and one behind them leave their
    results alone, and are checked as well. 1: each sample uses the memory of the one before."""
    body: Callable[[], object] = staticmethod(idle)

    def __init__(self, room: Room, parts: Iterable[str] = ()) -> None:
        self.room, self.device = room, room.device
        self.times_s: dict[str, list[float]] = {name: [] for name in parts}
        """Times of parts by name, one value for each call of `body` since `forget`."""

    def parts(self) -> Iterable[TrialPart]:
        """What it is made of: memory is that of all, all are refreshed, and all are checked."""
        return ()

    def needed_bytes(self) -> int:
        """Memory of this rank, before anything is allocated."""
        return sum(part.needed_bytes() for part in self.parts())

    def open(self) -> None:
        """Allocate and bind; raises UnsupportedCallError."""

    def refresh(self) -> None:
        """Outside the timed region: fresh inputs, spoiled outputs, in all places."""
        for part in self.parts():
            part.refresh()

    def count_wrong(self) -> int | None:
        """Wrong elements that the samples since `refresh` left, each in its own place; None where nothing can be
        checked."""
        return count_wrong_of(self.parts())

    def facts(self) -> Facts:
        raise NotImplementedError

    def settle(self) -> None:
        """Marks on a device's time line become times: called between samples, when the device has passed them."""

    def further_s(self) -> dict[str, list[float]]:
        self.settle()
        return self.times_s

    def own_s(self) -> list[float] | None:
        """The case's own times, one for each call of `body` since `forget`, where that does more than what counts."""
        return None

    def forget(self) -> None:
        """Drop what was recorded so far: it was a rehearsal."""
        for values in self.times_s.values():
            values.clear()

    def close(self) -> None:
        for part in self.parts():
            part.close()
        self.body = idle


def count_wrong_of(parts: Iterable[TrialPart]) -> int | None:
    """Wrong elements of all; None where none could be checked."""
    counts = [count for part in parts if (count := part.count_wrong()) is not None]
    return sum(counts) if counts else None


class CallRotation:
    """The calls of a trial whose samples use several places in memory in turn."""

    def __init__(self, places: Sequence[Sequence[Callable[[], object]]]) -> None:
        """The calls of one sample, for each place; equally many in all."""
        self._calls = [call for calls in places for call in calls]
        self._made, self._calls_per_sample = 0, len(places[0])

    def restart(self) -> None:
        """With fresh data, in the first place."""
        self._made = 0

    def body(self) -> None:
        made = self._made
        self._made = made + 1
        self._calls[made % len(self._calls)]()

    @property
    def used(self) -> int:
        """Places that samples have used since the last start."""
        return self._made // self._calls_per_sample


class WaitingDevice:
    """A device that is done when what was started on it has also been waited for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.name, self.has_events = device.name, device.has_events
        self.elapsed_s, self.hold, self.has_reached = device.elapsed_s, device.hold, device.has_reached
        self.allocations = device.allocations
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


class Stopwatch:
    """Moments of a rank: on the device's time line where it has one, else on the host's clock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.now: Callable[[], Any] = device.mark if device.has_events else time.perf_counter_ns

    def between_s(self, start: Any, stop: Any) -> float:
        """Only after the device has been waited for."""
        return self._device.elapsed_s(start, stop) if self._device.has_events else (stop - start) * 1e-9


class Steps:
    """How the ranks walk through the loop together, checking on the way.

    A timed call takes the same time whether it is checked or not. What disturbs the ranks (an agreement, a check) is
    therefore always followed by the same: fresh data, a barrier, and one call that is not timed. Calls that are checked
    follow each other as directly as others, since each has its own place in memory: they are compared when the places
    are used up. And ranks that are done with the last one make one more call before they compare: on a machine with few
    cores the comparison would hold up those that are not done yet.
    """

    def __init__(self, trial: Trial, room: Room, case: Case) -> None:
        self._trial, self._room, self._case = trial, room, case
        self._taken = 0
        self._disturbed = True
        self._looks = False
        self._burst = self._following = 1
        self._uncompared = 0
        """Samples that were made ready to be compared, and are not yet."""
        self._released_ns = 0
        self._quickest_s = math.inf
        self.wrong = 0
        self.checked = 0
        """Samples whose results were compared, those around the timed ones included."""

    def agree(self, value: int) -> int:
        self._note_pace()
        self._disturbed = True
        self._room.heartbeat.beat("measuring", self._case.key)
        agreed, self._burst = self._room.world.broadcast_value((value, self._choose_burst()), self._trial.judge)
        return agreed

    def _note_pace(self) -> None:
        """What a call took when nothing held it up: the machine's pauses are not to make bursts shorter."""
        if self._released_ns:
            took_s = (time.perf_counter_ns() - self._released_ns) * 1e-9
            self._quickest_s = min(self._quickest_s, took_s / self._following)
            self._released_ns = 0

    def _choose_burst(self) -> int:
        return max(1, min(self._trial.burst, int(LONGEST_BURST_S / self._quickest_s)))

    def align(self) -> int:
        self._note_pace()
        checkable = max(1, self._trial.places - 2)
        full = self._uncompared + self._burst > checkable
        if self._looks and (full or self._disturbed or self._room.check == "sample"):
            self.look()
        self._room.heartbeat.tick()
        self._taken += 1
        self._looks = self._is_looked_at(self._taken)
        self._get_ready()
        self._following = min(self._burst, checkable) if self._looks else self._burst
        self._uncompared += self._following if self._looks else 0
        self._released_ns = time.perf_counter_ns()
        return self._following

    def _is_looked_at(self, number: int) -> bool:
        """`sample`: the 1st, 2nd, 4th, 8th … sample; and, by `verify`, one call behind the last."""
        return self._room.check == "all" or (self._room.check == "sample" and number & (number - 1) == 0)

    def _get_ready(self) -> None:
        """Data is put in by each rank at its own pace: the ranks meet after it."""
        if self._disturbed or (self._looks and not self._uncompared):
            if self._trial.active:
                self._trial.refresh()
                self._room.device.synchronize()
            if self._trial.places > 1:
                self._room.world.barrier()
                self._call()
        if not self._trial.synchronises:
            self._room.world.barrier()
        self._disturbed = False

    def _call(self) -> None:
        if self._trial.active:
            for _ in range(self._trial.iterations):
                self._trial.body()
            self._trial.device.synchronize()

    def look(self) -> None:
        """Compare what the samples left, and those around them: no call is left out where all are checked."""
        self._disturbed = True
        if not self._trial.synchronises:
            self._room.world.barrier()
        if self._trial.places > 1:
            self._call()
        found = self._trial.count_wrong() if self._trial.active else None
        if found is not None:
            self.wrong += found
            self.checked += self._uncompared + 2 if self._trial.places > 1 else 1
        self._uncompared = 0

    def verify(self) -> None:
        """After the last sample: look at it where it was prepared for that, else at one call more."""
        if self._room.check == "off":
            return
        if not self._looks:
            self._looks = True
            self._get_ready()
            self._uncompared = 1
            self._call()
        self.look()
