"""Trials, folding and clocks in one process, with a fake process group."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from comms_runs import BRIEF, RankMeasurement, cases_of, fold_ranks
from spoiled import SpoiledWorld, flip_element

from fake_device import FakeDevice
from stepscope.bench.comms.exchange import CollectiveTrial
from stepscope.bench.comms.fake_group import FakeWorld
from stepscope.bench.comms.group import UnsupportedCollectiveError
from stepscope.bench.comms.operations import operations
from stepscope.bench.comms.producer import make_trial
from stepscope.bench.comms.trial import BURST, Check, Facts, Room, Steps, WaitingDevice
from stepscope.core.errors import RankHungError, UsageError
from stepscope.core.units import format_share
from stepscope.launch import Heartbeat
from stepscope.launch.join import is_peer_disconnect, wait_for_all
from stepscope.launch.worker import Session
from stepscope.measure import CpuDevice, FakeClock, Measurement, MeasureSettings, WallClock, measure
from stepscope.records import Case, CommunicationRequest, Failure, Notice, describe_exception
from stepscope.records.kinds import CollectiveObserved
from stepscope.run.clocks import ClockOffset, answer_pings, ask_clock, find_arrivals
from stepscope.run.producer import RankOutcome
from stepscope.run.rank import Gathered
from stepscope.run.ranks import Ranks, Refusal
from stepscope.store import MeasuredCase
from stepscope.system.collect import (
    describe_torch_library,
    find_loaded_libraries,
    read_communication_settings,
)


class QuietHeartbeat(Heartbeat):
    def __init__(self) -> None:
        self.phases: list[str] = []

    def tick(self) -> None:
        return

    def beat(self, phase: str, case: str | None = None) -> None:
        self.phases.append(phase)


def try_out(case: Case, world: Any = None, check: Check = "all") -> RankMeasurement:
    room = Room(world or FakeWorld(case.world_size), CpuDevice(), QuietHeartbeat(), check)
    trial = make_trial(case, room)
    trial.open()
    settings = msgspec.structs.replace(BRIEF, iterations=trial.iterations)
    steps = Steps(trial, room, case)
    measurement = measure(trial.body, settings=settings, clock=WallClock(), device=trial.device, peers=steps)
    steps.verify()
    facts = trial.facts()
    trial.close()
    return RankMeasurement(measurement, facts, wrong=steps.wrong, checked=steps.checked)


@pytest.mark.parametrize("name", operations())
@pytest.mark.parametrize("mode", ["blocking", "nonblocking"])
@pytest.mark.parametrize("ranks", [2, 5])
def test_every_operation_is_right_in_a_played_world(name: str, mode: str, ranks: int) -> None:
    if (operations()[name].objects or operations()[name].made_of) and mode == "nonblocking":
        with pytest.raises(UsageError, match="waits for its result"):
            cases_of(name, ranks=ranks, mode=mode, depth=3)
        return
    (case,) = cases_of(name, ranks=ranks, mode=mode, depth=3 if mode == "nonblocking" else 1)
    for rank in range(ranks):
        done = try_out(case, FakeWorld(ranks, rank))
        assert done.wrong == 0
        assert done.facts is not None
        assert done.facts.observed.facts()["members"] == ranks


def test_a_right_result_scores_bus_bandwidth() -> None:
    (case,) = cases_of("all_reduce", ranks=4)
    result, samples = fold_ranks(case, [try_out(case)], offsets=[ClockOffset(0, 0)])
    assert result.status == "ok"
    assert result.facts["bus_factor"] == 1.5
    assert result.facts["wrong"] == 0
    measured = MeasuredCase(result, samples)
    summary = measured.summary()
    assert summary is not None
    assert measured.score() == pytest.approx(1.5 * 4096 / summary.median_s / 1e9)
    assert samples[0].extra_s["arrival"] == [0.0] * len(samples[0].seconds())


@pytest.mark.parametrize("check", get_args(Check))
@pytest.mark.parametrize("place", [0, 7, 1023])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_a_planted_corruption_is_found(check: Check, place: int, dtype: str) -> None:
    (case,) = cases_of("all_reduce", ranks=2, dtype=dtype)
    done = try_out(case, SpoiledWorld(FakeWorld(2), flip_element(place)), check)
    if check == "off":
        assert (done.wrong, done.checked) == (0, 0)
        return
    assert done.wrong == done.checked > 0
    result, samples = fold_ranks(case, [done])
    assert result.status == "failed"
    assert result.failure is not None
    assert result.failure.kind == "wrong_result"
    assert samples, "evidence is kept for a wrong row too"


def test_a_corruption_of_one_call_is_found_by_looking_at_all() -> None:
    (case,) = cases_of("all_reduce", ranks=2)
    assert try_out(case, SpoiledWorld(FakeWorld(2), flip_element(5, only_call=5)), "all").wrong == 1


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "broadcast", "send_recv"])
@pytest.mark.parametrize("mode", ["blocking", "nonblocking"])
@pytest.mark.parametrize(("period", "phase"), [(p, phase) for p in (2, 3, 4, 7) for phase in range(p)])
def test_looking_at_all_leaves_no_call_out(name: str, mode: str, period: int, phase: int) -> None:
    """An error that comes back with any period is found as often as it comes, in timed and untimed calls."""
    (case,) = cases_of(name, ranks=2, mode=mode, depth=3 if mode == "nonblocking" else 1)
    harmed = 0

    def harm(result: Any, number: int) -> None:
        nonlocal harmed
        if number % period == phase:
            harmed += 1
            result[0] = result[0] == 0

    done = try_out(case, SpoiledWorld(FakeWorld(2, rank=1), harm), "all")
    assert done.wrong == harmed > 0


class ListeningWorld(FakeWorld):
    """Writes down what happens around each call."""

    def __init__(self) -> None:
        super().__init__(2, rank=1)
        self.events: list[str] = []

    def barrier(self) -> None:
        self.events.append("barrier")


def record_events(name: str, check: Check, mode: str = "blocking") -> list[str]:
    """Of ten samples: data put in, barriers, calls with and without a time, comparisons."""
    (case,) = cases_of(name, ranks=2, mode=mode)
    world = ListeningWorld()
    room = Room(world, CpuDevice(), QuietHeartbeat(), check)
    trial = CollectiveTrial(case, room)
    trial.open()
    body, refresh, compare = trial.body, trial.refresh, trial.count_wrong
    trial.body = lambda: (world.events.append("call"), body())
    trial.refresh = lambda: (world.events.append("refresh"), refresh())[0]  # type: ignore[method-assign]
    trial.count_wrong = lambda: (world.events.append("compare"), compare())[1]  # type: ignore[method-assign]
    steps = Steps(trial, room, case)
    for _ in range(10):
        world.events += ["timed"] * (following := steps.align())
        for _ in range(following):
            body()
        steps.agree(1)
    steps.verify()
    assert steps.wrong == 0
    return world.events


@pytest.mark.parametrize("check", get_args(Check))
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "broadcast", "send_recv"])
def test_the_same_comes_before_a_timed_call_with_and_without_a_check(name: str, check: Check) -> None:
    events = record_events(name, check)
    timed = [number for number, event in enumerate(events) if event == "timed"]
    before = ["refresh", "barrier", "call"] + (["barrier"] if name in {"broadcast", "send_recv"} else [])
    first = [number for number in timed if events[number - 1] != "timed"]
    assert [events[number - len(before) : number] for number in first] == [before] * 10
    assert len(timed) == (10 if len(before) == 4 else 1 + 9 * BURST), "checked calls come in bursts as others do"
    assert events.count("compare") == {"all": 10, "sample": 4 + 1, "off": 0}[check]
    assert ("timed", "compare") not in set(pairwise(events)), "ranks that are done do not compare at once"


@pytest.mark.parametrize("size", [8, 64 << 10, 256 << 10, 260 << 10, 768 << 10, 2 << 20, 5 << 20])
def test_calls_follow_each_other_directly_at_every_size(size: int) -> None:
    (case,) = cases_of("all_reduce", ranks=2, sizes=(size,))
    room = Room(FakeWorld(2), CpuDevice(), QuietHeartbeat(), "off")
    trial = CollectiveTrial(case, room)
    steps = Steps(trial, room, case)
    assert steps.align() == 1, "how long a call takes is not known yet"
    steps.agree(0)
    assert steps.align() == BURST


@pytest.mark.parametrize(("call_s", "wanted"), [(0.0, 16), (0.02, 12), (0.1, 2), (0.3, 1)])
def test_bursts_of_long_calls_are_short(call_s: float, wanted: int) -> None:
    (case,) = cases_of("all_reduce", ranks=2)
    room = Room(FakeWorld(2), CpuDevice(), QuietHeartbeat(), "off")
    steps = Steps(CollectiveTrial(case, room), room, case)
    steps.align()
    time.sleep(call_s)
    steps.agree(0)
    assert wanted - 3 <= steps.align() <= wanted


@pytest.mark.parametrize(("call", "found"), [(1, True), (2, True), (3, False), (4, True), (5, False), (8, True)])
def test_looking_at_samples_finds_what_it_looks_at(call: int, found: bool) -> None:
    """Samples 1, 2, 4, 8 are looked at; the calls between them, and those that nobody times, are not."""
    (case,) = cases_of("all_reduce", ranks=2)
    spoiled = {"now": False}

    def harm(result: Any, number: int) -> None:
        if spoiled["now"]:
            result[0] = result[0] == 0

    room = Room(SpoiledWorld(FakeWorld(2), harm), CpuDevice(), QuietHeartbeat(), "sample")
    trial = CollectiveTrial(case, room)
    trial.open()
    steps = Steps(trial, room, case)
    for number in range(1, 11):
        steps.align()
        spoiled["now"] = number == call
        trial.body()
        spoiled["now"] = False
    steps.verify()
    assert (steps.wrong == 1) == found


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "all_to_all", "broadcast", "send_recv"])
def test_a_result_of_an_earlier_iteration_is_wrong(name: str) -> None:
    (case,) = cases_of(name, ranks=2)
    kept: list[Any] = []

    def hold_back(result: Any, number: int) -> None:
        kept.append(result.clone())
        if len(kept) > 1:
            result.copy_(kept[-2])

    done = try_out(case, SpoiledWorld(FakeWorld(2, rank=1), hold_back))
    assert done.wrong > 0


def test_messages_of_a_window_do_not_change_places() -> None:
    (case,) = cases_of("send_recv", ranks=2, window=2)

    def swap(result: Any, number: int) -> None:
        half = len(result) // 2
        result.copy_(result.roll(half))

    done = try_out(case, SpoiledWorld(FakeWorld(2), swap))
    assert done.wrong > 100


def test_an_agreement_is_not_in_the_next_time() -> None:
    """After an agreement the ranks meet, and make one call that is not timed."""
    (case,) = cases_of("all_reduce", ranks=2)
    room = Room(FakeWorld(2), CpuDevice(), QuietHeartbeat(), "off")
    trial = CollectiveTrial(case, room)
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    trial.open()
    trial.body = count
    steps = Steps(trial, room, case)
    steps.align()
    assert calls == 1
    steps.align()
    assert calls == 1
    steps.agree(3)
    steps.align()
    assert calls == 2


def test_a_case_has_one_interval() -> None:
    """That of the slowest rank's times, of which the notices speak too, not that of rank 0's own."""
    (case,) = cases_of("all_reduce", ranks=2)
    quiet, noisy = ([1e-3] * 40, [1e-3 * (1 + i % 2) for i in range(40)])

    def measured(rank: int, times: list[float], notices: list[Notice]) -> RankMeasurement:
        measurement = Measurement(
            start_ns=[0] * 40, duration_s=times, iterations=[1] * 40, device_s=None, starved=0, allocations=0,
            host_share=None, warmups=0, notices=notices,
        )  # fmt: skip
        return RankMeasurement(measurement, Facts(observed=CollectiveObserved()), rank=rank)

    own = [Notice(kind="wide_interval", message="±77 %"), Notice(kind="not_warm", message="still changing")]
    ranks = [measured(0, quiet, own), measured(1, noisy, [])]
    result, samples = fold_ranks(case, ranks, settings=MeasureSettings())
    summary = MeasuredCase(result, samples).summary()
    assert summary is not None
    wide = next(notice for notice in result.notices if notice.kind == "wide_interval")
    assert f"±{format_share(summary.relative_half_width)} after 40 samples" in wide.message
    assert [notice.message for notice in result.notices if notice.kind == "not_warm"] == ["still changing"]


@pytest.mark.parametrize(
    ("name", "ranks", "size", "wanted"),
    [
        ("incast", 4, 65536, "65,536 bytes do not divide evenly among 3 ranks: 65,532 were measured"),
        ("all_gather", 3, 65536, "65,536 bytes do not divide evenly among 3 ranks: 65,532 were measured"),
        ("all_reduce", 3, 65536, None),
        ("all_gather", 4, 65536, None),
    ],
)
def test_a_rounded_size_differs_from_the_one_asked_for(name: str, ranks: int, size: int, wanted: str | None) -> None:
    (case,) = cases_of(name, ranks=ranks, sizes=(size,))
    trial = CollectiveTrial(case, Room(FakeWorld(ranks), CpuDevice(), QuietHeartbeat()))
    assert [notice.message for notice in trial.facts().notices] == ([wanted] if wanted else [])


def test_a_result_that_nobody_writes_is_wrong() -> None:
    (case,) = cases_of("all_gather", ranks=2)

    def wipe(result: Any, number: int) -> None:
        result[: len(result) // 2].fill_(float("nan"))

    done = try_out(case, SpoiledWorld(FakeWorld(2), wipe))
    assert done.wrong == done.checked * 512


def test_one_rank_that_cannot_makes_the_case_a_skip() -> None:
    refusal = Refusal(status="skipped", failure=Failure(kind="does_not_fit", message="no room"))
    (case,) = cases_of("all_reduce", ranks=2)
    result, samples = fold_ranks(case, [Gathered(outcome=RankOutcome(rank=rank), refusal=refusal) for rank in range(2)])
    assert (result.status, samples) == ("skipped", [])


def test_what_cannot_be_is_refused_before_anything_is_allocated() -> None:
    room = Room(FakeWorld(1), CpuDevice(), QuietHeartbeat())
    (case,) = cases_of("send_recv", ranks=1)
    with pytest.raises(UnsupportedCollectiveError, match="two ranks"):
        CollectiveTrial(case, room)
    (case,) = cases_of("all_reduce", ranks=2, mode="graph", device="cuda")
    trial = CollectiveTrial(case, Room(FakeWorld(2), CpuDevice(), QuietHeartbeat()))
    with pytest.raises(UnsupportedCollectiveError, match="GPU"):
        trial.open()


def test_memory_is_told_before_it_is_taken() -> None:
    room = Room(FakeWorld(2), CpuDevice(), QuietHeartbeat())
    (case,) = cases_of("all_reduce", ranks=2, sizes=(1 << 20,))
    # Buffers in 18 places and two sets of data for inputs and outputs, and float64 twice while values are made.
    assert CollectiveTrial(case, room).needed_bytes() == 2 * (18 + 2) * (1 << 20) + 2 * 2 * (1 << 20)


@pytest.mark.parametrize(("size", "places"), [(8, 18), (2 << 20, 18), (4 << 20, 16), (16 << 20, 4), (1 << 30, 3)])
def test_large_messages_have_few_places(size: int, places: int) -> None:
    (case,) = cases_of("all_reduce", ranks=2, sizes=(size,))
    assert CollectiveTrial(case, Room(FakeWorld(2), CpuDevice(), QuietHeartbeat())).places == places


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_checked_samples_are_compared_when_their_places_are_used_up(name: str) -> None:
    """Samples of operations that meet before each call are compared together as well."""
    (case,) = cases_of(name, ranks=2)
    room = Room(FakeWorld(2, rank=1), CpuDevice(), QuietHeartbeat(), "all")
    trial = CollectiveTrial(case, room)
    trial.open()
    steps, compared = Steps(trial, room, case), []
    for _ in range(40):
        steps.align()
        trial.body()
        compared.append(steps.checked)
    steps.verify()
    assert sorted(set(compared)) == [0, BURST + 2, 2 * (BURST + 2)]
    assert (steps.wrong, steps.checked) == (0, 40 + 2 * 3)


def test_samples_looked_at() -> None:
    (case,) = cases_of("all_reduce", ranks=2)
    room = Room(FakeWorld(2), CpuDevice(), QuietHeartbeat(), "sample")
    trial = CollectiveTrial(case, room)
    trial.open()
    steps = Steps(trial, room, case)
    for _ in range(20):
        steps.align()
        trial.body()
    steps.verify()
    assert steps.checked == 3 * (len([1, 2, 4, 8, 16]) + 1), "with the calls before and behind"
    assert steps.wrong == 0


def test_outstanding_calls_end_before_the_clock_is_read() -> None:
    clock = FakeClock()
    device = WaitingDevice(FakeDevice(clock))
    waited = []

    class Work:
        def wait(self) -> None:
            waited.append(clock.now_ns())

    device.started += [Work(), Work()]
    device.synchronize()
    assert len(waited) == 2
    assert device.started == []


# Clocks, joining, arguments


def test_arrivals_are_counted_from_the_first_rank() -> None:
    came = find_arrivals([[100, 2000], [1_000_400, 1_002_100]], [ClockOffset(0, 0), ClockOffset(1_000_000, 50)])
    assert came == [[0.0, 0.0], pytest.approx([300e-9, 100e-9])]


class Line:
    """Two worlds that speak to each other through a list."""

    def __init__(self, offset_ns: int) -> None:
        self.offset_ns = offset_ns

    def send_value(self, value: int, to: int) -> None:
        return

    def receive_value(self, source: int) -> int:
        import time

        return time.perf_counter_ns() + self.offset_ns


def test_another_clock_is_asked_by_the_fastest_round_trip() -> None:
    found = ask_clock(Line(5_000_000_000), 1)  # type: ignore[arg-type]
    assert found.offset_ns == pytest.approx(5_000_000_000, abs=1_000_000)
    assert found.error_ns < 1_000_000
    answer_pings(Line(0))  # type: ignore[arg-type]


class EmptyStore:
    def __init__(self, joined: set[str]) -> None:
        self._joined = joined

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= self._joined


def test_ranks_that_do_not_join_are_named() -> None:
    with pytest.raises(RankHungError, match=r"ranks 1, 3 sent no heartbeat for 0 s \(they never joined\)") as raised:
        wait_for_all(EmptyStore({"joined/0", "joined/2"}), 4, 0.0)
    failure = describe_exception(raised.value)
    assert (failure.rank, failure.where) == (1, "ranks 1, 3"), "not the rank that reports it"
    wait_for_all(EmptyStore({"joined/0", "joined/1"}), 2, 0.0)


class TwoRanks(FakeWorld):
    def __init__(self, other: dict[str, str]) -> None:
        super().__init__(2)
        self._other = other

    def gather_values(self, value: Any) -> Any:
        return [value, {**value, **self._other}]


def require_same_request(other: dict[str, str]) -> None:
    Ranks(Session(verb="comms", request=CommunicationRequest(check="all")), TwoRanks(other)).require_same_request()


def test_ranks_that_were_started_differently_are_named() -> None:
    require_same_request({})
    with pytest.raises(UsageError, match='rank 1 was started differently: check is "off" there and "all" on rank 0'):
        require_same_request({"check": '"off"'})
    with pytest.raises(UsageError, match="version of stepscope"):
        require_same_request({"version of stepscope": "9"})


def test_connection_errors_are_no_property_of_the_operation() -> None:
    assert is_peer_disconnect("Connection closed by peer [127.0.0.1]:123")
    assert not is_peer_disconnect("Invalid scalar type")


def test_the_library_is_told_as_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    assert describe_torch_library("gloo") == {"name": "gloo", "version": f"built into torch {torch.__version__}"}
    assert all(path.is_absolute() for path in find_loaded_libraries())
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("MY_TOKEN", "secret")
    settings = read_communication_settings()
    assert settings["NCCL_ALGO"] == "Ring"
    assert "MY_TOKEN" not in settings
