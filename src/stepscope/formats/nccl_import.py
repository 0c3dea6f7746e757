"""From the output of nccl-tests to a stored run, so that everything that reads runs reads it too."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.core.dtypes import dtype_name
from stepscope.core.errors import BadInputError, UsageError, unknown_name
from stepscope.core.files import open_regular
from stepscope.core.units import format_bandwidth, format_duration
from stepscope.formats.nccl_json import parse_nccl_json
from stepscope.formats.nccl_tests import (
    FOREIGN_HINT,
    OPERATIONS,
    NcclOutput,
    NcclRank,
    NcclRow,
    NcclTest,
    parse_nccl_text,
)
from stepscope.records import (
    Benchmark,
    Case,
    CaseResult,
    Communication,
    Cpu,
    Failure,
    Gpu,
    Host,
    ImportedFile,
    ImportedRank,
    ImportRequest,
    Memory,
    Notice,
    RankPlace,
    RankSamples,
    Score,
    System,
    ToolSummary,
)
from stepscope.records.kinds import (
    COMMUNICATION_OWNER,
    POINT_TO_POINT,
    WORLD,
    CollectiveObserved,
    CollectiveSpec,
    PointToPointObserved,
    PointToPointSpec,
)
from stepscope.store.folder import utc_now
from stepscope.store.reader import StoredRun
from stepscope.store.writer import RunWriter, create_run

VERB = "import"
"""Verb in the plan of an imported run; nothing can continue it."""
BACKEND = "nccl"
DEVICE = "cuda"

CHECKED_BYTES_PER_S = 1e9
"""Rates are printed with two decimals of GB/s: below this rate they are too coarse to check."""
RATE_TOLERANCE = 0.02

_UNKNOWN = "unknown"
_RUN_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


class PreparedImport(NamedTuple):
    """A run that only has to be written: everything about the file has been checked."""

    file: str
    """Its name, without the folders."""
    output: NcclOutput
    operation: NcclTest
    cases: list[Case]
    results: list[CaseResult]
    samples: list[RankSamples]
    system: System
    communication: Communication
    request: ImportRequest


def prepare_import(path: Path, *, operation: str | None = None, partial: bool = False) -> PreparedImport:
    """Reads the file and checks it; writes nothing."""
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise BadInputError(f"cannot read {path.name}: {error.strerror}", where=str(path)) from error
    output = parse_nccl_output(data.decode("utf-8", errors="replace"), where=str(path), partial=partial)
    found = find_operation(output, operation, where=str(path))
    _check_rates(output, found, where=str(path))
    cases: dict[str, Case] = {}
    rows: dict[str, list[NcclRow]] = {}
    # A size that was measured again (`-N`, or small sizes that all become 0) gives one case more samples.
    for row in output.rows:
        case = _make_case(output, found, row)
        cases[case.key] = case
        rows.setdefault(case.key, []).append(row)
    samples = [_make_samples(output, key, several) for key, several in rows.items()]
    results = [_make_result(output, found, cases[one.case], rows[one.case], one) for one in samples]
    return PreparedImport(
        file=path.name,
        output=output,
        operation=found,
        cases=list(cases.values()),
        results=results,
        samples=samples,
        system=_make_system(output),
        communication=_make_communication(output),
        request=_make_request(output, path.name, hashlib.sha256(data).hexdigest()),
    )


def parse_nccl_output(text: str, *, where: str, partial: bool = False) -> NcclOutput:
    """Text or JSON, recognised by its first character."""
    if not text.strip():
        raise BadInputError("the file is empty", hint=FOREIGN_HINT, where=where)
    parse = parse_nccl_json if text.lstrip().startswith("{") else parse_nccl_text
    return parse(text, where=where, partial=partial)


def write_import(prepared: PreparedImport, store: Path, *, name: str | None = None) -> StoredRun:
    """Whole or not at all: a run that cannot be finished is taken away again."""
    name = name or prepared.operation.name
    if not _RUN_NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be part of a run's id", hint="use letters, digits and . _ + -")
    folder = create_run(
        store,
        verb=VERB,
        name=name,
        command=["stepscope", "runs", "import", prepared.file],
        request=prepared.request,
        cases=prepared.cases,
        launcher=prepared.output.tool,
        world_size=prepared.output.world_size,
    )
    try:
        with RunWriter(folder) as writer:
            writer.write_system(prepared.system)
            writer.write_communication(prepared.communication)
            for result, samples in zip(prepared.results, prepared.samples, strict=True):
                writer.append(result, [samples])
            writer.finish()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return StoredRun(folder)


# Which operation, over how many ranks


def find_operation(output: NcclOutput, asked: str | None, *, where: str) -> NcclTest:
    """What the file's header names, else what was asked for, else the only one that the numbers allow."""
    if output.members < 1:
        raise BadInputError(
            "the file does not tell how many ranks there were: it has no line `#  Rank  0 …`",
            hint="keep the header of the output in the file",
            where=where,
        )
    by_name = {operation.name: operation for operation in OPERATIONS.values()}
    chosen = None
    if asked is not None:
        chosen = by_name.get(asked) or OPERATIONS.get(asked.removesuffix("_perf"))
        if chosen is None:
            raise unknown_name("operation of nccl-tests", asked, by_name, where="--operation")
    if output.program is not None:
        named = OPERATIONS[output.program]
        if chosen is not None and chosen is not named:
            message = f"the file is of {named.name}, and --operation says {asked}"
            raise UsageError(message, hint="leave --operation out", where=where)
        return named
    return chosen or _guess_operation(output, where)


