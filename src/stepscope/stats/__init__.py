"""Summaries, intervals, significance: pure functions on numbers."""

from stepscope.stats.significance import (
    ASSUMED_BETWEEN_SD,
    SPELL_CHANCE,
    SPELL_CHANCE_PROBED,
    SPELL_LOG,
    Noise,
    RatioEstimate,
    compare_paired,
    compare_processes,
    holm,
    holm_levels,
    quiet_time,
    t_quantile,
    t_two_sided,
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
    "ASSUMED_BETWEEN_SD",
    "DEFAULT_LEVEL",
    "SPELL_CHANCE",
    "SPELL_CHANCE_PROBED",
    "SPELL_LOG",
    "Noise",
    "RatioEstimate",
    "Summary",
    "compare_paired",
    "compare_processes",
    "drift",
    "find_outliers",
    "holm",
    "holm_levels",
    "median_interval",
    "quantile_sorted",
    "quiet_time",
    "summarize",
    "t_quantile",
    "t_two_sided",
]
