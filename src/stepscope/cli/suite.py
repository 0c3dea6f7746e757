"""`stepscope bench list` and `bench suite proxy`: which whole models there are, and all of them by one command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from stepscope.cli.execute import open_job, run_stored
from stepscope.cli.options import json_option, run_options
from stepscope.cli.output import emit, terminal_width
from stepscope.cli.workload import make_request, workload_options
from stepscope.core.errors import UsageError
from stepscope.core.units import format_duration
from stepscope.run.plan import Job

if TYPE_CHECKING:
    from stepscope.bench.workloads import Workload


@click.command("list")
@click.option("--model", "models", multiple=True, help="List only this model; may be repeated.")
@json_option
def list_benchmarks(*, models: tuple[str, ...]) -> None:
    """List the workloads: what is measured, and by which rules."""
    from stepscope.bench.workloads import choose_workloads

    known = {one.model.model for one in choose_workloads()}
    unknown = [one for one in models if one not in known]
    if unknown:
        raise UsageError(
            f"there is no model {', '.join(unknown)}", hint=f"there are {', '.join(sorted(known))}", where="--model"
        )
    found = choose_workloads(models=models)
    emit({"benchmarks": [describe_workload(one) for one in found]}, lambda: format_list(found))


def describe_workload(one: Workload) -> dict[str, Any]:
    declared, benchmark = one.declared, one.benchmark
    of_benchmark = ("id", "model", "implementation", "mode", "config", "version", "description")
    of_declared = ("source", "precision", "batch_size", "max_batch_size", "latency_limit_s", "limit_reason", "devices",
                   "parameters", "accumulate")  # fmt: skip
    return {
        **{name: getattr(benchmark, name) for name in of_benchmark},
        **{name: getattr(declared, name) for name in of_declared},
        "modes": sorted({other.mode for other in one.model.benchmark}),
        "domain": one.model.domain,
        "precisions": one.precisions,
        "latency_percentile": declared.latency_percentile if declared.latency_limit_s is not None else None,
    }


def format_list(found: list[Workload]) -> str:
    from stepscope.report.table import align

    rows = [["ID", "v", "domain", "precisions", "batch", "limit"]]
    for one in found:
        declared = one.declared
        if declared.latency_limit_s is not None:
            limit = f"p{declared.latency_percentile:g} ≤ {format_duration(declared.latency_limit_s)}"
        else:
            limit = f"batch ≤ {declared.max_batch_size}"
        precisions = ",".join(one.precisions)
        rows.append(
            [one.benchmark.id, str(declared.version), one.model.domain, precisions, str(declared.batch_size), limit]
        )
    return "\n".join(
        line.rstrip() for line in align(rows, [False, True, False, False, True, False], width=terminal_width())
    )


@click.command("proxy")
@click.option(
    "--model",
    "models",
    multiple=True,
    help="Measure only this model; may be repeated [default: the seven of the suite].",
)
@click.option(
    "--mode", "modes", multiple=True, type=click.Choice(["train", "infer"]), help="Only training or inference."
)
@click.option(
    "--implementation",
    "implementations",
    multiple=True,
    type=click.Choice(["ootb", "optimized"]),
    help="Only out-of-the-box or optimized implementations.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="All models in all configurations for one device, instead of the first one of each mode.",
)
@workload_options
@run_options
def proxy(
    *, models: tuple[str, ...], modes: tuple[str, ...], implementations: tuple[str, ...], everything: bool, **how: Any
) -> int:
    """Measure the workload suite: seven models, out of the box and optimized, training and inference.

    Example: stepscope bench suite proxy --device cpu --scale tiny
    """
    from stepscope.bench.workloads.registry import choose_suite, make_suite_cases

    chosen = choose_suite(models=models, modes=modes, implementations=implementations, everything=everything)
    cases = make_suite_cases(chosen, device=how["device"], scale=how["scale"], precision=how["precision"])
    left_out = [one.benchmark.id for one in chosen if how["precision"] and how["precision"] not in one.precisions]
    if left_out:
        click.echo(f"not measured, as they do not allow {how['precision']}: {', '.join(left_out)}", err=True)
    job = Job("suite", "suite-proxy", cases, make_request(how))
    return run_stored(open_job(job, store=how["store"], resume=how["resume"], verb="suite"))
