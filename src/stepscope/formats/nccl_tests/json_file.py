"""What nccl-tests wrote with `-J`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from stepscope.core.errors import BadInputError
from stepscope.formats.nccl_tests.output import (
    FOREIGN_HINT,
    PARTIAL_HINT,
    SPLIT_HINT,
    NcclOutput,
    NcclRank,
    NcclRow,
    Placement,
    find_program,
    format_version_code,
    parse_number,
    parse_rate,
)

AVERAGES = {"0": "rank 0", "1": "mean over ranks", "2": "fastest rank", "3": "slowest rank"}
"""What `-a` chooses."""

_RESULTS = re.compile(r'"results"\s*:\s*\[')
_KEPT_VARIABLES = re.compile(r"[NR]CCL_(?!COMM_ID|DEBUG_FILE|HOSTID)\w+")
"""The file holds the whole environment, secrets and all: only what steers the library is taken."""


class _Placed(msgspec.Struct):
    time: float | str | None = None
    cpu_time: float | str | None = None
    alg_bw: float | str = "nan"
    bus_bw: float | str = "nan"
    nwrong: float | None = None


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


class _Device(msgspec.Struct):
    rank: int
    pid: int
    hostname: str
    device: int
    group: int = 0
    device_hex: str = ""
    device_info: str = ""


class _Config(msgspec.Struct):
    nthreads: int = 1
    ngpus: int = 1
    warmup_iters: int | None = None
    iterations: int | None = None
    aggregated_iterations: int | None = None
    validation: int | None = None
    graph: int | None = None
    blocking_collectives: str | bool | int | None = None
    devices: list[_Device] = []


class _OutOfBounds(msgspec.Struct):
    count: int


class _Average(msgspec.Struct):
    bandwidth: float | str


class _File(msgspec.Struct):
    """The fields that are read; others are left alone."""

    results: list[_Row]
    config: _Config = msgspec.field(default_factory=_Config)
    devices: list[_Device] = []
    start_time: str | None = None
    args: list[str] = []
    env: list[str] = []
    nccl_version: int | None = None
    out_of_bounds: _OutOfBounds | None = None
    average_bus_bandwidth: _Average | None = None
    errors: list[str] = []


def parse_nccl_json(text: str, *, where: str, partial: bool = False) -> NcclOutput:
    """Raises BadInputError with the place and the rule that it breaks.

    With `partial`, a file that was cut off gives the rows that are whole, and `remarks` say so.
    """
    remarks: list[str] = []
    try:
        file = msgspec.json.decode(text, type=_File)
    except msgspec.ValidationError as error:
        raise _foreign(error, where) from error
    except msgspec.DecodeError as error:
        file = _decode_cut_off(text, error, where=where, partial=partial)
        remarks.append(f"the file is cut off: {error}")
    rows = [row for number, item in enumerate(file.results) for row in _convert_row(item, number, where)]
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
    end = _find_last_whole(text, found.end())
    try:
        return msgspec.json.decode(f"{text[:end]}]}}", type=_File)
    except msgspec.MsgspecError as second:
        raise _foreign(second, where) from second


def _find_last_whole(text: str, start: int) -> int:
    """Where the last whole value of the list that begins at `start` ends."""
    from json import JSONDecodeError, JSONDecoder

    decoder = JSONDecoder()
    end = position = start
    while True:
        while text[position : position + 1] in {" ", "\t", "\n", "\r", ","}:
            position += 1
        try:
            _, end = decoder.raw_decode(text, position)
        except (JSONDecodeError, RecursionError):
            return end
        position = end


def _foreign(error: Exception, where: str) -> BadInputError:
    return BadInputError(f"this JSON is not what nccl-tests writes: {error}", hint=FOREIGN_HINT, where=where)


def _convert_row(item: _Row, number: int, where: str) -> list[NcclRow]:
    rows = []
    sides: tuple[tuple[Placement, _Placed | None, _Iterations | None], ...] = (
        ("out_of_place", item.out_of_place, item.out_of_place_per_iter),
        ("in_place", item.in_place, item.in_place_per_iter),
    )
    for placement, placed, iterations in sides:
        place = f"results[{number}].{placement}"
        try:
            rows += [_convert_placed(item, placed, iterations, placement, place)] if placed is not None else []
        except ValueError as error:
            raise BadInputError(str(error), hint="repeat the test", where=f"{where}: {place}") from error
    return rows


def _convert_placed(
    item: _Row, placed: _Placed, iterations: _Iterations | None, placement: Placement, place: str
) -> NcclRow:
    time_us = placed.time if placed.time is not None else placed.cpu_time
    if time_us is None:
        raise ValueError("`time` is missing")
    return NcclRow(
        where=place,
        placement=placement,
        size_bytes=item.size,
        count=item.count,
        dtype=item.type,
        redop=item.redop.strip() or "none",
        root=int(item.root),
        time_s=parse_number(str(time_us), "time") * 1e-6,
        algbw_bytes_per_s=parse_rate(placed.alg_bw),
        busbw_bytes_per_s=parse_rate(placed.bus_bw),
        wrong=int(placed.nwrong) if placed.nwrong is not None else None,
        iterations=item.actual_iterations,
        iteration_s=[time * 1e-6 for time in iterations.times_us] if iterations is not None else [],
    )


def _convert_file(file: _File, rows: list[NcclRow], remarks: list[str], where: str) -> NcclOutput:
    config, average = file.config, file.average_bus_bandwidth
    devices = sorted(config.devices or file.devices, key=lambda device: device.rank)
    if len({device.rank for device in devices}) != len(devices):
        raise BadInputError("a rank is listed twice", hint=SPLIT_HINT, where=f"{where}: config.devices")
    variables = (entry.partition("=") for entry in file.env)
    first = file.results[0].out_of_place or file.results[0].in_place
    return NcclOutput(
        format="json",
        program=find_program(file.args[0]) if file.args else None,
        library_version=format_version_code(file.nccl_version) if file.nccl_version else None,
        ranks=[_convert_device(device) for device in devices],
        ranks_per_line=max(1, config.nthreads * config.ngpus),
        parameters=_convert_config(file),
        environment={name: value for name, _, value in variables if _KEPT_VARIABLES.fullmatch(name)},
        host_time=first is not None and first.time is None,
        rows=rows,
        out_of_bounds=file.out_of_bounds.count if file.out_of_bounds else None,
        average_busbw_bytes_per_s=parse_rate(average.bandwidth) if average else None,
        remarks=remarks,
    )


def _convert_config(file: _File) -> dict[str, int | str]:
    config = file.config
    blocking = str(config.blocking_collectives).lower() in {"true", "1"}
    found: dict[str, int | str | None] = {
        "threads": config.nthreads,
        "gpus_per_thread": config.ngpus,
        "warmup_iterations": config.warmup_iters,
        "iterations": config.iterations,
        "aggregated_iterations": config.aggregated_iterations,
        "check_iterations": config.validation,
        "graph_launches": config.graph,
        "blocking": "wait for completion after each collective" if blocking else None,
        "average": _find_average(file.args),
        "start_time": file.start_time,
    }
    return {name: value for name, value in found.items() if value is not None}


def _convert_device(device: _Device) -> NcclRank:
    return NcclRank(
        rank=device.rank,
        group=device.group,
        pid=device.pid,
        host=device.hostname,
        device=device.device,
        pci_address=device.device_hex,
        name=device.device_info.strip(),
    )


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
