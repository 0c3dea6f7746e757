"""Results as plain aligned text: data rows, and everything else on lines that begin with `#`."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.core.units import escape_line
from stepscope.records import Notice
from stepscope.report.columns import Column, choose_columns, explain
from stepscope.report.heatmap import (
    MAX_TEXT_UNITS,
    Heatmap,
    PairView,
    describe_findings,
    describe_matrix,
    explain_map,
    make_heatmaps,
    matrix_rows,
    without_pairs,
)
from stepscope.report.latency import explain_stars
from stepscope.report.scale import TimeScale, choose_time_scale
from stepscope.report.view import CaseView, Report, RunView, SystemView

_GAP = "  "


def render_text(report: Report, *, width: int | None = None) -> str:
    """One table per system. With `width`, columns of detail are left out until the rows fit, and a line says which."""
    lines = [f"# stepscope {report.tool_version}"]
    for number, system in enumerate(report.systems, start=1):
        lines += ["#", *_head(system, number, len(report.systems)), "#", *_body(system, width)]
    if not report.systems:
        lines.append("# no runs")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _head(system: SystemView, number: int, of: int) -> list[str]:
    place = f" {number} of {of}" if of > 1 else ""
    lines = [f"# system{place}: {plain(system.name)} ({system.fingerprint or 'no record of it'})"]
    if system.system is not None:
        libraries = {"python": system.system.python, **system.system.libraries}
        lines.append(f"# libraries: {', '.join(f'{plain(k)} {plain(v)}' for k, v in libraries.items())}")
    lines += [_describe_run(run) for run in system.runs]
    return lines + ([f"# scale: {system.reach.describe()}"] if system.reach is not None else [])


def _describe_run(run: RunView) -> str:
    status = "" if run.status == "complete" else f", {plain(run.status)}"
    return f"# run {plain(run.id)} ({plain(run.created_at)}{status}): {plain(run.command)}"


def _body(system: SystemView, width: int | None) -> list[str]:
    if not system.cases:
        return ["# no finished cases"]
    single = without_pairs(system)
    lines = _table(single, width) if single.cases else []
    for view in system.pairs:
        lines += [*(["#"] if lines else []), *format_pairs(view, width=width)]
    return lines + _describe_notices(system.cases)


def _table(system: SystemView, width: int | None) -> list[str]:
    columns = choose_columns(system, scale=table_scale(system.cases))
    table, left_out = _fit(columns, system.cases, width)
    lines = [f"# all rows: {plain(' '.join(system.shared))}"] if system.shared else []
    lines += table
    if left_out:
        lines.append(f"# left out for width: {', '.join(left_out)}")
    lines += [f"# * {plain(remark)}" for remark in explain_stars(system.cases)]
    lines += [f"# {plain(remark)}" for remark in explain(system.cases)]
    return lines + [line for case in system.cases for line in _describe_failure(case)]


def format_pairs(view: PairView, *, width: int | None = None) -> list[str]:
    """Matrices and what was found in them. With `width`, fewer ranks or hosts are shown until the rows fit."""
    tables: list[list[str]] = []
    for most in (MAX_TEXT_UNITS, 12, 8, 6, 4):
        tables = [_matrix_table(heatmap) for heatmap in make_heatmaps(view, most)]
        if width is None or max((text_width(line) for _, *rows in tables for line in rows), default=0) <= width:
            break
    lines = [f"# pairs of {plain(describe_matrix(view))}", *(line for table in tables for line in table)]
    for sentence, step in describe_findings(view):
        lines.append(f"# {plain(sentence)}")
        lines += [f"#   next: {plain(step)}"] if step else []
    return lines


def _matrix_table(heatmap: Heatmap) -> list[str]:
    titles, rows, numeric = matrix_rows(heatmap)
    head, *body = align([titles, *rows], numeric)
    return [f"# {plain(explain_map(heatmap))}", f"# {head}", *(f"  {line}" for line in body)]


def table_scale(cases: Sequence[CaseView]) -> TimeScale:
    """The unit that the middle one of the medians fills."""
    medians = sorted(case.timing.summary.median_s for case in cases if case.timing is not None)
    return choose_time_scale(medians[len(medians) // 2] if medians else 1.0)


def _fit(columns: list[Column], cases: Sequence[CaseView], width: int | None) -> tuple[list[str], list[str]]:
    shown, left_out = list(columns), list[str]()
    while True:
        lines = _result_table(shown, cases)
        droppable = [column for column in shown if column.detail]
        if width is None or not droppable or max(map(text_width, lines)) <= width:
            return lines, left_out
        shown.remove(droppable[-1])
        left_out.insert(0, droppable[-1].title)


def _result_table(columns: Sequence[Column], cases: Sequence[CaseView]) -> list[str]:
    cells = [[column.title, f"({column.unit})" if column.unit else "", *_texts(column, cases)] for column in columns]
    titles, units, *rows = zip(*map(_pad_stars, cells, columns), strict=True)
    head = [titles, units] if any(column.unit for column in columns) else [titles]
    lines = align([*head, *rows], [column.numeric for column in columns])
    return ["# " + line for line in lines[: len(head)]] + ["  " + line for line in lines[len(head) :]]


def _texts(column: Column, cases: Sequence[CaseView]) -> list[str]:
    return [column.cell(case).text for case in cases]


def _pad_stars(texts: Sequence[str], column: Column) -> list[str]:
    """Keeps digits under digits where some numbers of a column end in `*`."""
    if not column.numeric or not any(text.endswith("*") for text in texts):
        return list(texts)
    return [text if text.endswith("*") else f"{text} " for text in texts]


def _describe_failure(case: CaseView) -> list[str]:
    if case.failure is None:
        return []
    failure = case.failure
    rank = f" (rank {failure.rank})" if failure.rank is not None else ""
    lines = [f"# {case.status}: {plain(case.name)}{rank}: {plain(failure.kind)}: {plain(failure.message)}"]
    return lines + ([f"#   next: {plain(failure.hint)}"] if failure.hint else [])


def _describe_notices(cases: Sequence[CaseView]) -> list[str]:
    """One entry a kind of notice: on a noisy machine every case says the same, and the page has them all."""
    by_kind: dict[str, list[tuple[CaseView, Notice]]] = {}
    for case in cases:
        for notice in case.notices:
            by_kind.setdefault(notice.kind, []).append((case, notice))
    lines = []
    for said in by_kind.values():
        case, notice = said[0]
        count = f"{len(said)} cases, for example " if len(said) > 1 else ""
        lines.append(f"# notice: {count}{plain(case.name)}: {plain(notice.message)}")
        lines += [f"#   next: {plain(notice.hint)}"] if notice.hint else []
    return lines


def align(rows: Sequence[Sequence[str]], numeric: Sequence[bool]) -> list[str]:
    cells = [[plain(text) for text in row] for row in rows]
    widths = [max(map(text_width, column)) for column in zip(*cells, strict=True)]
    return [
        _GAP.join(
            _pad(text, width, right=right) for text, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    ]


def _pad(text: str, width: int, *, right: bool) -> str:
    padding = " " * (width - text_width(text))
    return padding + text if right else text + padding


def text_width(text: str) -> int:
    """Places on a terminal: some characters take two, some none."""
    from rich.cells import cell_len

    return cell_len(text)


def plain(text: str) -> str:
    """On one line and harmless to a terminal: control characters are written out."""
    return text if text.isprintable() else escape_line(text)
