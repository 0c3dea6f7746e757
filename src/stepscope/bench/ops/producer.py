"""Measures operator cases, and estimates beforehand what that takes: the side that knows torch."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

import msgspec

from stepscope.bench.ops.build import BufferRotation, Built, CacheFlush, OperatorCase, build, math_mode, read_case
from stepscope.bench.ops.cases import PEAK_SETTINGS
from stepscope.bench.ops.inputs import Arenas
from stepscope.bench.ops.kernels import CaptureError, ProfiledCase, profile_in_child, profile_kernels, time_replays
from stepscope.core.errors import first_line
from stepscope.core.lazy_torch import torch
from stepscope.core.units import format_bytes
from stepscope.launch.worker import Session
from stepscope.measure import (
    CudaDevice,
    Device,
    MeasureSettings,
    device_kind,
    free_memory_bytes,
    give_back_memory,
    keep_freed_memory,
    last_level_cache_bytes,
    open_device,
)
from stepscope.records import Case, Notice, OperatorRequest, Score
from stepscope.records.kinds import CallObserved, CallSpec, OperatorObserved
from stepscope.run.producer import ExtraMeasurements, Prepared, Producer
from stepscope.run.ranks import CaseSkipped

MEMORY_SHARE = 0.9
"""How much of the free memory a case may take: the rest belongs to the allocator and to other processes."""

_LACKING = re.compile(
    r"not implemented|not supported|only supports?|not support|No available kernel|Could not run|only implemented"
    r"|requires? .*(compute capability|device)|unsupported|must be divisible by|floating point dtype can require",
    re.IGNORECASE,
)
"""How torch says that it lacks an operator for a dtype or device; anything else is a failure of the case."""


class Ready(NamedTuple):
    """A case built, before anything is timed."""

    asked: OperatorCase
    rotation: BufferRotation
    built: Built
    before_sample: CacheFlush | None


class OperatorProducer(Producer):
    """Prepares cases one after the other in one process; what they can share (inputs, flush buffer) is kept."""

    device: Device

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        assert isinstance(session.request, OperatorRequest)
        self._request = session.request
        self._profiled: Mapping[str, ProfiledCase] = {}
        self._arenas = Arenas()
        self._flush: CacheFlush | None = None

    @property
    def settings(self) -> MeasureSettings:
        return self._request.settings

    def open(self) -> Device:
        folder, name = self.session.folder, self._request.device
        if folder is not None and self._request.kernels and device_kind(name) == "cuda":
            self._profiled = profile_in_child(folder)
        device = self.device = open_device(name)
        self._cache_bytes = last_level_cache_bytes(device.name)
        if isinstance(device, CudaDevice):
            device.use_own_stream()
            _wake_autograd(device.name)
            # torch lays the weights of short floats apart and cuDNN gathers them on every call: that is their time.
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")
        else:
            keep_freed_memory()
        return device

    def prepare(self, case: Case) -> Prepared:
        """Raises CaseSkipped for what this machine cannot do: nothing falls back to another dtype or device."""
        ready = self.build(case)
        asked, built = ready.asked, ready.built
        sets, work, unit = len(built.calls), asked.work, asked.operator.unit
        repeated = asked.operator.repeated_bytes(asked.shape, asked.dtype, asked.direction, built.inputs)
        kind = CallObserved if isinstance(case.spec, CallSpec) else OperatorObserved
        observed = kind(
            flops=work.flops,
            moved_bytes=work.bytes,
            unique_bytes=work.bytes - repeated,
            input_sets=sets,
            compile_s=built.compile_s,
        )
        turn = cycle(built.calls)

        def call_next() -> object:
            return next(turn)()

        return Prepared(
            body=built.calls[0] if sets == 1 else call_next,
            check=built.check if self._request.check and not asked.measures_peak else None,
            score=Score(unit=unit, work=work.flops if unit == "TFLOP/s" else work.bytes),
            observed=observed,
            scope=math_mode(asked.dtype, asked.direction),
            before_sample=ready.before_sample,
            saturated=self.device.has_events,
            steady_memory=True,
            settings=self._choose_settings(asked, ready.rotation),
            finish=lambda measurement: (measurement, self._measure_extra(case, ready)),
        )

    def build(self, case: Case) -> Ready:
        """Raises CaseSkipped, as `prepare` does."""
        asked = read_case(case)
        asked.require(self.device.name)
        if asked.cold and not self._cache_bytes:
            raise CaseSkipped("unknown_cache", f"nobody tells how large the last-level cache of {self.device.name} is")
        rotation = asked.rotation(self._cache_bytes)
        self._require_memory(asked, rotation)
        self._arenas.rewind()
        with math_mode(asked.dtype, asked.direction):
            built = self._build(asked, rotation)
        # A GPU's marks leave room for a flush before every call, so that what lies in the cache is always the same.
        flushes = rotation.flush or (asked.cold and self.device.has_events)
        return Ready(asked, rotation, built, self._open_flush() if flushes else None)

    def _choose_settings(self, asked: OperatorCase, rotation: BufferRotation) -> MeasureSettings:
        """Behind a flush a sample is one lap: a second one would find its inputs in the cache."""
        kind = device_kind(self.device.name)
        settings = PEAK_SETTINGS[kind] if asked.measures_peak else self._request.settings
        return msgspec.structs.replace(settings, iterations=rotation.sets) if rotation.flush else settings

    def _require_memory(self, asked: OperatorCase, rotation: BufferRotation) -> None:
        needed, name = asked.memory_bytes(rotation.sets, check=self._request.check), self.device.name
        if needed > MEMORY_SHARE * free_memory_bytes(name):
            self._arenas.release()
            give_back_memory(name)
        free = free_memory_bytes(name)
        if needed > MEMORY_SHARE * free:
            raise CaseSkipped(
                "does_not_fit",
                f"needs {format_bytes(needed)}, {format_bytes(free)} are free on {name}",
                "use a smaller shape" + (", or --no-check" if self._request.check else ""),
            )

    def _build(self, asked: OperatorCase, rotation: BufferRotation) -> Built:
        """With a first call on every set, so that what torch lacks shows now."""
        try:
            built = build(
                asked.operator, asked.shape, dtype=asked.dtype, device=self.device.name, direction=asked.direction,
                sets=rotation.sets, compiled=asked.compiled, arenas=self._arenas,
            )  # fmt: skip
            for call in built.calls:
                call()
            self.device.synchronize()
        except NotImplementedError as error:
            raise CaseSkipped("unsupported", first_line(error)) from error
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._arenas.release()
            give_back_memory(self.device.name)
            raise CaseSkipped("does_not_fit", first_line(error), "use a smaller shape") from error
        except RuntimeError as error:
            if asked.compiled or not _LACKING.search(str(error)):
                raise
            raise CaseSkipped("unsupported", first_line(error)) from error
        return built

    def _open_flush(self) -> CacheFlush:
        if self._flush is None:
            self._flush = CacheFlush(self.device.name, self._cache_bytes)
        return self._flush

    def _measure_extra(self, case: Case, ready: Ready) -> ExtraMeasurements:
        extra, calls, flush = ExtraMeasurements(), ready.built.calls, ready.before_sample
        cuda = self.device.name.startswith("cuda")
        if self._request.graph and cuda:
            try:
                extra.extra_s["graph"] = time_replays(calls, self.device, before_sample=flush)
            except CaptureError as error:
                extra.notices.append(Notice(kind="not_captured", message=f"no graph could be captured: {error}"))
        if self._request.kernels and not cuda:
            extra.kernels, _ = profile_kernels(calls, cuda=False, before_sample=flush)
        elif self._request.kernels:
            self._add_profiled(extra, case)
        return extra

    def _add_profiled(self, extra: ExtraMeasurements, case: Case) -> None:
        lost = ProfiledCase(case=case.key, failure="the profiling process ended before it")
        found = self._profiled.get(case.key, lost)
        if found.failure is not None:
            message = f"its kernels are not known: {found.failure}"
            extra.notices.append(Notice(kind="not_profiled", message=message))
        extra.kernels = found.kernels
        if found.kernel_s:
            extra.extra_s["kernel"] = found.kernel_s


def _wake_autograd(device: str) -> None:
    """The backward thread meets its CUDA context on its first product, and warns of it; that is not a case's affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        leaf = torch.ones(2, 2, device=device, requires_grad=True)
        torch.autograd.grad(leaf @ leaf, leaf, torch.ones(2, 2, device=device))


