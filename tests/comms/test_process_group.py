"""Forming process groups: the phases, their times, and how ranks agree that have no group."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from comms_runs import BRIEF, fold_ranks
from spoiled import SpoiledGroup, flip_element
from test_trial import QuietHeartbeat, try_out

from stepscope.bench.comms import process_group
from stepscope.bench.comms.group import Group
from stepscope.bench.comms.process_group import (
    FakeForming,
    ProcessGroupTrial,
    TorchForming,
    make_process_group_cases,
)
from stepscope.bench.comms.trial import Facts, Room
from stepscope.launch.context import ALONE
from stepscope.measure import CpuDevice
from stepscope.records.kinds import LATER_PHASES, SETUP_PHASES, ProcessGroupObserved


def make_case(ranks: int) -> Any:
    (case,) = make_process_group_cases(backend="fake", world_size=ranks, device="cpu")
    return case


def test_a_sample_has_all_phases_and_counts_those_until_the_ranks_can_work() -> None:
    trial = ProcessGroupTrial(make_case(4), Room(FakeForming(4), CpuDevice(), QuietHeartbeat()))
    trial.body()
    first = {name: values[0] for name, values in trial.further_s().items()}
    assert list(first) == [*SETUP_PHASES, *LATER_PHASES]
    trial.forget()
    assert trial.own_s() == []
    for _ in range(3):
        trial.body()
    times_s = trial.further_s()
    assert trial.own_s() == [pytest.approx(sum(times_s[name][i] for name in SETUP_PHASES)) for i in range(3)]
    assert trial.facts().observed == ProcessGroupObserved(members=4, cold=first)
    assert trial.count_wrong() == 0


def test_a_group_that_adds_wrongly_is_found() -> None:
    class SpoiledForming(FakeForming):
        def create(self, device_id: Any | None) -> Group:
            return SpoiledGroup(super().create(device_id), flip_element(3))

    assert try_out(make_case(2), SpoiledForming(2)).wrong > 0
    assert try_out(make_case(2), FakeForming(2)).wrong == 0


def test_the_slowest_rank_tells_what_the_first_time_took() -> None:
    case = make_case(2)
    done = try_out(case, FakeForming(2))
    ranks = [done._replace(rank=rank) for rank in range(2)]
    cold = [{"rendezvous": 1.0, "destroy": 4.0}, {"rendezvous": 2.0, "destroy": 3.0}]
    ranks = [
        one._replace(facts=Facts(observed=ProcessGroupObserved(members=2, cold=found)))
        for one, found in zip(ranks, cold, strict=True)
    ]
    result, _ = fold_ranks(case, ranks, settings=BRIEF)
    facts = result.facts
    assert (facts["members"], facts["cold_rendezvous_s"], facts["cold_destroy_s"]) == (2, 2.0, 4.0)


def test_backends_that_connect_late_are_measured_in_both_ways() -> None:
    cases = make_process_group_cases(backend="nccl", world_size=2, device="cuda")
    assert [case.parameters for case in cases] == [{"device": "cuda"}, {"device": "cuda", "eager": True}]
    assert len(make_process_group_cases(backend="gloo", world_size=2, device="cpu")) == 1


def test_ranks_without_a_group_agree_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads in the place of two ranks."""
    shared = dist.HashStore()
    monkeypatch.setattr(process_group, "open_store", lambda *_: dist.PrefixStore("ranks", shared))

    def talk(rank: int) -> list[Any]:
        context = msgspec.structs.replace(ALONE, rank=rank, world_size=2)
        session: Any = SimpleNamespace(context=context, hang_limit_s=20.0, heartbeat=QuietHeartbeat())
        world = TorchForming(session, "gloo")
        said: list[Any] = []
        for _ in range(2):
            said += [world.broadcast_value({"from": 1} if rank else None, 1), world.gather_values(rank * 10)]
            if rank == 0:
                world.send_value(7, 1)
                said.append(world.receive_value(1))
            else:
                said.append(world.receive_value(0))
                world.send_value(8, 0)
                world.gather_values("a turn more than the other rank makes")
            world.set_mark(f"mark{rank}")
            world.renew()
            world.barrier()
            said.append(world.has_marks(["mark0", "mark1"]))
        return said

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(talk, range(2))
    assert first == [{"from": 1}, [0, 10], 8, True] * 2
    assert second == [{"from": 1}, None, 7, True] * 2
