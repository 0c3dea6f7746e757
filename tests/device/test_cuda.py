"""What only a real GPU can show; skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.bench.ops import make_cases, operators
from stepscope.measure import QUICK, CudaDevice, MeasureSettings, WallClock, measure
from stepscope.records import Case, Reading, make_request
from stepscope.run.execute import execute
from stepscope.stats import median
from stepscope.store import MeasuredCase, StoredRun, create_run
from stepscope.system import collect_system, find_device_peak, open_telemetry

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


def spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)


def test_a_kernel_is_timed_by_events_and_by_the_wall() -> None:
    """A kernel of some milliseconds: launching it takes microseconds, so both clocks must wait for it."""
    device = CudaDevice(0)
    result = measure(
        lambda: spin(10_000_000), settings=MeasureSettings(max_time_s=0.5), clock=WallClock(), device=device
    )
    assert result.device_s is not None
    wall, events = result.duration_s[result.warmups :], result.device_s[result.warmups :]
    for wall_s, device_s in zip(wall, events, strict=True):
        assert device_s > 1e-3
        assert device_s <= wall_s
        assert wall_s - device_s < 1e-3


def run_on_gpu(tmp_path: Path, cases: list[Case], **request: Any) -> list[MeasuredCase]:
    asked = {"device": "cuda", "settings": msgspec.to_builtins(QUICK), **request}
    folder = create_run(tmp_path, verb="ops", name="gpu", command=[], request=make_request("ops", asked), cases=cases)
    return execute(StoredRun(folder)).cases()


@pytest.fixture(scope="module")
def tiny_cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[MeasuredCase]]:
    """Every operator, pass and dtype at the tiny shape; in one run, for a profiler takes seconds to start."""
    cases = [
        case
        for name, operator in operators().items()
        for case in make_cases(
            names=[name], shapes=[], sets=["tiny"], dtypes=operator.dtypes, directions=operator.passes, device="cuda",
            caches=["cold"],
        )
    ]  # fmt: skip
    found: dict[str, list[MeasuredCase]] = {}
    for one in run_on_gpu(tmp_path_factory.mktemp("tiny"), cases, graph=True, kernels=True):
        found.setdefault(one.result.case.benchmark.model, []).append(one)
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", list(operators()))
def test_every_operator_runs_on_the_gpu(tiny_cases: dict[str, list[MeasuredCase]], name: str) -> None:
    """Checked against float64; what is skipped says why."""
    measured = tiny_cases[name]
    failed = [(one.result.case.label, one.result.failure) for one in measured if one.result.status == "failed"]
    assert failed == []
    skipped = [
        (one.result.case.label, one.result.failure)
        for one in measured
        if one.result.status == "skipped" and one.result.case.parameters["dtype"] in {"float32", "bfloat16", "tf32"}
    ]
    # A conversion to its own dtype has a gradient that nothing computes.
    assert all(failure is not None and "computes nothing" in failure.message for _, failure in skipped), skipped
    for one in measured:
        if one.result.status == "ok":
            assert one.result.timing == "device"
            assert one.result.kernels
            assert one.extra_seconds("kernel")
            summary = one.summary()
            assert summary is not None
            # Marks and gaps are in device time, not in the kernels' own.
            assert median(one.extra_seconds("kernel")) <= 1.1 * summary.median_s


def test_device_time_is_free_of_launches(tmp_path: Path) -> None:
    """A product of some microseconds, launched in some more: wall, device, graph and kernel time stand in order."""
    cases = make_cases(
        names=["gemm"], shapes=["m=64,n=64,k=64"], dtypes=["float32"], directions=["forward", "backward"],
        device="cuda",
    )  # fmt: skip
    for one in run_on_gpu(tmp_path, cases, graph=True, kernels=True):
        summary, wall_s = one.summary(), median(one.wall_seconds())
        graph_s, kernel_s = median(one.extra_seconds("graph")), median(one.extra_seconds("kernel"))
        assert summary is not None
        assert wall_s is not None
        assert graph_s is not None
        assert kernel_s is not None
        assert kernel_s <= 1.1 * graph_s
        assert graph_s <= 1.1 * summary.median_s
        assert not [notice for notice in one.result.notices if notice.kind == "queue_starved"]


def test_a_cold_cache_is_slower_and_never_beats_the_datasheet(tmp_path: Path) -> None:
    cases = make_cases(
        names=["elementwise"], shapes=["rows=1024,cols=2048,chain=mul"], dtypes=["float32"], directions=["forward"],
        device="cuda", caches=["warm", "cold"],
    )  # fmt: skip
    warm, cold = run_on_gpu(tmp_path, cases)
    warm_s, cold_s = median(warm.seconds()), median(cold.seconds())
    assert warm_s is not None
    assert cold_s is not None
    assert cold_s > 1.1 * warm_s
    peak = find_device_peak(torch.cuda.get_device_name(0))
    if peak is not None and peak.memory_bytes_per_s:
        assert float(cold.result.facts["moved_bytes"]) / cold_s < peak.memory_bytes_per_s


def test_float32_is_not_tf32(tmp_path: Path) -> None:
    cases = make_cases(
        names=["gemm", "conv2d"], shapes=[], dtypes=["float32", "tf32"], directions=["forward"], device="cuda"
    )
    for one in run_on_gpu(tmp_path, cases, kernels=True):
        assert one.result.status == "ok", one.result.failure
        names = " ".join(use.name for use in one.result.kernels)
        if one.result.case.benchmark.model == "gemm":
            assert ("tf32" in names) == (one.result.case.parameters["dtype"] == "tf32"), names


def test_readings_are_kept(tmp_path: Path) -> None:
    cases = make_cases(names=["gemm"], shapes=[], dtypes=["float32"], directions=["forward"], device="cuda")
    (one,) = run_on_gpu(tmp_path, cases)
    readings = [reading for reading in one.result.readings if reading.device.startswith("cuda")]
    assert {reading.at for reading in readings} >= {"start", "end"}
    assert all(isinstance(reading, Reading) and reading.clock_hz for reading in readings)


def test_the_system_knows_its_gpu_and_its_peak() -> None:
    torch.cuda.init()
    system = collect_system()
    gpu = system.hosts[0].gpus[0]
    assert gpu.name == torch.cuda.get_device_name(0)
    assert gpu.memory_bytes
    assert gpu.driver
    assert gpu.power_limit_w
    assert system.libraries["cuda"]
    peak = find_device_peak(gpu.name)
    if peak is None:
        pytest.skip(f"{gpu.name} is not in the catalogue")
    assert peak.memory_bytes_per_s


def test_a_reading_is_cheap() -> None:
    import time

    with open_telemetry("cuda:0") as telemetry:
        telemetry.read("start")
        start = time.perf_counter()
        for _ in range(20):
            telemetry.read("during")
        assert (time.perf_counter() - start) / 20 < 0.02
