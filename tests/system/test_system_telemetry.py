from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from system_fakes import FakeNvml, make_torch_with_gpus, make_x86, write_tree

from stepscope.system import open_telemetry


def test_processors(tmp_path: Path) -> None:
    root = write_tree(
        make_x86(tmp_path),
        {
            "sys/class/hwmon/hwmon0/name": "nvme\n",
            "sys/class/hwmon/hwmon0/temp1_input": "30000\n",
            "sys/class/hwmon/hwmon1/name": "coretemp\n",
            "sys/class/hwmon/hwmon1/temp1_input": "55500\n",
        },
    )
    [reading] = open_telemetry("cpu", root=root).read("start")

    assert (reading.device, reading.at) == ("cpu", "start")
    # The six processors this process may use: 0-3, 6 and 7.
    assert reading.clock_hz == pytest.approx(2e9 + (0 + 1 + 2 + 3 + 6 + 7) / 6 * 1e6)
    assert reading.temperature_c == 55.5
    assert reading.load_1m == 3.5
    assert reading.throttle == []  # counts of the past are not this case's


def test_throttling_is_seen_when_a_count_grows(tmp_path: Path) -> None:
    root = write_tree(make_x86(tmp_path), {"sys/fs/cgroup/cpu.stat": "nr_throttled 3\n"})
    telemetry = open_telemetry("cpu", root=root)
    telemetry.read("start")

    counter = root / "sys/devices/system/cpu/cpu2/thermal_throttle/core_throttle_count"
    counter.write_text("1\n")
    assert telemetry.read("during")[0].throttle == ["core_thermal"]
    (root / "sys/fs/cgroup/cpu.stat").write_text("nr_throttled 9\n")
    assert telemetry.read("end")[0].throttle == ["core_thermal", "cpu_quota"]
    assert telemetry.read("start")[0].throttle == []  # the next case starts anew


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    [reading] = open_telemetry("cpu", root=tmp_path).read("during")
    assert (reading.clock_hz, reading.temperature_c, reading.load_1m, reading.throttle) == (None, None, None, [])


def test_gpu(tmp_path: Path) -> None:
    nvml = FakeNvml()
    nvml.reasons = 0x1 | 0x4 | 0x40
    with open_telemetry("cuda:1", root=make_x86(tmp_path), nvml=nvml, environment={}) as telemetry:
        [reading] = telemetry.read("during")
        assert nvml.opened == 1
    assert nvml.opened == 0

    assert (reading.device, reading.at) == ("cuda:1", "during")
    assert (reading.clock_hz, reading.memory_clock_hz) == (1.501e9, 3.201e9)
    assert (reading.power_w, reading.temperature_c, reading.load_1m) == (400.5, 61.0, 3.5)
    assert reading.throttle == ["sw_power_cap", "hw_thermal_slowdown"]


def test_an_idle_gpu_is_not_throttled(tmp_path: Path) -> None:
    [reading] = open_telemetry("cuda", root=tmp_path, nvml=FakeNvml(), environment={}).read("start")
    assert reading.clock_hz == 1.5e9
    assert reading.throttle == []


def test_the_gpu_is_the_one_torch_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "1"}
    [reading] = open_telemetry("cuda:0", root=tmp_path, nvml=FakeNvml(), environment=hidden).read("start")
    assert reading.clock_hz == 1.501e9

    torch = make_torch_with_gpus(["bbbb-2", "aaaa-1"])
    torch.__version__ = "2.6"
    monkeypatch.setitem(sys.modules, "torch", torch)
    [reading] = open_telemetry("cuda:0", root=tmp_path, nvml=FakeNvml(), environment={}).read("start")
    assert reading.clock_hz == 1.501e9


def test_questions_the_gpu_does_not_answer(tmp_path: Path) -> None:
    nvml = FakeNvml()
    nvml.refused = {
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetClockInfo",
    }
    [reading] = open_telemetry("cuda:0", root=tmp_path, nvml=nvml, environment={}).read("start")
    assert (reading.power_w, reading.temperature_c, reading.clock_hz, reading.throttle) == (None, None, None, [])


@pytest.mark.parametrize("device", ["cuda:0", "cuda:7", "cuda", "mps", "xpu:1", "cuda:x"])
def test_devices_that_do_not_talk_still_carry_the_load(tmp_path: Path, device: str) -> None:
    telemetry = open_telemetry(device, root=make_x86(tmp_path), nvml=FakeNvml(driver=False), environment={})
    [reading] = telemetry.read("start")
    assert (reading.device, reading.clock_hz, reading.load_1m) == (device, None, 3.5)
    telemetry.close()


def test_a_device_beyond_the_visible_ones_leaves_the_library_closed(tmp_path: Path) -> None:
    nvml = FakeNvml()
    [reading] = open_telemetry("cuda:5", root=tmp_path, nvml=nvml, environment={}).read("start")
    assert reading.clock_hz is None
    assert nvml.opened == 0


def test_closing_twice_and_reading_after(tmp_path: Path) -> None:
    nvml = FakeNvml()
    telemetry = open_telemetry("cuda:0", root=tmp_path, nvml=nvml, environment={})
    telemetry.close()
    telemetry.close()
    assert nvml.opened == 0
    assert telemetry.read("end")[0].clock_hz is None


def test_a_read_of_this_machine_is_cheap() -> None:
    telemetry = open_telemetry("cpu")
    durations = []
    for _ in range(20):
        began = time.perf_counter()
        [reading] = telemetry.read("during")
        durations.append(time.perf_counter() - began)
    assert reading.load_1m is not None
    # The fastest of many: the slower ones say how busy the machine is.
    assert min(durations) < 2e-3
