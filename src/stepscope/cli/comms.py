"""`stepscope bench comms`: collectives and messages between ranks."""

from __future__ import annotations

import re
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from stepscope.cli.execute import Addition, add_nothing, open_job, run_stored, show_run
from stepscope.cli.options import (
    Duration,
    FiniteRange,
    json_option,
    make_settings,
    measure_options,
    request_processes,
    resume_option,
    store_option,
)
from stepscope.cli.output import LAST_WORD_S, emit, narrate, print_error, terminal_width
from stepscope.core.errors import ExitCode, UsageError
from stepscope.records import Case, CommunicationRequest
from stepscope.records.kinds import (
    CollectiveObserved,
    CollectiveSpec,
    OverlapSpec,
    PairSpec,
    PatternSpec,
    ProcessGroupSpec,
)
from stepscope.run.plan import Job
from stepscope.store import StoredRun

DEFAULT_HANG_TIMEOUT_S = 60.0
GPU_BACKENDS = ("nccl", "xccl")
BACKENDS_WITHOUT_TORCH = ("mpi", "fake")
OUTER_LAUNCHERS = ("torchrun", "mpirun", "slurm")
PLACEMENTS = ("in_place", "out_of_place")
MOST_IN_A_NAME = 4
"""Operations in the id of a run; of more, their number."""


