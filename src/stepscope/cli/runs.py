"""`stepscope runs`: what is stored."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from stepscope.api import describe_damage, report, tell_left_out
from stepscope.cli.execute import Addition, cases_to_dict
from stepscope.cli.options import ANY_PATH, FILE, json_option, metrics_option, store_option
from stepscope.cli.output import (
    emit,
    name_run,
    narrate,
    suggest,
    suggest_for_file,
    terminal_width,
    write_text,
)
from stepscope.cli.report import UNVERIFIED, chosen_runs
from stepscope.core.errors import ExitCode, RunNotFoundError, UsageError
from stepscope.core.units import count_of, escape_line
from stepscope.records import ImportRequest
from stepscope.store import (
    Damage,
    KernelRow,
    StoredRun,
    find_run,
    find_run_folder,
    list_runs,
    read_each,
    read_kernel_table,
    remove_run,
    rows_of_run,
    run_folders,
    verify_run,
    write_kernel_table,
    write_parquet,
)
from stepscope.store.kernel_table import require_table_name


@click.group("runs")
def command() -> None:
    """List, show, import, export, verify, query, resume and remove stored runs."""


def _describe(run: StoredRun) -> dict[str, Any]:
    run.check_records()
    states = [result.status for result in run.results]
    plan = run.plan
    return {
        "id": run.id,
        "path": str(run.folder),
        "status": run.status,
        "verified": run.is_verified,
        "kind": plan.kind,
        "verb": plan.verb,
        "tag": plan.request.tag,
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
def list_command(*, tag: str | None, store: Path) -> None:
    """List the stored runs, oldest first, with their state."""
    described, damaged = read_each(run_folders(store), _describe)
    rows = [row for row in described if tag in {None, row["tag"]}]
    lines = format_runs(rows) if rows else []
    lines += [f"damaged: {describe_damage(error)}" for error in damaged]
    text = "\n".join(lines) or (f"no runs in {store}" if tag is None else f"no runs tagged {tag} in {store}")
    emit({"runs": rows, "damaged": [error.as_dict() for error in damaged]}, text)


def format_runs(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One row per run, as wide as the terminal."""
    from stepscope.report.table import Column, format_table

    columns: list[Column[dict[str, Any]]] = [
        Column("Run", lambda row: row["id"], role="case"),
        Column("Status", lambda row: row["status"] if row["verified"] else f"{row['status']}, unverified"),
        Column("Cases", lambda row: f"{row['cases_ok']}/{row['cases_planned']} ok", numeric=True),
        Column("Failed", lambda row: str(row["cases_failed"] or "-"), numeric=True),
        Column("Skipped", lambda row: str(row["cases_skipped"] or "-"), numeric=True),
        Column("Tag", lambda row: str(row["tag"] or "-")),
        Column("System", lambda row: row["system"] or "unknown", role="setting"),
    ]
    return format_table(columns, rows, width=terminal_width())


@command.command("show")
@click.argument("name", metavar="RUN")
@metrics_option
@store_option
@json_option
def show(*, name: str, store: Path) -> None:
    """Show one run: its results, its system, and what failed."""
    run = find_run(store, name)
    data = {
        **_describe(run),
        **cases_to_dict(run.cases(), run.folder),
        "system_record": run.system,
        "failures": run.failures,
    }
    emit(data, lambda: _format_show(run))


def _format_show(run: StoredRun) -> str:
    about = _describe(run)
    keys = ("id", "status", "created_at", "launcher", "world_size", "path")
    lines = [f"{key}: {escape_line(str(about[key]))}" for key in keys]
    lines += [f"tag: {escape_line(str(about['tag']))}"] if about["tag"] else []
    lines.append(f"command: {escape_line(shlex.join(run.plan.command))}")
    if not run.is_verified:
        lines.append(f"evidence: {UNVERIFIED}")
    if run.results:
        lines += ["", report(run, width=terminal_width(), tell=narrate)]
    for failure in run.failures:
        lines += ["", f"{failure.kind}: {failure.message}", *(f"    {line}" for line in failure.last_lines)]
    if run.status == "interrupted":
        lines += ["", f"next: stepscope runs resume {run.id} --store {run.folder.parent}"]
    return "\n".join(lines)


