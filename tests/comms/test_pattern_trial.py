"""One step of a job on one rank of a world that is played, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from comms_runs import RankMeasurement, fold_ranks, measure_cases
from spoiled import SpoiledWorld, flip_element

from fake_device import FakeDevice
from stepscope.bench.comms.fake_group import FakeWorld
from stepscope.bench.comms.group import World
from stepscope.bench.comms.kernels import make_matmuls, matmul_bytes, plan_matmuls
from stepscope.bench.comms.patterns import PATTERNS
from stepscope.bench.comms.patterns.registry import find_pattern, make_case, read_options
from stepscope.bench.comms.patterns.trial import STEP, WAIT, PatternTrial, describe_sequence
from stepscope.bench.comms.producer import make_trial
from stepscope.bench.comms.trial import Room
from stepscope.launch import Heartbeat
from stepscope.measure import CpuDevice, FakeClock
from stepscope.measure.loop import Measurement
from stepscope.records import Case
from stepscope.records.kinds import CollectiveSpec
from stepscope.report import overlaps
from stepscope.report.overlaps import format_pattern_table, read_pattern
from stepscope.store import MeasuredCase

SMALL: dict[str, dict[str, Any]] = {
    "dlrm": {"batch": 4, "top": "8-4-1", "bottom": "8-16"},
    "ddp": {"scale": 1e-4},
    "fsdp": {"hidden": 16},
    "tp": {"hidden": 8, "sequence": 4, "degree": 2},
    "sp": {"hidden": 8, "sequence": 4},
    "pp": {"hidden": 8, "sequence": 4, "micro_batches": 3},
    "ep": {"hidden": 8, "tokens": 16},
    "ps": {"scale": 1e-4, "shards": 3},
}


class QuietHeartbeat(Heartbeat):
    def __init__(self) -> None:
        return

    def tick(self) -> None:
        return

    def beat(self, phase: str, case: str | None = None) -> None:
        return


def case_of(name: str, world_size: int = 4, *, overlap: bool = True, **parameters: Any) -> Case:
    pattern = find_pattern(name)
    options = read_options(pattern, {**SMALL[name], **parameters})
    return make_case(pattern, options, overlap=overlap, backend="fake", world_size=world_size, device="cpu")


def open_trial(case: Case, world: World, device: Any = None) -> PatternTrial:
    trial = make_trial(case, Room(world, device or CpuDevice(), QuietHeartbeat(), "all"))
    assert isinstance(trial, PatternTrial)
    trial.open()
    return trial


def play(trial: PatternTrial) -> int | None:
    trial.refresh()
    trial.body()
    return trial.count_wrong()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_step_leaves_what_it_must_and_times_every_communication(name: str, rank: int, overlap: bool) -> None:
    trial = open_trial(case_of(name, overlap=overlap), FakeWorld(4, rank))
    assert trial.active
    assert trial.needed_bytes() > 0
    assert play(trial) == 0
    trial.forget()
    assert [play(trial) for _ in range(3)] == [0, 0, 0]
    pattern = find_pattern(name)
    steps = pattern.make_steps(read_options(pattern, SMALL[name]), 4)
    mine = [step.name for step in steps if step.communicates and step.group_of(rank)]
    times = trial.further_s()
    assert sorted(times) == sorted([*(STEP + step for step in mine), *(WAIT + step for step in mine)])
    assert {len(values) for values in times.values()} == {3}
    assert all(times[STEP + step][i] >= times[WAIT + step][i] >= 0 for step in mine for i in range(3))
    facts = trial.facts()
    assert facts.observed.facts()["steps"] == sum(step.communicates for step in steps)
    assert facts.score is not None
    assert facts.observed.facts()["bytes"] == round(facts.score.work)
    assert facts.notices == []
    trial.close()


@pytest.mark.parametrize("name", PATTERNS)
def test_a_planted_corruption_is_found_and_the_step_named(name: str) -> None:
    clean = open_trial(case_of(name), FakeWorld(4))
    calls = sum(exchange.count_wrong() is not None for exchange in clean._exchanges.values())
    trial = open_trial(case_of(name), SpoiledWorld(FakeWorld(4), flip_element(3)))
    assert play(trial) == calls, "one element of every result"
    (notice,) = trial.facts().notices
    assert f"{next(iter(trial._wrong))} (1)" in notice.message


def test_an_element_that_nobody_wrote_is_wrong() -> None:
    trial = open_trial(case_of("fsdp"), FakeWorld(2))
    trial.refresh()
    assert trial.count_wrong() == sum(exchange.traffic.outputs[0] for exchange in trial._exchanges.values())


def test_steps_have_data_of_their_own() -> None:
    """A result that lands in another step's place must not look right."""
    trial = open_trial(case_of("tp"), FakeWorld(4))
    expected = {str(one.expected.tolist()) for exchange in trial._exchanges.values() for one in exchange._sets}
    assert len(expected) == 2 * len(trial._exchanges), "two sets of data each"


