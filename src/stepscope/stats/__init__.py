"""Summaries, intervals, significance: pure functions on numbers."""

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
    "Summary",
    "drift",
    "find_outliers",
    "median_interval",
    "quantile_sorted",
    "summarize",
]
