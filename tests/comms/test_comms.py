from __future__ import annotations

import pytest

from stepscope.comms import find_collective, make_cases
from stepscope.comms.collectives import fill_by_rank, ring_factor, sum_of_ranks
from stepscope.comms.group import FakeGroup
from stepscope.comms.worker import RankMeasurement, Trial, _fold
from stepscope.errors import UsageError
from stepscope.launch import Heartbeat
from stepscope.measure import QUICK, CpuDevice, WallClock, measure
from stepscope.records import Case, Failure
from stepscope.store import MeasuredCase


class QuietHeartbeat(Heartbeat):
    def __init__(self) -> None:
        self.phases: list[str] = []

    def beat(self, phase: str, case: str | None = None) -> None:
        self.phases.append(phase)


def one_case(size: int = 64, world_size: int = 2, dtype: str = "float32") -> Case:
    return make_cases(
        collective="all_reduce", sizes=[size], dtype=dtype, backend="gloo", world_size=world_size, device="cpu"
    )[0]


def try_out(group: FakeGroup, case: Case) -> RankMeasurement:
    import msgspec

    settings = msgspec.structs.replace(QUICK, iterations=1)
    trial = Trial(case, find_collective("all_reduce"), group, CpuDevice(), QuietHeartbeat())
    measurement = measure(trial.body, settings=settings, clock=WallClock(), device=CpuDevice(), peers=trial)
    return RankMeasurement(rank=0, measurement=measurement, wrong=trial.count_wrong())


def test_bus_factors() -> None:
    assert ring_factor(2) == 1
    assert ring_factor(8) == pytest.approx(1.75)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "float64"])
@pytest.mark.parametrize("world_size", [2, 4, 16])
def test_inputs_differ_by_rank_and_place_and_sums_are_exact(dtype: str, world_size: int) -> None:
    import torch

    kind = getattr(torch, dtype)
    inputs = [fill_by_rank(rank, 1000, kind, "cpu") for rank in range(world_size)]
    assert not torch.equal(inputs[0], inputs[1])
    assert inputs[0].unique().numel() > 1
    total = sum(tensor.to(torch.int64) for tensor in inputs)
    expected = sum_of_ranks(world_size, 1000, kind, "cpu")
    assert torch.equal(expected.to(torch.int64), total)


def test_a_right_result_has_no_wrong_elements_and_scores_bus_bandwidth() -> None:
    case = one_case(size=4096)
    result, samples = _fold(case, [try_out(FakeGroup(), case)], "t", 1.0, [])
    assert result.status == "ok"
    assert result.observed == {"size_bytes": 4096, "bus_factor": 1.0, "wrong": 0}
    measured = MeasuredCase(result, samples)
    summary, score = measured.summary(), measured.score()
    assert summary is not None
    assert score == pytest.approx(4096 / summary.median_s / 1e9)


@pytest.mark.parametrize("element", [0, 7, 15])
def test_a_planted_corruption_is_found(element: int) -> None:
    case = one_case()
    trial = try_out(FakeGroup(corrupt_element=element), case)
    assert trial.wrong > 0
    result, samples = _fold(case, [trial], "t", 1.0, [])
    assert result.status == "failed"
    assert result.failure is not None
    assert result.failure.kind == "wrong_result"
    assert samples, "evidence is kept for a wrong row too"


def test_one_rank_that_cannot_makes_the_case_a_skip() -> None:
    refusal = Failure(kind="does_not_fit", message="no room")
    ranks = [RankMeasurement(rank=r, measurement=None, wrong=0, failure=refusal) for r in range(2)]
    result, samples = _fold(one_case(), ranks, "t", 0.1, [])
    assert (result.status, samples) == ("skipped", [])


@pytest.mark.parametrize("size", [0, 3, 6, 2**50])
def test_sizes_that_cannot_be(size: int) -> None:
    with pytest.raises(UsageError):
        one_case(size=size)


def test_unknown_names() -> None:
    with pytest.raises(UsageError) as caught:
        find_collective("allreduce")
    assert "all_reduce" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="dtype"):
        one_case(dtype="float7")
