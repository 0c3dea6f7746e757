"""`stepscope bench ops` and `bench suite`: operators, one by one and as sets."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from stepscope.cli.execute import Addition, measure_stored, name_case, open_job, run_stored
from stepscope.cli.options import (
    ANY_PATH,
    FILE,
    apply_options,
    device_option,
    make_settings,
    request_processes,
    run_options,
)
from stepscope.cli.output import emit, name_run, narrate, suggest, wants_json
from stepscope.cli.resume import is_rehearsal
from stepscope.core.errors import BadInputError, ExitCode, StoreWriteError, UsageError, unknown_name
from stepscope.core.units import count_of, format_bytes, format_duration
from stepscope.records import Case, OperatorRequest, TracedCallsRecord

if TYPE_CHECKING:
    from stepscope.store import StoredRun

SHOWN_CASES = 40
"""Cases that a dry run lists on a terminal; `--json` lists them all."""


ops_options = apply_options(
    (
        device_option,
        click.option("--compile", "compiled", is_flag=True,
                     help="Compile each case with torch.compile; compile time is recorded apart."),
        click.option("--no-check", is_flag=True, help="Do not compare results with a float64 reference."),
        click.option("--kernels", is_flag=True, help="Profile each case: its kernels, and their times."),
        click.option("--graph", is_flag=True, help="Also time replays of CUDA graphs, which contain no launches."),
        click.option("--measured-peaks", "--ceilings", "measured_peaks", is_flag=True,
                     help="Measure this machine's matmul rate and bandwidths first: % of them, and a roofline."),
        click.option("--table", type=FILE, metavar="FILE",
                     help="Write a kernel table (.csv or .csv.gz), one row per case."),
        click.option("--dry-run", is_flag=True, help="List the cases with estimates of time and memory only."),
    )
)  # fmt: skip
"""What `ops` and `suite` share: how a case is measured beyond the loop's limits."""


@click.command("ops")
@click.option("--op", "names", multiple=True, metavar="NAME", help="Operator to measure, or `all`; repeatable.")
@click.option("--shape", "shapes", multiple=True, metavar="a=1,b=2", help="Shape, or a grid, range or draw of shapes.")
@click.option("--preset", "--set", "sets", multiple=True, metavar="NAME", help="Named shape set: tiny, A, llama3-8b, …")
@click.option("--draws", type=click.IntRange(1), help="Number of shapes to draw at random from each --shape.")
@click.option("--seed", type=int, default=0, help="Random seed for --draws.")
@click.option("--cases", "case_files", multiple=True, type=FILE, metavar="FILE",
              help="Measure the cases of a TOML, YAML or JSON file; PARAM's operator files work too.")  # fmt: skip
@click.option("--call", "target", metavar="TARGET", help="Any operator of torch: aten::NAME, a schema, or torch.NAME.")
@click.option("--args", "arguments", metavar="TEXT", help="Arguments of --call: 'float32[128,64] float32[64,8] 2'.")
@click.option("--build", "building", metavar="TEXT",
              help="Arguments that build the module of --call torch.nn.NAME, such as '64 32 bias=false'.")  # fmt: skip
@click.option("--from-trace", "trace_path", type=ANY_PATH, metavar="PATH",
              help="Measure the operators of a trace: timeline, execution trace, or a folder of both.")  # fmt: skip
@click.option("--trace-rank", type=click.IntRange(0), help="Rank that --from-trace reads [default: the first].")
@click.option("--top", type=click.IntRange(1), metavar="N", help="Only the N most expensive operators of --from-trace.")
@click.option("--dtype", "dtypes", multiple=True, metavar="DTYPE",
              help="Element type; repeatable [default: the preset's own, else float32].")  # fmt: skip
@click.option("--pass", "directions", multiple=True, metavar="PASS",
              help="forward or backward; repeatable [default: the preset's own, else forward].")  # fmt: skip
@click.option("--cache", "caches", multiple=True, type=click.Choice(["warm", "cold"]),
              help="Whether inputs lie in the last-level cache [default: warm].")  # fmt: skip
