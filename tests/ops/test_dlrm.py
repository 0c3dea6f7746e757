from __future__ import annotations

import pytest

from stepscope.errors import UsageError
from stepscope.measure import WrongResultError
from stepscope.workloads import WORKLOADS, find_workload
from stepscope.workloads.dlrm import build_model, make_small_case, prepare_small


def test_the_small_dlrm_has_the_declared_size() -> None:
    bottom = (13 * 64 + 64) + (64 * 16 + 16)
    tables = 8 * 1000 * 16
    interactions = 9 * 8 // 2 + 16
    top = (interactions * 64 + 64) + (64 * 32 + 32) + (32 * 1 + 1)
    assert sum(p.numel() for p in build_model().parameters()) == bottom + tables + top


def test_the_small_dlrm_trains() -> None:
    prepared = prepare_small(make_small_case("cpu"))
    for _ in range(20):
        prepared.body()
    assert prepared.check is not None
    prepared.check()
    assert prepared.score is not None
    assert (prepared.score.unit, prepared.score.work) == ("ex/s", 128)


def test_a_step_that_trains_nothing_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: None)
    prepared = prepare_small(make_small_case("cpu"))
    prepared.body()
    prepared.body()
    assert prepared.check is not None
    with pytest.raises(WrongResultError, match="did not fall"):
        prepared.check()


def test_every_workload_is_found_by_its_id() -> None:
    for benchmark_id, workload in WORKLOADS.items():
        assert find_workload(benchmark_id) is workload
        assert workload.make_case("cpu").benchmark.id == benchmark_id
    with pytest.raises(UsageError, match="no benchmark"):
        find_workload("dlrm/ootb/train/nothing")