# What a sweep would take, before it is run: from the declared work and a glimpse at what this machine does

GLIMPSE_SIDE, GLIMPSE_ELEMENTS, GLIMPSE_CALLS = 512, 1 << 22, 5
CALIBRATING, WARMING = 3, 4
"""Samples before the first that counts, as the loop takes them at least."""
CASE_OVERHEAD_S = 3e-3
CHECK_ITERATIONS = 8
"""What the float64 reference costs in iterations of the case, roughly."""


class PlannedCase(NamedTuple):
    case: Case
    iteration_s: float
    case_s: float
    memory_bytes: int
    skip: str | None
    """Why it would not be tried; None: it would."""


class Rates(NamedTuple):
    flops_per_s: float
    bytes_per_s: float
    call_s: float
    """Seconds of a call that does next to nothing."""


def estimate_cases(cases: Sequence[Case], *, device: str, settings: MeasureSettings, check: bool) -> list[PlannedCase]:
    rates = glimpse(device)
    free, cache = free_memory_bytes(device), last_level_cache_bytes(device)
    planned = []
    for case in cases:
        wanted = read_case(case)
        try:
            wanted.require(device)
        except CaseSkipped as skip:
            planned.append(PlannedCase(case, 0.0, 0.0, 0, str(skip)))
            continue
        work, needed = wanted.work, wanted.memory_bytes(wanted.rotation(cache).sets, check=check)
        iteration_s = rates.call_s + max(work.flops / rates.flops_per_s, work.bytes / rates.bytes_per_s)
        if needed > MEMORY_SHARE * free:
            why = f"needs {format_bytes(needed)}, {format_bytes(free)} are free"
            planned.append(PlannedCase(case, iteration_s, 0.0, needed, why))
            continue
        sample_s = max(iteration_s, settings.min_sample_s)
        sampling_s = min(max(settings.min_samples * sample_s, settings.min_time_s), settings.max_time_s + sample_s)
        checking_s = CHECK_ITERATIONS * iteration_s if check else 0.0
        case_s = CASE_OVERHEAD_S + (CALIBRATING + WARMING) * sample_s + sampling_s + checking_s
        planned.append(PlannedCase(case, iteration_s, case_s, needed, None))
    return planned


def glimpse(device: str) -> Rates:
    """Float32 rates of this machine from a few calls; a factor of two off is good enough here."""
    opened = open_device(device)

    def best(call: Callable[[], object]) -> float:
        times = []
        for _ in range(GLIMPSE_CALLS):
            opened.synchronize()
            start = time.perf_counter()
            call()
            opened.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    matrix = torch.ones(GLIMPSE_SIDE, GLIMPSE_SIDE, device=device)
    values, copy, one = (torch.ones(n, device=device) for n in (GLIMPSE_ELEMENTS, GLIMPSE_ELEMENTS, 1))
    return Rates(
        flops_per_s=2 * GLIMPSE_SIDE**3 / best(lambda: matrix @ matrix),
        bytes_per_s=2 * values.nbytes / best(lambda: copy.copy_(values)),
        call_s=best(lambda: one.add_(1)),
    )