@command.command("export")
@click.argument("names", nargs=-1, metavar="[RUN]...")
@click.option("--format", "kind", type=click.Choice(["csv", "json", "markdown", "table", "parquet"]), default="csv",
              help="Output format; table, parquet: the kernel table of operator runs.")  # fmt: skip
@click.option("--output", "-o", type=FILE, help="Write to this file.")
@metrics_option
@store_option
@json_option
def export(*, names: tuple[str, ...], kind: str, output: Path | None, store: Path) -> None:
    """Export stored runs, by default all, for other programs.

    For `parquet`, RUN may also be a kernel table (.csv, .csv.gz).
    """
    if kind in {"table", "parquet"}:
        return export_table(names, kind, output, store)
    content = report(chosen_runs(names, store), kind=kind, tell=narrate)
    if output is not None:
        return write_text(output, content, {"format": kind})
    return emit({"format": kind, "content": content}, content)


def export_table(names: Sequence[str], kind: str, output: Path | None, store: Path) -> None:
    """The operator runs' cases as one kernel table; a table that is already a file can be made Parquet too."""
    if output is None:
        raise UsageError(f"--format {kind} makes a file", hint="name it with --output", where="--output")
    require_table_name(output, kind)
    rows: list[KernelRow] = []
    for name in names:
        if name.endswith((".csv", ".csv.gz")):
            rows += read_kernel_table(Path(name))
            continue
        found, damaged = read_each([find_run_folder(store, name)], _table_rows)
        if damaged:
            raise damaged[0]
        rows += found[0]
    if not names:
        tables, damaged = read_each([run.folder for run in operator_runs(store)], _table_rows)
        tell_left_out(damaged, narrate)
        rows += [row for table in tables for row in table]
    count = (write_parquet if kind == "parquet" else write_kernel_table)(output, rows)
    data = {"output": str(output), "format": kind, "rows": count}
    emit(data, f"{count} rows: {output.resolve()}")
    if output.is_file():
        suggest_for_file(output)


def _table_rows(run: StoredRun) -> list[KernelRow]:
    return list(rows_of_run(run))


def operator_runs(store: Path) -> list[StoredRun]:
    """All of the store; what is left out, and what is not whole, is told."""
    runs = [run for run in chosen_runs((), store) if run.plan.verb == "ops"]
    for run in runs:
        if run.status == "interrupted":
            narrate(f"interrupted: {run.id}, with {len(run.results)} of its {len(run.plan.cases)} cases")
    return runs


@command.command("import")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=ANY_PATH)
@click.option(
    "--operation", metavar="NAME", help="Collective that was measured, where the file does not say: all_gather, …"
)
@click.option("--partial", is_flag=True, help="Keep the complete rows of a test that was cut off.")
@store_option
@json_option
def import_command(*, files: tuple[Path, ...], operation: str | None, partial: bool, store: Path) -> int:
    """Import output of nccl-tests or rccl-tests, printed or written with -J: one run per file.

    Nothing is written unless every file can be read. The exit code is 1 if a test found wrong elements.
    """
    from stepscope.formats.nccl_import import prepare_import, write_import

    prepared = [prepare_import(path, operation=operation, partial=partial) for path in files]
    runs = [write_import(one, store) for one in prepared]
    rows = [{**_describe(run), "file": str(path)} for run, path in zip(runs, files, strict=True)]
    lines = [_format_imported(run, path) for run, path in zip(runs, files, strict=True)]
    emit({"runs": rows}, "\n".join(lines))
    suggest(f"stepscope report {name_run(runs[-1].folder)} --format nccl")
    failed = any(result.status == "failed" for run in runs for result in run.results)
    return ExitCode.FAILED if failed else ExitCode.DONE


def _format_imported(run: StoredRun, path: Path) -> str:
    results = run.results
    failed = sum(result.status == "failed" for result in results)
    wrong = f", {failed} with wrong elements" if failed else ""
    remarks = dict.fromkeys(n.message for result in results for n in result.notices if n.kind == "partial")
    ranks = count_of(run.plan.world_size, "rank")
    about = f"{run.plan.cases[0].benchmark.model}, {ranks}, {len(results)} cases{wrong}"
    return "\n".join([f"{path.name}: {about}: {run.folder}", *(f"    {remark}" for remark in remarks)])


