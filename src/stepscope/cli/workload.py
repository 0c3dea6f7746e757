"""`stepscope bench workload`: one whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
import msgspec

from stepscope.cli.comms import GPU_BACKENDS, Ranks, find_ranks, run_ranks
from stepscope.cli.execute import Addition, open_job, run_stored
from stepscope.cli.options import (
    PROCESS_OPTIONS,
    Duration,
    FiniteRange,
    device_option,
    json_option,
    make_settings,
    measure_options,
    request_processes,
    resume_option,
    store_option,
)
from stepscope.core.errors import UsageError
from stepscope.core.units import format_duration
from stepscope.run.plan import Job

if TYPE_CHECKING:
    from stepscope.bench.workloads import Workload
    from stepscope.records import Case
    from stepscope.store import StoredRun

F = TypeVar("F", bound=Callable[..., Any])
LONG_S = 60.0
"""Whoever waits longer for requests is told so before."""

_OPTIONS = (
    device_option,
    click.option(
        "--scale", type=click.Choice(["full", "tiny"]), default="full", show_default=True,
        help="`tiny` runs the same code with sizes for two CPU cores.",
    ),
    click.option("--precision", help="One that the benchmark allows [default: its own]."),
    click.option("--no-check", is_flag=True, help="Do not compare optimized forms with the plain one."),
    click.option(
        "--loader-workers", type=click.IntRange(0), default=2, show_default=True,
        help="Processes that feed the second score, the one with a loader.",
    ),
    click.option("--no-loader", is_flag=True, help="Only time batches that are ready on the device."),
    click.option("--trace", is_flag=True, help="Record a few steps after the timed ones."),
    click.option(
        "--compile-backend", default="inductor", show_default=True, help="Of torch.compile, where used."
    ),
)  # fmt: skip


def workload_options(function: F) -> F:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command("workload")
@click.argument("benchmark_id", required=False, metavar="[ID]")
@click.option("--batch-size", type=click.IntRange(1), help="Examples a step [default: the benchmark's].")
@click.option("--batch-sizes", metavar="N,N,…", help="One row for each of these.")
@click.option(
    "--find-batch", type=click.Choice(["throughput"]), help="Search the batch size with the best score in the limits."
)
@click.option("--largest-batch", type=click.IntRange(1), help="The search tries none above this.")
@click.option(
    "--batch-resolution", type=FiniteRange(1e-9, 1), default=1 / 16, show_default=True,
    help="How close to the best size the search ends, as a share of it.",
)  # fmt: skip
@click.option(
    "--accumulate", type=click.IntRange(1), metavar="N",
    help="Training: add up the gradients of N batches for each update [default: the benchmark's].",
)  # fmt: skip
@click.option("--rate", type=FiniteRange(0, min_open=True), help="Of decoders: requests a second that come in.")
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="How many come with --rate.")
@click.option("--ranks", type=click.IntRange(1), help="Start so many ranks here, which share the batch.")
@click.option(
    "--parallel", type=click.Choice(["ddp", "fsdp", "sharded"]),
    help="How ranks share the model [default: ddp; sharded where the benchmark is for several devices].",
)  # fmt: skip
@click.option("--backend", "group_backend", default=None, help="Of several ranks [default: nccl on cuda, else gloo].")
@click.option(
    "--hang-timeout", type=Duration(), default="300s", show_default=True,
    help="End the run when a rank gives no sign of life for so long.",
)  # fmt: skip
@click.option("--data", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Your own examples.")
@workload_options
@measure_options
@resume_option
@store_option
@json_option
def workload(
    *,
    benchmark_id: str | None,
    batch_size: int | None,
    batch_sizes: str | None,
    find_batch: str | None,
    largest_batch: int | None,
    batch_resolution: float,
    accumulate: int | None,
    rate: float | None,
    requests: int,
    ranks: int | None,
    parallel: str | None,
    group_backend: str | None,
    hang_timeout: float,
    data: Path | None,
    resume: str | None,
    store: Path,
    as_json: bool,
    **how: Any,
) -> int:
    """Measure a whole model. ID is model/implementation/mode/config, as `stepscope bench list` shows, or
    path/to/file.py:build for a model of your own.

    --data takes a file of torch.save: a list of batches, each a dict of tensors as the synthetic ones are.

    Example: stepscope bench workload dlrm/ootb/train/A.1dev-embed32-fp32 --scale tiny
    """
    if benchmark_id and is_own_model(benchmark_id):
        _refuse_for_own()
    shared = _find_ranks(ranks, group_backend, hang_timeout, how)
    _refuse_idle(has={"--find-batch": find_batch, "--rate": rate, "--ranks": shared})
    if benchmark_id:
        _refuse_without_effect(benchmark_id)
    job = None
    if not benchmark_id and shared is not None and shared.outer:
        return run_ranks(None, shared, store=store, resume=resume, as_json=as_json, verb="workload")
    if benchmark_id and shared is not None:
        _refuse_on_ranks()
        sizes = _read_sizes(batch_size, batch_sizes, None)
        added = _read_accumulate(benchmark_id, accumulate, sizes, how)
        job = _make_shared_job(benchmark_id, sizes, shared, how, parallel=parallel, accumulate=added)
        return run_ranks(job, shared, store=store, resume=resume, as_json=as_json, verb="workload")
    if benchmark_id:
        sizes = _read_sizes(batch_size, batch_sizes, find_batch)
        search = Search(find_batch, largest_batch, batch_resolution) if find_batch else None
        arrivals = Arrivals(rate, requests) if rate else None
        job = _make_job(benchmark_id, sizes, how, accumulate=accumulate, search=search, arrivals=arrivals, data=data)
    stored = open_job(job, store=store, resume=resume, verb="workload")
    return run_stored(stored, as_json=as_json, finish=_describe_search)


class Search(NamedTuple):
    """For a batch size."""

    goal: str
    largest: int | None
    resolution: float


class Arrivals(NamedTuple):
    """Of requests, to a decoder."""

    rate_per_s: float
    requests: int


def _make_job(
    benchmark_id: str,
    sizes: list[int | None],
    how: dict[str, Any],
    *,
    accumulate: int | None,
    search: Search | None,
    arrivals: Arrivals | None,
    data: Path | None,
) -> Job:
    """On one device."""
    from stepscope.bench.workloads.files import hash_file

    if search and how["processes"] > 1:
        raise UsageError("a search decides as it goes: it has one process", where="--processes")
    if search and data:
        raise UsageError(
            "batches of your own have the size that they have", hint="leave --find-batch out", where="--data"
        )
    if arrivals and data:
        raise UsageError(
            "requests come with synthetic prompts, not with those of a file", hint="leave one of the two out",
            where="--data",
        )  # fmt: skip
    request = make_request(how, data=str(data.resolve()) if data else None)
    if arrivals:
        if not _generates(benchmark_id):
            raise UsageError("only decoders answer requests", hint="gpt2 or llama, in inference", where="--rate")
        duration_s = arrivals.requests / arrivals.rate_per_s
        if duration_s > LONG_S:
            click.echo(f"requests come for about {format_duration(duration_s)}", err=True)
        request |= arrivals._asdict()
    added = _read_accumulate(benchmark_id, accumulate, sizes, how)
    if search:
        largest = _find_largest(benchmark_id, search.largest, accumulate)
        request["find_batch"] = {**search._asdict(), "largest": largest, "first": 1}
    further = {
        "search": search.goal if search else None,
        "accumulate": added,
        "data": hash_file(data) if data else None,
    }
    cases = _make_cases(benchmark_id, sizes, how, further)
    return Job("workload", cases[0].benchmark.model, cases, request)


_NEEDS = {
    "largest_batch": "--find-batch", "batch_resolution": "--find-batch", "requests": "--rate",
    "parallel": "--ranks", "group_backend": "--ranks", "hang_timeout": "--ranks",
}  # fmt: skip
"""Options that only mean something beside another one."""
_ONE_DEVICE = ("find_batch", "data", "rate")


def _was_given(name: str) -> bool:
    """On the command line, not by default."""
    source = click.get_current_context().get_parameter_source(name)
    return source not in {None, click.core.ParameterSource.DEFAULT}


def _refuse_idle(*, has: dict[str, object]) -> None:
    from stepscope.bench.workloads.own import as_flag

    for name, needed in _NEEDS.items():
        if _was_given(name) and has[needed] is None:
            other = " or a launcher such as torchrun" if needed == "--ranks" else ""
            raise UsageError(f"without {needed} this does nothing", hint=f"add {needed}{other}", where=as_flag(name))


def _refuse_without_effect(benchmark_id: str) -> None:
    """Of the options that are for some benchmarks only."""
    from stepscope.bench.workloads.own import as_flag

    if "/ootb/" in benchmark_id:
        for name in ("no_check", "compile_backend"):
            if _was_given(name):
                raise UsageError(
                    "out-of-the-box forms are neither checked nor compiled", hint="leave it out", where=as_flag(name)
                )
    if _was_given("loader_workers") and _was_given("no_loader"):
        raise UsageError("--no-loader has no workers", hint="leave one of the two out", where="--loader-workers")


def _refuse_on_ranks() -> None:
    from stepscope.bench.workloads.own import as_flag

    for name in _ONE_DEVICE:
        if _was_given(name):
            raise UsageError(
                "several ranks measure benchmarks of the suite at given batch sizes, without this",
                hint="leave it out, or measure on one device",
                where=as_flag(name),
            )


def _find_ranks(ranks: int | None, backend: str | None, hang_timeout: float, how: dict[str, Any]) -> Ranks | None:
    """None: one process, which needs no group."""
    from stepscope.launch import detect_rank_context

    if ranks is None and detect_rank_context().world_size == 1:
        return None
    if backend == "fake":
        raise UsageError("models are not played", hint="--backend gloo on a CPU", where="--backend")
    if backend is not None and backend not in GPU_BACKENDS and not _was_given("device"):
        how["device"] = "cpu"  # the best device is for the backend that fits it
    chosen = backend or ("nccl" if how["device"].startswith("cuda") else "gloo")
    return find_ranks(
        {"ranks": ranks, "backend": chosen, "device": how["device"], "processes": how["processes"], "time_by": "host",
         "hang_timeout": hang_timeout}
    )  # fmt: skip


def _make_shared_job(
    benchmark_id: str,
    sizes: list[int | None],
    ranks: Ranks,
    how: dict[str, Any],
    *,
    parallel: str | None,
    accumulate: int | None,
) -> Job:
    from stepscope.bench.workloads import find_workload

    found = find_workload(benchmark_id)
    way = parallel or ("sharded" if found.declared.devices > 1 else "ddp")
    if way == "sharded" and not found.spreads:
        raise UsageError(
            f"{found.model.model} has no tables to spread over the ranks", hint="--parallel ddp or fsdp",
            where="--parallel",
        )  # fmt: skip
    if _generates(benchmark_id):
        raise UsageError("generation is measured on one device", hint="leave --ranks out", where="--ranks")
    for size in sizes:
        whole = found.require_batch(size, how["scale"])
        if whole % ranks.world_size:
            raise UsageError(
                f"a batch of {whole} cannot be shared evenly by {ranks.world_size} ranks",
                hint=f"--batch-size {whole // ranks.world_size * ranks.world_size or ranks.world_size}",
                where="--batch-size",
            )
    further = {"parallel": way, "accumulate": accumulate, "world_size": ranks.world_size}
    cases = [_make_case(found, size, how, **further) for size in sizes]
    request = make_request(how, backend=ranks.backend, world_size=ranks.world_size, hang_timeout_s=ranks.hang_timeout_s)
    return Job("workload", found.model.model, cases, request, ranks.launcher, ranks.world_size)


def _read_sizes(one: int | None, several: str | None, find_batch: str | None) -> list[int | None]:
    if sum(choice is not None for choice in (one, several, find_batch)) > 1:
        raise UsageError(
            "--batch-size, --batch-sizes and --find-batch exclude each other",
            hint="--find-batch tries sizes by itself; --largest-batch bounds it",
            where="--batch-sizes",
        )
    if several is None:
        return [1 if find_batch else one]
    try:
        sizes = [int(part) for part in several.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(f"{several!r} is no list of batch sizes", hint="write 1,8,64", where="--batch-sizes")
    return list(dict.fromkeys(sizes))


def _read_accumulate(benchmark_id: str, asked: int | None, sizes: list[int | None], how: dict[str, Any]) -> int | None:
    """For the case; None: as the benchmark does without being asked."""
    from stepscope.bench.workloads import find_workload

    if asked is None:
        return None
    found = find_workload(benchmark_id)
    if found.declared.mode != "train":
        raise UsageError(
            "only training adds gradients up", hint="leave it out, or measure a benchmark …/train/…",
            where="--accumulate",
        )  # fmt: skip
    most = found.declared.max_batch_size
    for size in sizes:
        whole = asked * found.require_batch(size, how["scale"])
        if most is not None and whole > most:
            raise UsageError(
                f"{benchmark_id} is not known to converge with more than {most} examples an update: {whole} asked for",
                hint=f"--batch-size {most // asked}" if most >= asked else f"--accumulate {most} at most",
                where="--accumulate",
            )
    usual = found.declared.accumulate if how["scale"] == "full" else 1
    return asked if asked != usual else None


def _find_largest(benchmark_id: str, asked: int | None, accumulate: int | None) -> int | None:
    """Of a search: with gradients that are added up, the rule of the benchmark is on all batches of an update."""
    from stepscope.bench.workloads import find_workload

    if accumulate is None:
        return asked
    most = (find_workload(benchmark_id).declared.max_batch_size or 0) // accumulate
    return min(asked or most, most) if most else asked


def _generates(benchmark_id: str) -> bool:
    from stepscope.bench.workloads import find_workload

    return not is_own_model(benchmark_id) and "new_tokens" in find_workload(benchmark_id).declared.sizes


def _make_cases(benchmark_id: str, sizes: list[int | None], how: dict[str, Any], further: dict[str, Any]) -> list[Case]:
    from stepscope.bench.workloads import find_workload
    from stepscope.bench.workloads.own import make_own_case

    if is_own_model(benchmark_id):
        return [
            make_own_case(benchmark_id, device=how["device"], batch_size=size, precision=how["precision"])
            for size in sizes
        ]
    found = find_workload(benchmark_id)
    return [_make_case(found, size, how, **further) for size in sizes]


def is_own_model(benchmark_id: str) -> bool:
    from stepscope.bench.workloads.own import is_own

    return is_own(benchmark_id)


def _refuse_for_own() -> None:
    """Defaults are not refused: only what was written on the command line."""
    from stepscope.bench.workloads.own import refuse_options

    refuse_options(name for name in click.get_current_context().params if _was_given(name))


def _make_case(found: Workload, size: int | None, how: dict[str, Any], **further: Any) -> Case:
    return found.make_case(
        device=how["device"], scale=how["scale"], batch_size=size, precision=how["precision"], **further
    )


def make_request(how: dict[str, Any], **further: Any) -> dict[str, Any]:
    limits = {name: value for name, value in how.items() if name not in PROCESS_OPTIONS}
    for name in ("device", "scale", "precision", "no_check", "loader_workers", "no_loader", "trace", "compile_backend"):
        limits.pop(name, None)
    return {
        "device": how["device"],
        **request_processes(how),
        "settings": msgspec.to_builtins(make_settings(**limits)),
        "check": not how["no_check"],
        "loader_workers": None if how["no_loader"] else how["loader_workers"],
        "trace": how["trace"],
        "compile_backend": how["compile_backend"],
        **further,
    }


def _describe_search(run: StoredRun) -> Addition:
    """What the tries of a search came to."""
    from stepscope.bench.workloads.rounds import read_trial

    asked = run.plan.request.get("find_batch")
    if not asked:
        return Addition({}, "")
    tries = [read_trial(case) for case in run.cases() if case.result.case.spec.is_try]
    found = [case.result.case.batch_size for case in run.cases() if not case.result.case.spec.is_try]
    listed = [{"batch_size": one.batch_size, "score": one.throughput, "in_time": one.in_time} for one in tries]
    best = found[0] if found else None
    if best:
        text = f"best batch size: {best}, after {len(tries)} tries"
    elif all(one.failed for one in tries):
        reasons = [case.result.failure.message for case in run.cases() if case.result.failure is not None]
        text = f"all of {len(tries)} batch sizes failed; the last: {reasons[-1]}"
    else:
        text = f"none of {len(tries)} batch sizes is in the limits"
    return Addition({"search": {"goal": asked["goal"], "best_batch_size": best, "tries": listed}}, text)
