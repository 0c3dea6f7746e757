"""Comparisons as sentences."""

from __future__ import annotations

from collections import Counter

from stepscope.compare.verdict import CaseComparison, Comparison, Verdict
from stepscope.core.units import format_ratio, format_share

ORDER: tuple[Verdict, ...] = ("worse", "better", "no difference found", "not enough data")


def describe(row: CaseComparison, name_a: str = "A", name_b: str = "B") -> str:
    """One sentence with factor, interval and n; the faster side is the subject, as people speak."""
    count = f"n = {row.n_a} and {row.n_b} in {row.processes_a} and {_plural(row.processes_b, 'process', 'processes')}"
    if row.ratio is None or row.ci_low is None or row.ci_high is None:
        return f"{row.label}: not enough data: {row.reason}."
    if row.verdict in ("better", "worse"):
        inverse = row.verdict == "worse"
        faster, slower = (name_a, name_b) if inverse else (name_b, name_a)
        factor = row.ratio if inverse else 1 / row.ratio
        low, high = (row.ci_low, row.ci_high) if inverse else (1 / row.ci_high, 1 / row.ci_low)
        spread = f"{factor:.2f} ± {max(high - factor, factor - low):.2f}"
        return (
            f"{row.label}: {faster} ran {spread} times faster than {slower} "
            f"({row.statistic} times, {low:.2f} to {high:.2f}, {count})."
        )
    told = f"{name_b} took {format_ratio(row.ratio)} the {row.statistic} time of {name_a}"
    interval = f"({format_ratio(row.ci_low)} to {format_ratio(row.ci_high)}, {count})"
    return f"{row.label}: {row.verdict}: {told} {interval}; {row.reason}."


def describe_comparison(comparison: Comparison) -> str:
    """The closing sentence: how many of each, at which level."""
    if not comparison.rows:
        return "The two runs share no case, so nothing was compared."
    counts = Counter(row.verdict for row in comparison.rows)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict])
    cases = _plural(len(comparison.rows), "case", "cases")
    alone = len(comparison.only_a) + len(comparison.only_b)
    missing = f"; {_plural(alone, 'case is', 'cases are')} on one side only" if alone else ""
    chance = f"the chance of even one false alarm among them is at most {format_share(comparison.level)}"
    return f"Of {cases}: {told}; {chance}{missing}."


def _plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
