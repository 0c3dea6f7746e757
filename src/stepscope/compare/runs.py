"""Two stored runs beside each other."""

from __future__ import annotations

import msgspec

from stepscope.compare.verdict import DEFAULT_FAMILY_LEVEL, DEFAULT_RESOLUTION, Comparison, compare_cases
from stepscope.store import StoredRun


def compare_runs(
    a: StoredRun, b: StoredRun, *, level: float = DEFAULT_FAMILY_LEVEL, resolution: float = DEFAULT_RESOLUTION
) -> Comparison:
    """Verdicts for every case that both have."""
    same_system = _place(a) == _place(b)
    found = compare_cases(a.cases(), b.cases(), level=level, resolution=resolution, same_system=same_system)
    return msgspec.structs.replace(found, notes=[*found.notes, *_check_notes(a, b)])


def _place(run: StoredRun) -> tuple[str, str] | None:
    return run.system.place if run.system else None


def _check_notes(a: StoredRun, b: StoredRun) -> list[str]:
    """Results that are compared between the timed calls may leave other data in the caches."""
    checks = [run.plan.request.get("check") for run in (a, b)]
    if checks[0] == checks[1] or None in checks:
        return []
    told = f"A was measured with --check {checks[0]} and B with --check {checks[1]}"
    return [f"{told}; measure both sides with the same one to be sure that a difference is not the check's"]
