"""What stands beside a score: operations of the model, share of the device's peak, memory, energy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.system import find_device_peak
from stepscope.workloads.precision import math_of

if TYPE_CHECKING:
    from stepscope.workloads.protocol import Mode, Precision, Task


def count_flops(task: Task, *, mode: Mode, batch_size: int) -> int | None:
    """Of one batch through the plain model, forward and (in training) backward; nothing is computed for it.

    Counted are products and convolutions, a multiply-add as two. None where the model cannot run without values.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    batch = task.make_batch(batch_size, seed=0, mode=mode)
    try:
        with torch.device("meta"):
            module = task.build()
        shapes = {name: one.to("meta") for name, one in batch.items()}
        counter = FlopCounterMode(display=False)
        with counter, math_of("fp32", mode=mode, device="cpu"):
            if mode == "train":
                task.loss(module.train(), shapes).backward()  # type: ignore[no-untyped-call]
            else:
                task.infer(module.eval(), shapes)
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return None
    return int(counter.get_total_flops())


class Peak(NamedTuple):
    flops: float
    source: str


def find_peak(device: str, precision: Precision) -> Peak | None:
    """What the maker promises for this precision; None where nobody says."""
    if not device.startswith("cuda"):
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    found = find_device_peak(name)
    if found is None or precision not in found.flops:
        return None
    return Peak(found.flops[precision], f"{found.name} {precision}: {found.source}")


class PeakMemory:
    """The largest memory in use from now on. Made before a model is built: a captured step takes its memory then."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device.startswith("cuda"):
            import torch

            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._is_reset = _reset_resident_peak()

    def read_bytes(self) -> int | None:
        """Of the allocator on a GPU, of the whole process on a CPU; None where that cannot be told from before."""
        if self._device.startswith("cuda"):
            import torch

            return int(torch.cuda.max_memory_allocated(self._device))
        return _read_resident_peak() if self._is_reset else None


def _reset_resident_peak() -> bool:
    """Linux forgets the peak of a process that asks so."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _read_resident_peak() -> int | None:
    lines = Path("/proc/self/status").read_text().splitlines()
    found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else None


class EnergyMeter:
    """Joules a GPU has used since this was made; None where it does not count them."""

    def __init__(self, device: str) -> None:
        self._read: Any = _open_counter(device) if device.startswith("cuda") else None
        self._start_mj = self._read() if self._read is not None else None

    def read_j(self) -> float | None:
        now_mj = self._read() if self._read is not None else None
        if now_mj is None or self._start_mj is None:
            return None
        return float(now_mj - self._start_mj) / 1e3


def _open_counter(device: str) -> Any:
    """A function that gives millijoules, or None."""
    import torch

    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        index = torch.device(device).index or 0
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (AttributeError, pynvml.NVMLError):
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
