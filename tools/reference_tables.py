"""The tables and JSON Schemas of the documentation that are made from what the package declares."""

from __future__ import annotations

from typing import Any

import msgspec

from stepscope.metrics import Metric, list_metrics
from stepscope.metrics.sql import list_tables
from stepscope.metrics.traces import TRACE_METRICS
from stepscope.records import Benchmark, Case, CaseResult, Communication, Failure, Plan, RankSamples, Run, System
from stepscope.system.catalogue import DTYPES, load_catalogue

RECORDS: dict[str, type[msgspec.Struct]] = {
    "benchmark": Benchmark,
    "case": Case,
    "rank_samples": RankSamples,
    "case_result": CaseResult,
    "plan": Plan,
    "run": Run,
    "system": System,
    "communication": Communication,
    "failure": Failure,
}
_SEALED = {"case_result", "plan", "run", "system", "communication", "failure"}
"""Records that stand in files of their own, or on lines of their own."""
_SEALED_SCHEMA = {
    "description": "Always the last field, without spaces around it: SHA-256 of every byte of this object before it, "
    "behind the seal of the document that this one is bound to.",
    "pattern": "^[0-9a-f]{64}$",
    "type": "string",
}


def make_schema(name: str) -> dict[str, Any]:
    schema = msgspec.json.schema(RECORDS[name])
    if name in _SEALED:
        schema["$defs"][RECORDS[name].__name__]["properties"]["seal"] = _SEALED_SCHEMA
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name, **schema}


def format_metrics() -> str:
    """The list of metrics of `docs/metrics.md`."""
    lines = ["| name | column | unit | better | kinds | definition |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_format_metric, list_metrics().values())])


def _format_metric(one: Metric) -> str:
    kinds = ", ".join(kind.replace("_", " ") for kind in one.kinds) or "all"
    column = one.title if one.column != "none" else "–"
    better = "–" if one.better == "neither" else one.better
    unit = "–" if one.unit in {"count", "text", "yes/no", "fraction", "rank"} else one.unit
    return f"| `{one.name}` | {column} | {unit} | {better} | {kinds} | {one.formula} |"


def format_trace_metrics(analysis: str) -> str:
    """The table of one analysis in `docs/trace-metrics.md`."""
    rows = [
        f"| `{one.names.replace(', ', '`, `')}` | {one.unit}{' ' if one.unit else ''}| {one.definition} |"
        for one in TRACE_METRICS[analysis]
    ]
    return "\n".join(["| name | unit | definition |", "|---|---|---|", *rows])


def format_sql_tables() -> str:
    """The tables and columns of `docs/store.md`."""
    lines = []
    for table, columns in list_tables().items():
        lines += [f"**{table}**", "", "| column | type |", "|---|---|"]
        lines += [f"| `{name}` | {kind} |" for name, kind in columns.items()]
        lines.append("")
    return "\n".join(lines)


def format_catalogue() -> str:
    """The two tables of `docs/system.md`."""
    rows = [["device", "memory", "GB/s", *DTYPES, "source", "note"]]
    rows.append(["---"] * 2 + ["--:"] * (1 + len(DTYPES)) + ["---"] * 2)
    for peak in load_catalogue().devices:
        rates = [f"{peak.flops[dtype] / 1e12:g}" if dtype in peak.flops else "" for dtype in DTYPES]
        bandwidth = f"{peak.memory_bytes_per_s / 1e9:g}"
        rows.append([peak.name, f"{peak.memory_bytes >> 30} GiB", bandwidth, *rates, peak.source, peak.note])
    links = [["link", "GB/s, one direction", "source"], ["---", "--:", "---"]]
    links += [[peak.name, f"{peak.bytes_per_s / 1e9:g}", peak.source] for peak in load_catalogue().links]
    return "\n\n".join("\n".join(f"| {' | '.join(cells)} |" for cells in table) for table in (rows, links))
