"""`stepscope runs`: what is stored."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from stepscope.cli.execute import Addition, cases_to_dict
from stepscope.cli.options import json_option, store_option
from stepscope.cli.output import emit, narrate
from stepscope.cli.report import chosen_runs, render, report_of, write_text
from stepscope.errors import ExitCode, UsageError
from stepscope.report.text import plain
from stepscope.store import (
    TABLES,
    KernelRow,
    StoredRun,
    find_run,
    list_runs,
    prepare_import,
    query_runs,
    read_kernel_table,
    remove_run,
    rows_of_run,
    verify_run,
    write_import,
    write_kernel_table,
    write_parquet,
)
from stepscope.store.kernel_table import require_parquet_name, require_table_name
from stepscope.store.nccl_tests import VERB as IMPORT_VERB


@click.group("runs")
def command() -> None:
    """List, show, import, export, verify, query, resume and remove stored runs."""


def _describe(run: StoredRun) -> dict[str, Any]:
    states = [result.status for result in run.results]
    plan = run.plan
    return {
        "id": run.id,
        "path": str(run.folder),
        "status": run.status,
        "kind": plan.kind,
        "verb": plan.verb,
        "tag": plan.request.get("tag"),
        "created_at": plan.created_at,
        "finished_at": run.run.finished_at if run.run else None,
        "launcher": plan.launcher,
        "world_size": plan.world_size,
        "command": plan.command,
        "cases_planned": len(plan.cases),
        "cases_ok": states.count("ok"),
        "cases_failed": states.count("failed"),
        "cases_skipped": states.count("skipped"),
        "system": run.system.name if run.system else None,
        "system_fingerprint": run.system.fingerprint if run.system else None,
    }


@command.command("list")
@click.option("--tag", metavar="TEXT", help="Only runs that were measured with this --tag.")
@store_option
@json_option
def list_command(*, tag: str | None, store: Path, as_json: bool) -> int:
    """List the runs of the store, oldest first; interrupted ones are named as such."""
    runs, damaged = list_runs(store)
    rows = [row for run in runs if tag in {None, (row := _describe(run))["tag"]}]
    lines = [
        f"{row['id']:<46} {row['status']:<12} {row['cases_ok']}/{row['cases_planned']} ok"
        + (f", {row['cases_failed']} failed" if row["cases_failed"] else "")
        + (f", {row['cases_skipped']} skipped" if row["cases_skipped"] else "")
        + f"  {row['system'] or ''}"
        + (f"  [{plain(str(row['tag']))}]" if row["tag"] else "")
        for row in rows
    ]
    lines += [f"damaged: {error.message} ({error.where})" for error in damaged]
    text = "\n".join(lines) or (f"no runs in {store}" if tag is None else f"no runs tagged {tag} in {store}")
    emit({"runs": rows, "damaged": [error.as_dict() for error in damaged]}, text, as_json=as_json)
    return ExitCode.DONE


@command.command("show")
@click.argument("name", metavar="RUN")
@store_option
@json_option
def show(*, name: str, store: Path, as_json: bool) -> int:
    """Show one run: its results, its system, what went wrong."""
    run = find_run(store, name)
    data = {
        **_describe(run),
        **cases_to_dict(run.cases(), run.folder),
        "system_record": run.system,
        "failures": run.failures,
    }
    text = "" if as_json else _format_show(run)
    emit(data, text, as_json=as_json)
    return ExitCode.DONE


def _format_show(run: StoredRun) -> str:
    about = _describe(run)
    lines = [f"{key}: {about[key]}" for key in ("id", "status", "created_at", "launcher", "world_size", "path")]
    lines += [f"tag: {plain(str(about['tag']))}"] if about["tag"] else []
    lines.append(f"command: {' '.join(run.plan.command)}")
    if run.results:
        lines += ["", render(report_of([run]), "text")]
    for failure in run.failures:
        lines += ["", f"{failure.kind}: {failure.message}", *(f"    {line}" for line in failure.last_lines)]
    if run.status == "interrupted":
        lines += ["", f"next: stepscope runs resume {run.id} --store {run.folder.parent}"]
    return "\n".join(lines)


@command.command("export")
@click.argument("names", nargs=-1, metavar="[RUN]...")
@click.option("--format", "kind", type=click.Choice(["csv", "json", "markdown", "table", "parquet"]), default="csv",
              show_default=True, help="table and parquet: the kernel table of operator runs.")  # fmt: skip
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file.")
@store_option
@json_option
def export(*, names: tuple[str, ...], kind: str, output: Path | None, store: Path, as_json: bool) -> int:
    """Export runs (all where none is named) for other programs.

    For `parquet`, RUN may also be a kernel table (.csv, .csv.gz).
    """
    if kind in {"table", "parquet"}:
        return export_table(names, kind, output, store, as_json)
    content = render(report_of(chosen_runs(names, store)), kind)
    if output is not None:
        write_text(output, content)
        emit({"output": str(output), "format": kind}, str(output.resolve()), as_json=as_json)
    elif as_json:
        emit({"format": kind, "content": content}, "", as_json=True)
    else:
        click.echo(content, nl=not content.endswith("\n"))
    return ExitCode.DONE


def export_table(names: Sequence[str], kind: str, output: Path | None, store: Path, as_json: bool) -> int:
    """The operator runs' cases as one kernel table; a table that is already a file can be made Parquet too."""
    if output is None:
        raise UsageError(f"--format {kind} makes a file", hint="name it with --output", where="--output")
    (require_parquet_name if kind == "parquet" else require_table_name)(output)
    rows: list[KernelRow] = []
    for name in names:
        is_table = name.endswith((".csv", ".csv.gz"))
        rows += read_kernel_table(Path(name)) if is_table else rows_of_run(find_run(store, name))
    for run in [] if names else operator_runs(store):
        rows += rows_of_run(run)
    count = (write_parquet if kind == "parquet" else write_kernel_table)(output, rows)
    data = {"output": str(output), "format": kind, "rows": count}
    emit(data, f"{count} rows: {output.resolve()}", as_json=as_json)
    return ExitCode.DONE


