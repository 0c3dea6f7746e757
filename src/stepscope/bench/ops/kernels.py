"""What really ran: kernels by the profiler, and the time of calls replayed as a CUDA graph, free of launches.

Profiled wall time is never used. Once the profiler has been used on a GPU, every later launch of the process takes
about twice as long: wall times taken there would be those of the profiler. So a child process looks at the kernels of
all cases first and leaves them in the run's folder; the process that measures only reads them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stepscope.bench.ops.operator import Call
from stepscope.core.lazy_torch import torch
from stepscope.measure import Device
from stepscope.records import KernelUse
from stepscope.store import StoredRun
from stepscope.store.folder import whole_lines

PROFILED_CALLS = 5
QUIET_LOG_LEVEL = "6"
"""The profiler announces each start and stop on stderr otherwise."""


def profile_kernels(
    calls: Sequence[Call], *, cuda: bool, before_sample: Callable[[], object] | None = None
) -> tuple[list[KernelUse], list[float]]:
    """The kernels of one call and, on CUDA, the sum of their durations for each profiled call.

    On the CPU the operators below the called one stand for kernels; the profiler slows them, so no time is returned.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET_LOG_LEVEL)
    lap = (list(calls) * PROFILED_CALLS)[:PROFILED_CALLS]
    return _profile_cuda(lap, before_sample) if cuda else (_profile_cpu(lap), [])


def _profile_cuda(
    lap: Sequence[Call], before_sample: Callable[[], object] | None
) -> tuple[list[KernelUse], list[float]]:
    """With `before_sample` before each call; what that launches is known from what it launches alone."""
    flushing = _record([before_sample]) if before_sample is not None else []
    steps = [step for call in lap for step in ((before_sample, call) if before_sample is not None else (call,))]
    pieces = _pieces(_record(steps), flushing, len(lap))
    durations: dict[str, list[float]] = {}
    for name, duration_s in (event for piece in pieces for event in piece):
        durations.setdefault(name, []).append(duration_s)
    uses = {name: (len(values), sum(values)) for name, values in durations.items()}
    # Where calls did not launch alike there is one piece: all that is known is their mean.
    seconds = [sum(duration for _, duration in piece) * len(pieces) / len(lap) for piece in pieces]
    return _as_uses(uses, len(lap)), seconds if uses else []


def _record(steps: Sequence[Callable[[], object]]) -> list[tuple[str, float]]:
    """Name and duration of everything that ran on the device, in the order it began."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    profiler: Any
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for step in steps:
            step()
        torch.cuda.synchronize()
    found = [
        (event.start_ns(), event.name(), event.duration_ns() * 1e-9)
        for event in profiler.profiler.kineto_results.events()
        if event.device_type().name == "CUDA" and "Synchronize" not in event.name()
    ]
    return [(name, duration_s) for _, name, duration_s in sorted(found)]


Event = tuple[str, float]


def _pieces(events: Sequence[Event], flushing: Sequence[Event], calls: int) -> list[list[Event]]:
    """Without what `before_sample` launched. Calls launch alike: their events fall into as many equal pieces."""
    if len(events) % calls:
        names = {name for name, _ in flushing}
        return [[event for event in events if event[0] not in names]]
    each = len(events) // calls
    return [list(events[i * each + len(flushing) : (i + 1) * each]) for i in range(calls)]


def _profile_cpu(lap: Sequence[Call]) -> list[KernelUse]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for call in lap:
            call()
    uses: dict[str, tuple[int, float]] = {}
    for row in profiler.key_averages():
        if row.key.startswith(("aten::", "quantized::", "mkldnn::", "prims::")) and row.self_cpu_time_total > 0:
            uses[row.key] = (row.count, row.self_cpu_time_total * 1e-6)
    return _as_uses(uses, len(lap))


def _as_uses(uses: dict[str, tuple[int, float]], calls: int) -> list[KernelUse]:
    found = [
        KernelUse(name=name, count=count / calls, duration_s=total / calls) for name, (count, total) in uses.items()
    ]
    return sorted(found, key=lambda use: -use.duration_s)


MIN_CAPTURED_CALLS = 8
REPLAYS = 7
HOLD_S, LONGEST_HOLD_S = 50e-6, 0.02


class CaptureError(Exception):
    """The calls cannot be captured; says why."""


def time_replays(
    calls: Sequence[Call], device: Device, *, before_sample: Callable[[], object] | None = None
) -> list[float]:
    """Seconds per call of each replay. The current stream must not be the default one: that one cannot be captured."""
    lap = list(calls)
    if before_sample is None:
        lap = lap * -(-MIN_CAPTURED_CALLS // len(lap))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="The CUDA Graph is empty")
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in lap:
                    call()
            finally:
                graph.capture_end()
    except (RuntimeError, UserWarning) as error:
        raise CaptureError(str(error).splitlines()[0]) from error
    times = [_time_replay(graph, device, before_sample) / len(lap) for _ in range(REPLAYS + 1)]
    graph.reset()
    return times[1:]


def _time_replay(graph: torch.cuda.CUDAGraph, device: Device, before_sample: Callable[[], object] | None) -> float:
    """Behind a hold that is long enough for the host to have launched the graph; a large one takes a while."""
    hold_s = HOLD_S
    while True:
        if before_sample is not None:
            before_sample()
        device.hold(hold_s)
        began = device.mark()
        graph.replay()
        ended = device.mark()
        starved = device.has_reached(began)
        device.synchronize()
        if not starved or hold_s > LONGEST_HOLD_S:
            return device.elapsed_s(began, ended)
        hold_s *= 4


KERNELS_FILE = "kernels.jsonl"


class ProfiledCase(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file."""

    case: str
    """Key of the case."""
    kernels: list[KernelUse] = []
    kernel_s: list[float] = []
    """Seconds of all kernels of a call, for each profiled call."""
    failure: str | None = None


def read_profiled(folder: Path) -> dict[str, ProfiledCase]:
    """By the case's key; empty where nothing was profiled."""
    path = folder / KERNELS_FILE
    if not path.exists():
        return {}
    decoder = msgspec.json.Decoder(ProfiledCase)
    lines = [decoder.decode(line) for _, line in whole_lines(path.read_bytes())]
    return {one.case: one for one in lines}


def profile_in_child(folder: Path) -> dict[str, ProfiledCase]:
    """Profile what the run's plan still lacks. A child that dies leaves what it has: its cases have no kernels."""
    run = StoredRun(folder)
    missing = {case.key for case in run.plan.cases} - {result.case.key for result in run.results}
    if not missing <= read_profiled(folder).keys():
        subprocess.run([sys.executable, "-m", "stepscope.bench.ops.profiling", str(folder)], check=False)
    return read_profiled(folder)
