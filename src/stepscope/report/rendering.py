"""From stored runs to a rendered report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from stepscope.core.errors import unknown_name
from stepscope.core.units import escape_controls, escape_json
from stepscope.report.data import render_csv, render_json
from stepscope.report.html import render_html
from stepscope.report.markdown import render_markdown
from stepscope.report.text import render_text
from stepscope.report.view import Report, ReportRun
from stepscope.store import StoredRun


def read_report_runs(runs: Sequence[StoredRun]) -> list[ReportRun]:
    return [
        ReportRun(
            id=run.id,
            created_at=run.plan.created_at,
            status=run.status if run.is_verified else f"{run.status}, unverified",
            command=run.plan.command,
            system=run.system,
            cases=run.cases(),
            communication=run.communication,
            request=run.plan.request,
        )
        for run in runs
    ]


def render_report(report: Report, kind: str, *, width: int | None = None) -> str:
    """As text, markdown, csv, json or html; `width` cuts the rows of text."""
    renderers: dict[str, Callable[[Report], str]] = {
        "text": partial(render_text, width=width),
        "markdown": render_markdown,
        "csv": render_csv,
        "json": render_json,
        "html": render_html,
    }
    if kind not in renderers:
        raise unknown_name("format", kind, renderers)
    return (escape_json if kind == "json" else escape_controls)(renderers[kind](report))
