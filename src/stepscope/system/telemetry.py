"""What a device reports while it is measured: clocks, power, temperature and why it runs slower.

A read costs well under 2 ms, so that it can stand between samples; what is slow to find is found on opening.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.records import Reading
from stepscope.records.case import ReadingMoment
from stepscope.system.collect import find_loaded_torch
from stepscope.system.host import (
    ROOT,
    is_there,
    list_folder,
    read_allowed_cpus,
    read_int,
    read_load,
    read_text,
    read_throttled_periods,
)
from stepscope.system.nvml import ask, find_nvml_index, import_nvml, start_nvml

MAX_WATCHED_CPUS = 8
"""A look at one processor's clock takes the kernel up to 20 µs; a few stand for all."""

_THROTTLE_REASONS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
    "board_limit": 0x200,
    "reliability": 0x400,
    "applications_clocks_setting": 0x2,
}
"""NVML's bits; an idle GPU (0x1) does not run slower than it could, it has nothing to do."""

_CPU_SENSORS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal"})


class Telemetry:
    """Readings of one device. Open it before the measurement, close it after; nothing here ever raises for want
    of a driver or a file: a field that nothing reports is None."""

    def __init__(self, device: str, *, root: Path = ROOT) -> None:
        self.device = device
        self._root = root

    def read(self, at: ReadingMoment) -> list[Reading]:
        """One reading per device; `start` also sets the counts against which throttling is seen."""
        return [Reading(device=self.device, at=at, load_1m=read_load(self._root))]

    def close(self) -> None:
        """Safe to call twice."""

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class CpuTelemetry(Telemetry):
    def __init__(self, device: str = "cpu", *, root: Path = ROOT) -> None:
        super().__init__(device, root=root)
        folders = _list_watched_cpus(root)
        self._clocks = [path for folder in folders if is_there(path := folder / "cpufreq/scaling_cur_freq")]
        self._counters = {
            reason: [path for folder in folders if is_there(path := folder / "thermal_throttle" / name)]
            for reason, name in (("core_thermal", "core_throttle_count"), ("package_thermal", "package_throttle_count"))
        }
        self._sensor = _find_cpu_sensor(root)
        self._baseline = self._count_throttling()

    def read(self, at: ReadingMoment) -> list[Reading]:
        counts = self._count_throttling()
        if at == "start":
            self._baseline = counts
        throttle = [reason for reason, count in counts.items() if count > self._baseline.get(reason, count)]
        reading = Reading(
            device=self.device,
            at=at,
            clock_hz=self._read_clock_hz(),
            temperature_c=self._read_temperature_c(),
            throttle=throttle,
            load_1m=read_load(self._root),
        )
        return [reading]

    def _read_clock_hz(self) -> float | None:
        """Mean of the processors watched."""
        clocks_khz = [clock for path in self._clocks if (clock := read_int(path))]
        return sum(clocks_khz) / len(clocks_khz) * 1e3 if clocks_khz else None

    def _read_temperature_c(self) -> float | None:
        millidegrees = read_int(self._sensor) if self._sensor is not None else None
        return millidegrees / 1e3 if millidegrees is not None else None

    def _count_throttling(self) -> dict[str, int]:
        counts = {
            reason: sum(read_int(path) or 0 for path in paths) for reason, paths in self._counters.items() if paths
        }
        stopped = read_throttled_periods(self._root)
        return counts if stopped is None else {**counts, "cpu_quota": stopped}


def _list_watched_cpus(root: Path) -> list[Path]:
    """Evenly spread over the processors this process may use, so that every socket is among them."""
    folder = root / "sys/devices/system/cpu"
    usable = [path for number in read_allowed_cpus(root) if is_there(path := folder / f"cpu{number}")]
    usable = usable or list_folder(folder, "cpu[0-9]*")
    step = max(1, -(-len(usable) // MAX_WATCHED_CPUS))
    return usable[::step]


def _find_cpu_sensor(root: Path) -> Path | None:
    for sensor in list_folder(root / "sys/class/hwmon"):
        path = sensor / "temp1_input"
        if read_text(sensor / "name") in _CPU_SENSORS and is_there(path):
            return path
    return None


class NvmlTelemetry(Telemetry):
    def __init__(self, device: str, nvml: Any, handle: Any, *, root: Path = ROOT) -> None:
        super().__init__(device, root=root)
        self._nvml = nvml
        self._handle = handle
        self._open = True

    def read(self, at: ReadingMoment) -> list[Reading]:
        if not self._open:
            return super().read(at)
        nvml = self._nvml
        clock = self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)
        memory_clock = self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM)
        power_mw = self._ask("nvmlDeviceGetPowerUsage")
        temperature = self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
        reading = Reading(
            device=self.device,
            at=at,
            clock_hz=clock * 1e6 if clock is not None else None,
            memory_clock_hz=memory_clock * 1e6 if memory_clock is not None else None,
            power_w=power_mw / 1e3 if power_mw is not None else None,
            temperature_c=float(temperature) if temperature is not None else None,
            throttle=read_throttle_reasons(nvml, self._handle),
            load_1m=read_load(self._root),
        )
        return [reading]

    def close(self) -> None:
        if self._open:
            self._open = False
            ask(self._nvml, "nvmlShutdown")

    def _ask(self, question: str, *arguments: Any) -> Any | None:
        return ask(self._nvml, question, self._handle, *arguments)


def read_throttle_reasons(nvml: Any, handle: Any) -> list[str]:
    """Newer drivers call them event reasons; the bits are the same."""
    bits = ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:
        bits = ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return [name for name, bit in _THROTTLE_REASONS.items() if bits is not None and bits & bit]


def open_telemetry(
    device: str, *, root: Path = ROOT, nvml: Any | None = None, environment: Mapping[str, str] | None = None
) -> Telemetry:
    """For `cpu`, `cuda` or `cuda:1` (as torch numbers them); never raises.

    Where the device does not talk (no driver, another maker's GPU) the readings still carry the host's load.
    """
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return CpuTelemetry(device, root=root)
    module = import_nvml() if nvml is None else nvml
    if kind != "cuda" or not (number.isdigit() or not number) or module is None or not start_nvml(module):
        return Telemetry(device, root=root)
    torch = find_loaded_torch()
    # Telemetry must not be what starts CUDA in a process that has not yet done so.
    started = torch if torch is not None and torch.cuda.is_initialized() else None
    index = find_nvml_index(module, int(number or 0), torch=started, environment=environment)
    handle = ask(module, "nvmlDeviceGetHandleByIndex", index) if index is not None else None
    if handle is None:
        ask(module, "nvmlShutdown")
        return Telemetry(device, root=root)
    return NvmlTelemetry(device, module, handle, root=root)
