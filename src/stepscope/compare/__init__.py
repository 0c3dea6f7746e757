"""Verdicts between runs, gates for CI, and the sentences that tell them."""

from stepscope.compare.gate import GateResult, GateRow, check_regression
from stepscope.compare.verdict import (
    CROWDED_SHARE,
    DEFAULT_FAMILY_LEVEL,
    MIN_EFFECT,
    MIN_SAMPLES,
    RESOLUTION,
    CaseComparison,
    Comparison,
    Pair,
    Verdict,
    compare_cases,
    compare_pairs,
)
from stepscope.compare.views import compare_implementations, compare_systems, pair_ootb_optimized
from stepscope.compare.wording import describe, describe_comparison

__all__ = [
    "CROWDED_SHARE",
    "DEFAULT_FAMILY_LEVEL",
    "MIN_EFFECT",
    "MIN_SAMPLES",
    "RESOLUTION",
    "CaseComparison",
    "Comparison",
    "GateResult",
    "GateRow",
    "Pair",
    "Verdict",
    "check_regression",
    "compare_cases",
    "compare_implementations",
    "compare_pairs",
    "compare_systems",
    "describe",
    "describe_comparison",
    "pair_ootb_optimized",
]
