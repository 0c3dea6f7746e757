"""Where tasks run beside each other, and how long each of them then takes, from one common start."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from stepscope.bench.comms.group import Waitable
from stepscope.bench.comms.side_tasks import Task
from stepscope.measure import Device

FIRST_HOLD_S, LONGEST_HOLD_S = 2e-3, 0.1
HOLD_MARGIN_S, HOLD_FACTOR = 50e-6, 1.5


class Stage(Protocol):
    hold_s: float
    """How long the start waits until everything is queued; the same on all ranks, or some would begin late."""
    issue_s: float
    """The longest that queueing took since it was set to 0."""
    dry: int
    """Stretches whose start came before everything was queued; their times contain launches."""
    untold: bool
    """Whether some work could not tell when it was over: its time ends when waiting for it returned."""

    def play(self, tasks: Sequence[Task]) -> list[float]:
        """Start all of them in this order; seconds from the common start to the end of each.

        A task that computes in the calling thread comes last: those before it are under way by then.
        """


class CpuStage:
    """What is started beside has threads of its own; the calling thread computes, then waits."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self.hold_s, self.issue_s, self.dry, self.untold = 0.0, 0.0, 0, False

    def play(self, tasks: Sequence[Task]) -> list[float]:
        now_ns = self._now_ns
        started: list[tuple[int, list[_Ending]]] = []
        start_ns = now_ns()
        for task in tasks:
            endings = [_Ending(work, now_ns) for work in task.start()]
            started.append((now_ns(), endings))
        self.untold |= any(not ending.tells for _, endings in started for ending in endings)
        # Without anything to wait for, a task was over when its start returned.
        ends = [max([ending.wait() for ending in endings], default=at_ns) for at_ns, endings in started]
        return [(end_ns - start_ns) * 1e-9 for end_ns in ends]


class _Ending:
    """When a piece of work was over: as the library tells from its own thread, else when waiting for it returned.

    The latter alone would say that whatever ran beside a longer computation took as long as that.
    """

    def __init__(self, work: Waitable, now_ns: Callable[[], int]) -> None:
        self._work, self._now_ns = work, now_ns
        self._told_ns: int | None = None
        self.tells = True
        try:
            future = work.get_future()  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError):  # messages between single ranks, and MPI, have none
            self.tells = False
        else:
            future.add_done_callback(self._note)

    def _note(self, _: object) -> None:
        self._told_ns = self._now_ns()

    def wait(self) -> int:
        self._work.wait()
        returned_ns = self._now_ns()
        # Waiting may return before the other thread has come to tell.
        return returned_ns if self._told_ns is None else min(self._told_ns, returned_ns)


class CudaStage:
    """Each task has a stream of its own; all wait for one event, which a short spin keeps back until all is queued.

    So neither the launching of many kernels nor that of the collective is part of any time.
    """

    def __init__(self, device: Device, cuda: Any = None) -> None:
        if cuda is None:
            import torch

            cuda = torch.cuda
        self._device, self._cuda = device, cuda
        self._base = cuda.current_stream()
        self._lanes: list[Any] = []
        self.hold_s, self.issue_s, self.dry, self.untold = FIRST_HOLD_S, 0.0, 0, False

    def play(self, tasks: Sequence[Task]) -> list[float]:
        cuda, lanes = self._cuda, self._find_lanes(len(tasks))
        begin, ends = cuda.Event(enable_timing=True), [cuda.Event(enable_timing=True) for _ in tasks]
        issue_ns = time.perf_counter_ns()
        self._device.hold(self.hold_s)
        begin.record(self._base)
        waiting = []
        for lane, task, end in zip(lanes, tasks, ends, strict=True):
            lane.wait_event(begin)
            with cuda.stream(lane):
                works = task.start()
            end.record(lane)
            if works:
                waiting.append((lane, works, end))
        self.dry += bool(begin.query())
        self.issue_s = max(self.issue_s, (time.perf_counter_ns() - issue_ns) * 1e-9)
        for lane, works, end in waiting:
            with cuda.stream(lane):
                for work in works:  # puts the end of the work into this stream; with most backends the host goes on
                    work.wait()
            end.record(lane)  # again: only the last time counts
        self._device.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for end in ends]

    def _find_lanes(self, count: int) -> list[Any]:
        while len(self._lanes) < count:
            self._lanes.append(self._cuda.Stream())
        return self._lanes[:count]


def open_stage(device: Device) -> Stage:
    return CudaStage(device) if device.has_events else CpuStage()


def choose_hold(issue_s: float) -> float:
    """Long enough for the slowest rank's queueing."""
    return min(issue_s * HOLD_FACTOR + HOLD_MARGIN_S, LONGEST_HOLD_S)
