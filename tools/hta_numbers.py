"""What Holistic Trace Analysis says about some public traces, for tests/analyze/test_against_hta_numbers.py.

    /path/to/venv/bin/python tools/hta_numbers.py TRACES tests/analyze/data/hta_numbers.json

Run it with a Python that has the package `traceinsight` installed; Stepscope itself does not need it. TRACES is the
folder that holds `public/`. All times are in microseconds, as HTA gives them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

TRACES = {
    "nccl_data": "public/hta/nccl_parser_config/nccl_data.json.gz",
    "sampled": "public/hta/timeline_analysis/sampled_rank-0.json.gz",
    "alexnet": "public/hta/critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz",
    "linear": "public/param/linear_kineto.json.gz",
    "resnet": "public/param/resnet_kineto.json.gz",
    "dlrm0": "public/param/dlrm8_kineto/worker0_step_12.1694128201545.pt.trace.json.gz",
    "dlrm3": "public/param/dlrm8_kineto/worker3_step_12.1694128201557.pt.trace.json.gz",
}
NO_FOLDING = {"num_kernels": 1_000_000, "duration_ratio": 1.0}
"""Keeps every name apart: HTA's own folding replaces the statistics of each name by those of sums."""


def describe(path: Path) -> dict[str, Any]:
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir="/", include_last_profiler_step=True)
    temporal = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    types, kernels = analysis.get_gpu_kernel_breakdown(visualize=False, include_memory_kernels=True, **NO_FOLDING)
    found: dict[str, Any] = {
        "temporal": {name: float(temporal[f"{name}_time(us)"]) for name in ("idle", "compute", "non_compute")},
        "types": {row["kernel_type"]: float(row["sum"]) for _, row in types.iterrows()},
        "kernels": describe_kernels(kernels),
        "overlap_percent": describe_overlap(analysis),
        "launches": describe_launches(analysis.get_cuda_kernel_launch_stats(ranks=[0], visualize=False)[0]),
        "queue_max": describe_queue(analysis),
    }
    found["temporal"]["kernel"] = float(temporal["kernel_time(us)"])
    idle, _ = analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
    found["idle_by_stream"] = {
        f"{row['stream']}/{row['idle_category']}": float(row["idle_time"]) for _, row in idle.iterrows()
    }
    return found


def describe_overlap(analysis: Any) -> float | None:
    """None where HTA gives NaN: without communication."""
    percent = float(analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].iloc[0])
    return None if math.isnan(percent) else percent


def describe_kernels(frame: Any) -> list[dict[str, Any]]:
    """The five names with most time."""
    frame = frame.sort_values("sum (us)", ascending=False).head(5)
    return [
        {"name": row["name"], "type": row["kernel_type"]}
        | {key: float(row[f"{key} (us)"]) for key in ("sum", "mean", "min", "max")}
        | {"std": float(row["stddev"])}
        for _, row in frame.iterrows()
    ]


def describe_launches(frame: Any) -> dict[str, float]:
    return {
        "count": len(frame),
        "call_sum": float(frame["cpu_duration"].sum()),
        "work_sum": float(frame["gpu_duration"].sum()),
        "short": int((frame["gpu_duration"] < frame["cpu_duration"]).sum()),
        "delay_sum": float(frame["launch_delay"].sum()),
    }


def describe_queue(analysis: Any) -> dict[str, int]:
    series = analysis.get_queue_length_time_series()[0]
    return {str(stream): int(part["queue_length"].max()) for stream, part in series.groupby("stream")}


def main() -> None:
    logging.disable(logging.CRITICAL)
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    content: dict[str, Any] = {"made_by": f"traceinsight {version('traceinsight')}", "traces": {}}
    for name, place in TRACES.items():
        with contextlib.redirect_stdout(sys.stderr):
            content["traces"][name] = {"file": place, **describe(folder / place)}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(f"{len(TRACES)} traces written to {out}")


if __name__ == "__main__":
    main()
