"""A yes, a no, or "cannot tell" for CI: has anything become slower than the limit allows?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from stepscope.compare.sides import choose_processes, read_processes, slow_phase_chance
from stepscope.compare.verdict import (
    DEFAULT_FAMILY_LEVEL,
    PASS_LEVEL,
    STATISTICS,
    CaseComparison,
    Comparison,
    leave_out_tries,
)
from stepscope.core.errors import ExitCode, UsageError
from stepscope.core.units import format_ratio, format_share
from stepscope.stats import compare_processes, plan_processes
from stepscope.store import MeasuredCase

Outcome = Literal["pass", "regression", "undecided"]


class GateRow(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    outcome: Outcome
    reason: str
    """One sentence."""
    row: CaseComparison | None = None
    """None for a case that the candidate does not have."""


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    exit_code: int
    max_regression: float
    rows: list[GateRow]


def check_regression(comparison: Comparison, max_regression: float) -> GateResult:
    """The verdict of a gate on a comparison: pass, regression, or undecided, for each case and for the whole.

    `comparison`: A is the baseline, B the candidate. `max_regression`: a fraction; 0.05 allows up to 5 % more time.

    A case is a *regression* when one of its statistics (p10, median, p95) is significantly worse and that ratio is
    above 1 + max_regression, or when it worked in the baseline and fails in the candidate. It *passes* when the upper
    bound of its p10 ratio (one-sided, 95 %) is within the limit. Else it is *undecided*: the data allow both. One
    regression makes the whole a regression; without one, one undecided case makes it undecided. A case that failed in
    the baseline has nothing to be compared with and passes where the candidate is no worse off; a case skipped on both
    sides passes too.

    >>> stepscope.check_regression(stepscope.compare("latest", "latest"), 0.5).outcome in {"pass", "undecided"}
    True
    """
    if max_regression < 0:
        raise UsageError(
            f"the largest allowed regression {max_regression} is below zero", hint="write for example 5% or 0.05"
        )
    rows = []
    for row in comparison.rows:
        outcome, reason = _check_status(row) or _check_ratio(row, 1 + max_regression)
        rows.append(GateRow(label=row.label, outcome=outcome, reason=reason, row=row))
    rows += [
        GateRow(label=label, outcome="undecided", reason="the candidate does not have this case")
        for label in comparison.only_a
    ]
    if not rows:
        rows = [GateRow(label="all", outcome="undecided", reason="baseline and candidate share no case")]
    outcomes = {row.outcome for row in rows}
    overall: Outcome = next((o for o in ("regression", "undecided") if o in outcomes), "pass")
    codes = {"pass": ExitCode.DONE, "regression": ExitCode.REGRESSION, "undecided": ExitCode.UNDECIDED}
    return GateResult(outcome=overall, exit_code=codes[overall], max_regression=max_regression, rows=rows)


def _check_status(row: CaseComparison) -> tuple[Outcome, str] | None:
    """None where both sides have samples to go by."""
    if row.status_a == "ok" and row.status_b == "failed":
        return "regression", f"it worked in the baseline and fails in the candidate; {row.reason}"
    if row.status_a == "ok" and row.status_b == "skipped":
        return "undecided", row.reason
    if row.status_a != "ok":
        said = "was skipped" if row.status_a == "skipped" else "failed"
        return "pass", f"the baseline has no time to be compared with: the case {said} there"
    return None


def _check_ratio(row: CaseComparison, limit: float) -> tuple[Outcome, str]:
    if row.upper_bound is None or not row.statistics:
        return "undecided", row.reason
    allowed = f"{format_share(limit - 1)} more time is allowed"
    slower = max(row.statistics, key=lambda one: one.ratio if one.significant else 0.0)
    if slower.significant and slower.ratio > limit:
        interval = f"{format_ratio(slower.ci_low)} to {format_ratio(slower.ci_high)}"
        return "regression", f"{slower.name} time {format_ratio(slower.ratio)} ({interval}), {allowed}"
    ratio = row.statistics[0].ratio
    told = f"p10 time {format_ratio(ratio)}, at most {format_ratio(row.upper_bound)} (95 %), {allowed}"
    if row.upper_bound <= limit:
        return "pass", told
    return "undecided", f"{told}; {_tell_next(row, math.log(limit / ratio))}"


def _tell_next(row: CaseComparison, distance: float) -> str:
    """How many processes would bring the upper bound below the limit, should the ratio stay as it is."""
    if row.verdict == "not enough data":
        return row.reason
    if distance <= 0 or row.between_bound is None:
        return f"the ratio is above the limit, but noise could have done that: {row.reason}"
    needed = plan_processes(row.between_bound, distance, 2 * PASS_LEVEL)
    return f"{needed} processes per side would tell (--processes {needed})" if needed else row.reason


def plan_candidate(
    baseline: Sequence[MeasuredCase],
    candidate: Sequence[MeasuredCase],
    *,
    resolution: float,
    level: float = DEFAULT_FAMILY_LEVEL,
    same_system: bool = True,
) -> dict[str, int | None]:
    """Processes that show a change by `resolution`, by the label of each case; None where the baseline has too few.

    Only the noise is looked at, never the difference: stopping by what was found would favour finding something.
    """
    by_key = {case.key: case for case in leave_out_tries(baseline) if case.result.status == "ok"}
    pairs = [(by_key[case.key], case) for case in candidate if case.key in by_key and case.result.status == "ok"]
    return {
        b.result.case.label: _plan_one(a, b, math.log1p(resolution), level / len(pairs), same_system=same_system)
        for a, b in pairs
    }


def _plan_one(a: MeasuredCase, b: MeasuredCase, log_effect: float, level: float, *, same_system: bool) -> int | None:
    before, after = choose_processes(read_processes(a), read_processes(b), same_system=same_system)
    if len(before.processes) < 2:
        return None
    fast_end = STATISTICS[0]
    noise = compare_processes(before.seconds, after.seconds, quantile=fast_end.quantile)

    def plan(spread: float) -> int | None:
        return plan_processes(
            spread,
            log_effect,
            level * fast_end.weight,
            slow_chance=slow_phase_chance(before, after, same_system=same_system),
            other=len(before.processes),
        )

    # Where the baseline is too small for the largest spread that there may be, the likely one is planned for.
    return plan(noise.between_bound) or plan(noise.between_sd)
