"""A kernel beside a collective, or several collectives at once: each alone and all together, in turn.

Efficiency and slow-downs are derived from the times on reading.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from stepscope.bench.comms.cases import make_benchmark, require_size
from stepscope.bench.comms.data import DTYPE_BYTES
from stepscope.bench.comms.group import Waitable
from stepscope.bench.comms.kernels import parse_compute
from stepscope.bench.comms.layouts import parse_layout
from stepscope.bench.comms.operations import CollectiveShape, find_operation
from stepscope.bench.comms.side_tasks import CollectiveTask, ComputeTask, CopyTask, SideTask
from stepscope.bench.comms.trial import Facts, Room, Trial
from stepscope.core.errors import UsageError, unknown_name
from stepscope.core.lazy_torch import torch
from stepscope.core.units import parse_size
from stepscope.measure import Device
from stepscope.records import Case, Notice, Score
from stepscope.records.kinds import COMM, COMPUTE, TOGETHER, WORLD, OverlapObserved, OverlapSide, OverlapSpec

FIRST_HOLD_S, LONGEST_HOLD_S = 2e-3, 0.1
HOLD_MARGIN_S, HOLD_FACTOR = 50e-6, 1.5


class OverlapStage:
    hold_s: float = 0.0
    """How long the start waits until everything is queued; the same on all ranks, or some would begin late."""
    issue_s: float = 0.0
    """The longest that queueing took since it was set to 0."""
    starved: int = 0
    """Segments whose start came before everything was queued; their times contain launches."""
    unreported: bool = False
    """Whether some work could not tell when it was over: its time ends when waiting for it returned."""

    def run(self, tasks: Sequence[SideTask]) -> list[float]:
        """Start all of them in this order; seconds from the common start to the end of each.

        A task that computes in the calling thread comes last: those before it are under way by then.
        """
        raise NotImplementedError


class CpuStage(OverlapStage):
    """What is started beside has threads of its own; the calling thread computes, then waits."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns

    def run(self, tasks: Sequence[SideTask]) -> list[float]:
        now_ns = self._now_ns
        started: list[tuple[int, list[Callable[[], int]]]] = []
        start_ns = now_ns()
        for task in tasks:
            endings = [self._watch(work) for work in task.start()]
            started.append((now_ns(), endings))
        # Without anything to wait for, a task was over when its start returned.
        ends = [max([wait() for wait in endings], default=at_ns) for at_ns, endings in started]
        return [(end_ns - start_ns) * 1e-9 for end_ns in ends]

    def _watch(self, work: Waitable) -> Callable[[], int]:
        """Waits for it, and returns when it was over: as the library tells from its own thread, else when waiting for
        it returned.

        The latter alone would say that whatever ran beside a longer computation took as long as that.
        """
        told_ns: list[int] = []
        try:
            future = work.get_future()  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError):  # messages between single ranks, and MPI, have none
            self.unreported = True
        else:
            future.add_done_callback(lambda _: told_ns.append(self._now_ns()))

        def wait() -> int:
            work.wait()
            # Waiting may return before the other thread has come to tell.
            return min([self._now_ns(), *told_ns])

        return wait


class CudaStage(OverlapStage):
    """Each task has a stream of its own; all wait for one event, which a short spin keeps back until all is queued.

    So neither the launching of many kernels nor that of the collective is part of any time.
    """

    def __init__(self, device: Device, cuda: Any = None) -> None:
        self._device, self._cuda = device, cuda or torch.cuda
        self._base = self._cuda.current_stream()
        self._lanes: list[Any] = []
        self.hold_s = FIRST_HOLD_S

    def run(self, tasks: Sequence[SideTask]) -> list[float]:
        cuda = self._cuda
        self._lanes += [cuda.Stream() for _ in tasks[len(self._lanes) :]]
        begin, ends = cuda.Event(enable_timing=True), [cuda.Event(enable_timing=True) for _ in tasks]
        issue_ns = time.perf_counter_ns()
        self._device.hold(self.hold_s)
        begin.record(self._base)
        waiting = []
        for lane, task, end in zip(self._lanes, tasks, ends, strict=False):
            lane.wait_event(begin)
            with cuda.stream(lane):
                works = task.start()
            end.record(lane)
            if works:
                waiting.append((lane, works, end))
        self.starved += bool(begin.query())
        self.issue_s = max(self.issue_s, (time.perf_counter_ns() - issue_ns) * 1e-9)
        for lane, works, end in waiting:
            with cuda.stream(lane):
                for work in works:  # puts the end of the work into this stream; with most backends the host goes on
                    work.wait()
            end.record(lane)  # again: only the last time counts
        self._device.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for end in ends]


