"""What is known of a model that writes text, declared once for tables, the page and CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from stepscope.records.kinds import Serving, WorkloadObserved
from stepscope.report.view import CaseView

Kind = Literal["time", "rate", "share", "count"]


class GenerationFact(NamedTuple):
    name: str
    """Of its column in CSV."""
    title: str
    """Of its column in tables; empty: it has none."""
    read: Callable[[CaseView], float | None]
    kind: Kind = "time"
    hint: str = ""
    detail: bool = True
    """Tables may leave it out where there is no room."""
    judged: bool = False
    """Carries `*` where requests were answered too late."""


def _first(point: str) -> Callable[[CaseView], float | None]:
    return lambda case: case.ttft_s.get(point)


def _later(point: str) -> Callable[[CaseView], float | None]:
    return lambda case: case.tpot_s.get(point)


def _served(name: str, title: str, kind: Kind = "time", hint: str = "", **changes: bool) -> GenerationFact:
    """A field of what was found while requests were served."""

    def read(case: CaseView) -> float | None:
        serving = find_serving(case)
        value: float | None = getattr(serving, name) if serving is not None and case.timing is not None else None
        return value

    return GenerationFact(f"serving_{name}", title, read, kind, hint, **changes)


def find_serving(case: CaseView) -> Serving | None:
    return case.found.serving if isinstance(case.found, WorkloadObserved) else None


def _read_token_rate(case: CaseView) -> float | None:
    return case.found.tokens_per_s if case.timing is not None and isinstance(case.found, WorkloadObserved) else None


FACTS = (
    GenerationFact("ttft_p50_s", "TTFT", _first("p50"), "time", "Time to first token of a batch, median", detail=False),
    GenerationFact("ttft_p95_s", "", _first("p95")),
    GenerationFact("ttft_p99_s", "TTFT P99", _first("p99"), "time", "The latency limit is on the time to first token"),
    GenerationFact("tpot_p50_s", "TPOT", _later("p50"), "time", "Time of each token after the first, median", False),
    GenerationFact("tpot_p95_s", "", _later("p95")),
    GenerationFact("tpot_p99_s", "", _later("p99")),
    GenerationFact("tokens_per_s", "Tokens/s", _read_token_rate, "rate",
                   "New tokens of all sequences over time, prefill included", detail=False),
    _served("requests", "Requests", "count", "That came, each at its own moment"),
    _served("offered_per_s", "Offered/s", "rate", "Requests that came a second"),
    _served("achieved_per_s", "Reached/s", "rate", "Requests answered a second", detail=False),
    _served("ttft_p50_s", ""),
    _served("ttft_p95_s", ""),
    _served("ttft_p99_s", "Served TTFT P99", "time", "From arrival to first token, waiting included",
          detail=False, judged=True),
    _served("tpot_p50_s", ""),
    _served("tpot_p95_s", ""),
    _served("tpot_p99_s", ""),
    _served("latency_p50_s", ""),
    _served("latency_p95_s", ""),
    _served("latency_p99_s", "Served P99", "time", "From arrival to last token, waiting included"),
    _served("longest_queue", "Queue", "count", "Most requests that waited at one moment"),
    _served("busy_share", "Busy", "share", "Share of the time in which the server worked"),
)  # fmt: skip
"""In the order of columns."""


def generates(case: CaseView) -> bool:
    return bool(case.ttft_s)


def is_served_late(case: CaseView) -> bool | None:
    """None where no requests came, or nothing limits how long they take."""
    serving = find_serving(case)
    return serving.missed_latency if serving is not None else None


def explain_generation(cases: Sequence[CaseView]) -> list[str]:
    """Sentences without a full stop, for below a table in which text is generated."""
    if not any(generates(case) for case in cases):
        return []
    lines = ["TTFT: time to first token, on which the latency limit is; TPOT: each token after it"]
    if any(generates(case) and case.latency_target is not None for case in cases):
        lines.append("P95 and P99 of a model that generates: from the prompts to the last token")
    if any(find_serving(case) is not None for case in cases):
        lines.append("Served: requests that came at their own pace, after the timed batches; waiting is included")
    return lines
