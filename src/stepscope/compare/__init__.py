"""Verdicts between runs, gates for CI, and the sentences that tell them."""

from stepscope.compare.gate import GateResult, GateRow, check_regression
from stepscope.compare.runs import compare_runs
from stepscope.compare.verdict import (
    DEFAULT_FAMILY_LEVEL,
    DEFAULT_RESOLUTION,
    MIN_EFFECT,
    MIN_SAMPLES,
    STATISTICS,
    CaseComparison,
    Comparison,
    Pair,
    Verdict,
    compare_cases,
    compare_pairs,
    estimate_ratios,
    lead_estimate,
)
from stepscope.compare.views import compare_implementations, pair_ootb_optimized
from stepscope.compare.wording import describe, describe_comparison

__all__ = [
    "DEFAULT_FAMILY_LEVEL",
    "DEFAULT_RESOLUTION",
    "MIN_EFFECT",
    "MIN_SAMPLES",
    "STATISTICS",
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
    "compare_runs",
    "describe",
    "describe_comparison",
    "estimate_ratios",
    "lead_estimate",
    "pair_ootb_optimized",
]
