"""Communication on a real GPU: one NCCL rank moves nothing between GPUs, but its kernels and graphs are real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from comms_runs import cases_of, measure_cases

from stepscope.bench.comms.overlap import make_overlap_cases
from stepscope.store import MeasuredCase

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")


def nccl_cases(name: str, **options: Any) -> list[Any]:
    return cases_of(name, ranks=1, backend="nccl", device="cuda", sizes=(4096, 16 << 20), **options)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[MeasuredCase]:
    cases = [case for name in COLLECTIVES for case in nccl_cases(name)]
    cases += [case for name in COLLECTIVES for case in nccl_cases(name, mode="nonblocking", depth=3)]
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        cases += [*nccl_cases(name, mode="graph"), *nccl_cases(name, coalesce=4)]
    for dtype in ("bfloat16", "float16", "float8_e4m3fn", "int8"):
        cases += nccl_cases("all_reduce", dtype=dtype)
    store = tmp_path_factory.mktemp("nccl")
    _, found = measure_cases(
        store, cases, ranks=1, backend="nccl", device="cuda", device_time=True, hang_timeout_s=90.0
    )
    return found


@pytest.mark.timeout(300)
def test_every_mode_runs_and_is_right(measured: list[MeasuredCase]) -> None:
    for one in measured:
        assert one.result.status == "ok", (one.result.case.label, one.result.failure)
        assert one.result.facts.get("wrong", 0) == 0
        assert str(one.result.facts["library"]).startswith("NCCL 2.")


def test_device_time_is_the_cases_time(measured: list[MeasuredCase]) -> None:
    for one in measured:
        assert one.result.timing == "device", "there is one rank, and no slowest one"
        assert one.seconds() == one.device_seconds()
        for device_s, wall_s in zip(one.seconds(), one.wall_seconds(), strict=True):
            # The device's clock starts at a mark just before the host's, and stops no later.
            assert 0 < device_s <= wall_s + 1e-4


@pytest.mark.timeout(300)
def test_a_product_beside_a_device_copy(tmp_path: Path) -> None:
    cases = make_overlap_cases(
        collectives=["device_copy"], sizes=[64 << 20], computes=["gemm:m=2048,n=2048,k=2048"], backend="nccl",
        world_size=1, device="cuda", dtype="float32", repeat=None, groups="world", beside=(),
    )  # fmt: skip
    _, (one,) = measure_cases(tmp_path, cases, ranks=1, backend="nccl", device="cuda", hang_timeout_s=90.0)
    assert one.result.status == "ok", one.result.failure
    parts = one.parts_s()
    assert parts["together"] >= 0.9 * max(parts["compute"], parts["comm"])
    assert parts["together"] <= 1.5 * (parts["compute"] + parts["comm"])
