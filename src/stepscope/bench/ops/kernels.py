"""What really ran: kernel names, counts and times from the profiler. Profiled wall time is never used."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from stepscope.bench.ops.operator import Call
from stepscope.records import KernelUse

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
    """With the cache before_sampleed before each call; what that launches is told by what it launches alone."""
    flushing = _record([before_sample]) if before_sample is not None else []
    steps = [step for call in lap for step in ((before_sample, call) if before_sample is not None else (call,))]
    pieces = _pieces(_record(steps), flushing, len(lap))
    uses: dict[str, tuple[int, float]] = {}
    for name, duration_s in (event for piece in pieces for event in piece):
        count, total = uses.get(name, (0, 0.0))
        uses[name] = (count + 1, total + duration_s)
    # Where calls did not launch alike there is one piece: all that is known is their mean.
    seconds = [sum(duration for _, duration in piece) * len(pieces) / len(lap) for piece in pieces]
    return _as_uses(uses, len(lap)), seconds if uses else []


def _record(steps: Sequence[Callable[[], object]]) -> list[tuple[str, float]]:
    """Name and duration of everything that ran on the device, in the order it began."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for step in steps:
            step()
        torch.cuda.synchronize()
    return [(name, duration_s) for _, name, duration_s in sorted(_device_events(profiler))]


Event = tuple[str, float]


def _pieces(events: Sequence[Event], flushing: Sequence[Event], calls: int) -> list[list[Event]]:
    """Without what before_sampleing launched. Calls launch alike: their events fall into as many equal pieces."""
    if len(events) % calls:
        names = {name for name, _ in flushing}
        return [[event for event in events if event[0] not in names]]
    each = len(events) // calls
    return [list(events[i * each + len(flushing) : (i + 1) * each]) for i in range(calls)]


def _device_events(profiler: Any) -> list[tuple[int, str, float]]:
    """Start, name and duration of everything that ran on the device."""
    return [
        (event.start_ns(), event.name(), event.duration_ns() * 1e-9)
        for event in profiler.profiler.kineto_results.events()
        if event.device_type().name == "CUDA" and "Synchronize" not in event.name()
    ]


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
