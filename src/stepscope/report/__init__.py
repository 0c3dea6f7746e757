"""Stored runs made readable: one view model, rendered as text, Markdown, CSV, JSON and one offline HTML page."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.report.communication import format_collective_table, has_collectives
    from stepscope.report.html import render_html
    from stepscope.report.render import (
        read_report_runs,
        render_comparison_markdown,
        render_comparison_text,
        render_csv,
        render_json,
        render_markdown,
        render_report,
        render_text,
    )
    from stepscope.report.view import Report, ReportRun, build_report

_HOMES = {
    "Report": "view",
    "ReportRun": "view",
    "build_report": "view",
    "format_collective_table": "communication",
    "has_collectives": "communication",
    "read_report_runs": "render",
    "render_comparison_markdown": "render",
    "render_comparison_text": "render",
    "render_csv": "render",
    "render_html": "html",
    "render_json": "render",
    "render_markdown": "render",
    "render_report": "render",
    "render_text": "render",
}
"""Name → its module, which is loaded when the name is first used: the views of traces need none of them."""

__all__ = [
    "Report",
    "ReportRun",
    "build_report",
    "format_collective_table",
    "has_collectives",
    "read_report_runs",
    "render_comparison_markdown",
    "render_comparison_text",
    "render_csv",
    "render_html",
    "render_json",
    "render_markdown",
    "render_report",
    "render_text",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
