"""What only a real GPU can show; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.measure import QUICK, CudaDevice, MeasureSettings, SilentProgress, WallClock, measure
from stepscope.ops import make_cases
from stepscope.ops.worker import run_ops
from stepscope.records import Reading
from stepscope.store import StoredRun, create_run
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


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
def test_operators_run_on_the_gpu_and_readings_are_kept(tmp_path: Path) -> None:
    cases = make_cases(
        names=["gemm", "linear", "embedding_bag"],
        shapes=[],
        dtypes=["float32", "bfloat16"],
        directions=["forward", "backward"],
        device="cuda",
    )
    folder = create_run(tmp_path, verb="ops", name="gpu", command=[], request={}, cases=cases)
    run_ops(folder, settings=QUICK, device_name="cuda", progress=SilentProgress())
    run = StoredRun(folder)
    assert [(r.case.label, r.failure) for r in run.results if r.status != "ok"] == []
    for case in run.cases():
        device_s = case.device_seconds()
        assert device_s is not None
        assert all(value > 0 for value in device_s)
    gpu_readings = [reading for reading in run.results[-1].readings if reading.device.startswith("cuda")]
    assert {reading.at for reading in gpu_readings} >= {"start", "end"}
    assert all(isinstance(reading, Reading) and reading.clock_hz for reading in gpu_readings)


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