def _guess_operation(output: NcclOutput, where: str) -> NcclTest:
    possible = [operation for operation in OPERATIONS.values() if _is_possible(operation, output)]
    if len(possible) == 1:
        return possible[0]
    names = " or ".join(operation.name for operation in possible)
    raise UsageError(
        "the file does not name its operation, and "
        + (f"its numbers fit {names}" if possible else "its numbers fit none that is known"),
        hint=f"say which with --operation{f' {possible[0].name}' if possible else ''}",
        where=where,
    )


def _is_possible(operation: NcclTest, output: NcclOutput) -> bool:
    """By root, reduction and the ratio of the two bandwidths, where they are printed exactly enough to tell."""
    row = output.rows[0]
    # sendrecv prints the reduction it was started with, although it does not reduce.
    reduction_fits = operation.name == "send_recv" or operation.reduces == (row.redop != "none")
    if operation.rooted != (row.root >= 0) or not reduction_fits or operation.name == "hypercube":
        return False
    ratios = [
        row.busbw_bytes_per_s / row.algbw_bytes_per_s
        for row in output.rows
        if row.algbw_bytes_per_s and row.busbw_bytes_per_s and row.algbw_bytes_per_s >= CHECKED_BYTES_PER_S
    ]
    factor = operation.bus_factor(output.members)
    return bool(ratios) and all(abs(ratio - factor) <= RATE_TOLERANCE * max(factor, 1e-9) for ratio in ratios)


def _check_rates(output: NcclOutput, operation: NcclTest, *, where: str) -> None:
    """What Stepscope will say of a row must be what the file says: size, time, operation and ranks belong together."""
    factor = operation.bus_factor(output.members)
    for row in output.rows:
        printed = row.busbw_bytes_per_s
        if printed is None or printed < CHECKED_BYTES_PER_S:
            continue
        derived = row.size_bytes / row.time_s * factor
        if abs(derived - printed) > RATE_TOLERANCE * printed:
            ranks = f"{output.members} rank{'' if output.members == 1 else 's'}"
            raise BadInputError(
                f"the bus bandwidth is {format_bandwidth(printed)}, but {operation.name} of {row.size_bytes} bytes "
                f"over {ranks} in {format_duration(row.time_s)} has {format_bandwidth(derived)}",
                hint="is the operation the right one (--operation), and is every rank listed in the file?",
                where=f"{where}, {row.where}",
            )


# Rows to cases


def _make_case(output: NcclOutput, operation: NcclTest, row: NcclRow) -> Case:
    spec_type = PointToPointSpec if operation.name == POINT_TO_POINT else CollectiveSpec
    spec = spec_type(
        operation=operation.name,
        size_bytes=row.size_bytes,
        dtype=dtype_name(row.dtype),
        device=DEVICE,
        splits=operation.splits,
        reduction=row.redop if operation.reduces and row.redop != "none" else "sum",
        root=max(row.root, 0) if operation.rooted else 0,
        placement=row.placement if row.placement != operation.usual else None,
        groups=output.describe_groups() if output.groups > 1 else WORLD,
        clock="issue" if output.host_time else None,
    )
    benchmark = Benchmark(
        model=operation.name,
        implementation="micro",
        mode=BACKEND,
        config=f"{output.world_size}ranks",
        owner=COMMUNICATION_OWNER,
        description=f"imported from {output.tool}",
    )
    return Case(benchmark=benchmark, spec=spec, world_size=output.world_size)


def _make_result(
    output: NcclOutput, operation: NcclTest, case: Case, rows: Sequence[NcclRow], samples: RankSamples
) -> CaseResult:
    factor = operation.bus_factor(output.members)
    failure = None
    if any(row.is_wrong for row in rows):
        counted = sum(row.wrong or 0 for row in rows)
        failure = Failure(
            kind="wrong_result",
            message=f"{f'{counted} elements are' if counted else 'some elements are'} not what {operation.name} must "
            f"give, says {output.tool}",
            hint="the communication library or the network corrupts data: repeat the test",
            where=rows[0].where,
        )
    return CaseResult(
        case=case,
        status="failed" if failure else "ok",
        failure=failure,
        started_at=utc_now(),
        elapsed_s=sum(samples.duration_s),
        score=Score(unit="GB/s", work=rows[0].size_bytes * factor),
        timing="own",
        observed=_observe(output, operation, rows, factor),
        notices=list(_find_notices(output, rows)),
    )


