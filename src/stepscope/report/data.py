"""Results for programs: CSV with one row per case, and the whole view model as JSON."""

from __future__ import annotations

import csv
import io
from typing import Any

import msgspec

from stepscope.metrics import Value, list_metrics
from stepscope.report.table import plain
from stepscope.report.view import CaseView, Report, RunView, SystemView
from stepscope.stats import Summary
from stepscope.store import TPOT, TTFT

CsvValue = str | int | float | None


def render_json(report: Report) -> str:
    """One line and a newline; sample series are thinned as the view says. Metrics stand among the fields of a case."""
    content = msgspec.to_builtins(report)
    for system, view in zip(content["systems"], report.systems, strict=True):
        system["cases"] = [_json_case(fields, case) for fields, case in zip(system["cases"], view.cases, strict=True)]
    return msgspec.json.encode(content).decode() + "\n"


def _json_case(fields: dict[str, Any], case: CaseView) -> dict[str, Any]:
    values = {name: case.metrics.get(name) for name in list_metrics() if name not in Summary.__struct_fields__}
    kept = {name: value for name, value in fields.items() if name not in _VIEW_ONLY}
    tokens = {
        f"{name}_s": {point: case.value(f"{name}_{point}_s") for point in ("p50", "p95", "p99")}
        for name in (TTFT, TPOT)
        if f"{name}_p50_s" in case.metrics
    }
    return {**kept, **values, "intensity": values["intensity_flops_per_byte"], **tokens}


_VIEW_ONLY = frozenset({"spec", "found", "metrics", "marks", "untabled"})


def render_csv(report: Report) -> str:
    """One line per case, SI units, no rounding, empty where there is no value.

    `parameters`, `observed` and `kernels` are JSON.
    """
    rows = [
        {
            **{name: _as_cell(case.metrics.get(name)) for name in list_metrics()},
            **_run_fields(runs[case.run_id], system),
            **_case_fields(case),
        }
        for system in report.systems
        for runs in [{run.id: run for run in system.runs}]
        for case in system.cases
    ]
    out = io.StringIO()
    added = [name for name in list_metrics() if name not in CSV_COLUMNS]
    writer = csv.DictWriter(out, fieldnames=[*CSV_COLUMNS, *added], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _run_fields(run: RunView, system: SystemView) -> dict[str, CsvValue]:
    return {
        "run_id": plain(run.id),
        "run_created_at": plain(run.created_at),
        "run_status": plain(run.status),
        "system_fingerprint": system.fingerprint,
        "system_name": plain(system.name),
    }


def _case_fields(case: CaseView) -> dict[str, CsvValue]:
    return {
        "benchmark": case.benchmark,
        "benchmark_version": case.version,
        "model": case.model,
        "implementation": case.implementation,
        "mode": case.mode,
        "config": case.config,
        "case_key": case.key,
        "parameters": msgspec.json.encode(case.parameters).decode(),
        "batch_size": case.batch_size,
        "world_size": case.world_size,
        "status": case.status,
        "unit": case.unit,
        "observed": msgspec.json.encode(case.observed).decode(),
        "notices": len(case.notices),
        "started_at": case.started_at,
        "elapsed_s": case.elapsed_s,
        "failure_kind": plain(case.failure.kind) if case.failure is not None else None,
        "failure_message": plain(case.failure.message) if case.failure is not None else None,
        "timing": case.timing_kind,
        "is_ceiling": _as_cell(case.is_ceiling),
        "kernels": msgspec.json.encode(case.kernels).decode(),
    }


def _as_cell(value: Value | None) -> CsvValue:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else value


CSV_COLUMNS = (
    "run_id", "run_created_at", "run_status", "system_fingerprint", "system_name",
    "benchmark", "benchmark_version", "model", "implementation", "mode", "config", "case_key", "parameters",
    "batch_size", "world_size", "status", "score", "unit", "missed_latency",
    "n", "median_s", "ci_low_s", "ci_high_s", "level", "mean_s", "stdev_s", "min_s", "max_s", "p95_s", "p99_s",
    "outliers", "drift", "device_median_s",
    "size_bytes", "algbw_bytes_per_s", "busbw_bytes_per_s", "wrong",
    "observed", "notices", "started_at", "elapsed_s", "failure_kind", "failure_message",
    "timing", "wall_median_s", "graph_median_s", "kernel_median_s",
    "intensity_flops_per_byte", "flops_per_s", "bytes_per_s", "compute_share", "memory_share", "is_ceiling", "kernels",
    "skew_s", "straggler_rank", "straggler_share",
    "loader_score", "input_share", "mfu", "peak_memory_bytes", "energy_j_per_example",
    "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "tpot_p50_s", "tpot_p95_s", "tpot_p99_s", "tokens_per_s",
    "serving_requests", "serving_offered_per_s", "serving_achieved_per_s",
    "serving_ttft_p50_s", "serving_ttft_p95_s", "serving_ttft_p99_s",
    "serving_tpot_p50_s", "serving_tpot_p95_s", "serving_tpot_p99_s",
    "serving_latency_p50_s", "serving_latency_p95_s", "serving_latency_p99_s",
    "serving_longest_queue", "serving_busy_share", "serving_missed_latency",
)  # fmt: skip
"""In this order; columns may be added at the end, never moved: readers may count on it."""