@click.option("--list", "listing", is_flag=True, help="List the operators, their parameters and presets.")
@ops_options
@run_options
def ops(
    *,
    names: tuple[str, ...],
    shapes: tuple[str, ...],
    sets: tuple[str, ...],
    draws: int | None,
    seed: int,
    case_files: tuple[Path, ...],
    target: str | None,
    arguments: str | None,
    building: str | None,
    trace_path: Path | None,
    trace_rank: int | None,
    top: int | None,
    dtypes: tuple[str, ...],
    directions: tuple[str, ...],
    caches: tuple[str, ...],
    listing: bool,
    **how: Any,
) -> int:
    """Measure operators: time, TFLOP/s or GB/s from their declared work, and % of this machine's measured peaks.

    Example: stepscope bench ops --op gemm --shape m=512,n=512,k=512 --pass forward --pass backward
    """
    if listing:
        return list_operators()
    from stepscope.bench.ops import call_cases, cases_of_requests, make_cases, read_case_file

    if (arguments is not None or building is not None) and target is None:
        raise UsageError("--args and --build belong to --call", hint="name it: --call aten::mm", where="--call")
    common: dict[str, Any] = {"device": how["device"], "caches": caches, "compiled": how["compiled"]}
    cases: list[Case] = []
    if names:
        cases += make_cases(
            names=names, shapes=shapes, sets=sets, draws=draws, seed=seed, dtypes=dtypes, directions=directions,
            **common,
        )  # fmt: skip
    elif shapes or sets:
        raise UsageError("a shape needs its operator", hint="name it with --op; --list shows them", where="--op")
    for path in case_files:
        requests = read_case_file(path, seed=seed)
        cases += cases_of_requests(requests, dtypes=dtypes, directions=directions, draws=draws, seed=seed, **common)
    if target is not None:
        require_call(target)
        cases += call_cases(
            target, arguments or "", build=building or "", dtypes=dtypes, directions=directions, draws=draws, **common
        )
    trace = None
    if trace_path is not None:
        if dtypes or directions:
            raise UsageError("a trace says dtypes and passes itself", hint="leave --dtype and --pass out",
                             where="--from-trace")  # fmt: skip
        trace = read_trace(trace_path, rank=trace_rank, top=top, **common)
        cases += trace.cases
    elif trace_rank is not None or top is not None:
        raise UsageError("--trace-rank and --top belong to --from-trace", hint="name the trace: --from-trace PATH")
    parts = [*names, *(path.stem for path in case_files), *(["call"] if target else []), *(["trace"] if trace else [])]
    return measure_cases(cases, "-".join(dict.fromkeys(parts)), trace=trace, **how)


class TraceCases(NamedTuple):
    """Cases of a trace, and what is kept of it."""

    cases: list[Case]
    stored: TracedCallsRecord
    listing: str
    """What is in it, for a dry run."""


def read_trace(
    path: Path, *, rank: int | None, top: int | None, device: str, caches: Sequence[str], compiled: bool
) -> TraceCases:
    from stepscope.bench.ops.from_trace import cases_of_trace, find_trace_files, read_traced_calls
    from stepscope.bench.ops.trace_comparison import format_calls
    from stepscope.measure import require_device

    require_device(device)
    files = find_trace_files(path, rank=rank)
    traced = read_traced_calls(files, device=device)
    cases = cases_of_trace(traced, device=device, caches=caches, compiled=compiled, top=top)
    if not cases:
        reasons = dict.fromkeys(call.skip for call in traced.calls if call.skip)
        raise BadInputError(
            f"no operator of this trace can be run again: {next(iter(reasons), None) or 'it holds none'}",
            hint="record with `stepscope trace record`, which keeps shapes and the execution trace",
            where=str(path),
        )
    stored = traced.record()
    return TraceCases(cases, stored, format_calls(stored))


@click.group("suite")
def suite() -> None:
    """Measure a suite of benchmarks: one command, one table."""


@suite.command("micro")
@click.option("--benchmark", "wanted", multiple=True, metavar="ID",
              help="Only this benchmark of the suite; --list shows them all.")  # fmt: skip
@click.option("--dtype", "dtypes", multiple=True, default=["float32"], metavar="DTYPE",
              help="Element type; may be given several times.")  # fmt: skip