@command.command("verify")
@click.argument("names", nargs=-1, metavar="[RUN]...")
@store_option
@json_option
def verify(*, names: tuple[str, ...], store: Path) -> int:
    """Verify every file and every sample against the hashes taken when they were written."""
    folders = [find_run_folder(store, name) for name in names] if names else run_folders(store)
    if not folders:
        raise RunNotFoundError(f"there are no runs in {store}", hint="name the store with --store", where=str(store))
    rows = [_verify(folder) for folder in folders]
    lines = []
    for row in rows:
        state = f"{len(row['damage'])} damaged" if row["damage"] else "intact" if row["verified"] else UNVERIFIED
        lines.append(f"{escape_line(row['id'])}: {state}")
        lines += [f"    {one.file}: {one.message}" for one in row["damage"]]
    emit({"runs": rows}, "\n".join(lines))
    return ExitCode.FAILED if any(row["damage"] for row in rows) else ExitCode.DONE


def _verify(folder: Path) -> dict[str, Any]:
    """One run, however damaged it is: what keeps it from being checked is a damage too."""
    checked, failed = read_each([folder], lambda run: (verify_run(run), run))
    if failed:
        damage = [Damage(file=failed[0].where or folder.name, message=failed[0].message)]
        return {"id": folder.name, "intact": False, "verified": False, "damage": damage}
    damage, run = checked[0]
    return {"id": run.id, "intact": not damage, "verified": not damage and run.is_verified, "damage": damage}


@command.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="RUN...")
@store_option
@json_option
def remove(*, names: tuple[str, ...], store: Path) -> None:
    """Remove runs permanently."""
    folders = [find_run_folder(store, name) for name in names]
    lines = [f"removed {path.name}" + (", a link; the run is kept" if path.is_symlink() else "") for path in folders]
    for path in folders:
        remove_run(path)
    emit({"removed": [path.name for path in folders]}, "\n".join(lines))


@command.command("resume")
@click.argument("name", metavar="RUN")
@click.option("--trust", is_flag=True, help="Also run the Python file, or replace the table, that its command names.")
@store_option
@json_option
def resume(*, name: str, trust: bool, store: Path) -> int:
    """Continue an interrupted run; finished cases are not measured again.

    The stored command is planned again and must give the same cases: a run folder is data, never code.
    """
    from stepscope.cli.execute import add_nothing, run_stored
    from stepscope.cli.explain_comms import explain_run
    from stepscope.cli.ops import finish_run
    from stepscope.cli.resume import find_table, plan_again

    run = find_run(store, name)
    if run.status != "interrupted":
        raise UsageError(f"run {run.id} is {run.status}", hint="only interrupted runs can be continued")
    if isinstance(run.plan.request, ImportRequest):
        hint = f"stepscope runs rm {run.id}, then stepscope runs import FILE again"
        raise UsageError(f"run {run.id} was imported: there is nothing to measure", hint=hint)
    table = find_table(plan_again(run, trust=trust))
    narrate(f"continuing: {escape_line(shlex.join(run.plan.command))}")
    finishes: dict[str, Callable[[StoredRun], Addition]] = {
        "ops": partial(finish_run, table=table),
        "comms": explain_run,
    }
    return run_stored(run, finishes.get(run.plan.verb, add_nothing))


@command.command("sql")
@click.argument("query", required=False, metavar='"SELECT …"')
@click.option("--tables", is_flag=True, help="List the tables and their columns.")
@metrics_option
@store_option
@json_option
def sql(*, query: str | None, tables: bool, store: Path) -> None:
    """Query the stored runs with SQL (DuckDB). Tables: runs, systems, cases, samples.

    Example: stepscope runs sql "SELECT benchmark, median_s FROM cases"
    """
    from stepscope.metrics.sql import list_tables, query_runs

    if tables or not query or not query.strip():
        listed = list_tables()
        lines = [f"{table}({', '.join(f'{n} {t}' for n, t in columns.items())})" for table, columns in listed.items()]
        return emit({"tables": listed}, "\n".join(lines))
    runs, unread = list_runs(store)
    result = query_runs(runs, query)
    damaged = [*unread, *result.damaged]
    tell_left_out(damaged, narrate)
    data = {"columns": result.columns, "rows": [list(row) for row in result.rows],
            "damaged": [error.as_dict() for error in damaged]}  # fmt: skip
    return emit(data, lambda: _format_rows(result.columns, result.rows))


def _format_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")
