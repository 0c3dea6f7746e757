"""What stands beside a score: operations of the model, share of the device's peak, memory, energy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.bench.workloads.feed import Shapes, shapes_of
from stepscope.bench.workloads.generation import Decoder, generate_plainly
from stepscope.bench.workloads.precision import math_of, to_device
from stepscope.bench.workloads.protocol import Batch, Batches, Mode, Precision, Setting, Task
from stepscope.core.lazy_torch import torch
from stepscope.system import find_device_peak
from stepscope.system.nvml import ask, find_nvml_index, import_nvml, start_nvml

MOST_ON_HOST = 1 << 30
"""Weights of a model whose operations are counted on the host: a step of a larger one takes minutes there."""


def count_flops(task: Task, batches: Batches, *, mode: Mode, device: str) -> int | None:
    """Operations of one batch through the plain model, the mean over those given, forward and (in training) backward;
    of a decoder, to the last new token. Of batches of one shape the first stands for all.

    Counted are matmuls and convolutions, a multiply-add as two. Nothing is computed for it where the model can be
    followed without values; else one step is made, on the device if it can be counted there, else on the host if the
    model is not too large for it. None where it cannot.
    """
    alike: dict[Shapes, list[Batch]] = {}
    for batch in batches:
        alike.setdefault(shapes_of(batch), []).append(batch)
    firsts = [group[0] for group in alike.values()]
    places = dict.fromkeys(("meta", device, "cpu"))
    counts = (
        _count_on(place, task, mode, firsts) for place in places if place in ("meta", device) or _suits_a_host(task)
    )
    found = next((count for count in counts if count is not None), None)
    if found is None:
        return None
    return sum(count * len(group) for count, group in zip(found, alike.values(), strict=True)) // len(batches)


def _suits_a_host(task: Task) -> bool:
    with torch.device("meta"):
        return sum(one.numel() for one in task.build().parameters()) <= MOST_ON_HOST


def _count_on(device: str, task: Task, mode: Mode, batches: Batches) -> list[int] | None:
    """Operations of each batch."""
    from torch.utils.flop_counter import FlopCounterMode

    counts, setting = [], Setting(mode, "fp32", device)
    try:
        with torch.device(device):
            module = task.build()
        for batch in batches:
            counter = FlopCounterMode(display=False)
            with counter, math_of(setting), countable_kernels(device):
                _make_step(task, module, to_device(batch, setting), mode)
            counts.append(int(counter.get_total_flops()))
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return None
    return counts


@contextmanager
def countable_kernels(device: str) -> Iterator[None]:
    """Some layers are one operator of a library that nobody counts, and that not every machine has: recurrent ones,
    attention on a CPU."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    library: Any = torch.backends.mkldnn if device == "cpu" else torch.backends.cudnn
    before, library.enabled = library.enabled, False
    try:
        with sdpa_kernel(SDPBackend.MATH) if device == "cpu" else nullcontext():
            yield
    finally:
        library.enabled = before


def _make_step(task: Task, module: torch.nn.Module, batch: dict[str, torch.Tensor], mode: Mode) -> None:
    if mode == "train":
        task.loss(module.train(), batch).backward()  # type: ignore[no-untyped-call]
    elif isinstance(task, Decoder):
        for _ in generate_plainly(task, module.eval(), batch):
            pass
    else:
        task.infer(module.eval(), batch)


class Peak(NamedTuple):
    flops: float
    source: str


def find_peak(device: str, precision: Precision) -> Peak | None:
    """What the maker promises for this precision; None where nobody says."""
    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(device)
    found = find_device_peak(name)
    if found is None or precision not in found.flops:
        return None
    return Peak(found.flops[precision], f"{found.name} {precision}: {found.source}")


class PeakMemory:
    """The largest memory in use from now on. Made before a model is built: a captured step takes its memory then."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._before: int | None = 0
        if device.startswith("cuda"):
            # What earlier models left behind, of which libraries keep some, is none of this one's.
            self._before = int(torch.cuda.memory_allocated(device))
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux forgets the peak of a process that asks so
        except OSError:
            self._before = None

    def read_bytes(self) -> int | None:
        """Use of the allocator on a GPU, of the whole process on a CPU; None where that cannot be told from before."""
        if self._before is None:
            return None
        if self._device.startswith("cuda"):
            return int(torch.cuda.max_memory_allocated(self._device)) - self._before
        found = re.search(r"^VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None


class EnergyMeter:
    """Joules that a GPU uses for a step, between two moments at which the steps made so far are known."""

    def __init__(self, device: str) -> None:
        self._read_mj = _open_counter(device) if device.startswith("cuda") else lambda: None
        self._start: tuple[Any, int] | None = None
        self.is_counted = self._read_mj() is not None

    def begin(self, steps: int) -> None:
        """Only the first time."""
        if self._start is None and self.is_counted:
            self._start = self._read_mj(), steps

    def read_j_per_step(self, steps: int) -> float | None:
        """None where the device does not count them, or no step was made."""
        now_mj = self._read_mj()
        if self._start is None or now_mj is None or steps == self._start[1]:
            return None
        return float(now_mj - self._start[0]) / 1e3 / (steps - self._start[1])


def _open_counter(device: str) -> Callable[[], Any]:
    """What gives millijoules, or None."""
    nvml = import_nvml()
    if nvml is None or not start_nvml(nvml):
        return lambda: None
    index = find_nvml_index(nvml, torch.device(device).index or 0, torch=torch)
    handle = ask(nvml, "nvmlDeviceGetHandleByIndex", index) if index is not None else None
    return lambda: None if handle is None else ask(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle)
