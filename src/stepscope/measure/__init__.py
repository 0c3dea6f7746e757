"""The measuring loop: plan, warm up, synchronise, time (the clock is injected), stop rule, write."""

from stepscope.measure.device import (
    Clock,
    CpuDevice,
    CudaDevice,
    Device,
    FakeClock,
    FakeDevice,
    WallClock,
    best_device,
    device_kind,
    free_memory_bytes,
    give_back_memory,
    keep_freed_memory,
    last_level_cache_bytes,
    open_device,
    require_device,
)
from stepscope.measure.instability import OF_TIMES, judge_times
from stepscope.measure.loop import (
    Alone,
    Estimate,
    Measurement,
    Peers,
    freeze_libraries,
    freeze_new_libraries,
    measure,
    no_garbage_collection,
)
from stepscope.measure.progress import BarProgress, LineProgress, SilentProgress, format_case_line, open_progress
from stepscope.measure.surroundings import CoRunningLoad, CpuUse, find_co_running_load, read_cpu_use
from stepscope.records import QUICK, MeasureSettings

__all__ = [
    "OF_TIMES", "QUICK", "Alone", "BarProgress", "Clock", "CoRunningLoad", "CpuDevice", "CpuUse", "CudaDevice",
    "Device", "Estimate", "FakeClock", "FakeDevice", "LineProgress", "MeasureSettings", "Measurement", "Peers",
    "SilentProgress", "WallClock", "best_device", "device_kind", "find_co_running_load", "format_case_line",
    "free_memory_bytes", "freeze_libraries", "freeze_new_libraries", "give_back_memory", "judge_times",
    "keep_freed_memory", "last_level_cache_bytes", "measure", "no_garbage_collection", "open_device", "open_progress",
    "read_cpu_use", "require_device",
]  # fmt: skip