def _make_samples(output: NcclOutput, case: str, rows: Sequence[NcclRow]) -> RankSamples:
    durations: list[float] = []
    iterations: list[int] = []
    for row in rows:
        number = output.count_averaged(row) or 1
        durations += row.iteration_s or [row.time_s * number]
        iterations += [1] * len(row.iteration_s) or [number]
    return RankSamples(case=case, duration_s=durations, iterations=iterations, warmup=[False] * len(durations))


def _observe(output: NcclOutput, operation: NcclTest, rows: Sequence[NcclRow], factor: float) -> CollectiveObserved:
    first, are_checked = rows[0], all(row.wrong is not None for row in rows)
    observed_type = PointToPointObserved if operation.name == POINT_TO_POINT else CollectiveObserved
    return observed_type(
        size_bytes=first.size_bytes,
        bus_factor=factor,
        members=output.members,
        count=first.count,
        groups=output.groups if output.groups > 1 else None,
        wrong=sum(row.wrong or 0 for row in rows) if are_checked else None,
        average_s=first.time_s if any(row.iteration_s for row in rows) else None,
        iteration=first.iteration_stats,
    )


def _find_notices(output: NcclOutput, rows: Sequence[NcclRow]) -> Iterable[Notice]:
    between = output.parameters.get("blocking", "its iterations follow each other without a barrier")
    if all(row.iteration_s for row in rows):
        yield Notice(
            kind="imported",
            message=f"{output.tool} timed each iteration by device events and kept the longest time of all ranks "
            f"({between})",
        )
    else:
        number = output.count_averaged(rows[0])
        average = output.parameters.get("average", "mean over ranks, unless it was started with -a")
        over = f"{number} iterations" if number else "an unknown number of iterations"
        yield Notice(
            kind="averaged",
            message=f"{output.tool} gives one time averaged over {over} ({average}; {between}): how single iterations "
            "spread is not known",
            hint="run nccl-tests with -I 1 -J FILE and import that file",
        )
    if output.host_time:
        yield Notice(kind="host_time", message="the times are how long the host took to issue the calls (-C 1)")
    if len(output.ranks) < output.world_size:
        listed = f"the file lists {len(output.ranks)} of {output.world_size} ranks"
        yield Notice(kind="ranks_not_listed", message=listed)
    for remark in output.remarks:
        yield Notice(kind="partial", message=remark)
    if output.out_of_bounds and not any(row.is_wrong for row in output.rows):
        message = f"{output.tool} ends with {output.out_of_bounds} values out of bounds, and no row of it shows them"
        yield Notice(kind="out_of_bounds", message=message)


# What the file tells of the machine


def _make_system(output: NcclOutput) -> System:
    library = "rccl" if output.tool == "rccl-tests" else "nccl"
    versions = {library: output.library_version, "cuda": output.cuda_version, output.tool: output.tool_version}
    by_host: dict[str, list[NcclRank]] = {}
    for rank in output.ranks:
        by_host.setdefault(rank.host, []).append(rank)
    return System(
        collected_at=utc_now(),
        hosts=[_make_host(name, ranks) for name, ranks in by_host.items()],
        python="none",
        libraries={name: version for name, version in versions.items() if version},
        environment=output.environment,
    )


def _make_host(name: str, ranks: Sequence[NcclRank]) -> Host:
    """The header knows the GPUs and nothing else of a host; a record has to have the rest."""
    devices = {rank.device: rank for rank in ranks}
    return Host(
        name=name,
        os=_UNKNOWN,
        kernel=_UNKNOWN,
        cpu=Cpu(model=_UNKNOWN, architecture=_UNKNOWN, threads=0, usable_threads=0),
        memory=Memory(total_bytes=0),
        gpus=[
            Gpu(index=number, name=devices[number].name, pci_address=devices[number].pci_address or None)
            for number in sorted(devices)
        ],
    )


def _make_communication(output: NcclOutput) -> Communication:
    version = {"version": output.library_version} if output.library_version else {}
    seen: dict[str, int] = {}
    places = []
    for rank in output.ranks:
        local = seen[rank.host] = seen.get(rank.host, -1) + 1
        places.append(
            RankPlace(
                rank=rank.rank,
                host=rank.host,
                pid=rank.pid,
                local_rank=local * output.ranks_per_line,
                device=f"{DEVICE}:{rank.device}",
                name=rank.name or None,
            )
        )
    name = "RCCL" if output.tool == "rccl-tests" else "NCCL"
    return Communication(backend=BACKEND, library={"name": name, **version}, settings=output.environment, ranks=places)


def _make_request(output: NcclOutput, file: str, digest: str) -> ImportRequest:
    source = ImportedFile(
        tool=output.tool, tool_version=output.tool_version, headers_version=output.headers_version,
        format=output.format, file=file, sha256=digest,
    )  # fmt: skip
    summary = ToolSummary(
        out_of_bounds=output.out_of_bounds, average_busbw_bytes_per_s=output.average_busbw_bytes_per_s
    )
    return ImportRequest(
        backend=BACKEND,
        device=DEVICE,
        imported_from=source,
        tool_parameters=output.parameters,
        tool_summary=summary,
        ranks=[ImportedRank(**msgspec.structs.asdict(rank)) for rank in output.ranks],
    )
