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

from stepscope.cli.execute import Addition, cases_to_dict
from stepscope.cli.options import json_option, metrics_option, store_option
from stepscope.cli.output import emit, narrate, show_text, write_text
from stepscope.cli.report import UNVERIFIED, chosen_runs, describe_damage, render, report_of, tell_left_out
from stepscope.core.errors import ExitCode, RunNotFoundError, UsageError
from stepscope.core.units import escape_line
from stepscope.formats.nccl_import import VERB as IMPORT_VERB
from stepscope.formats.nccl_import import prepare_import, write_import
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
from stepscope.store.kernel_table import require_parquet_name, require_table_name


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
    described, damaged = read_each(run_folders(store), _describe)
    rows = [row for row in described if tag in {None, row["tag"]}]
    lines = [
        f"{escape_line(row['id']):<46} {row['status']:<12} {row['cases_ok']}/{row['cases_planned']} ok"
        + (f", {row['cases_failed']} failed" if row["cases_failed"] else "")
        + (f", {row['cases_skipped']} skipped" if row["cases_skipped"] else "")
        + f"  {row['system'] or ''}"
        + (f"  [{escape_line(str(row['tag']))}]" if row["tag"] else "")
        + ("" if row["verified"] else f"  ({UNVERIFIED})")
        for row in rows
    ]
    lines += [f"damaged: {describe_damage(error)}" for error in damaged]
    text = "\n".join(lines) or (f"no runs in {store}" if tag is None else f"no runs tagged {tag} in {store}")
    emit({"runs": rows, "damaged": [error.as_dict() for error in damaged]}, text, as_json=as_json)
    return ExitCode.DONE


@command.command("show")
@click.argument("name", metavar="RUN")
@metrics_option
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
    keys = ("id", "status", "created_at", "launcher", "world_size", "path")
    lines = [f"{key}: {escape_line(str(about[key]))}" for key in keys]
    lines += [f"tag: {escape_line(str(about['tag']))}"] if about["tag"] else []
    lines.append(f"command: {escape_line(shlex.join(run.plan.command))}")
    if not run.is_verified:
        lines.append(f"evidence: {UNVERIFIED}")
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
@metrics_option
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
        write_text(output, content, {"format": kind}, as_json=as_json)
    elif as_json:
        emit({"format": kind, "content": content}, "", as_json=True)
    else:
        show_text(content)
    return ExitCode.DONE


def export_table(names: Sequence[str], kind: str, output: Path | None, store: Path, as_json: bool) -> int:
    """The operator runs' cases as one kernel table; a table that is already a file can be made Parquet too."""
    if output is None:
        raise UsageError(f"--format {kind} makes a file", hint="name it with --output", where="--output")
    (require_parquet_name if kind == "parquet" else require_table_name)(output)
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
        tell_left_out(damaged)
        rows += [row for table in tables for row in table]
    count = (write_parquet if kind == "parquet" else write_kernel_table)(output, rows)
    data = {"output": str(output), "format": kind, "rows": count}
    emit(data, f"{count} rows: {output.resolve()}", as_json=as_json)
    return ExitCode.DONE


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
    folders = [find_run_folder(store, name) for name in names] if names else run_folders(store)
    if not folders:
        raise RunNotFoundError(f"there are no runs in {store}", hint="name the store with --store", where=str(store))
    rows = [_verify(folder) for folder in folders]
    lines = []
    for row in rows:
        state = f"{len(row['damage'])} damaged" if row["damage"] else "intact" if row["verified"] else UNVERIFIED
        lines.append(f"{escape_line(row['id'])}: {state}")
        lines += [f"    {one.file}: {one.message}" for one in row["damage"]]
    emit({"runs": rows}, "\n".join(lines), as_json=as_json)
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
def remove(*, names: tuple[str, ...], store: Path, as_json: bool) -> int:
    """Remove runs for good."""
    folders = [find_run_folder(store, name) for name in names]
    lines = [f"removed {path.name}" + (", a link; the run is kept" if path.is_symlink() else "") for path in folders]
    for path in folders:
        remove_run(path)
    emit({"removed": [path.name for path in folders]}, "\n".join(lines), as_json=as_json)
    return ExitCode.DONE


@command.command("resume")
@click.argument("name", metavar="RUN")
@click.option("--trust", is_flag=True, help="Also run the Python file, or replace the table, that its command names.")
@store_option
@json_option
def resume(*, name: str, trust: bool, store: Path, as_json: bool) -> int:
    """Continue an interrupted run as it was asked for; finished cases are not measured again.

    The command that the run shows is planned again, and must ask for the same: a run folder is data, never code.
    """
    from stepscope.cli.comms import explain_run
    from stepscope.cli.execute import add_nothing, run_stored
    from stepscope.cli.ops import finish_run
    from stepscope.cli.resume import plan_again

    run = find_run(store, name)
    if run.status != "interrupted":
        raise UsageError(f"run {run.id} is {run.status}", hint="only interrupted runs can be continued")
    if run.plan.verb == IMPORT_VERB:
        hint = f"stepscope runs rm {run.id}, then stepscope runs import FILE again"
        raise UsageError(f"run {run.id} was imported: there is nothing to measure", hint=hint)
    table = plan_again(run, trust=trust).get("table")
    narrate(f"continuing: {escape_line(shlex.join(run.plan.command))}")
    finishes: dict[str, Callable[[StoredRun], Addition]] = {
        "ops": partial(finish_run, table=Path(table) if table else None),
        "comms": explain_run,
    }
    finish = finishes.get(run.plan.verb, add_nothing)
    return run_stored(run, as_json=as_json, finish=finish)


@command.command("sql")
@click.argument("query", required=False, metavar='"SELECT …"')
@click.option("--tables", is_flag=True, help="List the tables and their columns.")
@metrics_option
@store_option
@json_option
def sql(*, query: str | None, tables: bool, store: Path, as_json: bool) -> int:
    """Ask the stored runs in SQL (DuckDB). Tables: runs, systems, cases, samples."""
    from stepscope.metrics import list_tables, query_runs

    if tables or not query or not query.strip():
        listed = list_tables()
        lines = [f"{table}({', '.join(f'{n} {t}' for n, t in columns.items())})" for table, columns in listed.items()]
        emit({"tables": listed}, "\n".join(lines), as_json=as_json)
        return ExitCode.DONE
    runs, unread = list_runs(store)
    result = query_runs(runs, query)
    damaged = [*unread, *result.damaged]
    tell_left_out(damaged)
    data = {"columns": result.columns, "rows": [list(row) for row in result.rows],
            "damaged": [error.as_dict() for error in damaged]}  # fmt: skip
    emit(data, "" if as_json else _format_rows(result.columns, result.rows), as_json=as_json)
    return ExitCode.DONE


def _format_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")
