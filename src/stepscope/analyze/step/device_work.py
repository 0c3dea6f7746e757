"""What one device did: its rows in order of start, what each is, and when the device was busy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from stepscope.analyze.step.intervals import Intervals, clip, length
from stepscope.formats import classify
from stepscope.formats.timeline import COPY, MISSING, SET, Integers

COMPUTE, COMMUNICATION, TRANSFER = range(3)
"""What a device row counts as in a breakdown. Transfer: copies and fills."""

LONG_AGO = -(1 << 62)
"""Before every time in a trace."""


class Window(NamedTuple):
    """[start_ns, end_ns) on the clock of the trace."""

    start_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


def exclusive_windows(windows: Mapping[int, Window]) -> dict[int, Window]:
    """Windows of steps, in order of time, each without what still belongs to the steps before.

    Where the host runs ahead, the device works on one step while the next is already being launched: from launch to
    completion the steps overlap, and only these windows add up to the time that the steps took. In steady state each is
    as long as the period of the loop, whether the host or the device decides it.
    """
    own: dict[int, Window] = {}
    reached: int | None = None
    for number, window in windows.items():
        start = window.start_ns if reached is None else min(max(window.start_ns, reached), window.end_ns)
        own[number] = Window(start, window.end_ns)
        reached = window.end_ns if reached is None else max(reached, window.end_ns)
    return own


class DeviceWork:
    """What one device did, in order of start. Columns are taken from the timeline when they are asked for."""

    def __init__(self, device: int, rows: Integers, core: Mapping[str, Any]) -> None:
        self.device = device
        self.rows = rows
        self._core = core

    def _take(self, column: str) -> Integers:
        taken: Integers = self._core[column].take(self.rows)
        return taken

    @cached_property
    def start(self) -> Integers:
        return self._take("start_ns")

    @cached_property
    def end(self) -> Integers:
        return self._take("end_ns")

    @cached_property
    def latest_end(self) -> Integers:
        """The latest end of this row and all before it."""
        return np.maximum.accumulate(self.end)

    @cached_property
    def stream(self) -> Integers:
        return self._take("stream")

    @cached_property
    def step(self) -> Integers:
        return self._take("step")

    @cached_property
    def launch(self) -> Integers:
        """Row of the call that launched it; −1 where the trace has none."""
        return self._take("parent")

    @cached_property
    def has_launches(self) -> bool:
        """Whether the trace has the call of every row."""
        return bool(self.launch.min(initial=0) >= 0)

    @cached_property
    def called(self) -> Integers:
        """When that call began; LONG_AGO where there is none."""
        called: Integers = self._core["start_ns"].take(self.launch, mode="wrap")
        if not self.has_launches:
            called[self.launch < 0] = LONG_AGO
        return called

    @cached_property
    def communicates(self) -> bool:
        return bool((self._take("category") == classify.COMMUNICATION).any())

    @cached_property
    def share(self) -> Integers:
        """COMPUTE, COMMUNICATION or TRANSFER."""
        return share_work(self._take("kind"), self._take("category"))

    def part(self, window: Window) -> slice:
        return reaching_in(self.start, self.latest_end, window)


def reaching_in(start: Integers, latest_end: Integers, window: Window) -> slice:
    """Rows, in order of start, that reach into the window (some in between may have ended before it)."""
    first = int(latest_end.searchsorted(window.start_ns, side="left"))
    return slice(first, max(first, int(start.searchsorted(window.end_ns, side="left"))))


def share_work(kind: Integers, category: Integers) -> Integers:
    """COMPUTE, COMMUNICATION or TRANSFER, for device rows of these kinds and categories."""
    share = np.full(len(kind), COMPUTE, np.int8)
    share[(kind == COPY) | (kind == SET) | (category == classify.COPY) | (category == classify.SET)] = TRANSFER
    share[category == classify.COMMUNICATION] = COMMUNICATION
    return share


def busy_spans(work: DeviceWork, part: slice) -> tuple[Intervals, Integers]:
    """When the device was busy in a part of its work, and the place of the first row of each busy time.

    Rows without length count: they divide what would be one gap.
    """
    start, latest = work.start[part], work.latest_end[part]
    if not len(start):
        return Intervals(start, latest), np.zeros(0, np.int64)
    breaks = np.flatnonzero(start[1:] > latest[:-1])
    first = np.concatenate(([0], breaks + 1))
    return Intervals(start[first], latest[np.append(breaks, len(latest) - 1)]), first + part.start


def busy_ns(work: DeviceWork, window: Window) -> int:
    spans, _ = busy_spans(work, work.part(window))
    return length(clip(spans, *window))


def device_label(device: int) -> str:
    return "unknown" if device == MISSING else str(device)
