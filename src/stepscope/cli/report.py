"""`stepscope report`: show runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from stepscope.api import REPORT_KINDS, report, report_kind, tell_left_out
from stepscope.cli.options import FILE, json_option, metrics_option, store_option
from stepscope.cli.output import emit, narrate, terminal_width, wants_json, write_text
from stepscope.core.errors import RunNotFoundError
from stepscope.core.units import escape_line
from stepscope.store import StoredRun, find_run, read_each, run_folders

UNVERIFIED = "unverified: written without hashes by an older Stepscope, and never completed"


def unverified_lines(runs: Sequence[StoredRun]) -> list[str]:
    """For the head of a table: whose evidence cannot be checked."""
    return [f"# {escape_line(run.id)}: {UNVERIFIED}" for run in runs if not run.is_verified]


def _with_cases(run: StoredRun) -> StoredRun:
    """With everything that a report shows of it, which is read once."""
    run.check_records()
    run.cases()
    return run


def chosen_runs(names: Sequence[str], store: Path) -> list[StoredRun]:
    """The runs named, or all of the store."""
    if names:
        return [find_run(store, name) for name in names]
    runs, damaged = read_each(run_folders(store), _with_cases)
    tell_left_out(damaged, narrate)
    if not runs:
        raise RunNotFoundError(f"there are no runs in {store}", hint="stepscope demo makes some", where=str(store))
    return runs


@click.command("report")
@click.argument("names", nargs=-1, metavar="[RUN]...")
@click.option("--format", "kind", type=click.Choice(REPORT_KINDS),
              help="Output format [default: by the ending of --output, else text].")  # fmt: skip
@click.option("--output", "-o", type=FILE, help="Write to this file.")
@metrics_option
@store_option
@json_option
def command(*, names: tuple[str, ...], kind: str | None, output: Path | None, store: Path) -> None:
    """Show stored runs, by default all: one table per system, then details of every case.

    RUN is a folder, the beginning of an id, `latest`, or `latest~1` for the run before it. `--format nccl` prints
    communication runs as nccl-tests does.

    Example: stepscope report latest -o report.html
    """
    runs = chosen_runs(names, store)
    chosen = "json" if wants_json() and output is None else kind or report_kind(output)
    text = report(runs, kind=chosen, width=terminal_width(), tell=narrate)
    if output is not None:
        write_text(output, text, {"format": chosen})
    else:
        emit(msgspec.Raw(text.encode()), text)