def test_on_a_device_with_a_queue_times_are_its_own() -> None:
    """Moments are marks, and are read only after the device has passed them."""
    device = FakeDevice(FakeClock())
    device.name = "cpu"  # where tensors live
    trial = open_trial(case_of("ddp", flops=100.0), FakeWorld(2), device)
    device.submit(1.0)
    play(trial)
    device.synchronize()
    assert set(trial.further_s()[f"{STEP}reduce.0"]) == {0.0}, "nothing was given to the device in between"


def test_a_rank_that_no_step_needs_keeps_still() -> None:
    case = case_of("ps", 4, servers=3, shards=1)
    idle = open_trial(case, FakeWorld(4, 3))
    assert (idle.active, idle.needed_bytes()) == (False, 0)
    assert open_trial(case, FakeWorld(4, 1)).active


def test_work_is_matrix_products() -> None:
    assert plan_matmuls(2 * 256**3 * 10, "cpu") == (256, 10)
    assert plan_matmuls(2 * 100**3, "cpu") == (100, 1)
    assert matmul_bytes([2 * 100**3, 2 * 100**3 * 1.0], "cpu") == 3 * 100 * 100 * 4
    make_matmuls(1e4, "cpu")()


@pytest.mark.ranks
def test_real_ranks_find_what_a_backend_spoils(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    cases = [case_of(name, 2, degree=2) if name == "tp" else case_of(name, 2) for name in ("ddp", "tp", "pp", "ep")]
    _, measured = measure_cases(tmp_path, cases, ranks=2, target="comms_runs:run_spoiled")
    for one in measured:
        assert one.result.failure is not None
        assert one.result.failure.kind == "wrong_result"
        assert "rank 1" in one.result.failure.message


# What readers make of it


def measured_case(name: str, times: dict[int, dict[str, list[float]]], duration_s: list[float]) -> MeasuredCase:
    case = case_of(name, len(times))
    trial = open_trial(case, FakeWorld(len(times)))
    ranks = [
        RankMeasurement(
            rank=rank,
            measurement=Measurement(
                start_ns=[0] * len(duration_s), duration_s=duration_s, iterations=[1] * len(duration_s), device_s=None,
                starved=0, allocations=0, host_share=None, warmups=0, notices=[],
            ),
            facts=trial.facts(),
            checked=1,
            parts_s=further,
        )
        for rank, further in times.items()
    ]  # fmt: skip
    return MeasuredCase(*fold_ranks(case, ranks))


def test_readers_know_the_names_that_producers_write() -> None:
    assert (overlaps.STEP, overlaps.WAIT) == (STEP, WAIT)
    pattern = find_pattern("dlrm")
    steps = pattern.make_steps(pattern.options(), 4)
    planned = describe_sequence(steps)
    told = [step for step in steps if step.communicates]
    assert [step.name for step in planned] == [step.name for step in told]
    assert [step.size_bytes for step in planned] == [step.size_bytes for step in told]
    assert [step.bus_bytes for step in planned] == [round(step.bus_bytes) for step in told]


def test_times_of_steps_are_those_of_the_slowest_rank() -> None:
    times = {
        0: {"step:push.0": [1.0, 3.0, 2.0], "wait:push.0": [0.5, 0.5, 0.5]},
        1: {"step:push.0": [2.0, 1.0, 1.0], "wait:push.0": [1.0, 1.0, 1.0]},
        2: {},
        3: {},
    }
    view = read_pattern(measured_case("ps", times, [4.0, 4.0, 4.0]))
    assert view is not None
    (step,) = view.steps
    assert (step.name, step.part, step.operation) == ("push.0", "push", "incast")
    assert (step.median_s, step.quickest_s, step.share) == (2.0, 1.0, 0.5)
    assert step.p95_s == pytest.approx(2.9)
    assert step.waited_s == 0.75
    assert step.waited_share == pytest.approx(0.75 / 4 * 2 / 4), "two of four ranks waited"
    assert step.busbw_bytes_per_s == step.bus_bytes / 2.0
    assert (view.median_s, view.wrong, view.overlap) == (4.0, 0, True)


def test_the_table_has_one_row_a_part() -> None:
    names = ("push.0", "push.1", "pull.0")
    times = {rank: {f"{kind}:{name}": [1.0] for name in names for kind in ("step", "wait")} for rank in range(2)}
    measured = measured_case("ps", times, [4.0])
    rows = [line.split() for line in format_pattern_table([measured]).splitlines() if not line.startswith("#")]
    assert [row[:3] for row in rows] == [["push", "incast", "2"], ["pull", "multicast", "1"]]
    assert rows[0][-4:] == ["50.0", "%", "50.0", "%"]


def test_what_is_no_pattern_has_no_table() -> None:
    measured = measured_case("ps", {0: {}, 1: {}}, [1.0])
    other = msgspec.structs.replace(measured.result.case, spec=CollectiveSpec(operation="all_reduce", size_bytes=4096))
    unlike = MeasuredCase(msgspec.structs.replace(measured.result, case=other), measured.samples)
    assert read_pattern(unlike) is None
    assert format_pattern_table([unlike]) == ""
    assert read_pattern(MeasuredCase(measured.result, [])) is None