def operator_runs(store: Path) -> list[StoredRun]:
    """All of the store; what is left out, and what is not whole, is told."""
    runs = [run for run in chosen_runs((), store) if run.plan.verb == "ops"]
    for run in runs:
        if run.status == "interrupted":
            narrate(f"interrupted: {run.id}, with {len(run.results)} of its {len(run.plan.cases)} cases")
    return runs


@command.command("import")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--operation", metavar="NAME", help="What was measured, where a file does not tell: all_gather, …")
@click.option("--partial", is_flag=True, help="Keep the whole rows of a test that did not come to its end.")
@store_option
@json_option
def import_command(*, files: tuple[Path, ...], operation: str | None, partial: bool, store: Path, as_json: bool) -> int:
    """Make runs of what nccl-tests or rccl-tests printed, or wrote with -J: one run a file.

    Nothing is written unless every file can be read. The exit code is 1 when a test found wrong elements.
    """
    prepared = [prepare_import(path, operation=operation, partial=partial) for path in files]
    runs = [write_import(one, store) for one in prepared]
    rows = [{**_describe(run), "file": str(path)} for run, path in zip(runs, files, strict=True)]
    lines = [_format_imported(run, path) for run, path in zip(runs, files, strict=True)]
    emit({"runs": rows}, "\n".join(lines), as_json=as_json)
    failed = any(result.status == "failed" for run in runs for result in run.results)
    return ExitCode.FAILED if failed else ExitCode.DONE


