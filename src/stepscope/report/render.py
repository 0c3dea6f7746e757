"""Reports and verdicts in every format but HTML: plain text, Markdown, CSV, JSON."""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.core.errors import unknown_name
from stepscope.core.units import count_of, escape_controls, escape_json, format_duration, format_ratio
from stepscope.metrics import list_metrics
from stepscope.report.charts import TimeScale, choose_time_scale
from stepscope.report.columns import choose_columns, explain, explain_stars
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
from stepscope.report.table import (
    NONE,
    Column,
    align,
    escape,
    format_notices,
    format_table,
    markdown_table,
    plain,
    show,
    text_columns,
    text_width,
)
from stepscope.report.view import CaseView, Report, ReportRun, SystemView
from stepscope.stats import Summary
from stepscope.store import TPOT, TTFT, StoredRun

if TYPE_CHECKING:
    from stepscope.compare.verdict import CaseComparison


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
    """As text, markdown, csv, json or html; the tables of text are no wider than `width`."""
    renderers: dict[str, Callable[[Report], str]] = {
        "text": partial(render_text, width=width),
        "markdown": render_markdown,
        "csv": render_csv,
        "json": render_json,
        "html": _render_html,
    }
    if kind not in renderers:
        raise unknown_name("format", kind, renderers)
    return (escape_json if kind == "json" else escape_controls)(renderers[kind](report))


def _render_html(report: Report) -> str:
    from stepscope.report.html import render_html  # with it come charts, which other formats do without

    return render_html(report)


# Text: data rows, and everything else on lines that begin with `#`


def render_text(report: Report, *, width: int | None = None) -> str:
    """One table per system, no wider than `width`; what is left out for that is named below it."""
    lines = [f"# stepscope {report.tool_version}"]
    for number, system in enumerate(report.systems, start=1):
        lines += ["#", *_head(system, number, len(report.systems)), "#", *_body(system, width)]
    if not report.systems:
        lines.append("# no runs")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _head(system: SystemView, number: int, of: int) -> list[str]:
    place = f" {number} of {of}" if of > 1 else ""
    lines = [f"# system{place}: {plain(system.name)} ({system.fingerprint or 'no record of it'})"]
    return lines + [f"# {fact}" for fact in _list_facts(system, plain, plain)]


def _list_facts(system: SystemView, shown: Callable[[str], str], quoted: Callable[[str], str]) -> list[str]:
    """What was loaded, which runs there are, and what their cases can tell."""
    lines = []
    if system.system is not None:
        libraries = {"python": system.system.python, **system.system.libraries}
        lines.append(f"libraries: {', '.join(f'{shown(name)} {shown(value)}' for name, value in libraries.items())}")
    for run in system.runs:
        status = "" if run.status == "complete" else f", {shown(run.status)}"
        lines.append(f"run {quoted(run.id)} ({shown(run.created_at)}{status}): {quoted(run.command)}")
    return lines + ([f"scale: {shown(system.coverage.describe())}"] if system.coverage is not None else [])


def _body(system: SystemView, width: int | None) -> list[str]:
    if not system.cases:
        return ["# no finished cases"]
    single = without_pairs(system)
    lines = _table(single, width) if single.cases else []
    for view in system.pairs:
        lines += [*(["#"] if lines else []), *format_pairs(view, width=width)]
    notices = [(notice, f"{case.name}: ") for case in system.cases for notice in case.result.notices]
    return lines + format_notices(notices, "{} cases, for example ")


def _table(system: SystemView, width: int | None) -> list[str]:
    columns = choose_columns(system, scale=table_scale(system.cases))
    lines = [f"# all rows: {plain(' '.join(system.shared))}"] if system.shared else []
    lines += format_table(columns, system.cases, width=width)
    lines += [f"# * {plain(remark)}" for remark in explain_stars(system.cases)]
    lines += [f"# {plain(remark)}" for remark in explain(system.cases)]
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for case in system.cases:
        if (failure := case.result.failure) is not None:
            rank = f" (rank {failure.rank})" if failure.rank is not None else ""
            reason = f"{rank}: {plain(failure.kind)}: {plain(failure.message)}"
            hint = f"\n#   next: {plain(failure.hint)}" if failure.hint else ""
            alike[case.result.status, reason + hint].append(plain(case.name))
    for (status, reason), names in alike.items():
        some = f"{len(names)} cases, for example " if len(names) > 1 else ""
        lines += f"# {status}: {some}{names[0]}{reason}".split("\n")
    return lines


