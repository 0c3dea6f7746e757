"""The registry of metrics: one function with its declaration each; tables, CSV, JSON, SQL and docs come from it."""

from stepscope.metrics.cases import bandwidth_of
from stepscope.metrics.flatten import flatten_case, format_metrics_markdown, list_values
from stepscope.metrics.registry import (
    COLLECTIVES,
    EXCHANGES,
    MESSAGES,
    MODELS,
    OPERATORS,
    WORKLOADS,
    CaseInput,
    Failed,
    Metric,
    NotApplicable,
    Outcome,
    Value,
    evaluate_case,
    forget_metrics,
    list_metrics,
    load_metrics_file,
    metric,
    read_value,
    with_peaks,
)
from stepscope.metrics.sql import QueryResult, format_tables_markdown, list_tables, query_runs
from stepscope.metrics.traces import TRACE_METRICS, format_trace_metrics_markdown

__all__ = [
    "COLLECTIVES",
    "EXCHANGES",
    "MESSAGES",
    "MODELS",
    "OPERATORS",
    "TRACE_METRICS",
    "WORKLOADS",
    "CaseInput",
    "Failed",
    "Metric",
    "NotApplicable",
    "Outcome",
    "QueryResult",
    "Value",
    "bandwidth_of",
    "evaluate_case",
    "flatten_case",
    "forget_metrics",
    "format_metrics_markdown",
    "format_tables_markdown",
    "format_trace_metrics_markdown",
    "list_metrics",
    "list_tables",
    "list_values",
    "load_metrics_file",
    "metric",
    "query_runs",
    "read_value",
    "with_peaks",
]