@click.option("--list", "listing", is_flag=True, help="List the benchmarks of the suite.")
@ops_options
@run_options
def micro(*, wanted: tuple[str, ...], dtypes: tuple[str, ...], listing: bool, **how: Any) -> int:
    """Measure the linear and embedding rows of Proxy Workloads, one score per benchmark.

    Example: stepscope bench suite micro --benchmark dlrm/micro/linear/linear_small.1dev
    """
    from stepscope.bench.ops.suites import MICRO, find_rows

    if listing:
        benchmarks = [{"id": row.id, "unit": row.unit, "description": row.description} for row in MICRO]
        text = "\n".join(f"{row.id}  {row.unit}: {row.description}" for row in MICRO)
        emit({"suite": "micro", "benchmarks": benchmarks}, text)
        return ExitCode.DONE
    from stepscope.bench.ops import DTYPES

    for dtype in dtypes:
        if dtype not in DTYPES:
            raise unknown_name("dtype", dtype, DTYPES, where="--dtype")
    rows = find_rows(wanted)
    cases = [
        case
        for row in rows
        for dtype in dtypes
        for case in row.cases(dtype=dtype, device=how["device"], compiled=how["compiled"])
    ]
    return measure_cases(cases, "suite-micro", **how)


def measure_cases(
    cases: Sequence[Case],
    title: str,
    *,
    trace: TraceCases | None = None,
    resume: str | None,
    store: Path,
    device: str,
    no_check: bool,
    kernels: bool,
    graph: bool,
    measured_peaks: bool,
    table: Path | None,
    dry_run: bool,
    **limits: Any,
) -> int:
    """Measure the cases (measured peaks first), or only list them; then write the table that was asked for."""
    from stepscope import api
    from stepscope.measure import device_kind, require_device

    processes = request_processes(limits)
    require_device(device)
    if graph and device_kind(device) != "cuda":
        raise UsageError("a CPU has no graphs to replay", hint="leave --graph out, or name a GPU: --device cuda",
                         where="--graph")  # fmt: skip
    if table is not None:
        require_table_path(table)
    settings = make_settings(limits)
    # Calls that a trace names are given random numbers: their sums cancel, and float64 then says nothing about them.
    check = not no_check and trace is None
    listed = list(cases)
    if listed and measured_peaks:
        from stepscope.bench.ops import make_peak_cases

        listed = make_peak_cases([str(case.spec.dtype) for case in cases], device) + listed
    if dry_run:
        return show_plan(listed, device=device, settings=settings, check=check, trace=trace)
    job = None
    if listed:
        job = api.plan(
            "ops", listed, name=title[:40], device=device, settings=settings, check=check, kernels=kernels,
            graph=graph, table=str(table.resolve()) if table is not None else None,
            from_trace=trace.stored if trace is not None else None, **processes,
        )  # fmt: skip
    stored = open_job(job, store=store, resume=resume, verb="ops")
    if find_stored_trace(stored) is not None and not wants_json():
        # A case's arguments may be lists of hundreds of tensors, which no table of cases has room for.
        return show_trace_run(measure_stored(stored), table)
    return run_stored(stored, lambda run: finish_run(run, table))


def find_stored_trace(run: StoredRun) -> TracedCallsRecord | None:
    """The trace that a run's plan keeps; None where its cases are not a trace's."""
    request = run.plan.request
    return request.from_trace if isinstance(request, OperatorRequest) else None


def show_trace_run(run: StoredRun, table: Path | None) -> int:
    """A trace's own times beside what was measured; the exit code is 1 when a case failed."""
    results = [case.result for case in run.cases()]
    noticed = sum(1 for result in results if result.notices)
    emit(None, f"{finish_run(run, table).text}\nrun: {run.folder}")
    if noticed:
        narrate(f"{noticed} of {count_of(len(results), 'case')} {'has' if noticed == 1 else 'have'} notices")
    suggest(f"stepscope report {name_run(run.folder)} -o report.html")
    return ExitCode.FAILED if any(result.status == "failed" for result in results) else ExitCode.DONE


def require_call(target: str) -> None:
    """What no device could ever run is wrong use, not a case that is skipped."""
    from stepscope.traces.calls.torch_calls import require_target

    try:
        require_target(target)
    except NotImplementedError as error:
        raise UsageError(str(error), hint="write for example --call aten::mm, or --call torch.nn.functional.gelu",
                         where="--call") from error  # fmt: skip


