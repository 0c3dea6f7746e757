"""`stepscope doctor`: what this machine is and its sources of noise."""

from __future__ import annotations

import click

from stepscope.cli.options import json_option
from stepscope.cli.output import emit


@click.command("doctor")
@click.option("--no-probe", is_flag=True, help="Do not start child processes that try out torch.")
@json_option
def command(*, no_probe: bool) -> None:
    """Show what this machine is, what can run on it, what is missing, and sources of noise in measurements."""
    from stepscope.system import diagnose, format_diagnosis

    diagnosis = diagnose(probe=not no_probe)
    emit(diagnosis, format_diagnosis(diagnosis))
