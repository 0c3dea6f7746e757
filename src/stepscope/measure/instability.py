"""What weakens a measurement, with its numbers and the next thing to try. Nothing is dropped for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stepscope.core.units import format_duration, format_share
from stepscope.records import MeasureSettings, Notice
from stepscope.stats import drift, find_outliers, summarize

OUTLIER_SHARE = 0.02
"""A few slow samples are ordinary; more than this share is worth a notice."""
OUTLIER_FACTOR = 1.2
DRIFT_SHARE = 0.05
LONGEST_ADVICE_S = 120.0
"""Longer times are not advised: the noise has to be removed instead."""


def find_notices(
    warmups: Sequence[float],
    times: Sequence[float],
    *,
    settled: bool,
    sample_s: float,
    resolution_s: float,
    settings: MeasureSettings,
) -> list[Notice]:
    """Times are seconds per iteration; `sample_s` is the shortest sample as the clock saw it."""
    candidates = (
        _unsettled(warmups, settled, settings),
        *judge_times(times, settings),
        _coarse_clock(sample_s, resolution_s, settings),
    )
    return [notice for notice in candidates if notice is not None]


OF_TIMES = frozenset({"few_samples", "wide_interval", "outliers", "drift"})
"""Kinds of notices that `judge_times` finds."""


def judge_times(times: Sequence[float], settings: MeasureSettings) -> list[Notice]:
    """What the samples themselves show; a case of several ranks has one series, whose interval is the case's."""
    candidates = (_few(times, settings), _wide(times, settings), _outliers(times), _drifting(times))
    return [notice for notice in candidates if notice is not None]


def find_queue_notices(starved: int, allocations: int, iterations: int) -> list[Notice]:
    """What was in the timed region that does not belong there: the host, and fetching memory."""
    notices = []
    if starved:
        notices.append(
            Notice(
                kind="queue_starved",
                message=f"the device waited for the host in {starved} samples: device time contains launches",
                hint="the call waits for the device inside; compare its wall time and its kernels",
            )
        )
    if allocations:
        notices.append(
            Notice(
                kind="allocations",
                message=f"memory was fetched {allocations} times in {iterations} iterations while timing",
                hint="results are larger than what is kept of freed memory; the time contains fetching it",
            )
        )
    return notices


def _unsettled(warmups: Sequence[float], settled: bool, settings: MeasureSettings) -> Notice | None:
    if settled or len(warmups) < 2 * settings.window:
        return None
    change, limit = drift(warmups[-2 * settings.window :]), format_duration(settings.warmup_max_time_s)
    return Notice(
        kind="not_warm",
        message=f"still changing by {format_share(change)} after {limit} of warm-up",
        hint="raise --warmup-max-time, or look for other load with `stepscope doctor`",
    )


def _few(times: Sequence[float], settings: MeasureSettings) -> Notice | None:
    if len(times) >= settings.min_samples:
        return None
    return Notice(
        kind="few_samples",
        message=f"only {len(times)} samples fit into {format_duration(settings.max_time_s)}",
        hint="raise --max-time for a narrower interval",
    )


def _wide(times: Sequence[float], settings: MeasureSettings) -> Notice | None:
    summary = summarize(times, settings.level)
    width = summary.relative_half_width
    if width <= settings.target_width:
        return None
    growth = (width / settings.target_width) ** 2
    digits = 1 if format_share(width) != format_share(settings.target_width) else 3
    needed_s = settings.max_time_s * growth
    longer = f", or allow --max-time {math.ceil(needed_s)}s" if needed_s <= LONGEST_ADVICE_S else ""
    if settings.fixed_samples:
        longer = f", or take --iterations {math.ceil(summary.n * growth)}"
    return Notice(
        kind="wide_interval",
        message=f"the interval is ±{format_share(width, digits)} after {summary.n} samples; "
        f"the target is ±{format_share(settings.target_width, digits)}",
        hint=f"close other programs (`stepscope doctor` lists the load){longer}",
    )


def _outliers(times: Sequence[float]) -> Notice | None:
    found = find_outliers(times)
    if len(found) <= OUTLIER_SHARE * len(times):
        return None
    summary = summarize(times)
    slowest = max(times[i] for i in found) / summary.median_s
    if slowest < OUTLIER_FACTOR:
        return None
    return Notice(
        kind="outliers",
        message=f"outliers are {len(found)} of {summary.n} samples, the slowest {slowest:.1f} times "
        "the median; all are kept",
        hint="look for periodic work on this machine (other processes, swap, power management)",
    )


def _drifting(times: Sequence[float]) -> Notice | None:
    if len(times) < 10:
        return None
    change, summary = drift(times), summarize(times)
    direction = "slower" if change > 0 else "faster"
    if abs(change) <= max(DRIFT_SHARE, 2 * summary.relative_half_width):
        return None
    return Notice(
        kind="drift",
        message=f"the later half is {format_share(abs(change))} {direction} than the earlier",
        hint="clocks, heat or other load are moving: see the readings of this case, let the machine settle, repeat",
    )


def _coarse_clock(sample_s: float, resolution_s: float, settings: MeasureSettings) -> Notice | None:
    share = resolution_s / sample_s if sample_s > 0 else 1.0
    if share <= settings.resolution_share:
        return None
    return Notice(
        kind="coarse_clock",
        message=f"the clock's step is {format_share(share)} of a sample of {format_duration(sample_s)}",
        hint="measure more iterations per sample",
    )
