"""`stepscope report`: show runs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from stepscope.cli.options import json_option, store_option
from stepscope.cli.output import emit, narrate
from stepscope.errors import ExitCode, RunNotFoundError, StepscopeError
from stepscope.store import StoredRun, find_run, list_runs

if TYPE_CHECKING:
    from stepscope.report import Report

FORMATS = ("text", "markdown", "csv", "json", "html")


def report_of(runs: Sequence[StoredRun]) -> Report:
    from stepscope.report import ReportRun, build_report

    return build_report(
        [
            ReportRun(
                id=run.id,
                created_at=run.plan.created_at,
                status=run.status,
                command=run.plan.command,
                system=run.system,
                cases=run.cases(),
            )
            for run in runs
        ]
    )


def render(report: Report, kind: str) -> str:
    from stepscope import report as room

    # On a terminal rows are cut to its width; a file or a pipe gets all columns.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    renderers: dict[str, Callable[[Report], str]] = {
        "text": partial(room.render_text, width=width),
        "markdown": room.render_markdown,
        "csv": room.render_csv,
        "json": room.render_json,
        "html": room.render_html,
    }
    return renderers[kind](report)


def write_text(path: Path, content: str) -> None:
    """Whole or not at all."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        aside.write_text(content, encoding="utf-8")
        aside.rename(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise StepscopeError(
            f"cannot write {path}: {error.strerror}", hint="choose another file with --output", where=str(path)
        ) from error


def chosen_runs(names: Sequence[str], store: Path) -> list[StoredRun]:
    """The runs named, or all of the store."""
    if names:
        return [find_run(store, name) for name in names]
    runs, damaged = list_runs(store)
    for error in damaged:
        narrate(f"left out: {error.message} ({error.where})")
    if not runs:
        raise RunNotFoundError(f"there are no runs in {store}", hint="stepscope demo makes some", where=str(store))
    return runs


@click.command("report")
@click.argument("names", nargs=-1, metavar="[RUN]...")
@click.option("--format", "kind", type=click.Choice(FORMATS), help="[default: by the ending of --output, else text]")
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file.")
@store_option
@json_option
def command(*, names: tuple[str, ...], kind: str | None, output: Path | None, store: Path, as_json: bool) -> int:
    """Show runs (all of the store where none is named): one table a system, then what every case measured."""
    report = report_of(chosen_runs(names, store))
    endings = {".html": "html", ".htm": "html", ".md": "markdown", ".csv": "csv", ".json": "json"}
    chosen = kind or (endings.get(output.suffix, "text") if output else "text")
    if output is not None:
        write_text(output, render(report, chosen))
        emit({"output": str(output), "format": chosen}, str(output.resolve()), as_json=as_json)
    elif as_json:
        emit(msgspec.Raw(render(report, "json").encode()), "", as_json=True)
    else:
        click.echo(render(report, chosen))
    return ExitCode.DONE
