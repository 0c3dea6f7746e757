"""What the loop takes as arguments, so that its logic can be tested in fake time: a clock, and a device that can be
waited for and that marks moments on its own time line."""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import psutil

from stepscope.core.errors import MissingDependencyError, UsageError


class Clock(Protocol):
    def now_ns(self) -> int:
        """Never goes back; its zero means nothing."""

    @property
    def resolution_s(self) -> float:
        """The smallest step two readings can differ by, as seen, not as promised."""


class WallClock:
    """The monotonic clock with the finest step Python has."""

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    @cached_property
    def resolution_s(self) -> float:
        """The smallest difference seen between two readings: on most machines the cost of reading, ~50 ns."""
        smallest = 1_000_000_000
        for _ in range(2000):
            first = time.perf_counter_ns()
            while (second := time.perf_counter_ns()) == first:
                pass
            smallest = min(smallest, second - first)
        return smallest * 1e-9


class FakeClock:
    """A clock that moves only when told; shipped for tests, here and in code that plugs into Stepscope."""

    def __init__(self, resolution_s: float = 1e-9) -> None:
        self._now_ns = 0
        self._resolution_s = resolution_s

    def now_ns(self) -> int:
        step_ns = max(1, round(self._resolution_s * 1e9))
        return self._now_ns // step_ns * step_ns

    @property
    def resolution_s(self) -> float:
        return self._resolution_s

    def advance(self, seconds: float) -> None:
        self._now_ns += round(seconds * 1e9)


class Device(Protocol):
    """As it stands, one without a queue: work is done when the call returns."""

    name: str
    has_events: bool = False

    def synchronize(self) -> None:
        """Return when all work given to the device is done."""
        return

    def mark(self) -> Any:
        """A moment on the device's time line, behind the work given to it so far."""
        return None

    def elapsed_s(self, start: Any, stop: Any) -> float:
        """Device time between two marks; only after `synchronize`."""
        raise TypeError(f"{self.name} has no device events")

    def hold(self, seconds: float) -> None:
        """Keep the device busy for about so long, so that what is given to it next queues up behind."""
        return

    def has_reached(self, mark: Any) -> bool:
        """Whether the device has got as far as the mark."""
        return True

    def allocations(self) -> int:
        """How often memory had to be fetched from below so far: calls to the driver, or page faults of the host."""


class CpuDevice(Device):
    name = "cpu"

    def allocations(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class CudaDevice:
    """Work is queued: wall time needs a wait at both ends, device time comes from events in the queue."""

    has_events = True

    def __init__(self, index: int) -> None:
        import torch

        self.name = f"cuda:{index}"
        self._cuda: Any = torch.cuda
        self._index = index
        self._cuda.set_device(index)
        self._stream = self._cuda.current_stream(index)
        # The spin counts clock ticks; at a lower clock it lasts longer, which does no harm.
        self._clock_hz = getattr(self._cuda.get_device_properties(index), "clock_rate", 2_000_000) * 1e3

    def use_own_stream(self) -> None:
        """Leave the default stream, which no graph can be captured on, for the rest of the process."""
        self._stream = self._cuda.Stream(self._index)
        self._cuda.set_stream(self._stream)

    def synchronize(self) -> None:
        self._cuda.synchronize(self._index)

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._stream)  # named: finding the current one takes longer than recording
        return event

    def elapsed_s(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop)) * 1e-3

    def hold(self, seconds: float) -> None:
        self._cuda._sleep(int(seconds * self._clock_hz))

    def has_reached(self, mark: Any) -> bool:
        return bool(mark.query())

    def allocations(self) -> int:
        return int(self._cuda.memory_stats(self._index).get("num_device_alloc", 0))


def device_kind(name: str) -> str:
    """`cpu` or `cuda`; refuses what is no device's name, without looking whether it is there."""
    kind, _, index = name.partition(":")
    if kind not in {"cpu", "cuda"} or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise UsageError(f"{name!r} is not a device", hint="write cpu, cuda or cuda:0", where="--device")
    return kind


_ACCELERATOR_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
"""Drivers of accelerators that torch calls cuda: of NVIDIA, on Tegra, of AMD, and under Windows."""


def best_device() -> str:
    """`cuda` where it works, else `cpu`. Where no driver is there, torch is not loaded to find out."""
    if not any(Path(node).exists() for node in _ACCELERATOR_NODES):
        return "cpu"
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def require_device(name: str) -> None:
    """Refuse a device that is not there before a run is made, which would be left behind empty."""
    if device_kind(name) != "cpu":
        open_device(name)


def open_device(name: str) -> CpuDevice | CudaDevice:
    """`cpu`, `cuda` or `cuda:1`. Refuses what is not there: nothing falls back to another device."""
    kind, index = device_kind(name), name.partition(":")[2]
    try:
        import torch
    except ImportError:
        raise MissingDependencyError("measuring needs torch", hint="pip install 'stepscope[produce]'") from None
    if kind == "cpu":
        return CpuDevice()
    if not torch.cuda.is_available():
        raise UsageError(
            "there is no CUDA device here", hint="use --device cpu; `stepscope doctor` says what is missing",
            where="--device",
        )  # fmt: skip
    if int(index or 0) >= torch.cuda.device_count():
        raise UsageError(f"{name} is not there: {torch.cuda.device_count()} CUDA devices are visible", where="--device")
    return CudaDevice(int(index or 0))


def free_memory_bytes(device: str) -> int:
    """What a case may still allocate there."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    available, limit = int(psutil.virtual_memory().available), _container_limit_bytes()
    return available if limit is None else min(available, limit - int(psutil.Process().memory_info().rss))


@cache
def _container_limit_bytes() -> int | None:
    from stepscope.system import read_container

    return read_container().memory_limit_bytes


def give_back_memory(device: str) -> None:
    """Hand freed memory back to the driver or the kernel: a large case needs it more than later small ones."""
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def last_level_cache_bytes(device: str) -> int:
    """Size of the cache behind which only memory is; 0 where it is unknown."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    from stepscope.system import read_last_level_cache

    return read_last_level_cache() or 0


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell the C library to keep what is freed, so that large results do not fault their pages in on every call.

    False where the C library does not listen (it is not glibc): timed regions then contain page faults, and say so.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))
