"""Results as GitHub-flavoured Markdown: one table per system."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.report.columns import Column, choose_columns, explain
from stepscope.report.heatmap import (
    MAX_TEXT_UNITS,
    PairView,
    describe_findings,
    describe_matrix,
    explain_map,
    make_heatmaps,
    matrix_rows,
    without_pairs,
)
from stepscope.report.latency import explain_stars
from stepscope.report.text import plain
from stepscope.report.view import CaseView, Report, SystemView

_ESCAPES = str.maketrans({"\\": "\\\\", "|": "\\|", "*": "\\*", "`": "\\`", "[": "\\[", "]": "\\]"} | {
    "&": "&amp;", "<": "&lt;", ">": "&gt;",
})  # fmt: skip


def render_markdown(report: Report) -> str:
    lines = ["# Results", ""]
    for system in report.systems:
        lines += [f"## {escape(system.name)}", "", *_facts(system), "", *_results(system)]
    if not report.systems:
        lines += ["No runs.", ""]
    return "\n".join([*lines, f"Made by stepscope {report.tool_version}."]) + "\n"


def _facts(system: SystemView) -> list[str]:
    lines = [f"- System: {code(system.fingerprint) if system.fingerprint else 'no record of it'}"]
    if system.system is not None:
        libraries = {"python": system.system.python, **system.system.libraries}
        lines.append(f"- Libraries: {', '.join(f'{escape(k)} {escape(v)}' for k, v in libraries.items())}")
    for run in system.runs:
        status = "" if run.status == "complete" else f", {escape(run.status)}"
        lines.append(f"- Run {code(run.id)} ({escape(run.created_at)}{status}): {code(run.command)}")
    return lines + ([f"- Scale: {escape(system.reach.describe())}"] if system.reach is not None else [])


def _results(system: SystemView) -> list[str]:
    if not system.cases:
        return ["No finished cases.", ""]
    single = without_pairs(system)
    lines = _table(single) if single.cases else []
    return lines + [line for view in system.pairs for line in _pairs(view)]


def _table(system: SystemView) -> list[str]:
    columns = choose_columns(system)
    lines = [f"All rows: {escape(' '.join(system.shared))}.", ""] if system.shared else []
    lines += [*markdown_table(_titles(columns), _rows(columns, system.cases), [c.numeric for c in columns]), ""]
    for remark in [*(f"* {star}" for star in explain_stars(system.cases)), *explain(system.cases)]:
        lines += [f"{escape(remark)}.", ""]
    remarks = [remark for case in system.cases for remark in _remarks(case)]
    return lines + ([*remarks, ""] if remarks else [])


def _pairs(view: PairView) -> list[str]:
    lines = [f"### Pairs of {escape(describe_matrix(view))}", ""]
    for heatmap in make_heatmaps(view, MAX_TEXT_UNITS):
        titles, rows, numeric = matrix_rows(heatmap)
        cells = [[text.strip() for text in row] for row in rows]
        said = escape(explain_map(heatmap))
        lines += [f"{said[:1].upper()}{said[1:]}.", ""]
        lines += [*markdown_table([title.strip() for title in titles], cells, numeric), ""]
    for sentence, step in describe_findings(view):
        lines.append(f"- {escape(sentence)}{f'. Next: {escape(step)}' if step else ''}")
    return [*lines, ""]


def _titles(columns: Sequence[Column]) -> list[str]:
    return [f"{column.title} ({column.unit})" if column.unit else column.title for column in columns]


def _rows(columns: Sequence[Column], cases: Sequence[CaseView]) -> list[list[str]]:
    return [[column.cell(case).text for column in columns] for case in cases]


def _remarks(case: CaseView) -> list[str]:
    lines = []
    if case.failure is not None:
        hint = f" Next: {escape(case.failure.hint)}" if case.failure.hint else ""
        cause = f"{escape(case.failure.kind)}: {escape(case.failure.message)}"
        lines.append(f"- **{case.status}** {escape(case.name)}: {cause}{hint}")
    for notice in case.notices:
        hint = f" Next: {escape(notice.hint)}" if notice.hint else ""
        lines.append(f"- **notice** {escape(case.name)}: {escape(notice.message)}{hint}")
    return lines


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rule = line(["---:" if right else "---" for right in numeric])
    return [line([escape(title) for title in titles]), rule, *(line([escape(text) for text in row]) for row in rows)]


def escape(text: str) -> str:
    """Shown as written, whatever it holds; on one line."""
    return plain(text).translate(_ESCAPES)


def code(text: str) -> str:
    """A code span whose fence is longer than any run of backticks inside."""
    shown = plain(text)
    fence = "`"
    while fence in shown:
        fence += "`"
    padding = " " if "`" in shown else ""
    return f"{fence}{padding}{shown}{padding}{fence}"
