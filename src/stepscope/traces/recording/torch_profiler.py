"""torch's profiler and its execution trace observer, switched on and off together."""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepscope.traces.recording.evidence import ProfilerSettings

RANGE_VARIABLE = "ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE"
STEP_LABEL = "ProfilerStep#"
"""What torch's own schedule calls a step, so that every reader finds ours."""
PACKING_LEVEL = 3
"""A trace is packed while the program waits: 6 takes twice as long for a tenth less."""


def uses_cuda() -> bool:
    """Whether this process has started CUDA; asking does not start it."""
    import torch

    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def synchronize() -> None:
    """Wait for the devices that this process uses; nothing to do where it uses none."""
    import torch

    if uses_cuda():
        here = torch.cuda.current_device()
        for device in range(torch.cuda.device_count()):
            # A wait would start the context of a device that the program does not use.
            if device == here or torch.cuda.memory_reserved(device):
                torch.cuda.synchronize(device)
    elif not torch.cuda.is_available() and torch.accelerator.is_available():
        torch.accelerator.synchronize()


class TorchProfiler:
    """One use: prepare, start, label each step, stop, save."""

    def __init__(self, settings: ProfilerSettings, et_path: Path) -> None:
        from torch.profiler import ExecutionTraceObserver, profile, supported_activities

        _require_free()
        self._et_path = et_path
        self._observer: Any = None
        self._label: Any = None
        self._has_started = False
        if settings.et:
            self._observer = ExecutionTraceObserver()
            with _range_variable(settings.ranges):
                self._observer.register_callback(str(et_path))
            # Of compiled kernels; asking for them loads the compiler, so only where it is there already.
            if "torch._inductor.codecache" in sys.modules:
                self._observer.set_extra_resource_collection(True)
        self._profile: Any = profile(
            activities=supported_activities(),  # type: ignore[no-untyped-call]
            record_shapes=settings.shapes,
            with_stack=settings.stacks,
            profile_memory=settings.memory,
            execution_trace_observer=self._observer,
        )

    def prepare(self) -> None:
        """From here on the profiler runs, but keeps nothing."""
        self._profile.prepare_trace()

    def start(self) -> None:
        self._has_started = True
        self._profile.start_trace()
        if self._observer is not None and not hasattr(self._observer, "_record_pg_config"):
            _write_groups()

    def begin_step(self, number: int) -> None:
        import torch

        self._label = torch.autograd.profiler.record_function(f"{STEP_LABEL}{number}")
        self._label.__enter__()

    def end_step(self) -> None:
        if self._label is not None:
            self._label.__exit__(None, None, None)
            self._label = None

    def stop(self) -> None:
        """Also of one that was only prepared: torch keeps it ready for ever otherwise."""
        if not self._has_started:
            self.start()
        self.end_step()
        self._profile.stop_trace()
        if self._observer is not None:
            self._observer.unregister_callback()

    def save(self, kineto: Path) -> None:
        """Both traces packed: `kineto` and the path of the execution trace, each with .gz added."""
        self._profile.export_chrome_trace(str(kineto))
        pack(kineto)
        if self._observer is not None:
            pack(self._et_path)

    def resources(self) -> Path | None:
        """Sources of the compiled kernels that ran, where there were any."""
        found = getattr(self._observer, "resources_dir", "")
        if not found or not os.path.isdir(found):
            return None
        if not os.listdir(found):
            os.rmdir(found)
            return None
        return Path(found)

    def discard(self) -> None:
        """After stop: what the observer has written."""
        self._et_path.unlink(missing_ok=True)
        resources = self.resources()
        if resources is not None:
            shutil.rmtree(resources, ignore_errors=True)


def _require_free() -> None:
    """torch would let a second profiler take the first one's events, without an error in either."""
    import torch

    if torch._C._autograd._profiler_enabled():
        raise RuntimeError("the program's own profiler is running")


def pack(path: Path) -> Path:
    """The file as .gz; the plain one is gone."""
    packed = path.with_name(f"{path.name}.gz")
    with path.open("rb") as plain, gzip.open(packed, "wb", compresslevel=PACKING_LEVEL) as file:
        shutil.copyfileobj(plain, file, 1 << 20)
    path.unlink()
    return packed


@contextmanager
def _range_variable(wanted: bool) -> Iterator[None]:
    """The observer reads it when it is registered; what the program itself has set is put back."""
    if not wanted:
        yield
        return
    before = os.environ.get(RANGE_VARIABLE)
    os.environ[RANGE_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[RANGE_VARIABLE]
        else:
            os.environ[RANGE_VARIABLE] = before


def _write_groups() -> None:
    """The process groups as a node of the execution trace: older observers leave that to whoever uses them."""
    import json

    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    groups = json.dumps(torch.distributed.distributed_c10d._world.pg_config_info)
    handle = torch.autograd._record_function_with_args_enter("## process_group:init ##", groups)  # type: ignore[attr-defined]
    torch.autograd._record_function_with_args_exit(handle)  # type: ignore[attr-defined]
