"""What really ran: kernel names, counts and times from the profiler. Profiled wall time is never used."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from stepscope.ops.operator import Call
from stepscope.records import KernelUse

PROFILED_CALLS = 5
QUIET_LOG_LEVEL = "6"
"""The profiler announces each start and stop on stderr otherwise."""


def profile_kernels(
    calls: Sequence[Call], *, cuda: bool, freshen: Callable[[], object] | None = None
) -> tuple[list[KernelUse], list[float]]:
    """The kernels of one call and, on CUDA, the sum of their durations for each profiled call.

    On the CPU the operators below the called one stand for kernels; the profiler slows them, so no time is returned.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET_LOG_LEVEL)
    lap = (list(calls) * PROFILED_CALLS)[: max(PROFILED_CALLS, len(calls) if freshen else 0)]
    if freshen is not None:
        freshen()
    return _profile_cuda(lap) if cuda else (_profile_cpu(lap), [])


def _profile_cuda(lap: Sequence[Call]) -> tuple[list[KernelUse], list[float]]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for call in lap:
            call()
        torch.cuda.synchronize()
    events = sorted(_device_events(profiler), key=lambda event: event[0])
    uses: dict[str, tuple[int, float]] = {}
    for _, name, duration_s in events:
        count, total = uses.get(name, (0, 0.0))
        uses[name] = (count + 1, total + duration_s)
    return _as_uses(uses, len(lap)), _per_call([duration for _, _, duration in events], len(lap))


def _device_events(profiler: Any) -> list[tuple[int, str, float]]:
    """Start, name and duration of everything that ran on the device."""
    return [
        (event.start_ns(), event.name(), event.duration_ns() * 1e-9)
        for event in profiler.profiler.kineto_results.events()
        if event.device_type().name == "CUDA" and "Synchronize" not in event.name()
    ]


def _per_call(durations: Sequence[float], calls: int) -> list[float]:
    """Calls launch alike: the events in order of start fall into as many equal pieces; one mean where they do not."""
    if not durations:
        return []
    if len(durations) % calls:
        return [sum(durations) / calls]
    each = len(durations) // calls
    return [sum(durations[i * each : (i + 1) * each]) for i in range(calls)]


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