def table_scale(cases: Sequence[CaseView]) -> TimeScale:
    """The unit that the middle one of the medians fills."""
    medians = sorted(case.timing.summary.median_s for case in cases if case.timing is not None)
    return choose_time_scale(medians[len(medians) // 2] if medians else 1.0)


def format_pairs(view: PairView, *, width: int | None = None) -> list[str]:
    """Matrices and what was found in them. With `width`, fewer ranks or hosts are shown until the rows fit."""
    tables: list[list[str]] = []
    for most in (MAX_TEXT_UNITS, 12, 8, 6, 4):
        tables = []
        for heatmap in make_heatmaps(view, most):
            titles, rows, numeric = matrix_rows(heatmap)
            head, *body = align([titles, *rows], numeric)
            tables.append([f"# {plain(explain_map(heatmap))}", f"# {head}", *(f"  {line}" for line in body)])
        if width is None or max((text_width(line) for _, *rows in tables for line in rows), default=0) <= width:
            break
    lines = [f"# pairs of {plain(describe_matrix(view))}", *(line for table in tables for line in table)]
    for sentence, step in describe_findings(view):
        lines.append(f"# {plain(sentence)}")
        lines += [f"#   next: {plain(step)}"] if step else []
    return lines


# Markdown, as GitHub shows it


def render_markdown(report: Report) -> str:
    lines = ["# Results", ""]
    for system in report.systems:
        about = [f"system: {code(system.fingerprint) if system.fingerprint else 'no record of it'}"]
        about += _list_facts(system, escape, code)
        lines += [f"## {escape(system.name)}", "", *(f"- {fact[:1].upper()}{fact[1:]}" for fact in about), ""]
        single = without_pairs(system)
        lines += [] if system.cases else ["No finished cases.", ""]
        lines += _markdown_results(single) if single.cases else []
        lines += [line for view in system.pairs for line in _markdown_pairs(view)]
    if not report.systems:
        lines += ["No runs.", ""]
    return "\n".join([*lines, f"Made by stepscope {report.tool_version}."]) + "\n"


def _markdown_results(system: SystemView) -> list[str]:
    lines = [f"All rows: {escape(' '.join(system.shared))}.", ""] if system.shared else []
    lines += [*markdown_table(choose_columns(system), system.cases), ""]
    for remark in [*(f"* {star}" for star in explain_stars(system.cases)), *explain(system.cases)]:
        lines += [f"{escape(remark)}.", ""]
    remarks = []
    for case in system.cases:
        told = [("notice", notice.message, notice.hint) for notice in case.result.notices]
        if (failure := case.result.failure) is not None:
            told.insert(0, (case.result.status, f"{failure.kind}: {failure.message}", failure.hint))
        for kind, message, hint in told:
            step = f" Next: {escape(hint)}" if hint else ""
            remarks.append(f"- **{kind}** {escape(case.name)}: {escape(message)}{step}")
    return lines + ([*remarks, ""] if remarks else [])


def _markdown_pairs(view: PairView) -> list[str]:
    lines = [f"### Pairs of {escape(describe_matrix(view))}", ""]
    for heatmap in make_heatmaps(view, MAX_TEXT_UNITS):
        titles, rows, numeric = matrix_rows(heatmap)
        cells: list[Sequence[str]] = [[text.strip() for text in row] for row in rows]
        said = escape(explain_map(heatmap))
        lines += [f"{said[:1].upper()}{said[1:]}.", ""]
        lines += [*markdown_table(text_columns([title.strip() for title in titles], numeric), cells), ""]
    for sentence, step in describe_findings(view):
        lines.append(f"- {escape(sentence)}{f'. Next: {escape(step)}' if step else ''}")
    return [*lines, ""]


def code(text: str) -> str:
    """A code span whose fence is longer than any run of backticks inside."""
    shown = plain(text)
    fence = "`"
    while fence in shown:
        fence += "`"
    padding = " " if "`" in shown else ""
    return f"{fence}{padding}{shown}{padding}{fence}"


# Verdicts between two sides; what decides them is elsewhere


def _ratio_interval(row: CaseComparison) -> str:
    if row.ci_low is None or row.ci_high is None:
        return NONE
    return f"{format_ratio(row.ci_low)}–{format_ratio(row.ci_high)}"  # ∞ where load may explain any difference


COMPARED: tuple[Column[CaseComparison], ...] = (
    Column("Case", lambda row: row.label, role="case"),
    Column("Of", lambda row: row.statistic or NONE, role="setting"),
    Column("A", lambda row: show(row.time_a_s, format_duration), numeric=True, drop=1),
    Column("B", lambda row: show(row.time_b_s, format_duration), numeric=True, drop=1),
    Column("B/A", lambda row: show(row.ratio, format_ratio), numeric=True),
    Column("Interval", _ratio_interval, numeric=True),
    Column("n", lambda row: f"{row.n_a}/{row.n_b}", numeric=True),
    Column("Processes", lambda row: f"{row.processes_a}/{row.processes_b}", numeric=True, role="setting"),
    Column("Verdict", lambda row: row.verdict),
)


def render_comparison_text(rows: Sequence[CaseComparison], *, width: int | None = None) -> str:
    lines = format_table(COMPARED, rows, width=width)
    lines += [f"# {plain(row.label)}: {plain(row.reason)}" for row in rows if row.reason]
    return "\n".join([*lines, f"# {_closing_line(rows)}"]) + "\n"


def render_comparison_markdown(rows: Sequence[CaseComparison]) -> str:
    remarks = [f"- {escape(row.label)}: {escape(row.reason)}" for row in rows if row.reason]
    table = markdown_table(COMPARED, rows)
    return "\n".join([*table, "", *([*remarks, ""] if remarks else []), escape(_closing_line(rows))]) + "\n"


def _closing_line(rows: Sequence[CaseComparison]) -> str:
    counts = Counter(row.verdict for row in rows)
    verdicts = ", ".join(f"{number} {plain(verdict)}" for verdict, number in counts.most_common())
    return f"{count_of(len(rows), 'case')}{': ' if verdicts else ''}{verdicts}"


# For programs: CSV with one row per case, and the whole view model as JSON

CsvValue = str | int | float | None


def render_json(report: Report) -> str:
    """One line and a newline; sample series are thinned as the view says. Metrics stand among the fields of a case."""
    bare = [msgspec.structs.replace(system, cases=[]) for system in report.systems]
    content = msgspec.to_builtins(msgspec.structs.replace(report, systems=bare))
    for system, view in zip(content["systems"], report.systems, strict=True):
        system["cases"] = [{**_case_fields(case), **_json_metrics(case)} for case in view.cases]
    return msgspec.json.encode(content).decode() + "\n"


def _json_metrics(case: CaseView) -> dict[str, Any]:
    values = {name: case.metrics.get(name) for name in list_metrics() if name not in Summary.__struct_fields__}
    tokens = {
        f"{name}_s": {point: case.value(f"{name}_{point}_s") for point in ("p50", "p95", "p99")}
        for name in (TTFT, TPOT)
        if f"{name}_p50_s" in case.metrics
    }
    return {**values, "intensity": values["intensity_flops_per_byte"], **tokens}


def _case_fields(case: CaseView) -> dict[str, Any]:
    """What is known of a case besides its metrics, by name."""
    result, asked = case.result, case.result.case
    alike = ("status", "latency_target", "started_at", "elapsed_s", "kernels", "readings", "notices", "failure")
    return {
        **{name: getattr(case, name) for name in ("anchor", "run_id", "difference", "unit", "timing", "series")},
        **{name: getattr(asked, name) for name in ("key", "parameters", "batch_size", "world_size")},
        **{name: getattr(asked.benchmark, name) for name in ("model", "implementation", "mode", "config", "version")},
        **{name: getattr(result, name) for name in alike},
        "benchmark": asked.benchmark.id,
        "is_ceiling": asked.spec.is_measured_peak,
        "timing_kind": result.timing,
        "observed": result.facts,
        "failed_metrics": case.failed_metrics,
    }


def render_csv(report: Report) -> str:
    """One line per case, SI units, no rounding, empty where there is no value.

    `parameters`, `observed` and `kernels` are JSON.
    """
    rows = []
    for system in report.systems:
        of_run = {
            run.id: {
                "run_id": plain(run.id), "run_created_at": plain(run.created_at), "run_status": plain(run.status),
                "system_fingerprint": system.fingerprint, "system_name": plain(system.name),
            }
            for run in system.runs
        }  # fmt: skip
        for case in system.cases:
            metrics = {name: _as_cell(case.metrics.get(name)) for name in list_metrics()}
            rows.append({**metrics, **of_run[case.run_id], **_csv_case(case)})
    out = io.StringIO()
    added = [name for name in list_metrics() if name not in CSV_COLUMNS]
    writer = csv.DictWriter(out, fieldnames=[*CSV_COLUMNS, *added], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _csv_case(case: CaseView) -> dict[str, CsvValue]:
    failure = case.result.failure
    return {
        **{name: _as_cell(value) for name, value in _case_fields(case).items() if name in CSV_COLUMNS},
        "benchmark_version": case.benchmark.version,
        "case_key": case.result.case.key,
        "notices": len(case.result.notices),
        "failure_kind": plain(failure.kind) if failure is not None else None,
        "failure_message": plain(failure.message) if failure is not None else None,
        "timing": case.result.timing,
    }


def _as_cell(value: Any) -> CsvValue:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, CsvValue) else msgspec.json.encode(value).decode()


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
    "check",
)  # fmt: skip
"""In this order; columns may be added at the end, never moved: readers may count on it."""
