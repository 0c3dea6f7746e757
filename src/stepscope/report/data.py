"""Results for programs: CSV with one row a case, and the whole view model as JSON."""

from __future__ import annotations

import csv
import io

import msgspec

from stepscope.records.kinds import ModelObserved
from stepscope.report.generation import FACTS, GenerationFact, is_served_late
from stepscope.report.text import plain
from stepscope.report.view import CaseView, Report, RunView, SystemView

CsvValue = str | int | float | None


def render_json(report: Report) -> str:
    """One line and a newline; sample series are thinned as the view says."""
    content = msgspec.to_builtins(report)
    for system in content["systems"]:
        for case in system["cases"]:  # which says the same by name
            del case["spec"], case["found"]
    return msgspec.json.encode(content).decode() + "\n"


def render_csv(report: Report) -> str:
    """One line a case, SI units, no rounding, empty where there is no value.

    `parameters`, `observed` and `kernels` are JSON.
    """
    rows = [
        {
            **_run_fields(runs[case.run_id], system),
            **_case_fields(case),
            **_time_fields(case),
            **_other_fields(case),
            **_operator_fields(case),
            **_arrival_fields(case),
            **_workload_fields(case),
            **{fact.name: _as_counted(fact, case) for fact in FACTS},
            "serving_missed_latency": _yes_no(is_served_late(case)),
        }
        for system in report.systems
        for runs in [{run.id: run for run in system.runs}]
        for case in system.cases
    ]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=CSV_COLUMNS, lineterminator="\n")
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
        "score": case.score,
        "unit": case.unit,
        "missed_latency": _yes_no(case.missed_latency),
    }


def _time_fields(case: CaseView) -> dict[str, CsvValue]:
    names = ("n", "median_s", "ci_low_s", "ci_high_s", "level", "mean_s", "stdev_s", "min_s", "max_s", "p95_s", "p99_s")
    timing = case.timing
    fields: dict[str, CsvValue] = {name: getattr(timing.summary, name) if timing else None for name in names}
    fields["outliers"] = timing.summary.outliers if timing else None
    fields["drift"] = timing.drift if timing else None
    fields["device_median_s"] = timing.device_median_s if timing else None
    return fields


def _other_fields(case: CaseView) -> dict[str, CsvValue]:
    return {
        "size_bytes": _whole(case.size_bytes),
        "algbw_bytes_per_s": case.algbw_bytes_per_s,
        "busbw_bytes_per_s": case.busbw_bytes_per_s,
        "wrong": case.wrong,
        "observed": msgspec.json.encode(case.observed).decode(),
        "notices": len(case.notices),
        "started_at": case.started_at,
        "elapsed_s": case.elapsed_s,
        "failure_kind": plain(case.failure.kind) if case.failure is not None else None,
        "failure_message": plain(case.failure.message) if case.failure is not None else None,
    }


def _operator_fields(case: CaseView) -> dict[str, CsvValue]:
    return {
        "timing": case.timing_kind,
        "wall_median_s": case.wall_median_s,
        "graph_median_s": case.graph_median_s,
        "kernel_median_s": case.kernel_median_s,
        "intensity_flops_per_byte": case.intensity,
        "flops_per_s": case.flops_per_s,
        "bytes_per_s": case.bytes_per_s,
        "compute_share": case.compute_share,
        "memory_share": case.memory_share,
        "is_ceiling": _yes_no(case.is_ceiling),
        "kernels": msgspec.json.encode(case.kernels).decode(),
    }


def _arrival_fields(case: CaseView) -> dict[str, CsvValue]:
    return {
        "skew_s": case.skew_s,
        "straggler_rank": case.straggler_rank,
        "straggler_share": case.straggler_share,
    }


def _workload_fields(case: CaseView) -> dict[str, CsvValue]:
    return {
        "loader_score": case.loader_score,
        "input_share": case.input_share,
        "mfu": case.mfu,
        "peak_memory_bytes": case.found.peak_memory_bytes if isinstance(case.found, ModelObserved) else None,
        "energy_j_per_example": case.found.energy_j_per_example if isinstance(case.found, ModelObserved) else None,
    }


def _as_counted(fact: GenerationFact, case: CaseView) -> float | None:
    return _whole(fact.read(case)) if fact.kind == "count" else fact.read(case)


def _whole(value: float | None) -> float | None:
    return int(value) if value is not None and float(value).is_integer() else value


def _yes_no(value: bool | None) -> str | None:
    return None if value is None else ("true" if value else "false")


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
