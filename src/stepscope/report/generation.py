"""What is said below tables of models that generate text."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.report.view import CaseView


def generates(case: CaseView) -> bool:
    return "ttft_p50_s" in case.metrics


def is_served_late(case: CaseView) -> bool:
    """False where no requests came, or nothing limits how long they take."""
    return bool(case.value("serving_missed_latency"))


def explain_generation(cases: Sequence[CaseView]) -> list[str]:
    """Sentences without a full stop, for below a table in which text is generated."""
    if not any(generates(case) for case in cases):
        return []
    lines = ["TTFT: time to first token, on which the latency limit is; TPOT: each token after it"]
    if any(generates(case) and case.latency_target is not None for case in cases):
        lines.append("P95 and P99 of a model that generates: from the prompts to the last token")
    if any("serving_requests" in case.metrics for case in cases):
        lines.append("Served: requests that came at their own pace, after the timed batches; waiting is included")
    return lines
