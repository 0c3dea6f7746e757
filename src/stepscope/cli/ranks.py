"""Who takes part in a measurement of several ranks, and how they are started, watched and asked."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import click
import msgspec
from msgspec.structs import replace

from stepscope.cli.execute import Addition, add_nothing, name_case, open_job, run_stored, show_run
from stepscope.cli.explain_comms import explain_run
from stepscope.cli.options import Duration, apply_options, make_settings, request_processes
from stepscope.cli.output import LAST_WORD_S, emit, print_error, wants_json
from stepscope.core.errors import ExitCode, UsageError
from stepscope.records import Case, CommunicationRequest
from stepscope.run.plan import Job
from stepscope.store import StoredRun

DEFAULT_HANG_TIMEOUT_S = 60.0
DEFAULT_RANKS = 2
BACKENDS_WITHOUT_TORCH = ("mpi", "fake")
OUTER_LAUNCHERS = ("torchrun", "mpirun", "slurm")


world_options = apply_options(
    [
        click.option("--backend",
                     help="Communication library: gloo, nccl, ucc or xccl as torch was built; mpi (under mpirun); "
                     "fake (one process, moves nothing) [default: nccl where each rank has a GPU of its own, else "
                     "gloo]."),
        click.option("--ranks", type=click.IntRange(1),
                     help="Number of ranks to start on this machine; not under torchrun, mpirun or srun."),
        click.option("--device",
                     help="Device of the buffers: cpu, or cuda (one per rank) [default: what the backend needs]."),
        click.option("--time", "time_by", type=click.Choice(["host", "device"]), default="host",
                     help="Clock that gives a case its time; both times are stored where the device has a clock."),
        click.option("--check", type=click.Choice(["all", "sample", "off"]), default="sample",
                     help="Iterations whose results are compared, outside the timed region: every one; the 1st, 2nd, "
                     "4th, 8th … and one more; none."),
        click.option("--hang-timeout", type=Duration(above_zero=True), default=f"{DEFAULT_HANG_TIMEOUT_S:.0f}s",
                     help="Abort if a rank sends no heartbeat for this long."),
    ]
)  # fmt: skip
"""Who takes part and how they are watched; the same for every verb that needs ranks."""


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Who will measure."""

    world_size: int
    launcher: str
    outer: bool
    """Somebody else started the ranks, and this process is one of them."""
    backend: str
    device: str
    hang_timeout_s: float


def find_ranks(choices: dict[str, Any]) -> RankOptions:
    """From the launcher, else from --ranks; what contradicts itself is refused."""
    from stepscope.launch import detect_rank_context
    from stepscope.launch.join import choose_backend, device_of_backend

    context, ranks = detect_rank_context(), choices["ranks"]
    outer = context.launcher in OUTER_LAUNCHERS
    here = context.local_world_size if outer else ranks or DEFAULT_RANKS
    backend = choices["backend"] or choose_backend(here, choices["device"])
    device = choices["device"] or device_of_backend(backend)
    repeats = choices.get("processes", 1) > 1 or bool(choices.get("until_decided"))
    rules = [
        (outer and repeats, "--processes",
         f"--processes starts fresh ranks itself, which it cannot under {context.launcher}",
         "run the command several times, or use --ranks without the launcher"),
        (outer and ranks not in {None, context.world_size}, "--ranks",
         f"--ranks {ranks} disagrees with {context.launcher}, which started {context.world_size}",
         "leave --ranks out under a launcher"),
        (backend == "mpi" and context.launcher != "mpirun" and ranks != 1, "--backend",
         "the mpi backend needs ranks that mpirun started",
         "mpirun -n 2 python -m stepscope bench comms … --backend mpi"),
        (backend == "fake" and outer, "--backend",
         f"the fake backend is one process, and {context.launcher} started {context.world_size}",
         "leave the launcher out, and say --ranks N"),
        (choices["time_by"] == "device" and device == "cpu", "--time",
         "a CPU has no clock of its own", "leave --time device out"),
    ]  # fmt: skip
    for broken, where, message, hint in rules:
        if broken:
            raise UsageError(message, hint=hint, where=where)
    return RankOptions(
        world_size=context.world_size if outer else ranks or DEFAULT_RANKS,
        launcher=context.launcher if outer else "inline" if backend == "fake" else "self",
        outer=outer,
        backend=backend,
        device=device,
        hang_timeout_s=choices["hang_timeout"],
    )


