"""`stepscope bench workload`: one whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from stepscope.cli.execute import Addition, open_job, run_stored
from stepscope.cli.options import (
    EXISTING_FILE,
    Duration,
    FiniteRange,
    apply_options,
    device_option,
    make_settings,
    request_processes,
    run_options,
    was_given,
)
from stepscope.cli.ranks import RankOptions, find_ranks, run_ranks
from stepscope.core.errors import UsageError
from stepscope.core.units import format_duration
from stepscope.records import BatchSearch, WorkloadRequest
from stepscope.run.plan import Job

if TYPE_CHECKING:
    from stepscope.bench.workloads import Workload
    from stepscope.records import Case
    from stepscope.store import StoredRun

LONG_S = 60.0
"""A load of requests that lasts longer is announced before it begins."""

workload_options = apply_options(
    (
        device_option,
        click.option("--scale", type=click.Choice(["full", "tiny"]), default="full",
                     help="`tiny` runs the same code with sizes for two CPU cores."),
        click.option("--precision", help="One of the precisions that the benchmark allows [default: its own]."),
        click.option("--no-check", is_flag=True, help="Do not compare optimized implementations with the "
                     "out-of-the-box one; they then have no score."),
        click.option("--loader-workers", type=click.IntRange(0), default=2,
                     help="Worker processes of the data loader that feeds the second score."),
        click.option("--no-loader", is_flag=True, help="Only time batches that are already on the device."),
        click.option("--trace", is_flag=True, help="Record a few steps after the timed ones."),
        click.option("--compile-backend", default="inductor",
                     help="Backend of torch.compile, for implementations that compile."),
    )
)  # fmt: skip


@click.command("workload")
@click.argument("benchmark_id", required=False, metavar="[ID]")
@click.option("--batch-size", type=click.IntRange(1), help="Examples per step [default: the benchmark's own].")
@click.option("--batch-sizes", metavar="N,N,…", help="Measure each of these batch sizes, one result per size.")
@click.option(
    "--find-batch", type=click.Choice(["throughput"]),
    help="Search for the batch size with the highest score within the benchmark's limits; for a user model, up to "
    "--largest-batch.",
)  # fmt: skip
@click.option("--largest-batch", type=click.IntRange(1), help="Largest batch size that --find-batch tries.")
@click.option(
    "--batch-resolution",
    type=FiniteRange(1e-9, 1),
    default=1 / 16,
    help="How close to the best batch size --find-batch ends, as a fraction of it.",
)
@click.option(
    "--accumulate",
    type=click.IntRange(1),
    metavar="N",
    help="Training: accumulate the gradients of N batches for each update [default: the benchmark's own].",
)
@click.option(
    "--rate", type=FiniteRange(0, min_open=True), help="Decoders: requests per second, sent after the timed batches."
)
@click.option("--requests", type=click.IntRange(1), default=64, help="Number of requests sent with --rate.")
@click.option("--ranks", type=click.IntRange(1), help="Start this many ranks here; they share the batch.")
@click.option(
    "--parallel",
    type=click.Choice(["ddp", "fsdp", "sharded"]),
    help="How ranks share the model [default: ddp; sharded where the benchmark is for several devices].",
)
@click.option(
    "--backend", "group_backend", help="Communication backend of several ranks [default: nccl on cuda, else gloo]."
)
@click.option(
    "--hang-timeout",
    type=Duration(above_zero=True),
    default="300s",
    help="Abort if a rank sends no heartbeat for this long; a user model is bounded by it if it is given.",
)
@click.option(
    "--data",
    type=EXISTING_FILE,
    help="Your own examples: a list of batches written by torch.save, each a dict of tensors like the synthetic ones.",
)
@workload_options
@run_options
def workload(*, benchmark_id: str | None, **how: Any) -> int:
    """Measure a whole model. ID is model/implementation/mode/config, as `stepscope bench list` shows, or
    path/to/file.py:build for a user model: a function that builds one training or inference step.

    Example: stepscope bench workload dlrm/ootb/train/A.1dev-embed32-fp32 --scale tiny
    """
    from stepscope.bench.workloads import find_workload
    from stepscope.bench.workloads.user import is_user_model

    with_user_model = benchmark_id is not None and is_user_model(benchmark_id)
    ranks = _find_ranks(how)
    _refuse_without_effect(benchmark_id or "", how, ranks, with_user_model=with_user_model)
    job = None
    if benchmark_id and with_user_model:
        job = _make_user_job(benchmark_id, how)
    elif benchmark_id and ranks is not None:
        job = _make_shared_job(find_workload(benchmark_id), ranks, how)
    elif benchmark_id:
        job = _make_job(find_workload(benchmark_id), how)
    if ranks is not None and (benchmark_id or ranks.outer):
        return run_ranks(job, ranks, how, verb="workload")
    return run_stored(open_job(job, store=how["store"], resume=how["resume"], verb="workload"), _describe_search)


# --- jobs ------------------------------------------------------------------------------------------------------------


def _make_job(found: Workload, how: dict[str, Any]) -> Job:
    """For one device."""
    from stepscope.bench.workloads.user import hash_file

    sizes, data, rate = _read_sizes(how), how["data"], how["rate"]
    if how["find_batch"] and data:
        raise UsageError(
            "batches of your own have the size that they have", hint="leave --find-batch out", where="--data"
        )
    if rate and data:
        raise UsageError(
            "requests come with synthetic prompts, not with those of a file", hint="leave one of the two out",
            where="--data",
        )  # fmt: skip
    given: dict[str, Any] = {"data": str(data.resolve()) if data else None}
    if rate:
        if not found.generates:
            raise UsageError("only decoders answer requests", hint="gpt2 or llama, in inference", where="--rate")
        if (duration_s := how["requests"] / rate) > LONG_S:
            click.echo(f"requests come for about {format_duration(duration_s)}", err=True)
        given |= {"rate_per_s": rate, "requests": how["requests"]}
    accumulate, largest = _read_accumulate(found, sizes, how), how["largest_batch"]
    # With accumulated gradients the benchmark's own limit is on all batches of an update.
    most = (found.declared.max_batch_size or 0) // (how["accumulate"] or 1)
    if how["find_batch"]:
        given["find_batch"] = _make_search(how, min(largest or most, most) if most else largest)
    further = {"search": how["find_batch"], "accumulate": accumulate, "data": hash_file(data) if data else None}
    cases = [_make_case(found, size, how, **further) for size in sizes]
    return Job("workload", found.model.model, cases, make_request(how, **given))


def _make_user_job(place: str, how: dict[str, Any]) -> Job:
    """In this process, or, where its time is limited, on one rank that a supervisor watches."""
    from stepscope.bench.workloads.user import make_user_case

    cases = [
        make_user_case(
            place, device=how["device"], batch_size=size, precision=how["precision"], search=how["find_batch"]
        )
        for size in _read_sizes(how)
    ]
    given: dict[str, Any] = {}
    if how["find_batch"]:
        given["find_batch"] = _make_search(how, how["largest_batch"])
    launcher = "inline"
    if was_given("hang_timeout"):
        given["hang_timeout_s"], launcher = how["hang_timeout"], "self"
    return Job("workload", cases[0].benchmark.model, cases, make_request(how, **given), launcher)


def _make_shared_job(found: Workload, ranks: RankOptions, how: dict[str, Any]) -> Job:
    sizes = _read_sizes(how)
    accumulate = _read_accumulate(found, sizes, how)
    way = how["parallel"] or ("sharded" if found.declared.devices > 1 else "ddp")
    if way == "sharded" and not found.model.shards:
        raise UsageError(
            f"{found.model.model} has no tables to shard over the ranks", hint="--parallel ddp or fsdp",
            where="--parallel",
        )  # fmt: skip
    if found.generates:
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
    request = make_request(how, backend=ranks.backend, hang_timeout_s=ranks.hang_timeout_s)
    return Job("workload", found.model.model, cases, request, ranks.launcher, ranks.world_size)


def _make_case(found: Workload, size: int | None, how: dict[str, Any], **further: Any) -> Case:
    return found.make_case(
        device=how["device"], scale=how["scale"], batch_size=size, precision=how["precision"], **further
    )


def _make_search(how: dict[str, Any], largest: int | None) -> BatchSearch:
    if how["processes"] > 1:
        raise UsageError("a search decides as it goes: it has one process", where="--processes")
    return BatchSearch(goal=how["find_batch"], largest=largest, resolution=how["batch_resolution"])


def _find_ranks(how: dict[str, Any]) -> RankOptions | None:
    """None: one process, which needs no group."""
    from stepscope.launch import detect_rank_context
    from stepscope.launch.join import device_of_backend

    if how["ranks"] is None and detect_rank_context().world_size == 1:
        return None
    if how["group_backend"] == "fake":
        raise UsageError(
            "workloads cannot run on the fake backend", hint="use --backend gloo or nccl", where="--backend"
        )
    if how["group_backend"] and not was_given("device") and device_of_backend(how["group_backend"]) == "cpu":
        how["device"] = "cpu"  # the best device is for the backend that fits it
    backend = how["group_backend"] or ("nccl" if how["device"].startswith("cuda") else "gloo")
    return find_ranks({**how, "backend": backend, "time_by": "host"})


def _read_sizes(how: dict[str, Any]) -> list[int | None]:
    one, several, find_batch = how["batch_size"], how["batch_sizes"], how["find_batch"]
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


def _read_accumulate(found: Workload, sizes: list[int | None], how: dict[str, Any]) -> int | None:
    """For the case; None: as the benchmark does without being asked."""
    asked = how["accumulate"]
    if asked is None:
        return None
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
                f"{found.benchmark.id} is not known to converge with more than {most} examples per update: "
                f"{whole} asked for",
                hint=f"--batch-size {most // asked}" if most >= asked else f"--accumulate {most} at most",
                where="--accumulate",
            )
    usual = found.declared.accumulate if how["scale"] == "full" else 1
    return asked if asked != usual else None


# --- options without effect ------------------------------------------------------------------------------------------

_NEEDS = {
    "largest_batch": "--find-batch", "batch_resolution": "--find-batch", "requests": "--rate",
    "parallel": "--ranks", "group_backend": "--ranks", "hang_timeout": "--ranks",
}  # fmt: skip
"""Options that only mean something beside another one."""


def _refuse_without_effect(
    benchmark_id: str, how: dict[str, Any], ranks: RankOptions | None, *, with_user_model: bool
) -> None:
    """No option is silently without effect. Defaults are not refused: only what was written on the command line."""
    from stepscope.bench.workloads.user import REFUSED

    reasons: dict[str, tuple[str, str]] = {}
    if benchmark_id and ranks is not None:
        alone = (
            "several ranks measure benchmarks of the suite at given batch sizes, without this",
            "leave it out, or measure on one device",
        )
        reasons |= dict.fromkeys(("find_batch", "data", "rate"), alone)
    if "/ootb/" in benchmark_id:
        unchecked = ("ootb implementations are neither checked nor compiled", "leave it out")
        reasons |= dict.fromkeys(("no_check", "compile_backend"), unchecked)
    if was_given("no_loader"):
        reasons["loader_workers"] = ("--no-loader has no workers", "leave one of the two out")
    if with_user_model and ranks is not None and ranks.outer:
        raise UsageError("a user model is measured in one process", hint="start it without the launcher")
    has = {"--find-batch": how["find_batch"], "--rate": how["rate"], "--ranks": ranks}
    for name, needed in _NEEDS.items():
        if has[needed] is None:
            other = " or a launcher such as torchrun" if needed == "--ranks" else ""
            reasons[name] = (f"without {needed} this does nothing", f"add {needed}{other}")
    if with_user_model:
        reasons |= REFUSED
        if not how["largest_batch"]:
            limit = ("a user model has no rules that limit the search", "add --largest-batch, or use --batch-sizes 1,8")
            reasons["find_batch"] = limit
        reasons.pop("hang_timeout", None)
    for name, (reason, hint) in reasons.items():
        if was_given(name):
            raise UsageError(reason, hint=hint, where="--" + name.removeprefix("group_").replace("_", "-"))


def make_request(how: dict[str, Any], **further: Any) -> WorkloadRequest:
    return WorkloadRequest(
        device=how["device"],
        settings=make_settings(how),
        check=not how["no_check"],
        loader_workers=None if how["no_loader"] else how["loader_workers"],
        trace=how["trace"],
        compile_backend=how["compile_backend"],
        **request_processes(how),
        **further,
    )


def _describe_search(run: StoredRun) -> Addition:
    """What the tries of a search came to."""
    from stepscope.bench.workloads.search import read_trial

    request = run.plan.request
    if not isinstance(request, WorkloadRequest) or request.find_batch is None:
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
    return Addition({"search": {"goal": request.find_batch.goal, "best_batch_size": best, "tries": listed}}, text)