def choose_hold(issue_s: float) -> float:
    """Long enough for the slowest rank's queueing."""
    return min(issue_s * HOLD_FACTOR + HOLD_MARGIN_S, LONGEST_HOLD_S)


MODEL = "overlap"
DEVICE_COPY = "device_copy"
"""In the place of a collective: a copy within the memory of one device, which needs no other rank."""
COPY_BUS_FACTOR = 2.0
"""A copy reads every byte and writes it."""
PLACES = 2
"""In memory, of everything that moves data."""
REHEARSALS = 5
SHORTEST_S = 1e-9
MOST_KERNELS, MOST_QUEUED_KERNELS = 10_000, 256
"""Kernels per segment; on a device with a queue, what surely fits into it together with the collective."""
NOTED_STARVED_FRACTION = 0.1


# Cases


class Beside(NamedTuple):
    """A further collective, on a communicator of its own."""

    collective: str
    size_bytes: int
    groups: str = WORLD

    @property
    def text(self) -> str:
        return f"{self.collective}:{self.size_bytes}" + (f":{self.groups}" if self.groups != WORLD else "")


def parse_beside(text: str, *, where: str = "--beside") -> Beside:
    """`all_gather:4M`, `all_reduce:64K:split:2`: name, size, and groups as `--groups` takes them."""
    name, _, rest = text.strip().partition(":")
    size, _, groups = rest.partition(":")
    if not size:
        raise UsageError(
            f"{text!r} lacks a size", hint="write NAME:SIZE[:GROUPS], for example all_gather:4M", where=where
        )
    return Beside(_require_collective(name, where), parse_size(size, where=where), groups or WORLD)


class OverlapPair(NamedTuple):
    """A collective and the kernel beside it."""

    collective: Beside
    compute: str


def parse_pair(text: str, *, where: str = "--pair") -> OverlapPair:
    """`all_reduce:1M+gemm:m=512`: a collective as `--beside` takes it, and a kernel as `--compute` takes it."""
    collective, plus, compute = text.partition("+")
    if not plus:
        hint = "write NAME:SIZE[:GROUPS]+KERNEL, for example all_reduce:1M+gemm:m=512"
        raise UsageError(f"{text!r} lacks a kernel", hint=hint, where=where)
    return OverlapPair(parse_beside(collective, where=where), parse_compute(compute, where=where).text)


def make_overlap_cases(
    *,
    collectives: Sequence[str],
    sizes: Sequence[int],
    computes: Sequence[str | None],
    backend: str,
    world_size: int,
    device: str,
    dtype: str = "float32",
    repeat: int | None = None,
    groups: str = WORLD,
    beside: Sequence[str] = (),
) -> list[Case]:
    """One case for each collective, kernel and size. Raises UsageError for what cannot be."""
    if dtype not in DTYPE_BYTES:
        raise unknown_name("dtype", dtype, DTYPE_BYTES, where="--dtype")
    others = [parse_beside(text) for text in beside]
    for layout in (groups, *(other.groups for other in others)):
        parse_layout(layout, world_size)
    for size in (*sizes, *(other.size_bytes for other in others)):
        require_size(size, dtype)
    specs = [parse_compute(compute).text if compute else None for compute in computes]
    if not others and None in specs:
        raise UsageError("nothing runs beside the collective", hint="name --compute or --beside", where="--compute")
    benchmark = make_benchmark(MODEL, backend, world_size, "a kernel beside a collective: alone, alone, together")
    asked = [
        OverlapSpec(
            collective=_require_collective(collective, "--collective"), size_bytes=size, compute=spec, dtype=dtype,
            device=device, repeat=repeat if spec else None, groups=groups, beside=[other.text for other in others],
        )
        for collective in collectives for spec in specs for size in sizes
    ]  # fmt: skip
    return [Case(benchmark=benchmark, spec=one, world_size=world_size) for one in asked]


