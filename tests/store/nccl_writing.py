"""Text and JSON as nccl-tests writes them, made from plain values, for round trips."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Factor = Callable[[int], float]


class Side(NamedTuple):
    """One placement of a row."""

    time_us: float
    algbw: float
    busbw: float
    wrong: int | None = 0
    iterations_us: tuple[float, ...] = ()


class Line(NamedTuple):
    size: int
    count: int
    dtype: str
    redop: str
    root: int
    out_of_place: Side
    in_place: Side


def fit(value: float, width: int) -> str:
    """Two decimals, then one, then none, then an exponent, as the number grows."""
    digits = 1
    while value >= 10**digits and digits < 30:
        digits += 1
    digits = 0 if value < 1 else digits
    if digits < width - 2:
        return f"{value:{width}.2f}"
    if digits < width - 1:
        return f"{value:{width}.1f}"
    if digits < width + 1:
        return f"{value:{width}.0f}"
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


def make_line(
    size: int,
    time_us: float,
    factor: float,
    *,
    count: int | None = None,
    dtype: str = "float",
    redop: str = "sum",
    root: int = -1,
    wrong: tuple[int | None, int | None] = (0, 0),
    iterations: int = 0,
) -> Line:
    sides = []
    for place, (share, bad) in enumerate(zip((1.0, 0.98), wrong, strict=True)):
        time = time_us * share
        algbw = size / time / 1e3
        single = tuple(round(time * (1 + 0.01 * ((3 * i + place) % 7)), 2) for i in range(iterations))
        sides.append(Side(time, algbw, algbw * factor, bad, single))
    return Line(size, size // 4 if count is None else count, dtype, redop, root, *sides)


def format_rank(rank: int, *, host: str = "node-1", group: int | None = 0, device: int | None = None) -> str:
    place = rank if device is None else device
    shown = f" Group {group:2d}" if group is not None else ""
    return (
        f"#  Rank {rank:2d}{shown} Pid {4100 + rank:6d} on {host:>10s} device {place:2d} "
        f"[0000:{16 + 8 * place:02x}:00] NVIDIA H100 80GB HBM3"
    )


def format_parameters(**changes: Any) -> str:
    values = {"threads": 1, "gpus": 1, "warmup": 1, "iters": 20, "agg": 1, "check": 1, "graph": 0, **changes}
    return (
        "# nThread {threads} nGpus {gpus} minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: {warmup} "
        "iters: {iters} agg iters: {agg} validation: {check} graph: {graph}".format(**values)
    )


def format_side(side: Side, per_iteration: bool) -> str:
    wrong = "   N/A" if side.wrong is None else f"{float(side.wrong):6g}"
    text = f"  {fit(side.time_us, 7)}  {fit(side.algbw, 6)}  {fit(side.busbw, 6)}  {wrong}"
    if per_iteration:
        times = sorted(side.iterations_us)
        cv = 100 * (times[-1] - times[0]) / (times[0] * 4)
        text += "".join(f"  {fit(value, 7)}" for value in (times[0], times[-1], times[-1], cv))
    return text


def format_line(line: Line, per_iteration: bool = False) -> str:
    start = f"{line.size:12d}  {line.count:12d}  {line.dtype:>8s}  {line.redop:>6s}  {line.root:6d}"
    return start + format_side(line.out_of_place, per_iteration) + format_side(line.in_place, per_iteration)


def format_titles(per_iteration: bool = False, time: str = "time") -> list[str]:
    block = [time, "algbw", "busbw", "#wrong", *(["i_min", "i_max", "i_p99", "i_cv%"] if per_iteration else [])]
    widths = [10, 12, 8, 6, 6, *([7, 6, 6, 6, *([7] * 4 if per_iteration else [])] * 2)]
    names = ["size", "count", "type", "redop", "root", *block, *block]
    unit = ["(us)", "(GB/s)", "(GB/s)", "", *(["(us)", "(us)", "(us)", "(%)"] if per_iteration else [])]
    units = ["(B)", "(elements)", "", "", "", *unit, *unit]
    return [
        "#",
        "#" + " " * 62 + "out-of-place                       in-place",
        *(
            "# " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            for row in (names, units)
        ),
    ]


def format_text(
    program: str,
    ranks: Sequence[str],
    lines: Sequence[Line],
    *,
    version: str | None = "# nccl-tests version 2.18.3 nccl-headers=23003 nccl-library=22809",
    parameters: str | None = None,
    per_iteration: bool = False,
) -> str:
    sides = [side for line in lines for side in (line.out_of_place, line.in_place)]
    wrong = sum(side.wrong or 0 for side in sides)
    head = [
        *([version, f"# Collective test starting: {program}"] if version else []),
        parameters or format_parameters(),
        "#",
        "# Using devices",
        *ranks,
    ]
    foot = [
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# Avg bus bandwidth    : {sum(side.busbw for side in sides) / len(sides):g} ",
        "#",
        *([f"# Collective test concluded: {program}"] if version else []),
    ]
    rows = [format_line(line, per_iteration) for line in lines]
    return "\n".join([*head, *format_titles(per_iteration), *rows, *foot]) + "\n"


def _json_side(side: Side) -> dict[str, Any]:
    wrong = None if side.wrong is None else float(side.wrong)
    return {"time": side.time_us, "alg_bw": side.algbw, "bus_bw": side.busbw, "nwrong": wrong}


def _json_line(line: Line, iterations: int) -> dict[str, Any]:
    row: dict[str, Any] = {"size": line.size, "count": line.count, "type": line.dtype, "redop": line.redop,
                           "root": f"{line.root:6d}"}  # fmt: skip
    for name, side in (("out_of_place", line.out_of_place), ("in_place", line.in_place)):
        row[name] = _json_side(side)
        if side.iterations_us:
            times = sorted(side.iterations_us)
            row[f"{name}_per_iter"] = {"min_us": times[0], "max_us": times[-1], "times_us": list(side.iterations_us)}
    return {**row, "actual_iterations": iterations, "experiment_name": "AllReduce"}


def format_json(
    program: str, devices: Sequence[dict[str, Any]], lines: Sequence[Line], *, config: dict[str, Any] | None = None,
    arguments: Sequence[str] = (), indent: int | None = None,
) -> str:  # fmt: skip
    iterations = len(lines[0].out_of_place.iterations_us) or 20
    content = {
        "version": 2,
        "start_time": "2026-07-01 12:00:00",
        "args": [f"./build/{program}", "-b", "1M", *arguments],
        "env": ["HOME=/home/somebody", "NCCL_ALGO=Ring", "NCCL_COMM_ID=10.0.0.1:4000", "CLUSTER_TOKEN=not-for-others"],
        "nccl_version": 22809,
        "config": {
            "nthreads": 1, "ngpus": 1, "minimum_bytes": 1048576, "maximum_bytes": 134217728, "step_factor": 2,
            "warmup_iters": 5, "iterations": iterations, "aggregated_iterations": 1, "validation": 1, "graph": 0,
            "blocking_collectives": "false", "per_iter_timing": "false", "parallel_init": "false",
            **(config or {}),
            "devices": list(devices),
        },
        "results": [_json_line(line, iterations) for line in lines],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 100.5, "okay": "unchecked"},
        "end_time": "2026-07-01 12:00:09",
        "errors": [],
    }  # fmt: skip
    return json.dumps(content, indent=indent) + "\n"


def make_device(rank: int, host: str = "node-1") -> dict[str, Any]:
    return {
        "rank": rank, "group": 0, "pid": 4100 + rank, "hostname": host, "device": rank % 8,
        "device_hex": f"0000:{16 + rank:02x}:00", "device_info": "NVIDIA H100 80GB HBM3",
    }  # fmt: skip
