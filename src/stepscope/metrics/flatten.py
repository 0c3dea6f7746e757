"""One measured case by names: what programs see in JSON, CSV and SQL."""

from __future__ import annotations

import math
from typing import Any

from stepscope.metrics.registry import (
    CaseInput,
    Failed,
    Metric,
    Outcome,
    Value,
    evaluate_case,
    list_metrics,
    read_value,
)
from stepscope.stats import Summary
from stepscope.store import TPOT, TTFT


def flatten_case(case: CaseInput) -> dict[str, Any]:
    """Times in seconds, sizes in bytes; facts and metrics under the names that they have everywhere."""
    measured, result, outcomes = case.measured, case.result, evaluate_case(case)
    asked = result.case
    content: dict[str, Any] = {
        "key": asked.key,
        "label": asked.label,
        "benchmark": asked.benchmark.id,
        "version": asked.benchmark.version,
        "kind": asked.spec.kind,
        "parameters": asked.parameters,
        "batch_size": asked.batch_size,
        "world_size": asked.world_size,
        "status": result.status,
        "samples_s": measured.seconds(),
        "device_samples_s": measured.device_seconds(),
        "summary": measured.summary(),
        "unit": result.score.unit if result.score else None,
        "notices": result.notices,
        "failure": result.failure,
        "readings": result.readings,
        "timing": result.timing,
        "kernels": result.kernels,
        **list_values(case, outcomes),
        **result.facts,
    }
    failed = {name: found.cause for name, found in outcomes.items() if isinstance(found, Failed)}
    return content | _list_times(case) | ({"failed_metrics": failed} if failed else {})


def list_values(case: CaseInput, outcomes: dict[str, Outcome]) -> dict[str, Value | None]:
    """Metrics of the case's kind; None where one does not apply to it. Statistics of its times have their own place."""
    kind = case.result.case.spec.kind
    return {
        name: read_value(outcomes[name])
        for name, one in list_metrics().items()
        if name not in Summary.__struct_fields__ and (not one.kinds or kind in one.kinds)
    }


def _list_times(case: CaseInput) -> dict[str, Any]:
    """Those that are more than one number."""
    measured, result = case.measured, case.result
    content: dict[str, Any] = {}
    if result.latency_target is not None:
        content |= {"latency_s": measured.latency_s(), "latency_target": result.latency_target}
        content |= {f"{name}_s": measured.latency_s(name) for name in (TTFT, TPOT) if measured.extra_seconds(name)}
    if result.timing.startswith("slowest_rank"):
        means = measured.rank_means_s()
        content |= {"latency_s": measured.latency_s(), "parts_s": measured.parts_s()}
        content["rank_mean_s"] = [{"rank": rank, "mean_s": mean_s} for rank, mean_s in means.items()]
        content["mean_s"] = math.fsum(means.values()) / len(means) if means else None
        content["total_s"] = math.fsum(measured.seconds()) if means else None
    return content


def format_metrics_markdown() -> str:
    """The documentation's list of metrics."""
    lines = ["| name | column | unit | better | kinds | definition |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(_format_row(one) for one in list_metrics().values())])


def _format_row(one: Metric) -> str:
    kinds = ", ".join(kind.replace("_", " ") for kind in one.kinds) or "all"
    column = one.title if one.column != "none" else "–"
    better = "–" if one.better == "neither" else one.better
    unit = "–" if one.unit in {"count", "text", "yes/no", "fraction", "rank"} else one.unit
    return f"| `{one.name}` | {column} | {unit} | {better} | {kinds} | {one.formula} |"