def finish_run(run: StoredRun, table: Path | None) -> Addition:
    """The kernel table that was asked for, one score for each benchmark of a suite, and a trace's own times beside."""
    from stepscope.bench.ops.suites import format_rows, score_rows
    from stepscope.bench.ops.trace_comparison import compare_with_trace, format_comparison

    data: dict[str, Any] = {}
    if table is not None:
        data["table"] = {"path": str(table), "rows": _write_table(run, table)}
        narrate(f"{count_of(data['table']['rows'], 'row')}: {table.resolve()}")
    scores = score_rows(run.cases())
    if scores:
        data["suite"] = [score._asdict() for score in scores]
    text = format_rows(scores)
    trace = find_stored_trace(run)
    if trace is not None:
        comparison = compare_with_trace(trace, run.cases())
        data["trace"] = msgspec.to_builtins(comparison)
        text = "\n".join(filter(None, [text, format_comparison(comparison)]))
    return Addition(data, text)


def require_table_path(table: Path) -> None:
    """Before hours of measuring: the ending is one that is written, and the folder takes a file."""
    from stepscope.store.kernel_table import require_table_name

    require_table_name(table)
    if is_rehearsal():
        return
    try:
        table.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=table.parent):
            pass
    except OSError as error:
        raise UsageError(
            f"{table.parent} takes no file: {error.strerror}", hint="name another place", where="--table"
        ) from error


def _write_table(run: StoredRun, table: Path) -> int:
    from stepscope.store import rows_of_run, write_kernel_table

    try:
        return write_kernel_table(table, rows_of_run(run))
    except StoreWriteError as error:
        hint = f"the run is kept: stepscope runs export {run.folder} --format table --output FILE"
        raise StoreWriteError(error.message, hint=hint, where=str(table)) from error


def show_plan(
    cases: Sequence[Case], *, device: str, settings: Any, check: bool, trace: TraceCases | None = None
) -> int:
    from stepscope.bench.ops.producer import estimate_cases

    if not cases:
        raise UsageError("nothing to measure was named", hint="stepscope bench ops --help")
    planned = estimate_cases(cases, device=device, settings=settings, check=check)
    total_s = sum(one.case_s for one in planned)
    lines = [
        f"{one.case.label}: {format_duration(one.iteration_s)} an iteration, {format_bytes(one.memory_bytes)}"
        + (f"; skipped: {one.skip}" if one.skip else "")
        for one in planned[:SHOWN_CASES]
    ]
    if len(planned) > SHOWN_CASES:
        lines.append(f"… and {len(planned) - SHOWN_CASES} more (--json lists them all)")
    about = f"about {format_duration(total_s)} in all"
    lines.append(f"{count_of(len(planned), 'case')}, {about}; estimates, nothing was measured")
    listed = [
        {**name_case(one.case), **{name: value for name, value in one._asdict().items() if name != "case"}}
        for one in planned
    ]
    content: dict[str, Any] = {"cases": listed, "total_s": total_s}
    if trace is not None:
        content["trace"] = msgspec.to_builtins(trace.stored)
        lines = [trace.listing, lines[-1]]
    emit(content, "\n".join(lines))
    return ExitCode.DONE


def list_operators() -> int:
    from stepscope.bench.ops import operators, shape_sets

    listed = [
        {
            "name": operator.name,
            "summary": operator.summary,
            "parameters": [parameter._asdict() for parameter in operator.parameters],
            "dtypes": operator.dtypes,
            "passes": operator.passes,
            "unit": operator.unit,
            "presets": list(shape_sets(operator)),
        }
        for operator in operators().values()
    ]
    lines = []
    for operator in operators().values():
        defaults = ",".join(f"{parameter.name}={parameter.default}" for parameter in operator.parameters)
        lines += [
            f"{operator.name}: {operator.summary}",
            f"    --shape {defaults}",
            f"    {', '.join(operator.dtypes)}; presets {', '.join(shape_sets(operator))}",
        ]
    emit({"ops": listed}, "\n".join(lines))
    return ExitCode.DONE
