"""`stepscope bench`: measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from stepscope.cli.comms import comms
from stepscope.cli.execute import Job, open_job, run_stored
from stepscope.cli.ops import ops, suite
from stepscope.cli.options import (
    json_option,
    make_settings,
    measure_options,
    resume_option,
    store_option,
)
from stepscope.cli.output import emit
from stepscope.cli.overlap import overlap
from stepscope.cli.pairs import bisect, pairs
from stepscope.cli.pattern import pattern
from stepscope.errors import ExitCode


@click.group("bench")
def command() -> None:
    """Measure operators, collectives and workloads."""


command.add_command(ops)
command.add_command(suite)
command.add_command(comms)
command.add_command(overlap)
command.add_command(pairs)
command.add_command(bisect)
command.add_command(pattern)


@command.command("workload")
@click.argument("benchmark_id", required=False, metavar="[ID]")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@measure_options
@resume_option
@store_option
@json_option
def workload(
    *, benchmark_id: str | None, device: str, resume: str | None, store: Path, as_json: bool, **limits: Any
) -> int:
    """Measure a whole model: ID is model/implementation/mode/config, as `stepscope bench list` shows."""
    from stepscope.workloads import find_workload

    job = None
    if benchmark_id:
        found = find_workload(benchmark_id)
        request = {
            "device": device,
            "processes": limits.pop("processes"),
            "settings": msgspec.to_builtins(make_settings(**limits)),
        }
        job = Job("workload", found.benchmark.model, [found.make_case(device)], request)
    return run_stored(open_job(job, store=store, resume=resume, verb="workload"), as_json=as_json)


@command.command("list")
@json_option
def list_benchmarks(*, as_json: bool) -> int:
    """List the workloads."""
    from stepscope.workloads import WORKLOADS

    benchmarks = [{**msgspec.structs.asdict(found.benchmark), "id": found.benchmark.id} for found in WORKLOADS.values()]
    text = "\n".join(f"{one['id']}  v{one['version']}  {one['owner']}: {one['description']}" for one in benchmarks)
    emit({"benchmarks": benchmarks}, text, as_json=as_json)
    return ExitCode.DONE
