"""How many processes a candidate needs before it can be compared with its baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stepscope.compare.sides import read_sides, slow_phase_chance
from stepscope.compare.verdict import DEFAULT_FAMILY_LEVEL, STATISTICS, leave_out_tries
from stepscope.stats import compare_processes, plan_processes
from stepscope.store import MeasuredCase


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
        b.result.case.label: _plan_case(a, b, math.log1p(resolution), level / len(pairs), same_system=same_system)
        for a, b in pairs
    }


def _plan_case(a: MeasuredCase, b: MeasuredCase, log_effect: float, level: float, *, same_system: bool) -> int | None:
    before, after = read_sides(a, b, same_system=same_system)
    if len(before.processes) < 2:
        return None
    fast_end = STATISTICS[0]
    return plan_processes(
        compare_processes(before.seconds, after.seconds, quantile=fast_end.quantile).between_sd,
        log_effect,
        level * fast_end.weight,
        slow_chance=slow_phase_chance(before, after, same_system=same_system),
        other=len(before.processes),
    )
