"""`stepscope report`: show runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from stepscope.cli.options import json_option, metrics_option, store_option
from stepscope.cli.output import emit, narrate, show_text, terminal_width, write_text
from stepscope.core.errors import ExitCode, RunNotFoundError, StepscopeError, UsageError
from stepscope.core.units import escape_controls, escape_line
from stepscope.store import StoredRun, find_run, read_each, run_folders
from stepscope.store.reader import UNSHOWABLE

if TYPE_CHECKING:
    from stepscope.report import Report

UNVERIFIED = "unverified: written without hashes by an older Stepscope, and never completed"
FORMATS = ("text", "markdown", "csv", "json", "html", "nccl")


def report_of(runs: Sequence[StoredRun]) -> Report:
    """What one run's values keep from being shown is left out and named, as long as others are left."""
    from stepscope.report import build_report, read_report_runs

    try:
        return build_report(read_report_runs(runs))
    except UNSHOWABLE:
        good, damaged = read_each([run.folder for run in runs], _with_report)
        if not damaged:
            raise
        if not good:
            raise damaged[0] from None
        tell_left_out(damaged)
        return build_report(read_report_runs(good))


def _with_report(run: StoredRun) -> StoredRun:
    from stepscope.report import build_report, read_report_runs

    build_report(read_report_runs([run]))
    return run


def tell_left_out(damaged: Sequence[StepscopeError]) -> None:
    for error in damaged:
        narrate(f"left out: {describe_damage(error)}")


def unverified_lines(runs: Sequence[StoredRun]) -> list[str]:
    """For the head of a table: whose evidence cannot be checked."""
    return [f"# {escape_line(run.id)}: {UNVERIFIED}" for run in runs if not run.is_verified]


def collective_table_of(runs: Sequence[StoredRun]) -> str:
    """Communication runs in the manner of nccl-tests; runs without communication are left out, and that is told."""
    from stepscope.report import format_collective_table, has_collectives, read_report_runs

    read = read_report_runs(runs)
    found = [run for run in read if has_collectives(run)]
    if not found:
        raise UsageError(
            f"{'the run has' if len(read) == 1 else 'these runs have'} no communication cases",
            hint="--format text shows every kind of case",
            where="--format nccl",
        )
    kept = {run.id for run in found}
    for name in (run.id for run in read if run.id not in kept):
        narrate(f"left out: {name} has no communication cases")
    return escape_controls(format_collective_table(found, width=terminal_width()))


def render(report: Report, kind: str) -> str:
    from stepscope.report import render_report

    return render_report(report, kind, width=terminal_width())


def render_runs(runs: Sequence[StoredRun], kind: str) -> str:
    return collective_table_of(runs) if kind == "nccl" else render(report_of(runs), kind)


def describe_damage(error: StepscopeError) -> str:
    """One line of a run that cannot be used."""
    return escape_line(f"{error.message} ({error.where})")


def _with_cases(run: StoredRun) -> StoredRun:
    """With everything that a report shows of it, which is read once."""
    from stepscope.report import read_report_runs

    read_report_runs([run])
    return run


def chosen_runs(names: Sequence[str], store: Path) -> list[StoredRun]:
    """The runs named, or all of the store."""
    if names:
        return [find_run(store, name) for name in names]
    runs, damaged = read_each(run_folders(store), _with_cases)
    tell_left_out(damaged)
    if not runs:
        raise RunNotFoundError(f"there are no runs in {store}", hint="stepscope demo makes some", where=str(store))
    return runs


@click.command("report")
@click.argument("names", nargs=-1, metavar="[RUN]...")
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    help="Output format [default: by the ending of --output, else text].",
)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file.")
@metrics_option
@store_option
@json_option
def command(*, names: tuple[str, ...], kind: str | None, output: Path | None, store: Path, as_json: bool) -> int:
    """Show stored runs, by default all: one table per system, then details of every case.

    RUN is a folder, the beginning of an id, `latest`, or `latest~1` for the run before it. `--format nccl` prints
    communication runs as nccl-tests does.

    Example: stepscope report latest -o report.html
    """
    runs = chosen_runs(names, store)
    endings = {".html": "html", ".htm": "html", ".md": "markdown", ".csv": "csv", ".json": "json"}
    chosen = kind or (endings.get(output.suffix, "text") if output else "text")
    if output is not None:
        write_text(output, render_runs(runs, chosen), {"format": chosen}, as_json=as_json)
    elif as_json:
        emit(msgspec.Raw(render_runs(runs, "json").encode()), "", as_json=True)
    else:
        show_text(render_runs(runs, chosen))
    return ExitCode.DONE