def _require_collective(name: str, where: str) -> str:
    if name == "barrier":
        raise UsageError("a barrier moves nothing that could run beside", hint="name a collective", where=where)
    return name if name == DEVICE_COPY else find_operation(name).name


# Sides of a cycle


class OverlapActivity(NamedTuple):
    """Something that runs alone and beside the others, each time into a place of its own: neither result is ever taken
    for the other. The places change their roles from cycle to cycle, since one may lie better in memory."""

    name: str
    tasks: Sequence[SideTask]
    moved: OverlapSide | None = None
    """What a collective moves, on its largest group; None: it computes."""
    members: int = 1

    def alone(self, cycle: int) -> SideTask:
        return self.tasks[cycle % len(self.tasks)]

    def beside(self, cycle: int) -> SideTask:
        return self.alone(cycle + 1)


class OverlapTrial(Trial):
    def __init__(self, case: Case, room: Room) -> None:
        super().__init__(room)
        assert isinstance(case.spec, OverlapSpec)
        self.options = case.spec
        self._seed = zlib.crc32(case.key.encode()) & 0xFFFF
        first = Beside(self.options.collective, self.options.size_bytes, self.options.groups)
        asked = [first, *(parse_beside(text) for text in self.options.beside)]
        self._sides = [self._make_side(number, beside) for number, beside in enumerate(asked)]
        self._compute: ComputeTask | None = None
        if self.options.compute is not None:
            self._compute = ComputeTask(parse_compute(self.options.compute), room.device.name)
            self._compute.repeat = self.options.repeat or 1
            # It computes in the calling thread, so it comes last: see `Stage.run`.
            self._sides.append(OverlapActivity(COMPUTE, [self._compute]))
        self._stage: OverlapStage = CudaStage(room.device) if room.device.has_events else CpuStage()
        self._cycles, self._rehearsed = 0, False
        names = [name for side in self._sides for name in (side.name, f"{side.name}_beside")]
        self.times_s = {name: [] for name in (*names, TOGETHER)}
        self.body = self._run_cycle

    def _make_side(self, number: int, beside: Beside) -> OverlapActivity:
        device, dtype, width = self.room.device, self.options.dtype, DTYPE_BYTES[self.options.dtype]
        name = COMM if not number else f"{COMM}{number + 1}"
        places = range(PLACES * number, PLACES * (number + 1))
        tasks: Sequence[SideTask]
        if beside.collective == DEVICE_COPY:
            tasks = copies = [
                CopyTask(beside.size_bytes, dtype, device.name, threaded=not device.has_events, seed=self._seed + place)
                for place in places
            ]
            size_bytes, bus_bytes, members = copies[0].size_bytes, COPY_BUS_FACTOR * copies[0].size_bytes, 1
        else:
            operation, elements = find_operation(beside.collective), beside.size_bytes // width
            group, largest, _ = self.room.choose_groups(beside.groups, number=number)
            seed = self._seed + zlib.crc32(str(group.ranks).encode())
            tasks = [
                CollectiveTask(
                    operation, CollectiveShape(len(group.ranks), elements), group, device=device.name, dtype=dtype,
                    seed=(seed + place) & 0xFFFF, tag=place,
                )
                for place in places
            ]  # fmt: skip
            members = len(largest.ranks)
            plan = operation.plan(CollectiveShape(members, elements))
            size_bytes, bus_bytes = plan.size * width, plan.bus * width
        moved = OverlapSide(name=name, collective=beside.collective, size_bytes=size_bytes, bus_bytes=bus_bytes)
        return OverlapActivity(name, tasks, moved, members)

    def parts(self) -> list[SideTask]:
        return [task for side in self._sides for task in side.tasks]

    def open(self) -> None:
        for task in self.parts():
            task.open()

    def _run_cycle(self) -> None:
        if not self._rehearsed:  # by the worker's rehearsal: once all ranks have agreed to take part
            self._rehearsed = True
            self._rehearse()
        segments = len(self._sides) + 1
        for place in range(segments):
            self._run_segment((self._cycles + place) % segments)
        self._cycles += 1

    def _run_segment(self, segment: int) -> None:
        """One side alone, or all of them; all ranks begin it at the same moment."""
        self.room.world.barrier()
        if segment < len(self._sides):
            side = self._sides[segment]
            (took_s,) = self._stage.run([side.alone(self._cycles)])
            self.times_s[side.name].append(took_s)
            return
        ends_s = self._run_all(self._cycles)
        for side, end_s in zip(self._sides, ends_s, strict=True):
            self.times_s[f"{side.name}_beside"].append(end_s)
        self.times_s[TOGETHER].append(max(ends_s))

    def _run_all(self, cycle: int) -> list[float]:
        return self._stage.run([side.beside(cycle) for side in self._sides])

    def _rehearse(self) -> None:
        """Everything once (what is set up on a first call is no part of any time), then how many kernels, how long to
        hold; every rank does the same steps and uses the same numbers."""
        for place in range(PLACES):
            self._run_all(place)
        if self._compute is not None and self.options.repeat is None:
            longest_s = max(self._time_alone(side.tasks[0]) for side in self._sides if side.moved is not None)
            most = MOST_QUEUED_KERNELS if self.room.device.has_events else MOST_KERNELS
            for _ in range(2):  # a first guess from one kernel, a second from many
                wanted = self._compute.repeat * longest_s / max(self._time_alone(self._compute), SHORTEST_S)
                kernels = max(1, min(round(wanted), most))
                decides = self.room.world.rank == self.judge
                self._compute.repeat = self.room.world.broadcast_value(kernels if decides else None, self.judge)
        self._stage.issue_s = 0.0
        for cycle in range(REHEARSALS):
            self.room.world.barrier()
            self._run_all(cycle)
        everybody = self.room.world.gather_values(self._stage.issue_s)
        slowest_s = self.room.world.broadcast_value(None if everybody is None else max(everybody))
        self._stage.hold_s = choose_hold(slowest_s) if self.room.device.has_events else 0.0
        self.refresh()
        self.room.device.synchronize()

    def _time_alone(self, task: SideTask) -> float:
        """The least of a few: other work on a machine only adds time."""
        times = []
        for _ in range(REHEARSALS):
            self.room.world.barrier()
            times += self._stage.run([task])
        return min(times)

    def facts(self) -> Facts:
        moved = [side.moved for side in self._sides if side.moved is not None]
        size_bytes, bus_bytes = sum(one.size_bytes for one in moved), sum(one.bus_bytes for one in moved)
        compute, work = self._compute, self._compute.work if self._compute is not None else None
        observed = OverlapObserved(
            size_bytes=size_bytes,
            bus_factor=bus_bytes / size_bytes if size_bytes else 0.0,
            members=self._sides[0].members,
            sides=moved,
            repeat=compute.repeat if compute is not None else None,
            compute_flops=work.flops if work is not None else None,
            compute_bytes=work.moved_bytes if work is not None else None,
        )
        score = Score(unit="GB/s", work=bus_bytes) if bus_bytes else None
        return Facts(score=score, observed=observed, notices=self._find_notices())

    def _find_notices(self) -> list[Notice]:
        notices, segments_run = [], max(1, self._cycles * (len(self._sides) + 1))
        if self._stage.starved > NOTED_STARVED_FRACTION * segments_run:
            message = f"in {self._stage.starved} of {segments_run} segments the device began before all was queued"
            notices.append(Notice(kind="late_launch", message=message, hint="use larger kernels, or fewer: --repeat N"))
        if self._stage.unreported and self._compute is not None:
            message = (
                f"{self.room.world.backend} does not report when all of this is over: what ran beside the kernels ends "
                "no earlier than they do, and its slow-down may be less than it says"
            )
            notices.append(Notice(kind="end_by_waiting", message=message))
        return notices

    def own_s(self) -> list[float] | None:
        return self.times_s[TOGETHER]

    def forget(self) -> None:
        super().forget()
        self._cycles = self._stage.starved = 0
