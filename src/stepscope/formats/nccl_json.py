"""What nccl-tests wrote with `-J`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from json import JSONDecodeError, JSONDecoder

import msgspec

from stepscope.core.errors import BadInputError
from stepscope.formats.nccl_tests import (
    FOREIGN_HINT,
    PARTIAL_HINT,
    SPLIT_HINT,
    NcclOutput,
    NcclRank,
    NcclRow,
    Placement,
    find_program,
    format_version_code,
    make_row,
    parse_rate,
)

AVERAGES = {"0": "rank 0", "1": "mean over ranks", "2": "fastest rank", "3": "slowest rank"}
"""What `-a` chooses."""

_RESULTS = re.compile(r'"results"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_KEPT_VARIABLES = re.compile(r"[NR]CCL_(?!COMM_ID|DEBUG_FILE|HOSTID)\w+")
"""The file holds the whole environment, secrets and all: only what steers the library is taken."""


class _Placed(msgspec.Struct):
    """One placement, by the titles of the text."""

    time: float | str | None = None
    cputime: float | str | None = msgspec.field(name="cpu_time", default=None)
    algbw: float | str = msgspec.field(name="alg_bw", default="nan")
    busbw: float | str = msgspec.field(name="bus_bw", default="nan")
    wrong: float | None = msgspec.field(name="nwrong", default=None)


class _Iterations(msgspec.Struct):
    times_us: list[float] = []


class _Row(msgspec.Struct):
    size: int
    count: int
    type: str
    redop: str = ""
    root: str | int = -1
    out_of_place: _Placed | None = None
    in_place: _Placed | None = None
    out_of_place_per_iter: _Iterations | None = None
    in_place_per_iter: _Iterations | None = None
    actual_iterations: int | None = None


class _Config(msgspec.Struct):
    threads: int = msgspec.field(name="nthreads", default=1)
    gpus_per_thread: int = msgspec.field(name="ngpus", default=1)
    warmup_iterations: int | None = msgspec.field(name="warmup_iters", default=None)
    iterations: int | None = None
    aggregated_iterations: int | None = None
    check_iterations: int | None = msgspec.field(name="validation", default=None)
    graph_launches: int | None = msgspec.field(name="graph", default=None)
    blocking_collectives: str | bool | int | None = None
    devices: list[NcclRank] = []


class _OutOfBounds(msgspec.Struct):
    count: int


class _Average(msgspec.Struct):
    bandwidth: float | str


class _File(msgspec.Struct):
    """The fields that are read; others are left alone."""

    results: list[_Row]
    config: _Config = msgspec.field(default_factory=_Config)
    devices: list[NcclRank] = []
    start_time: str | None = None
    args: list[str] = []
    env: list[str] = []
    nccl_version: int | None = None
    out_of_bounds: _OutOfBounds | None = None
    average_bus_bandwidth: _Average | None = None
    errors: list[str] = []


def parse_nccl_json(text: str, *, where: str, partial: bool = False) -> NcclOutput:
    """As `parse_nccl_text`; of a file that was cut off, `partial` keeps the rows that are whole."""
    remarks: list[str] = []
    try:
        file = msgspec.json.decode(text, type=_File)
    except msgspec.ValidationError as error:
        raise _foreign(error, where) from error
    except msgspec.DecodeError as error:
        file = _decode_cut_off(text, error, where=where, partial=partial)
        remarks.append(f"the file is cut off: {error}")
    rows = [row for number, item in enumerate(file.results) for row in _convert_row(item, f"results[{number}]", where)]
    if not rows:
        raise BadInputError("there is no whole result", hint="repeat the test", where=f"{where}: results")
    if file.out_of_bounds is None and not remarks:
        rule = "the test did not come to its end: `out_of_bounds` is missing"
        if not partial:
            raise BadInputError(rule, hint=PARTIAL_HINT, where=f"{where}: results[{len(file.results) - 1}]")
        remarks.append(rule)
    remarks += [f"the library's last error: {error}" for error in file.errors if error]
    return _convert_file(file, rows, remarks, where)


def _decode_cut_off(text: str, error: Exception, *, where: str, partial: bool) -> _File:
    """Up to the last row that is whole."""
    if not partial:
        raise BadInputError(f"the JSON is not whole: {error}", hint=PARTIAL_HINT, where=where) from error
    found = _RESULTS.search(text)
    if found is None:
        raise BadInputError("the JSON is cut off before its results", hint="repeat the test", where=where) from error
    end = found.end()
    try:
        while True:
            _, end = JSONDecoder().raw_decode(text, _BETWEEN.match(text, end).end())  # type: ignore[union-attr]
    except (JSONDecodeError, RecursionError):
        pass
    try:
        return msgspec.json.decode(f"{text[:end]}]}}", type=_File)
    except msgspec.MsgspecError as second:
        raise _foreign(second, where) from second


def _foreign(error: Exception, where: str) -> BadInputError:
    return BadInputError(f"this JSON is not what nccl-tests writes: {error}", hint=FOREIGN_HINT, where=where)


def _convert_row(item: _Row, place: str, where: str) -> Iterator[NcclRow]:
    shared = msgspec.structs.asdict(item) | {"iterations": item.actual_iterations}
    sides: tuple[tuple[Placement, _Placed | None, _Iterations | None], ...] = (
        ("out_of_place", item.out_of_place, item.out_of_place_per_iter),
        ("in_place", item.in_place, item.in_place_per_iter),
    )
    for placement, placed, single in sides:
        if placed is None:
            continue
        block = msgspec.structs.asdict(placed) | {"times_us": single.times_us if single else []}
        if placed.wrong is not None:
            block["#wrong"] = placed.wrong
        try:
            yield make_row(f"{place}.{placement}", placement, shared, block)
        except ValueError as error:
            raise BadInputError(str(error), hint="repeat the test", where=f"{where}: {place}.{placement}") from error


def _convert_file(file: _File, rows: list[NcclRow], remarks: list[str], where: str) -> NcclOutput:
    config, average = file.config, file.average_bus_bandwidth
    ranks = sorted(config.devices or file.devices, key=lambda rank: rank.rank)
    if len({rank.rank for rank in ranks}) != len(ranks):
        raise BadInputError("a rank is listed twice", hint=SPLIT_HINT, where=f"{where}: config.devices")
    variables = (entry.partition("=") for entry in file.env)
    first = file.results[0].out_of_place or file.results[0].in_place
    return NcclOutput(
        format="json",
        program=find_program(file.args[0]) if file.args else None,
        library_version=format_version_code(file.nccl_version) if file.nccl_version else None,
        ranks=[msgspec.structs.replace(rank, name=rank.name.strip()) for rank in ranks],
        ranks_per_line=max(1, config.threads * config.gpus_per_thread),
        parameters=_convert_parameters(file),
        environment={name: value for name, _, value in variables if _KEPT_VARIABLES.fullmatch(name)},
        host_time=first is not None and first.time is None,
        rows=rows,
        out_of_bounds=file.out_of_bounds.count if file.out_of_bounds else None,
        average_busbw_bytes_per_s=parse_rate(average.bandwidth) if average else None,
        remarks=remarks,
    )


def _convert_parameters(file: _File) -> dict[str, int | str]:
    found = msgspec.structs.asdict(file.config)
    del found["devices"]
    blocking = str(found.pop("blocking_collectives")).lower() in {"true", "1"}
    found |= {
        "blocking": "wait for completion after each collective" if blocking else None,
        "average": _find_average(file.args),
        "start_time": file.start_time,
    }
    return {name: value for name, value in found.items() if value is not None}


def _find_average(arguments: Sequence[str]) -> str | None:
    """From `-a 3`, `-a3`, `--average 3` or `--average=3`; nccl-tests' own default where the arguments are known."""
    if not arguments:
        return None
    chosen = "1"
    for argument, following in pairwise([*arguments, ""]):
        if argument in {"-a", "--average"}:
            chosen = following
        elif found := re.fullmatch(r"-a(\d)|--average=(\d)", argument):
            chosen = found[1] or found[2]
    return AVERAGES.get(chosen)
