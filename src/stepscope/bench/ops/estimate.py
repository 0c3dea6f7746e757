"""What a sweep would take, before it is run: from the declared work and a glimpse at what this machine does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepscope.bench.ops.build import read_case
from stepscope.bench.ops.producer import MEMORY_SHARE
from stepscope.core.units import format_bytes
from stepscope.measure import MeasureSettings, free_memory_bytes, last_level_cache_bytes, open_device
from stepscope.records import Case
from stepscope.run.ranks import CaseSkipped

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
    """Of a call that does nothing to speak of."""


def estimate_cases(cases: Sequence[Case], *, device: str, settings: MeasureSettings, check: bool) -> list[PlannedCase]:
    rates = glimpse(device)
    free, cache = free_memory_bytes(device), last_level_cache_bytes(device)
    planned = []
    for case in cases:
        try:
            read_case(case).require(device)
        except CaseSkipped as skip:
            planned.append(PlannedCase(case, 0.0, 0.0, 0, str(skip)))
            continue
        planned.append(_estimate(case, rates, free=free, cache_bytes=cache, settings=settings, check=check))
    return planned


def glimpse(device: str) -> Rates:
    """Float32 rates of this machine from a few calls; a factor of two off is good enough here."""
    import torch

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


def _estimate(
    case: Case, rates: Rates, *, free: int, cache_bytes: int, settings: MeasureSettings, check: bool
) -> PlannedCase:
    wanted = read_case(case)
    work = wanted.work
    iteration_s = rates.call_s + max(work.flops / rates.flops_per_s, work.bytes / rates.bytes_per_s)
    needed = wanted.memory_bytes(wanted.rotation(cache_bytes), check=check)
    if needed > MEMORY_SHARE * free:
        skip = f"needs {format_bytes(needed)}, {format_bytes(free)} are free"
        return PlannedCase(case, iteration_s, 0.0, needed, skip)
    sample_s = max(iteration_s, settings.min_sample_s)
    sampling_s = min(max(settings.min_samples * sample_s, settings.min_time_s), settings.max_time_s + sample_s)
    checking_s = CHECK_ITERATIONS * iteration_s if check else 0.0
    case_s = CASE_OVERHEAD_S + (CALIBRATING + WARMING) * sample_s + sampling_s + checking_s
    return PlannedCase(case, iteration_s, case_s, needed, None)
