"""Latency limits: what they are on, and which rows missed them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepscope.core.units import format_duration
from stepscope.report.generation import generates, is_served_late
from stepscope.report.view import CaseView


def describe_target(case: CaseView) -> str | None:
    """`p95 of a batch ≤ 20 ms`, where the benchmark has a latency target."""
    if case.timing is None:  # nobody knows what it would have been judged by
        return _describe(case, "")
    return _describe(case, " of TTFT" if generates(case) else " of a batch")


def _describe(case: CaseView, what: str) -> str | None:
    target = case.latency_target
    return f"p{target.percentile:g}{what} ≤ {format_duration(target.limit_s)}" if target is not None else None


def explain_stars(cases: Sequence[CaseView]) -> list[str]:
    """What each `*` of a table says, without the mark itself; one sentence a limit, without a full stop."""
    batches = _group(cases, lambda case: bool(case.missed_latency), describe_target)
    served = _group(
        cases, lambda case: bool(is_served_late(case)), lambda case: _describe(case, " of TTFT with waiting")
    )
    return [
        *(f"missed its latency limit, {limit}: {names}" for limit, names in batches),
        *(
            f"at Served TTFT: missed {limit}, or more was offered than full batches do: {names}"
            for limit, names in served
        ),
    ]


def _group(
    cases: Sequence[CaseView], is_late: Callable[[CaseView], bool], describe: Callable[[CaseView], str | None]
) -> list[tuple[str, str]]:
    """Limits, and the benchmarks that missed each."""
    found: dict[str, dict[str, None]] = {}
    for case in cases:
        if is_late(case):
            found.setdefault(describe(case) or "its latency limit", {})[case.benchmark] = None
    return [(limit, ", ".join(names)) for limit, names in found.items()]