def _format_imported(run: StoredRun, path: Path) -> str:
    results = run.results
    failed = sum(result.status == "failed" for result in results)
    wrong = f", {failed} with wrong elements" if failed else ""
    remarks = dict.fromkeys(n.message for result in results for n in result.notices if n.kind == "partial")
    ranks = f"{run.plan.world_size} rank{'' if run.plan.world_size == 1 else 's'}"
    about = f"{run.plan.cases[0].benchmark.model}, {ranks}, {len(results)} cases{wrong}"
    return "\n".join([f"{path.name}: {about}: {run.folder}", *(f"    {remark}" for remark in remarks)])


@command.command("verify")
@click.argument("names", nargs=-1, metavar="[RUN]...")
@store_option
@json_option
def verify(*, names: tuple[str, ...], store: Path, as_json: bool) -> int:
    """Check every file and every sample against the hashes taken when they were written."""
    runs = [find_run(store, name) for name in names] if names else _all_folders(store)
    found = {run.id: verify_run(run) for run in runs}
    lines = []
    for run_id, damage in found.items():
        lines.append(f"{run_id}: {'intact' if not damage else f'{len(damage)} damaged'}")
        lines += [f"    {one.file}: {one.message}" for one in damage]
    rows = [{"id": run_id, "intact": not damage, "damage": damage} for run_id, damage in found.items()]
    emit({"runs": rows}, "\n".join(lines), as_json=as_json)
    return ExitCode.FAILED if any(found.values()) else ExitCode.DONE


def _all_folders(store: Path) -> list[StoredRun]:
    from stepscope.store import run_folders

    return [StoredRun(folder) for folder in run_folders(store)]


@command.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="RUN...")
@store_option
@json_option
def remove(*, names: tuple[str, ...], store: Path, as_json: bool) -> int:
    """Remove runs for good."""
    runs = [find_run(store, name) for name in names]
    for run in runs:
        remove_run(run)
    emit({"removed": [run.id for run in runs]}, "\n".join(f"removed {run.id}" for run in runs), as_json=as_json)
    return ExitCode.DONE


@command.command("resume")
@click.argument("name", metavar="RUN")
@store_option
@json_option
def resume(*, name: str, store: Path, as_json: bool) -> int:
    """Continue an interrupted run as it was asked for; finished cases are not measured again."""
    from stepscope.cli.comms import explain_run
    from stepscope.cli.execute import add_nothing, run_stored
    from stepscope.cli.ops import finish_run

    run = find_run(store, name)
    if run.status != "interrupted":
        raise UsageError(f"run {run.id} is {run.status}", hint="only interrupted runs can be continued")
    if run.plan.verb == IMPORT_VERB:
        hint = f"stepscope runs rm {run.id}, then stepscope runs import FILE again"
        raise UsageError(f"run {run.id} was imported: there is nothing to measure", hint=hint)
    table = run.plan.request.get("table")
    finishes: dict[str, Callable[[StoredRun], Addition]] = {
        "ops": partial(finish_run, table=Path(table) if table else None),
        "comms": explain_run,
    }
    finish = finishes.get(run.plan.verb, add_nothing)
    return run_stored(run, as_json=as_json, finish=finish)


@command.command("sql")
@click.argument("query", required=False, metavar='"SELECT …"')
@click.option("--tables", is_flag=True, help="List the tables and their columns.")
@store_option
@json_option
def sql(*, query: str | None, tables: bool, store: Path, as_json: bool) -> int:
    """Ask the stored runs in SQL (DuckDB). Tables: runs, systems, cases, samples."""
    if tables or not query:
        lines = [f"{table}({', '.join(f'{n} {t}' for n, t in columns.items())})" for table, columns in TABLES.items()]
        emit({"tables": TABLES}, "\n".join(lines), as_json=as_json)
        return ExitCode.DONE
    runs, damaged = list_runs(store)
    for error in damaged:
        narrate(f"left out: {error.message} ({error.where})")
    result = query_runs(runs, query)
    data = {"columns": result.columns, "rows": [list(row) for row in result.rows]}
    emit(data, "" if as_json else _format_rows(result.columns, result.rows), as_json=as_json)
    return ExitCode.DONE


def _format_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")
