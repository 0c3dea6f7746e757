"""What the loop needs of a device: wait until it is done, and mark moments on its own time line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import psutil

from stepscope.errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from stepscope.measure.clock import FakeClock


class Device(Protocol):
    name: str
    has_events: bool

    def synchronize(self) -> None:
        """Return when all work given to the device is done."""

    def mark(self) -> Any:
        """A moment on the device's time line, behind the work given to it so far."""

    def elapsed_s(self, start: Any, stop: Any) -> float:
        """Device time between two marks; only after `synchronize`."""


class CpuDevice:
    """Work is done when the call returns."""

    name = "cpu"
    has_events = False

    def synchronize(self) -> None:
        return

    def mark(self) -> None:
        return

    def elapsed_s(self, start: object, stop: object) -> float:
        raise TypeError("a CPU has no device events")


class CudaDevice:
    """Work is queued: wall time needs a wait at both ends, device time comes from events in the queue."""

    has_events = True

    def __init__(self, index: int) -> None:
        import torch

        self.name = f"cuda:{index}"
        self._cuda: Any = torch.cuda
        self._index = index
        self._cuda.set_device(index)

    def synchronize(self) -> None:
        self._cuda.synchronize(self._index)

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_s(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop)) * 1e-3


class FakeDevice:
    """A queue in fake time: work given to it runs later, as on a GPU. Shipped for tests."""

    has_events = True

    def __init__(self, clock: FakeClock, *, launch_s: float = 0.0) -> None:
        self.name = "fake:0"
        self._clock = clock
        self._launch_s = launch_s
        self._free_at_s = 0.0

    def submit(self, duration_s: float) -> None:
        """What a kernel launch does: the host moves on at once, the device works when it is free."""
        self._clock.advance(self._launch_s)
        self._free_at_s = max(self._free_at_s, self._clock.now_ns() * 1e-9) + duration_s

    def synchronize(self) -> None:
        now_s = self._clock.now_ns() * 1e-9
        if self._free_at_s > now_s:
            self._clock.advance(self._free_at_s - now_s)

    def mark(self) -> float:
        return max(self._free_at_s, self._clock.now_ns() * 1e-9)

    def elapsed_s(self, start: float, stop: float) -> float:
        return stop - start


def open_device(name: str) -> CpuDevice | CudaDevice:
    """`cpu`, `cuda` or `cuda:1`. Refuses what is not there: nothing falls back to another device."""
    kind, _, index = name.partition(":")
    if kind not in {"cpu", "cuda"} or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise UsageError(f"{name!r} is not a device", hint="write cpu, cuda or cuda:0", where="--device")
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
    return int(psutil.virtual_memory().available)