def world_options(function: Any) -> Any:
    """Who takes part and how they are watched; the same for every verb that needs ranks."""
    options = [
        click.option("--backend", default="gloo", show_default=True,
                     help="Communication library: gloo, nccl, ucc or xccl as torch was built; mpi (under mpirun); "
                     "fake (one process, moves nothing)."),
        click.option("--ranks", type=click.IntRange(1),
                     help="Number of ranks to start on this machine; not under torchrun, mpirun or srun."),
        click.option("--device",
                     help="Device of the buffers: cpu, or cuda (one per rank) [default: what the backend needs]."),
        click.option("--time", "time_by", type=click.Choice(["host", "device"]), default="host", show_default=True,
                     help="Clock that gives a case its time; both times are stored where the device has a clock."),
        click.option("--check", type=click.Choice(["all", "sample", "off"]), default="sample", show_default=True,
                     help="Iterations whose results are compared, outside the timed region: every one; the 1st, 2nd, "
                     "4th, 8th … and one more; none."),
        click.option("--hang-timeout", type=Duration(), default=f"{DEFAULT_HANG_TIMEOUT_S:.0f}s", show_default=True,
                     help="Abort if a rank sends no heartbeat for this long."),
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


@click.command("comms")
@click.option("--collective", "collectives", multiple=True, metavar="NAME",
              help="Operation, for example all_reduce; a list, repeatable, or all.")  # fmt: skip
@click.option("--sizes", default="1K:1M:x4", show_default=True, help="Message sizes: list, first:last:xF or :+STEP.")
@click.option("--dtype", "dtypes", multiple=True, default=["float32"], show_default=True, metavar="DTYPE",
              help="Data type: float64 … float8_e4m3fn, integers, bool; a list, repeatable, or all.")  # fmt: skip
@click.option("--reduction", "reductions", multiple=True, default=["sum"], show_default=True, metavar="NAME",
              help="Reduction operator: sum, avg, min, max or prod; a list, repeatable, or all.")  # fmt: skip
@click.option("--root", "roots", multiple=True, default=["0"], show_default=True, metavar="MEMBER",
              help="Root rank within the group; a list, repeatable, or all.")  # fmt: skip
@click.option(
    "--placement",
    type=click.Choice(PLACEMENTS),
    help="Whether results replace the input [default: as usual for the operation].",
)
@click.option("--form", type=click.Choice(["tensor", "list"]), default="tensor", show_default=True,
              help="Whether pieces lie in one tensor or in a list of tensors.")  # fmt: skip
@click.option(
    "--pattern",
    help="Message pattern of send_recv: ring (default), one_to_one, pairwise, bidirectional, ping_pong, or all.",
)
@click.option("--src-ranks", metavar="RANKS", help="Sending ranks of send_recv, for example 0,2; with --dst-ranks.")
@click.option("--dst-ranks", metavar="RANKS", help="Receiving ranks of send_recv, one for each of --src-ranks.")
@click.option(
    "--window",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Messages of send_recv that follow each other.",
)
@click.option(
    "--skew", type=FiniteRange(0), help="Piece i of operations with uneven pieces is proportional to (i+1)^-SKEW."
)
@click.option("--splits", metavar="LIST|FILE",
              help="Proportions of uneven pieces: 3,1, or a matrix with one line per sender.")  # fmt: skip
@click.option("--split-bytes", metavar="LIST|FILE",
              help="Exact sizes of uneven pieces, for example 64K,4K, in place of --sizes.")  # fmt: skip
@click.option("--mode", type=click.Choice(["blocking", "nonblocking", "graph"]), default="blocking", show_default=True,
              help="How calls are made: waited for, several outstanding, or replayed from a CUDA graph.")  # fmt: skip
@click.option("--depth", type=click.IntRange(1), help="Outstanding calls with --mode nonblocking [default: 4].")
@click.option("--coalesce", type=click.IntRange(1), default=1, show_default=True,
              help="Number of calls that each message is cut into; they are made as one.")  # fmt: skip
@click.option(
    "--wire",
    help="Quantise float32 to fp16, bf16, fp8, int8, int4 or int2 on the wire; all_reduce, reduce, all_to_all.",
)
@click.option(
    "--groups",
    default="world",
    show_default=True,
    help="Groups of ranks that act together: world, split:N or colours:0,0,1,1.",
)
@click.option("--mesh", help="Mesh of ranks with the sizes of its axes, for example dp=2,tp=4; with --axis.")
@click.option("--axis", help="Axis of the mesh along which the groups lie.")
@click.option("--in-turn", is_flag=True, help="Measure one group at a time, instead of all at once.")
@click.option("--trace", "traced", metavar="SIZES",
              help="After timing, record these of --sizes (or all) with the profiler, one trace per rank.")  # fmt: skip
@click.option("--init-only", is_flag=True,
              help="Measure how long the ranks take to become a process group, and no collective.")  # fmt: skip
@click.option("--per-rank", is_flag=True, help="Also show each rank's average time, and the total.")
@click.option("--list", "listing", is_flag=True, help="List the operations.")
@click.option("--dry-run", is_flag=True, help="List the cases, measure nothing.")
@world_options
@measure_options
@resume_option
@store_option
@json_option
def comms(
    *,
    collectives: tuple[str, ...],
    sizes: str,
    listing: bool,
    dry_run: bool,
    resume: str | None,
    store: Path,
    as_json: bool,
    **choices: Any,
) -> int:
    """Measure collectives. The same command works by itself and under torchrun, mpirun and srun.

    Example: stepscope bench comms --collective all_reduce --sizes 1K:1M:x4 --ranks 2
    """
    from stepscope.bench.comms.cases import make_sweep
    from stepscope.core.units import parse_range

    if listing:
        return list_operations(as_json=as_json)
    ranks = find_ranks(choices)
    if choices["init_only"]:
        forming = plan_process_groups(ranks, choices)
        if dry_run:
            return list_cases(forming.cases, as_json=as_json)
        return run_ranks(forming, ranks, store=store, resume=resume, as_json=as_json)
    exact_splits = read_split_bytes(choices, ranks.world_size)
    points = [round(max(map(sum, exact_splits)))] if exact_splits else parse_range(sizes, where="--sizes")
    require_memory(min(points), ranks.device)
    cases, left_out = make_sweep(
        collectives=collectives, sizes=points, backend=ranks.backend,
        world_size=ranks.world_size, device=ranks.device, one_group_at_a_time=choices["in_turn"],
        **{name: choices[name] for name in ("dtypes", "reductions", "roots")},
        **call_options(choices, ranks.world_size),
    )  # fmt: skip
    for reason in left_out:
        narrate(f"left out: {reason}")
    if dry_run:
        return list_cases(cases, as_json=as_json)
    named = list(dict.fromkeys(case.benchmark.model for case in cases))
    request = make_request(ranks, choices, collectives=named, per_rank=choices["per_rank"],
                           trace=choose_traced(choices["traced"], cases))  # fmt: skip
    name = "-".join(named) if len(named) <= MOST_IN_A_NAME else f"{len(named)}-collectives"
    job = Job("comms", name, cases, request, ranks.launcher, ranks.world_size) if cases else None
    return run_ranks(job, ranks, store=store, resume=resume, as_json=as_json)


def list_cases(cases: Sequence[Case], *, as_json: bool) -> int:
    """What `--dry-run` shows."""
    listed = [{"key": case.key, "label": case.label, "parameters": case.parameters} for case in cases]
    emit({"cases": listed}, "\n".join(case.label for case in cases), as_json=as_json)
    return ExitCode.DONE


OF_COLLECTIVES = (
    "collectives", "sizes", "dtypes", "reductions", "roots", "placement", "form", "pattern", "src_ranks", "dst_ranks",
    "window", "skew", "splits", "split_bytes", "mode", "depth", "coalesce", "wire", "groups", "mesh", "axis", "in_turn",
    "traced", "time_by",
)  # fmt: skip
"""Options that say what to do with a group once it is there."""


def plan_process_groups(ranks: Ranks, choices: dict[str, Any]) -> Job:
    from stepscope.bench.comms.process_group import make_process_group_cases

    context = click.get_current_context()
    named = [name for name in OF_COLLECTIVES if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if named:
        (option,) = [one.opts[0] for one in context.command.params if one.name == named[0]]
        raise UsageError(f"--init-only measures no collective: {option} has no meaning", where=option)
    if ranks.backend == "mpi":
        raise UsageError(
            "MPI is initialised once in the life of a process", hint="use --backend gloo or nccl", where="--init-only"
        )
    cases = make_process_group_cases(backend=ranks.backend, world_size=ranks.world_size, device=ranks.device)
    request = make_request(ranks, choices, init_only=True, per_rank=choices["per_rank"])
    return Job("comms", "process-group", cases, request, ranks.launcher, ranks.world_size)


def explain_run(run: StoredRun) -> Addition:
    """What there is to say beside the table, by what was measured; for runs that are continued too."""
    from stepscope.cli.overlap import add_overlaps
    from stepscope.cli.pairs import explain_bisection, explain_pairs
    from stepscope.cli.pattern import add_steps

    if run.plan.request.searches:
        return explain_bisection(run)
    explain = {
        PatternSpec: add_steps, PairSpec: explain_pairs, OverlapSpec: add_overlaps,
        ProcessGroupSpec: explain_process_groups,
    }  # fmt: skip
    return explain.get(type(run.plan.cases[0].spec), explain_parts)(run)


def explain_process_groups(run: StoredRun) -> Addition:
    """Each phase on its slowest rank and on every rank, and what it took the first time."""
    from stepscope.report.process_group_table import format_process_groups, read_process_groups

    views = read_process_groups(run.cases())
    return Addition({"process_groups": views}, format_process_groups(views, width=terminal_width()))


def explain_parts(run: StoredRun) -> Addition:
    """What the table has no columns for: figures of pairs, times of parts, what quantising cost."""
    from stepscope.core.units import format_bytes, format_duration, format_significant
    from stepscope.report.communication import format_message_table, format_rank_averages, read_message_figures

    request, figures = run.plan.request, read_message_figures(run.cases())
    shows_ranks = isinstance(request, CommunicationRequest) and request.per_rank
    traced = [case.result.observed.trace for case in run.cases() if case.result.observed is not None]
    lines = [format_message_table(figures, width=terminal_width())] if figures else []
    lines += [f"# next: stepscope trace summary {run.folder / str(place)}" for place in traced if place]
    lines += [format_rank_averages(run.cases(), width=terminal_width())] if shows_ranks else []
    for case in run.cases():
        parts, spec, observed = case.parts_s(), case.result.case.spec, case.result.observed
        if not parts or not isinstance(spec, CollectiveSpec) or not isinstance(observed, CollectiveObserved):
            continue
        size = format_bytes(observed.size_bytes or 0)
        times = ", ".join(f"{name} {format_duration(value)}" for name, value in parts.items())
        if observed.wire_bytes is None:
            lines.append(f"# {size} of pickled objects by {spec.operation}: {times}")
            continue
        wire = format_bytes(observed.wire_bytes)
        errors = " and ".join(
            f"{format_significant(error)} {what}"
            for error, what in ((observed.error_max, "at most"), (observed.error_l2, "in the relative L2 norm"))
            if error is not None
        )
        lines.append(f"# {size} as {spec.wire}: {wire} on the wire; {times}; off by {errors}")
    return Addition({"messages": [one._asdict() for one in figures]} if figures else {}, "\n".join(lines))


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """Who will measure."""

    world_size: int
    launcher: str
    outer: bool
    """Somebody else started the ranks, and this process is one of them."""
    backend: str
    device: str
    hang_timeout_s: float


def find_ranks(choices: dict[str, Any]) -> Ranks:
    """From the launcher, else from --ranks; what contradicts itself is refused."""
    from stepscope.launch import detect_rank_context

    context, ranks, backend = detect_rank_context(), choices["ranks"], choices["backend"]
    outer = context.launcher in OUTER_LAUNCHERS
    if outer and (choices.get("processes", 1) > 1 or choices.get("until_decided")):
        raise UsageError(
            f"--processes starts fresh ranks itself, which it cannot under {context.launcher}",
            hint="run the command several times, or use --ranks without the launcher",
            where="--processes",
        )
    if outer and ranks not in {None, context.world_size}:
        raise UsageError(
            f"--ranks {ranks} disagrees with {context.launcher}, which started {context.world_size}",
            hint="leave --ranks out under a launcher",
            where="--ranks",
        )
    if backend == "mpi" and context.launcher != "mpirun" and ranks != 1:
        raise UsageError(
            "the mpi backend needs ranks that mpirun started",
            hint="mpirun -n 2 python -m stepscope bench comms … --backend mpi",
            where="--backend",
        )
    if backend == "fake" and outer:
        raise UsageError(
            f"the fake backend is one process, and {context.launcher} started {context.world_size}",
            hint="leave the launcher out, and say --ranks N",
            where="--backend",
        )
    device = choices["device"] or ("cuda" if backend in GPU_BACKENDS else "cpu")
    if choices["time_by"] == "device" and device == "cpu":
        raise UsageError("a CPU has no clock of its own", hint="leave --time device out", where="--time")
    return Ranks(
        world_size=context.world_size if outer else ranks or 2,
        launcher=context.launcher if outer else "inline" if backend == "fake" else "self",
        outer=outer,
        backend=backend,
        device=device,
        hang_timeout_s=choices["hang_timeout"],
    )


def require_memory(size: int, device: str) -> None:
    """Some sizes that do not fit are skipped cases; where even the smallest never can, the command is wrong."""
    import psutil

    from stepscope.core.units import format_bytes

    total = psutil.virtual_memory().total
    if device == "cpu" and size > total:
        raise UsageError(
            f"a message of {format_bytes(size)} can never fit into this machine's memory of {format_bytes(total)}",
            hint="write for example 1K:1M:x4",
            where="--sizes",
        )


def require_world(backend: str, device: str) -> None:
    """Refused here, and not by every rank after it was started."""
    from stepscope.launch.join import require_backend
    from stepscope.measure import device_kind, open_device

    if device_kind(device) != "cpu":
        open_device(device)
    if backend not in BACKENDS_WITHOUT_TORCH:
        require_backend(backend)


def call_options(choices: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Fields of a CollectiveSpec, from the command line."""
    from stepscope.bench.comms.cases import DEFAULT_DEPTH
    from stepscope.bench.comms.layouts import read_matrix

    names = ("placement", "form", "pattern", "window", "skew", "mode", "coalesce", "wire")
    options = {name: choices[name] for name in names}
    options["sources"] = read_ranks(choices["src_ranks"], where="--src-ranks")
    options["targets"] = read_ranks(choices["dst_ranks"], where="--dst-ranks")
    usual_depth = DEFAULT_DEPTH if choices["mode"] == "nonblocking" else 1
    options["depth"] = choices["depth"] or usual_depth
    options["groups"] = choices["groups"]
    if choices["mesh"] or choices["axis"]:
        if not (choices["mesh"] and choices["axis"]) or choices["groups"] != "world":
            raise UsageError("--mesh and --axis belong together, without --groups", hint="--mesh dp=2,tp=4 --axis tp")
        options["groups"] = f"mesh:{choices['mesh']}/{choices['axis']}"
    matrix = read_split_bytes(choices, world_size)
    if choices["splits"]:
        matrix = read_matrix(choices["splits"], world_size, where="--splits")
    if matrix:
        options["matrix"] = [value for row in matrix for value in row]
    return options


def read_ranks(text: str | None, *, where: str) -> list[int] | None:
    """`0,2` or `0-3`."""
    if text is None:
        return None
    spans = [re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word.strip()) for word in text.split(",")]
    if None in spans:
        raise UsageError(f"{text!r} is no list of ranks", hint="write for example 0,2 or 0-3", where=where)
    return [rank for span in spans if span for rank in range(int(span[1]), int(span[2] or span[1]) + 1)]


def choose_traced(text: str | None, cases: Sequence[Case]) -> list[int]:
    """Sizes in bytes of --trace, which must be among those of the cases."""
    from stepscope.core.units import parse_range

    if text is None:
        return []
    measured = list(dict.fromkeys(case.spec.size_bytes or 0 for case in cases))
    wanted = measured if text.strip() == "all" else parse_range(text, where="--trace")
    missing = [size for size in wanted if size not in measured]
    if missing:
        raise UsageError(f"{missing[0]} bytes are not measured", hint="name sizes of --sizes, or all", where="--trace")
    return wanted


def read_split_bytes(choices: dict[str, Any], world_size: int) -> list[list[float]] | None:
    """What --split-bytes says, which is also the size of the message."""
    from stepscope.bench.comms.cases import read_axis
    from stepscope.bench.comms.data import DTYPE_BYTES
    from stepscope.bench.comms.layouts import read_matrix, require_whole_elements

    given = choices["split_bytes"]
    if given is None:
        return None
    if choices["splits"] or click.get_current_context().get_parameter_source("sizes") is not ParameterSource.DEFAULT:
        other = "--splits" if choices["splits"] else "--sizes"
        raise UsageError(f"--split-bytes says what {other} says", hint="give one of them", where="--split-bytes")
    matrix = read_matrix(given, world_size, where="--split-bytes", in_bytes=True)
    for dtype in read_axis(choices["dtypes"], DTYPE_BYTES).values:
        require_whole_elements(matrix, dtype, DTYPE_BYTES.get(dtype, 1))
    return matrix


def make_request(ranks: Ranks, choices: dict[str, Any], **further: Any) -> CommunicationRequest:
    """What the plan keeps of how to measure."""
    from stepscope.launch.hosts import read_cluster_from_environment

    limits = {name: choices[name] for name in LIMITS if name in choices}
    cluster = read_cluster_from_environment()
    return CommunicationRequest(
        backend=ranks.backend,
        device=ranks.device,
        hang_timeout_s=ranks.hang_timeout_s,
        check=choices["check"],
        device_time=choices["time_by"] == "device",
        # One iteration per sample: what a rank waits for must not be averaged away.
        settings=msgspec.structs.replace(make_settings(**limits), iterations=1),
        cluster=cluster,
        **request_processes(choices),
        **further,
    )


LIMITS = ("quick", "target_width", "min_time", "max_time", "min_samples", "max_samples", "warmup_max_time",
          "iterations", "warmup")  # fmt: skip
"""Choices that `make_settings` understands."""


def run_ranks(
    job: Job | None,
    ranks: Ranks,
    *,
    store: Path,
    resume: str | None,
    as_json: bool,
    verb: str = "comms",
) -> int:
    """Start the ranks and measure, or be one of those that an outer launcher started."""
    require_world(ranks.backend, ranks.device)
    if ranks.outer:
        limit_s = ranks.hang_timeout_s
        return run_as_rank(job, store=store, resume=resume, hang_limit_s=limit_s, as_json=as_json, verb=verb)
    finish = explain_run if verb == "comms" else add_nothing
    return run_stored(open_job(job, store=store, resume=resume, verb=verb), as_json=as_json, finish=finish)


def run_as_rank(
    job: Job | None,
    *,
    store: Path,
    resume: str | None,
    hang_limit_s: float,
    as_json: bool,
    verb: str = "comms",
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
    folder = open_job(job, store=store, resume=resume, verb=verb).folder if rank == 0 else None
    beside: AbstractContextManager[None] = nullcontext()
    if folder is not None and context.world_size > 1:
        beside = companion(folder, context.world_size, hang_limit_s, partial(print_error, as_json=as_json))
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
                record_failure(folder, msgspec.structs.replace(describe_exception(error), rank=rank))
            raise
    if folder is None:
        return ExitCode.DONE
    release_run(folder)
    addition = explain_run(StoredRun(folder)) if verb == "comms" else None
    code = show_run(folder, as_json=as_json, addition=addition)
    sys.stdout.flush()
    time.sleep(LAST_WORD_S)
    return code


def describe_cases(cases: Sequence[Case]) -> str:
    """Short, and different for different cases: ranks compare it."""
    keys = zlib.crc32(" ".join(case.key for case in cases).encode())
    return f"{len(cases)} cases, the first {cases[0].label}, the last {cases[-1].label} ({keys:08x})"


def list_operations(*, as_json: bool) -> int:
    from stepscope.bench.comms import operations
    from stepscope.bench.comms.data import DTYPE_BYTES, REDUCTIONS
    from stepscope.bench.comms.operations import PATTERNS

    listed = [
        {
            "name": one.name,
            "summary": one.summary,
            "reductions": list(REDUCTIONS) if one.reduces else [],
            "rooted": one.rooted,
            "uneven": one.uneven,
            "forms": ["tensor", "list"] if one.cut else ["tensor"],
            "placements": list(PLACEMENTS) if one.both_placements else [PLACEMENTS[not one.in_place]],
            "patterns": list(PATTERNS) if one.name == "send_recv" else [],
        }
        for one in operations().values()
    ]
    text = "\n".join(f"{one.name:16} {one.summary}" for one in operations().values())
    emit({"operations": listed, "dtypes": list(DTYPE_BYTES)}, text, as_json=as_json)
    return ExitCode.DONE
