"""`stepscope launch`: scripts for a cluster's queue."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from stepscope.cli.options import json_option
from stepscope.cli.output import emit
from stepscope.cli.report import write_text
from stepscope.errors import ExitCode, UsageError


@click.group("launch")
def command() -> None:
    """Make (and submit) a Slurm script that runs a benchmark."""


@command.command("sbatch", context_settings={"ignore_unknown_options": False})
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True)
@click.option("--ranks-per-node", type=click.IntRange(1), default=1, show_default=True)
@click.option("--partition")
@click.option("--time-limit", help="As Slurm writes it, for example 00:30:00.")
@click.option("--gpus-per-node", type=click.IntRange(1))
@click.option("--account")
@click.option("--job-name", default="stepscope", show_default=True)
@click.option("--sbatch", "extra", multiple=True, metavar="OPTION", help="A further #SBATCH option; repeatable.")
@click.option("--setup", multiple=True, metavar="LINE", help="A shell line to run first (module load …); repeatable.")
@click.option("--python", default=sys.executable, help="Interpreter on the nodes [default: this one].")
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="Write the script to this file.")
@click.option("--submit", "submitting", is_flag=True, help="Submit it with sbatch.")
@json_option
@click.argument("arguments", nargs=-1, required=True, metavar="-- bench comms …")
def sbatch(
    *, arguments: tuple[str, ...], python: str, output: Path | None, submitting: bool, as_json: bool, **choices: Any
) -> int:
    """Print a batch script that runs `stepscope bench comms …` on every rank of a Slurm job."""
    from stepscope.launch import SlurmJob, format_sbatch, submit

    chosen: dict[str, Any] = {name: value for name, value in choices.items() if value is not None}
    try:
        job = SlurmJob(**chosen)
    except ValueError as error:
        raise UsageError(str(error), hint="stepscope launch sbatch --help") from error
    script = format_sbatch(job, list(arguments), python)
    if output is not None:
        write_text(output, script)
    job_id = submit(script) if submitting else None
    text = f"submitted job {job_id}" if job_id else str(output) if output else script
    emit({"script": script, "output": str(output) if output else None, "job": job_id}, text, as_json=as_json)
    return ExitCode.DONE
