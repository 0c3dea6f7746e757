"""`stepscope bench`: measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from stepscope.cli.execute import Job, open_job, run_stored, show_run
from stepscope.cli.ops import ops, suite
from stepscope.cli.options import (
    Duration,
    json_option,
    make_settings,
    measure_options,
    resume_option,
    store_option,
)
from stepscope.cli.output import emit
from stepscope.errors import ExitCode, UsageError

DEFAULT_HANG_TIMEOUT_S = 60.0


@click.group("bench")
def command() -> None:
    """Measure operators, collectives and workloads."""


command.add_command(ops)
command.add_command(suite)


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


@command.command("comms")
@click.option("--collective", metavar="NAME", help="For example all_reduce.")
@click.option("--sizes", default="1K:1M:x4", show_default=True, help="Message sizes: list, first:last:xF or :+STEP.")
@click.option("--backend", default="gloo", show_default=True, help="gloo, nccl, … as torch was built.")
@click.option("--ranks", type=click.IntRange(1), help="Start this many ranks here; not under torchrun, mpirun, srun.")
@click.option("--dtype", default="float32", show_default=True)
@click.option("--device", help="cpu, or cuda (one device a rank) [default: what the backend needs].")
@click.option("--hang-timeout", type=Duration(), default=f"{DEFAULT_HANG_TIMEOUT_S:.0f}s", show_default=True,
              help="End the run when a rank gives no sign of life for so long.")  # fmt: skip
@measure_options
@resume_option
@store_option
@json_option
def comms(
    *,
    collective: str | None,
    sizes: str,
    backend: str,
    ranks: int | None,
    dtype: str,
    device: str | None,
    hang_timeout: float,
    resume: str | None,
    store: Path,
    as_json: bool,
    **limits: Any,
) -> int:
    """Measure collectives. The same command works by itself and under torchrun, mpirun and srun.

    Example: stepscope bench comms --collective all_reduce --sizes 1K:1M:x4 --ranks 2
    """
    from stepscope.comms import make_cases
    from stepscope.launch import detect_rank_context
    from stepscope.units import parse_range

    context = detect_rank_context()
    world_size = context.world_size if context.world_size > 1 else ranks or 2
    if context.world_size > 1 and limits["processes"] > 1:
        raise UsageError(
            f"--processes starts fresh ranks itself, which it cannot under {context.launcher}",
            hint="run the command several times, or use --ranks without the launcher",
            where="--processes",
        )
    if context.world_size > 1 and ranks not in {None, context.world_size}:
        raise UsageError(
            f"--ranks {ranks} disagrees with {context.launcher}, which started {context.world_size}",
            hint="leave --ranks out under a launcher",
            where="--ranks",
        )
    device = device or ("cuda" if backend == "nccl" else "cpu")
    job = None
    if collective:
        points = parse_range(sizes, where="--sizes")
        cases = make_cases(
            collective=collective, sizes=points, dtype=dtype, backend=backend, world_size=world_size, device=device
        )
        processes = limits.pop("processes")
        # One iteration a sample: what a rank waits for must not be averaged away.
        settings = msgspec.structs.replace(make_settings(**limits), iterations=1)
        request = {
            "backend": backend,
            "device": device,
            "hang_timeout_s": hang_timeout,
            "processes": processes,
            "settings": msgspec.to_builtins(settings),
        }
        launcher = context.launcher if context.world_size > 1 else "self"
        job = Job("comms", collective, cases, request, launcher, world_size)
    if context.world_size > 1:
        return run_as_rank(job, store=store, resume=resume, hang_limit_s=hang_timeout, as_json=as_json)
    return run_stored(open_job(job, store=store, resume=resume, verb="comms"), as_json=as_json)


def run_as_rank(job: Job | None, *, store: Path, resume: str | None, hang_limit_s: float, as_json: bool) -> int:
    """This process is one rank of an outer launcher; rank 0 keeps the run and speaks."""
    from stepscope.comms.worker import run
    from stepscope.launch import detect_rank_context, rank_session
    from stepscope.records import describe_exception
    from stepscope.store import record_failure

    if job is None:
        raise UsageError("under a launcher every rank needs the whole command", hint="name --collective again")
    rank = detect_rank_context().rank
    folder = open_job(job, store=store, resume=resume, verb="comms").folder if rank == 0 else None
    try:
        with rank_session(folder, request=job.request, hang_limit_s=hang_limit_s) as session:
            run(session)
    except Exception as error:
        if folder is not None:
            record_failure(folder, msgspec.structs.replace(describe_exception(error), rank=rank))
        raise
    return show_run(folder, as_json=as_json) if folder is not None else ExitCode.DONE


@command.command("list")
@json_option
def list_benchmarks(*, as_json: bool) -> int:
    """List the workloads."""
    from stepscope.workloads import WORKLOADS

    benchmarks = [{**msgspec.structs.asdict(found.benchmark), "id": found.benchmark.id} for found in WORKLOADS.values()]
    text = "\n".join(f"{one['id']}  v{one['version']}  {one['owner']}: {one['description']}" for one in benchmarks)
    emit({"benchmarks": benchmarks}, text, as_json=as_json)
    return ExitCode.DONE
