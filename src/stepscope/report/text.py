"""Results as plain aligned text: data rows, and everything else on lines that begin with `#`."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.records import Notice
from stepscope.report.columns import Column, choose_columns, disclose, explain_shares
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
from stepscope.report.scale import TimeScale, choose_time_scale
from stepscope.report.view import CaseView, Report, RunView, SystemView
from stepscope.units import format_duration

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
    lines = table
    if left_out:
        lines.append(f"# left out for width: {', '.join(left_out)}")
    if any(case.missed_latency for case in system.cases):
        lines.append("# * missed its latency target")
    lines += [f"# {remark}" for remark in explain_shares(system.cases)]
    lines += [f"# {plain(remark)}" for remark in disclose(system.cases)]
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
    starred = any(case.missed_latency for case in cases)
    rows = [[_pad_star(column, column.cell(case).text, starred) for column in columns] for case in cases]
    titles = [_pad_star(column, column.title, starred) for column in columns]
    units = [_pad_star(column, f"({column.unit})" if column.unit else "", starred) for column in columns]
    head = [titles, units] if any(column.unit for column in columns) else [titles]
    lines = align([*head, *rows], [column.numeric for column in columns])
    return ["# " + line for line in lines[: len(head)]] + ["  " + line for line in lines[len(head) :]]


def _pad_star(column: Column, text: str, starred: bool) -> str:
    """Keeps digits under digits where some scores end in `*`."""
    return text + " " if starred and column.title == "Score" and not text.endswith("*") else text


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


def describe_target(case: CaseView) -> str | None:
    """`p95 ≤ 20 ms`, where the benchmark has a latency target."""
    target = case.latency_target
    return f"p{target.percentile:g} ≤ {format_duration(target.limit_s)}" if target is not None else None


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
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
