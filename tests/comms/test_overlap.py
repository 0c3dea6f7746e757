"""Overlap: formulas against numbers made by hand, stages in fake time, trials in a world that is only played."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from comms_runs import BRIEF, RankMeasurement, fold_ranks
from hypothesis import given
from hypothesis import strategies as st
from spoiled import SpoiledWorld, flip_element

from stepscope.bench.comms.fake_group import FakeWorld
from stepscope.bench.comms.kernels import make_kernel, parse_compute
from stepscope.bench.comms.overlap import (
    LONGEST_HOLD_S,
    CpuStage,
    CudaStage,
    OverlapTrial,
    choose_hold,
    make_overlap_cases,
    parse_beside,
)
from stepscope.bench.comms.producer import make_trial
from stepscope.bench.comms.side_tasks import ComputeTask, CopyTask, SideTask
from stepscope.bench.comms.trial import Room, Steps
from stepscope.core.errors import UsageError
from stepscope.launch import Heartbeat
from stepscope.measure import CpuDevice, FakeClock, WallClock, measure
from stepscope.records import Case, CaseResult, RankSamples, Scalar
from stepscope.records.codec import make_observed
from stepscope.records.kinds import CollectiveSpec
from stepscope.report.overlaps import (
    by_iteration,
    estimate,
    format_overlap_table,
    overlap_efficiency,
    read_overlap,
)
from stepscope.store import MeasuredCase

# Formulas


@pytest.mark.parametrize(
    ("alone", "together", "expected"),
    [
        ((2.0, 1.0), 2.0, 1.0),  # the shorter is hidden
        ((2.0, 1.0), 3.0, 0.0),  # one after the other
        ((2.0, 1.0), 2.5, 0.5),
        ((2.0, 1.0), 4.0, -1.0),  # worse than one after the other, and said so
        ((2.0, 1.0), 1.5, 1.5),
        ((3.0, 2.0, 1.0), 3.0, 1.0),  # three at once: two may hide
        ((3.0, 2.0, 1.0), 4.5, 0.5),
    ],
)
def test_efficiency_by_hand(alone: tuple[float, ...], together: float, expected: float) -> None:
    assert overlap_efficiency(alone, together) == pytest.approx(expected)


def test_nothing_to_hide_has_no_efficiency() -> None:
    assert overlap_efficiency([1.0], 1.0) is None
    assert overlap_efficiency([1.0, 0.0], 1.0) is None
    assert estimate([]) is None


seconds = st.floats(1e-6, 10.0)


@given(st.lists(seconds, min_size=2, max_size=5), st.floats(0, 1))
def test_efficiency_is_the_share_of_what_can_be_hidden(alone: list[float], share: float) -> None:
    longest, total = max(alone), sum(alone)
    found = overlap_efficiency(alone, total - share * (total - longest))
    assert found == pytest.approx(share, abs=1e-6)


@given(st.lists(seconds, min_size=2, max_size=4), seconds, seconds, st.floats(1e-3, 1e3))
def test_efficiency_falls_with_time_and_has_no_unit(alone: list[float], one: float, other: float, unit: float) -> None:
    short, long = sorted([one, other])
    first, second = overlap_efficiency(alone, short), overlap_efficiency(alone, long)
    assert first is not None
    assert second is not None
    assert first >= second
    scaled = overlap_efficiency([unit * value for value in alone], unit * long)
    assert scaled == pytest.approx(second, rel=1e-6, abs=1e-6)


# What is read from samples


def measured_by_hand(columns: Sequence[dict[str, list[float]]], *, processes: int = 1) -> MeasuredCase:
    (case,) = overlap_cases()
    facts: dict[str, Scalar] = {
        "repeat": 4, "wrong": 0, "comm_collective": "all_reduce", "comm_size_bytes": 1000, "comm_bus_bytes": 1000.0,
    }  # fmt: skip
    result = CaseResult(
        case=case, status="ok", started_at="t", elapsed_s=1.0, timing="slowest_rank",
        observed=make_observed(case.spec, facts),
    )  # fmt: skip
    samples = [
        RankSamples(
            case=case.key, rank=rank, process=process, duration_s=times["together"],
            iterations=[1] * len(times["together"]), warmup=[False] * len(times["together"]), extra_s=times,
        )
        for process in range(processes) for rank, times in enumerate(columns)
    ]  # fmt: skip
    return MeasuredCase(result, samples)


BY_HAND = [
    {"comm": [1.0, 1.0], "comm_beside": [2.0, 3.0], "compute": [2.0, 2.0], "compute_beside": [2.0, 2.0],
     "together": [2.0, 3.0]},
    {"comm": [1.0, 1.0], "comm_beside": [1.0, 1.0], "compute": [4.0, 2.0], "compute_beside": [4.0, 2.5],
     "together": [4.0, 2.5]},
]  # fmt: skip


def test_a_cycle_is_as_long_as_on_its_slowest_rank() -> None:
    samples = measured_by_hand(BY_HAND, processes=2).samples
    assert by_iteration(samples, "together", max) == [4.0, 3.0, 4.0, 3.0]
    assert by_iteration(samples, "nothing", max) == []


def test_efficiency_and_slowdowns_are_paired_by_cycle() -> None:
    view = read_overlap(measured_by_hand(BY_HAND))
    assert view is not None
    assert view.efficiency is not None
    # Cycle 1: (1 + 4 − 4) / 1; cycle 2: (1 + 2 − 3) / 1.
    assert (view.efficiency.value, view.efficiency.low, view.efficiency.high, view.efficiency.n) == (0.5, 0.0, 1.0, 2)
    comm, compute = view.sides
    assert comm.slowdown is not None
    assert compute.slowdown is not None
    assert (comm.name, comm.alone_s, comm.beside_s, comm.slowdown.value) == ("comm", 1.0, 2.5, 2.5)
    assert compute.slowdown.value == pytest.approx((4 / 4 + 2.5 / 2) / 2)
    assert view.busbw_bytes_per_s == pytest.approx(1000 / 3.5)
    assert comm.alone_busbw == 1000


def test_the_table_names_both_sides_and_keeps_a_negative_efficiency() -> None:
    slow = [{name: values if name != "together" else [6.0, 6.0] for name, values in BY_HAND[0].items()}]
    text = format_overlap_table([measured_by_hand(slow)])
    assert "-300.0 %" in text
    assert "all_reduce" in text
    assert "+ gemm:m=8,n=8,k=8" in text
    rows = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(rows) == 2
    msgspec.json.encode(read_overlap(measured_by_hand(slow)))


def test_other_cases_have_no_overlap() -> None:
    measured = measured_by_hand(BY_HAND)
    other = CollectiveSpec(operation="all_reduce", size_bytes=4096)
    case = msgspec.structs.replace(measured.result.case, spec=other)
    plain = MeasuredCase(msgspec.structs.replace(measured.result, case=case), measured.samples)
    assert read_overlap(plain) is None
    assert format_overlap_table([plain]) == ""


# What is asked for


def test_a_kernel_has_one_text() -> None:
    assert parse_compute("gemm").text == "gemm:m=512,n=512,k=512"
    assert parse_compute("gemm:k=2K, m=1K").text == parse_compute("gemm:m=1024,k=2048").text
    assert parse_compute("copy:size=1M,dtype=float16").text == "copy:size=1048576,dtype=float16"
    assert parse_compute(parse_compute("embedding:rows=1K").text) == parse_compute("embedding:rows=1024")


@pytest.mark.parametrize(
    "text", ["gem", "gemm:q=1", "gemm:m", "gemm:m=0", "gemm:dtype=int8", "copy:size=3", "add:size=6", "gemm:m=x"]
)
def test_kernels_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_compute(text)
    assert caught.value.where == "--compute"


def test_work_is_counted() -> None:
    assert make_kernel(parse_compute("gemm:m=2,n=3,k=4")).work == (48, 4 * (8 + 12 + 6))
    assert make_kernel(parse_compute("copy:size=64")).work == (0, 128)
    assert make_kernel(parse_compute("add:size=64")).work == (16, 192)
    assert make_kernel(parse_compute("scale:size=64,dtype=float16")).work == (32, 128)
    lookup = make_kernel(parse_compute("embedding:rows=10,dim=4,batch=2,pooling=3")).work
    assert lookup.moved_bytes == 4 * 4 * (6 + 2) + 8 * 6


def test_a_further_collective_is_read() -> None:
    assert parse_beside("all_gather:4K").text == "all_gather:4096"
    assert parse_beside("all_reduce:1M:split:2") == ("all_reduce", 1 << 20, "split:2")
    for text in ("all_gather", "nothing:4K", "barrier:4", "all_gather:x"):
        with pytest.raises(UsageError):
            parse_beside(text)


def overlap_cases(**options: Any) -> list[Case]:
    usual: dict[str, Any] = {
        "collectives": ["all_reduce"], "sizes": [4096], "computes": ["gemm:m=8,n=8,k=8"], "backend": "fake",
        "world_size": 2, "device": "cpu", "repeat": 2,
    }  # fmt: skip
    return make_overlap_cases(**{**usual, **options})


def test_cases_keep_what_sets_them_apart() -> None:
    cases = overlap_cases(collectives=["all_reduce", "device_copy"], computes=["gemm", "copy"], sizes=[64, 128])
    assert len({case.key for case in cases}) == 8
    (plain,) = overlap_cases(repeat=None)
    assert set(plain.parameters) == {"collective", "size_bytes", "compute", "dtype", "device"}
    (case,) = overlap_cases(computes=[None], beside=["all_gather:64:split:2"])
    assert case.parameters["beside"] == ["all_gather:64:split:2"]
    assert "repeat" not in case.parameters


@pytest.mark.parametrize(
    "options",
    [
        {"computes": [None]},
        {"sizes": [3]},
        {"dtype": "float7"},
        {"groups": "split:9"},
        {"beside": ["all_gather:3"]},
        {"collectives": ["barrier"]},
    ],
)
def test_cases_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        overlap_cases(**options)


# Kernels and copies

KERNELS = [
    "gemm:m=70,n=9,k=33",
    "embedding:rows=99,dim=8,batch=70,pooling=3",
    "copy:size=400",
    "add:size=400",
    "scale:size=400",
]


@pytest.mark.parametrize(
    "text",
    [
        *KERNELS,
        "gemm:m=8,dtype=bfloat16",
        *(
            f"{kind}:size=4000,dtype={dtype}"
            for kind in ("add", "scale")
            for dtype in ("float64", "float16", "bfloat16")
        ),
    ],
)
def test_kernels_are_checked_once(text: str) -> None:
    task = ComputeTask(parse_compute(text), "cpu")
    task.open()
    task.repeat = 3
    assert task.start() == ()
    assert task.count_wrong() == 0
    assert task.count_wrong() is None
    task.close()


@pytest.mark.parametrize("text", KERNELS)
@pytest.mark.parametrize("value", [float("nan"), 1e6])
def test_a_kernel_that_computes_wrong_is_found(text: str, value: float) -> None:
    kernel: Any = make_kernel(parse_compute(text))
    run = kernel.open("cpu")
    assert kernel.count_wrong() > 0  # nothing ran yet
    run()
    assert kernel.count_wrong() == 0
    result = kernel._results[0] if text.startswith("embedding") else kernel._result
    result.view(-1)[0] = value
    assert kernel.count_wrong() == 1


@pytest.mark.parametrize("threaded", [True, False])
def test_a_copy_runs_in_a_thread_of_its_own_where_there_is_no_queue(threaded: bool) -> None:
    task = CopyTask(4096, "float32", "cpu", threaded=threaded)
    task.open()
    task.refresh()
    assert task.count_wrong() == 1024
    works = task.start()
    assert len(works) == int(threaded)
    for work in works:
        work.wait()
    assert task.count_wrong() == 0
    task.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("copy")]


# Stages in fake time


class Told:
    """Work that is over at a moment of the fake clock, and tells so."""

    def __init__(self, clock: FakeClock, over_s: float, *, tells: bool = True) -> None:
        self._clock, self._over_s, self._tells = clock, over_s, tells
        self._callbacks: list[Callable[[object], None]] = []

    def get_future(self) -> Any:
        if not self._tells:
            raise RuntimeError("not implemented")
        return self

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self._callbacks.append(callback)

    def pass_time(self, seconds: float) -> None:
        """The caller computes; what is over meanwhile tells."""
        end_s = self._clock.now_ns() * 1e-9 + seconds
        if self._clock.now_ns() * 1e-9 <= self._over_s <= end_s:
            self._clock.advance(self._over_s - self._clock.now_ns() * 1e-9)
            for callback in self._callbacks:
                callback(None)
        self._clock.advance(max(0.0, end_s - self._clock.now_ns() * 1e-9))

    def wait(self) -> None:
        self.pass_time(max(0.0, self._over_s - self._clock.now_ns() * 1e-9))


class Acting:
    """A task that is only its start."""

    def __init__(self, start: Callable[[], Sequence[Any]]) -> None:
        self.start = start

    def needed_bytes(self) -> int:
        return 0

    def open(self) -> None: ...

    def refresh(self) -> None: ...

    def count_wrong(self) -> int | None:
        return None

    def close(self) -> None: ...


@pytest.mark.parametrize(("tells", "comm_s"), [(True, 3.0), (False, 5.0)])
def test_on_a_cpu_what_runs_beside_ends_when_the_library_says(tells: bool, comm_s: float) -> None:
    clock = FakeClock()
    work = Told(clock, 3.0, tells=tells)
    computing = Acting(lambda: work.pass_time(5.0) or ())
    stage = CpuStage(clock.now_ns)
    assert stage.run([Acting(lambda: [work]), computing]) == pytest.approx([comm_s, 5.0])
    assert stage.unreported is not tells


def test_on_a_cpu_the_caller_waits_for_what_is_not_over() -> None:
    clock = FakeClock()
    work = Told(clock, 7.0)
    computing = Acting(lambda: work.pass_time(5.0) or ())
    assert CpuStage(clock.now_ns).run([Acting(lambda: [work]), computing]) == pytest.approx([7.0, 5.0])


class FakeCuda:
    """Streams as lines of time: what is launched runs when its stream is free and the host has come to launch it."""

    def __init__(self, launch_s: float = 0.0) -> None:
        self.host_s, self._launch_s = 0.0, launch_s
        self.base = FakeStream(self)
        self.current = self.base
        self.streams = [self.base]

    def current_stream(self) -> FakeStream:
        return self.current

    def Stream(self) -> FakeStream:  # noqa: N802
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def Event(self, *, enable_timing: bool) -> FakeEvent:  # noqa: N802
        assert enable_timing
        return FakeEvent(self)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def launch(self, seconds: float, stream: FakeStream | None = None) -> None:
        self.host_s += self._launch_s
        stream = stream or self.current
        stream.free_s = max(stream.free_s, self.host_s) + seconds

    # What the stage needs of a device

    def hold(self, seconds: float) -> None:
        assert self.current is self.base
        self.base.free_s = max(self.base.free_s, self.host_s) + seconds

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, *(stream.free_s for stream in self.streams))


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.free_s = cuda, 0.0

    def wait_event(self, event: FakeEvent) -> None:
        self.free_s = max(self.free_s, event.at_s)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.at_s = cuda, -1.0

    def record(self, stream: FakeStream) -> None:
        self.at_s = max(stream.free_s, self._cuda.host_s)

    def query(self) -> bool:
        return self._cuda.host_s >= self.at_s

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at_s - self.at_s) * 1e3


def queued_kernels(cuda: FakeCuda, count: int, each_s: float) -> SideTask:
    def start() -> tuple[()]:
        for _ in range(count):
            cuda.launch(each_s)
        return ()

    return Acting(start)


def queued_collective(cuda: FakeCuda, seconds: float) -> SideTask:
    """As nccl does: on a stream of its own behind the current one; waiting makes the current one wait."""
    own = cuda.Stream()

    class Work:
        def wait(self) -> None:
            cuda.current.free_s = max(cuda.current.free_s, own.free_s)

    def start() -> list[Work]:
        own.free_s = max(own.free_s, cuda.current.free_s)
        cuda.launch(seconds, own)
        return [Work()]

    return Acting(start)


def test_on_a_gpu_both_begin_together_and_no_launch_is_timed() -> None:
    cuda = FakeCuda(launch_s=10e-6)
    stage = CudaStage(cuda, cuda)  # type: ignore[arg-type]
    stage.hold_s = 2e-3
    kernels, collective = queued_kernels(cuda, 100, 5e-6), queued_collective(cuda, 300e-6)
    for tasks, expected in (
        ([kernels], [500e-6]),
        ([collective], [300e-6]),
        ([collective, kernels], [300e-6, 500e-6]),
        ([collective, queued_collective(cuda, 700e-6), kernels], [300e-6, 700e-6, 500e-6]),
    ):
        assert stage.run(tasks) == pytest.approx(expected)
    assert stage.starved == 0


def test_on_a_gpu_a_hold_that_is_too_short_is_told() -> None:
    cuda = FakeCuda(launch_s=10e-6)
    stage = CudaStage(cuda, cuda)  # type: ignore[arg-type]
    stage.hold_s = 0.0
    (took_s,) = stage.run([queued_kernels(cuda, 100, 5e-6)])
    assert took_s > 900e-6
    assert stage.starved == 1


def test_the_hold_covers_the_slowest_rank_and_ends() -> None:
    assert choose_hold(1e-3) > 1e-3
    assert choose_hold(10.0) == LONGEST_HOLD_S


# Trials


class QuietHeartbeat(Heartbeat):
    def __init__(self) -> None: ...

    def tick(self) -> None:
        return

    def beat(self, phase: str, case: str | None = None) -> None: ...


def make_room(world: Any = None, check: Any = "all") -> Room:
    return Room(world or FakeWorld(2), CpuDevice(), QuietHeartbeat(), check)


def try_out(case: Case, world: Any = None) -> tuple[OverlapTrial, RankMeasurement]:
    room = make_room(world)
    trial = make_trial(case, room)
    assert isinstance(trial, OverlapTrial)
    assert trial.needed_bytes() > 0
    trial.open()
    trial.refresh()
    trial.body()  # the rehearsal
    trial.forget()
    steps = Steps(trial, room, case)
    settings = msgspec.structs.replace(BRIEF, iterations=1)
    measurement = measure(trial.body, settings=settings, clock=WallClock(), device=trial.device, peers=steps)
    steps.look()
    further = {name: values[measurement.warmups :] for name, values in trial.further_s().items()}
    own_s = trial.own_s()
    assert own_s is not None
    measurement = msgspec.structs.replace(measurement, duration_s=own_s)
    facts = trial.facts()
    trial.close()
    return trial, RankMeasurement(measurement, facts, wrong=steps.wrong, checked=steps.checked, parts_s=further)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repeat": None},
        {"computes": ["embedding:rows=50,dim=4,batch=8,pooling=2"], "collectives": ["all_to_all"]},
        {"collectives": ["device_copy"], "computes": ["copy:size=4096"], "world_size": 1},
        {"computes": [None], "beside": ["all_gather:1024", "all_reduce:256:split:2"]},
        {"world_size": 4, "groups": "split:2", "beside": ["device_copy:4096"]},
        {"collectives": ["scatter"], "dtype": "int32"},
    ],
)
def test_a_case_is_measured_whole(options: dict[str, Any]) -> None:
    (case,) = overlap_cases(**options)
    _, done = try_out(case, FakeWorld(case.world_size))
    result, samples = fold_ranks(case, [done])
    assert result.status == "ok"
    assert result.facts["wrong"] == 0
    measured = MeasuredCase(result, samples)
    view = read_overlap(measured)
    assert view is not None
    assert len(view.sides) == 1 + len(case.parameters.get("beside", ())) + ("compute" in case.parameters)  # type: ignore[arg-type]
    count = len(measured.seconds())
    assert {len(values) for values in samples[0].extra_s.values()} == {count}
    assert measured.seconds() == samples[0].extra_s["together"]
    for name, values in samples[0].extra_s.items():
        if name.endswith("_beside"):
            assert all(part <= joint for part, joint in zip(values, samples[0].extra_s["together"], strict=True))
    assert format_overlap_table([measured])


def test_facts_sum_over_all_collectives() -> None:
    (case,) = overlap_cases(beside=["all_gather:8192"], sizes=[4096])
    _, done = try_out(case)
    assert done.facts is not None
    observed = done.facts.observed.facts()
    assert observed["size_bytes"] == 4096 + 8192
    assert observed["comm_bus_bytes"] == 4096
    assert observed["comm2_bus_bytes"] == 4096
    assert observed["bus_factor"] == pytest.approx(8192 / 12288)
    assert done.facts.score is not None
    assert done.facts.score.work == 8192
    assert observed["repeat"] == 2
    assert observed["compute_flops"] == 2 * 2 * 8**3


def test_a_copy_on_one_device_needs_no_other_rank() -> None:
    (case,) = overlap_cases(collectives=["device_copy"], world_size=1)
    _, done = try_out(case, FakeWorld(1))
    assert done.facts is not None
    assert done.facts.observed.facts()["bus_factor"] == 2.0
    assert done.facts.observed.facts()["members"] == 1


@pytest.mark.parametrize("options", [{}, {"computes": [None], "beside": ["all_gather:1024"]}])
def test_a_planted_corruption_is_found(options: dict[str, Any]) -> None:
    (case,) = overlap_cases(**options)
    _, done = try_out(case, SpoiledWorld(FakeWorld(2), flip_element(3)))
    # Alone and together have a place each, and both are looked at.
    assert done.wrong >= 2 * done.checked > 0


class ScriptedStage:
    """Kernels take 1 ms each and the collective 7.3 ms; together they take as long as the longer."""

    hold_s, issue_s, starved, unreported = 0.0, 0.0, 0, False

    def __init__(self) -> None:
        self.played: list[str] = []

    def run(self, tasks: Sequence[SideTask]) -> list[float]:
        self.played.append("+".join("compute" if isinstance(task, ComputeTask) else "comm" for task in tasks))
        return [task.repeat * 1e-3 if isinstance(task, ComputeTask) else 7.3e-3 for task in tasks]


def scripted_trial(**options: Any) -> tuple[OverlapTrial, ScriptedStage]:
    (case,) = overlap_cases(**options)
    trial, stage = OverlapTrial(case, make_room()), ScriptedStage()
    trial._stage = stage
    trial.open()
    trial.body()
    trial.forget()
    return trial, stage


def test_kernels_are_chosen_to_last_as_long_as_the_collective() -> None:
    trial, _ = scripted_trial(repeat=None)
    assert trial.facts().observed.facts()["repeat"] == 7
    trial, _ = scripted_trial(repeat=3)
    assert trial.facts().observed.facts()["repeat"] == 3


def test_every_cycle_begins_one_place_further() -> None:
    trial, stage = scripted_trial()
    stage.played.clear()
    for _ in range(4):
        trial.body()
    first = ["comm", "compute", "comm+compute"]
    assert [stage.played[place : place + 3] for place in range(0, 12, 3)] == [
        first, [*first[1:], *first[:1]], [*first[2:], *first[:2]], first,
    ]  # fmt: skip
    assert trial.further_s() == {
        "comm": [7.3e-3] * 4, "comm_beside": [7.3e-3] * 4, "compute": [2e-3] * 4, "compute_beside": [2e-3] * 4,
        "together": [7.3e-3] * 4,
    }  # fmt: skip


def test_groups_apart_are_made_once() -> None:
    room = make_room()
    assert room.group((0, 1), 1) is room.group((0, 1), 1)
    assert room.group((0, 1), 1) is not room.group((0, 1), 2)
    assert room.group((0, 1), 1) is not room.group((0, 1))
