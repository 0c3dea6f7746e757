"""Stored runs made readable: one view model, rendered as text, Markdown, CSV, JSON and one offline HTML page."""

from stepscope.report.communication import format_collective_table, has_collectives
from stepscope.report.data import render_csv, render_json
from stepscope.report.html import render_html
from stepscope.report.render import (
    read_report_runs,
    render_comparison_markdown,
    render_comparison_text,
    render_markdown,
    render_report,
    render_text,
)
from stepscope.report.view import Report, ReportRun, build_report

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
