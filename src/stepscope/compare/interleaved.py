"""Verdicts from two runs whose fresh processes took turns, pair by pair."""

from __future__ import annotations

from stepscope.compare.verdict import DEFAULT_FAMILY_LEVEL, DEFAULT_RESOLUTION, Comparison, Pair, compare_pairs
from stepscope.core.errors import UsageError
from stepscope.store import MeasuredCase, StoredRun


def compare_interleaved(
    a: StoredRun, b: StoredRun, *, level: float = DEFAULT_FAMILY_LEVEL, resolution: float = DEFAULT_RESOLUTION
) -> Comparison:
    """Verdicts from pairs of processes; the cases of the two sides pair up by key, else by their order.

    Only differences inside the pairs count: what the machine did to both at that hour cancels.
    """
    cases_a, cases_b = a.cases(), b.cases()
    keys_b = {case.key: case for case in cases_b}
    if all(case.key in keys_b for case in cases_a):
        pairs = [(case, keys_b[case.key]) for case in cases_a]
    elif len(cases_a) == len(cases_b):
        pairs = list(zip(cases_a, cases_b, strict=True))
    else:
        raise UsageError(
            f"side A has {len(cases_a)} cases and side B has {len(cases_b)}, and they do not pair up",
            hint="give both sides the same number of shapes or sizes",
        )
    labelled = [Pair(one, other, _label(one, other)) for one, other in pairs]
    return compare_pairs(labelled, level=level, resolution=resolution, same_system=False, paired=True)


def _label(a: MeasuredCase, b: MeasuredCase) -> str:
    return a.result.case.label if a.key == b.key else f"{a.result.case.label} | {b.result.case.label}"
