"""Summaries, intervals, significance: pure functions on numbers."""

from stepscope.stats.significance import (
    BetweenSource,
    Noise,
    RatioEstimate,
    compare_paired,
    compare_processes,
    holm,
    holm_levels,
    is_disturbed,
    quiet_time,
)
from stepscope.stats.summary import (
    DEFAULT_LEVEL,
    Summary,
    drift,
    find_outliers,
    median_interval,
    quantile_sorted,
    summarize,
)

__all__ = [
    "DEFAULT_LEVEL",
    "BetweenSource",
    "Noise",
    "RatioEstimate",
    "Summary",
    "compare_paired",
    "compare_processes",
    "drift",
    "find_outliers",
    "holm",
    "holm_levels",
    "is_disturbed",
    "median_interval",
    "quantile_sorted",
    "quiet_time",
    "summarize",
]