def require_world(backend: str, device: str) -> None:
    """Refused here, and not by every rank after it was started."""
    from stepscope.launch.join import require_backend
    from stepscope.measure import device_kind, open_device

    if device_kind(device) != "cpu":
        open_device(device)
    if backend not in BACKENDS_WITHOUT_TORCH:
        require_backend(backend)


def make_request(ranks: RankOptions, choices: dict[str, Any], **further: Any) -> CommunicationRequest:
    """What the plan keeps of how to measure."""
    from stepscope.launch.hosts import read_cluster_from_environment

    cluster = read_cluster_from_environment()
    return CommunicationRequest(
        backend=ranks.backend,
        device=ranks.device,
        hang_timeout_s=ranks.hang_timeout_s,
        check=choices["check"],
        device_time=choices["time_by"] == "device",
        # One iteration per sample: what a rank waits for must not be averaged away.
        settings=replace(make_settings(choices), iterations=1),
        cluster=cluster,
        **request_processes(choices),
        **further,
    )


def measure_cases(name: str, cases: list[Case], ranks: RankOptions, choices: dict[str, Any], **further: Any) -> int:
    """Measure the cases of a communication run, or only list them; `further`: fields of its request."""
    if choices.get("dry_run"):
        emit({"cases": [name_case(case) for case in cases]}, "\n".join(case.label for case in cases))
        return ExitCode.DONE
    request = make_request(ranks, choices, **further)
    return run_ranks(
        Job("comms", name, cases, request, ranks.launcher, ranks.world_size) if cases else None, ranks, choices
    )


def run_ranks(job: Job | None, ranks: RankOptions, choices: dict[str, Any], verb: str = "comms") -> int:
    """Start the ranks and measure, or be one of those that an outer launcher started."""
    require_world(ranks.backend, ranks.device)
    open_run = partial(open_job, job, store=choices["store"], resume=choices.get("resume"), verb=verb)
    finish = explain_run if verb == "comms" else add_nothing
    return run_as_rank(job, ranks, open_run, finish) if ranks.outer else run_stored(open_run(), finish)


def run_as_rank(
    job: Job | None, ranks: RankOptions, open_run: Callable[[], StoredRun], finish: Callable[[StoredRun], Addition]
) -> int:
    """This process is one rank of an outer launcher; rank 0 keeps the run and prints."""
    from stepscope.launch import detect_rank_context, rank_session
    from stepscope.launch.companion import Termination, companion
    from stepscope.records import describe_exception
    from stepscope.run.execute import load_before_watched
    from stepscope.run.rank import run_rank
    from stepscope.store import record_failure
    from stepscope.store.folder import release_run

    if job is None:
        raise UsageError("under a launcher every rank needs the whole command", hint="name again what to measure")
    context = detect_rank_context()
    rank, ending = context.rank, Termination() if context.world_size > 1 else None
    folder, hang_limit_s = open_run().folder if rank == 0 else None, ranks.hang_timeout_s
    beside: AbstractContextManager[None] = nullcontext()
    if folder is not None and context.world_size > 1:
        beside = companion(folder, context.world_size, hang_limit_s, partial(print_error, as_json=wants_json()))
    with beside:
        try:
            load_before_watched(job.verb, uses_torch=job.request.backend not in BACKENDS_WITHOUT_TORCH)
            with rank_session(
                folder, verb=job.verb, request=job.request, hang_limit_s=hang_limit_s, cases=describe_cases(job.cases)
            ) as session:
                if ending is not None:
                    ending.session = session
                run_rank(session)
        except Exception as error:
            if ending is not None:
                ending.reports = True
            if folder is not None:
                failure = describe_exception(error)
                record_failure(folder, failure if failure.rank is not None else replace(failure, rank=rank))
            raise
    if folder is None:
        return ExitCode.DONE
    release_run(folder)
    code = show_run(folder, finish(StoredRun(folder)))
    sys.stdout.flush()
    time.sleep(LAST_WORD_S)
    return code


def describe_cases(cases: Sequence[Case]) -> str:
    """Short, and different for different cases: ranks compare it."""
    keys = zlib.crc32(" ".join(case.key for case in cases).encode())
    return f"{len(cases)} cases, the first {cases[0].label}, the last {cases[-1].label} ({keys:08x})"
