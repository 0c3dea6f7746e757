"""Output of nccl-tests and rccl-tests, as text or JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from json import JSONDecodeError, JSONDecoder
from pathlib import PurePath
from typing import Literal, NamedTuple

import msgspec

from stepscope.core.collectives import FACTS, bus_factor
from stepscope.core.errors import BadInputError

Placement = Literal["out_of_place", "in_place"]

SPLIT_HINT = "split the file: one test per file"
PARTIAL_HINT = "repeat the test, or keep the whole rows with --partial"
FOREIGN_HINT = "give the standard output of all_reduce_perf and the like, or the file it wrote with -J"

LARGEST = 2**63 - 1
"""Largest size or count."""


class Operation(NamedTuple):
    """What nccl-tests measures under one program name."""

    name: str
    """As Stepscope calls it."""
    usual: Placement = "out_of_place"
    splits: str | None = None
    """Who chose its pieces, where that tells it from Stepscope's operation of the same name."""

    def bus_factor(self, members: int) -> float:
        """Bus bytes over the size in the table."""
        return bus_factor(self.name, members) or 0.0

    @property
    def reduces(self) -> bool:
        return FACTS[self.name].reduces

    @property
    def rooted(self) -> bool:
        return FACTS[self.name].rooted


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation("all_reduce", usual="in_place"),
    "reduce": Operation("reduce", usual="in_place"),
    "broadcast": Operation("broadcast", usual="in_place"),
    "all_gather": Operation("all_gather"),
    "reduce_scatter": Operation("reduce_scatter"),
    "alltoall": Operation("all_to_all"),
    "alltoallv": Operation("all_to_allv", splits="nccl-tests"),
    "gather": Operation("gather"),
    "scatter": Operation("scatter"),
    "sendrecv": Operation("send_recv"),
    # Its own algorithmic bandwidth leaves out the rank's own piece; the bus bandwidth is the same either way.
    "hypercube": Operation("hypercube"),
}
"""By program, without `_perf`."""


class NcclRank(msgspec.Struct, frozen=True, kw_only=True):
    """One of the lines `#  Rank  0 Group  0 Pid …`; the JSON's names where they are others."""

    rank: int
    group: int = 0
    pid: int
    host: str = msgspec.field(name="hostname")
    device: int
    name: str = msgspec.field(name="device_info", default="")
    pci_address: str = msgspec.field(name="device_hex", default="")


class NcclRow(msgspec.Struct, frozen=True, kw_only=True):
    """One size in one placement; times in seconds, rates in bytes per second."""

    where: str
    """The line, or the place in the JSON."""
    placement: Placement
    size_bytes: int
    count: int
    dtype: str
    """As nccl-tests names it."""
    redop: str = "none"
    root: int = -1
    """-1: the operation has none."""
    time_s: float
    """Time of one collective, averaged over ranks and iterations."""
    algbw_bytes_per_s: float | None = None
    busbw_bytes_per_s: float | None = None
    wrong: int | None = None
    """Wrong elements; None: not checked, or not counted."""
    exceeds: bool = False
    """Marked as beyond the threshold, in versions that print a deviation in place of a count."""
    iterations: int | None = None
    """Iterations that were run, where the file says so for each row."""
    iteration_s: list[float] = []
    """Time of each iteration on the slowest rank, by device events; only JSON has them."""
    iteration_stats: dict[str, float] = {}
    """`min_s`, `max_s`, `p99_s` and `cv` of them, where only these were printed."""

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value > 0 for value in (self.time_s, *self.iteration_s)):
            raise ValueError("the time is not a number above zero")
        for name, value in (("size", self.size_bytes), ("count", self.count), ("#wrong", self.wrong or 0)):
            if not 0 <= value <= LARGEST:
                raise ValueError(f"{value} under {name} is not between 0 and {LARGEST}")

    @property
    def is_wrong(self) -> bool:
        return self.exceeds or bool(self.wrong)


class NcclOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One test."""

    format: Literal["text", "json"]
    tool: str = "nccl-tests"
    tool_version: str | None = None
    program: str | None = None
    """`all_reduce`: without path and `_perf`; None where the file does not name it."""
    library_version: str | None = None
    """NCCL as it was loaded."""
    headers_version: str | None = None
    """NCCL as the tests were compiled against."""
    cuda_version: str | None = None
    ranks: list[NcclRank]
    """In order of rank."""
    ranks_per_line: int = 1
    """Ranks that one entry of `ranks` stands for: JSON names the first of each process only."""
    parameters: dict[str, int | str] = {}
    environment: dict[str, str] = {}
    host_time: bool = False
    """Times are how long the host needed to issue the calls (`-C 1`), not how long they took."""
    rows: list[NcclRow]
    out_of_bounds: int | None = None
    average_busbw_bytes_per_s: float | None = None
    remarks: list[str] = []
    """What a reader of the numbers has to know: rows left out, errors of the library."""

    @property
    def world_size(self) -> int:
        """0 where no rank is listed."""
        return self.ranks[-1].rank + self.ranks_per_line if self.ranks else 0

    @property
    def groups(self) -> int:
        return len({rank.group for rank in self.ranks})

    @property
    def members(self) -> int:
        """Ranks of the group that rank 0 is in: the printed numbers are those of that group."""
        if self.groups < 2:
            return self.world_size
        return sum(rank.group == self.ranks[0].group for rank in self.ranks) * self.ranks_per_line

    def describe_groups(self) -> str:
        """In the words of `bench comms --groups`; of ranks that are not listed only the number of groups is known."""
        colours = [rank.group for rank in self.ranks]
        if len(colours) < self.world_size:
            return f"{self.groups} groups"
        if colours == [number % self.groups for number in range(self.world_size)]:
            return f"split:{self.groups}"
        return f"colours:{','.join(map(str, colours))}"

    def count_averaged(self, row: NcclRow) -> int | None:
        """Collectives that the row's time is the average of; None where the file does not say."""
        iterations = row.iterations or self.parameters.get("iterations")
        if not isinstance(iterations, int) or iterations < 1:
            return None
        factors = (self.parameters.get(name) for name in ("aggregated_iterations", "graph_launches"))
        return iterations * math.prod(max(1, factor) for factor in factors if isinstance(factor, int))


def format_version_code(code: int) -> str:
    """`23003` → `2.30.3`; NCCL counted in steps of 1000 before 2.9."""
    step = 10_000 if code >= 10_000 else 1_000
    return f"{code // step}.{code % step // 100}.{code % 100}"


def find_program(text: str) -> str | None:
    """`./build/all_reduce_perf` → `all_reduce`; None for what is no program of nccl-tests."""
    name = PurePath(text).name.removesuffix("_mpi").removesuffix("_perf")
    return name if name in OPERATIONS else None


def parse_number(cell: str, column: str) -> float:
    """Raises ValueError with the rule that the cell breaks."""
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"{cell!r} under {column} is no number") from None


def parse_rate(cell: str | float) -> float | None:
    """GB/s in bytes per second; None for what is no rate."""
    try:
        value = float(cell) * 1e9
    except ValueError:
        return None
    return value if math.isfinite(value) else None


_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LABEL = re.compile(r"^\s*(?:\[\d+,\d+\]<std(?:out|err)>:|\d+:(?=\s))")
"""What `mpirun --tag-output` and `srun --label` put before each line."""
_TITLES = re.compile(r"#[# ]*(size\s+count(?:\s.*)?)$")
_RANK = re.compile(
    r"#\s+Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+(\d+)\s+on\s+(\S+)\s+device\s+(\d+)\s+\[([^\]]*)\]\s*(.*)"
)
_MENTION = re.compile(r"^(?!#).*?\b([a-z_]+)_perf\b", re.MULTILINE)
_END = re.compile(r"^#\s*Out of bounds values\s*:\s*(\d+)", re.MULTILINE)
_LAST_ERROR = re.compile(r"^#\s*error:\s*(\S.*)", re.MULTILINE)
_FACTS = {
    "tool_version": r"^(?:#\s*nccl-tests version|rccl-tests: Version) (\S+)",
    "headers": r"^#\s*nccl-tests version \S+ nccl-headers=(\d+)",
    "library": r"^#\s*nccl-tests version \S+(?: nccl-headers=\d+)? nccl-library=(\d+)",
    "library_text": r"^(?!#).*?(?<![A-Za-z])[NR]CCL version\s*:?\s*(\d+(?:\.\d+)+)\S*(?:\s|$)",
    "cuda": r"^(?!#).*?(?<![A-Za-z])[NR]CCL version\s*:?\s*\d+(?:\.\d+)+\S*?\+cuda([\d.]+)(?:\s|$)",
    "program": r"^# Collective test starting: (\S+)",
    "average": r"^#\s*Avg bus bandwidth\s*:\s*(\S+)",
    "died": r"^(?!#).*?(Test (?:\w+ )?failure\b.*)",
    "blocking": r"^# Blocking Enabled[^:]*:(.*)",
}
_PARAMETERS = {
    "threads": r"nThread (\d+)",
    "gpus_per_thread": r"nGpus (\d+)",
    "warmup_iterations": r"warmup iters: (\d+)",
    "iterations": r"(?<!warmup )(?<!agg )iters: (\d+)",
    "aggregated_iterations": r"agg iters: (\d+)",
    "check_iterations": r"validation: (\d+)",
    "graph_launches": r"graph: (\d+)",
}
"""On the line that begins `# nThread`."""
_TIMES = ("time", "cputime")
_OF_ITERATIONS = {"i_min": ("min_s", 1e-6), "i_max": ("max_s", 1e-6), "i_p99": ("p99_s", 1e-6), "i_cv%": ("cv", 1e-2)}


class _Columns(NamedTuple):
    """How the cells of a row lie, from the line that names them."""

    shared: list[str]
    """size, count, type, …: what both placements have in common."""
    blocks: dict[Placement, list[str]]
    """time, algbw, … of each placement."""
    timestamps: bool

    @property
    def width(self) -> int:
        return len(self.shared) + sum(map(len, self.blocks.values())) + 2 * self.timestamps


def parse_nccl_text(text: str, *, where: str, partial: bool = False) -> NcclOutput:
    """The standard output of one test, with whatever the library and launchers wrote in between.

    Raises BadInputError with the line and the rule that it breaks. With `partial`, rows that are not whole are left out
    and a missing end is accepted; `remarks` say so.
    """
    lines = [_LABEL.sub("", line, count=1).strip() for line in _ESCAPE.sub("", text).split("\n")]
    text = "\n".join(lines)
    facts = {name: found[1] for name, rule in _FACTS.items() if (found := re.search(rule, text, re.MULTILINE))}
    ranks = _parse_ranks(lines, where)
    titles = _find_titles(lines, where)
    columns = _parse_titles(lines, titles, where)
    end = _END.search(text)
    last = text.count("\n", 0, end.start()) if end else len(lines)
    rows, broken = _parse_rows(lines, range(titles + 1, last), columns)
    if not rows and (partial or not broken):
        raise BadInputError("the table has no whole row", hint="repeat the test", where=where)
    cause = f" ({facts['died'].strip()})" if "died" in facts else ""
    faults = [(number, f"{rule}{cause}", f"line {number} was left out: {rule}") for number, rule in broken]
    if end is None:
        rule = f"the table has no end: the line `# Out of bounds values` is missing{cause}"
        at = max((number for number in range(titles + 1, last) if _looks_like_row(lines[number])), default=-1) + 1
        faults.append((at, rule, rule))
    if faults and not partial:
        raise BadInputError(faults[0][1], hint=PARTIAL_HINT, where=f"{where}:{faults[0][0]}")
    mentioned = set(_MENTION.findall("\n".join(lines[:titles]))) & OPERATIONS.keys()
    named = find_program(facts["program"]) if "program" in facts else None
    return NcclOutput(
        format="text",
        tool="rccl-tests" if re.search(r"^rccl-tests: Version", text, re.MULTILINE) else "nccl-tests",
        tool_version=facts.get("tool_version"),
        program=named or (mentioned.pop() if len(mentioned) == 1 else None),
        library_version=facts.get("library_text") or _version(facts.get("library")),
        headers_version=_version(facts.get("headers")),
        cuda_version=facts.get("cuda"),
        ranks=[ranks[rank] for rank in sorted(ranks)],
        parameters=_parse_parameters(lines, facts),
        host_time=any("cputime" in block for block in columns.blocks.values()),
        rows=rows,
        out_of_bounds=int(end[1]) if end else None,
        average_busbw_bytes_per_s=parse_rate(facts["average"]) if "average" in facts else None,
        remarks=[
            *(f"the library's last error: {error}" for error in _LAST_ERROR.findall(text)),
            *(remark for _, _, remark in faults),
        ],
    )


def _parse_ranks(lines: list[str], where: str) -> dict[int, NcclRank]:
    ranks: dict[int, NcclRank] = {}
    for number, line in enumerate(lines, start=1):
        if found := _RANK.match(line):
            rank, group, pid, host, device, address, name = found.groups()
            if int(rank) in ranks:
                raise BadInputError(
                    f"rank {rank} is listed twice, so more than one test wrote here",
                    hint=f"{SPLIT_HINT}; where all processes are rank 0, the tests were built without MPI",
                    where=f"{where}:{number}",
                )
            ranks[int(rank)] = NcclRank(
                rank=int(rank), group=int(group or 0), pid=int(pid), host=host, device=int(device),
                pci_address=address, name=name.strip(),
            )  # fmt: skip
    return ranks


def _parse_parameters(lines: list[str], facts: Mapping[str, str]) -> dict[str, int | str]:
    line = next((line for line in lines if line.startswith("# nThread")), "")
    found: dict[str, int | str] = {
        name: int(match[1]) for name, rule in _PARAMETERS.items() if (match := re.search(rule, line))
    }
    return found | ({"blocking": facts["blocking"].strip()} if "blocking" in facts else {})


def _find_titles(lines: list[str], where: str) -> int:
    titles = [number for number, line in enumerate(lines) if _TITLES.match(line)]
    if not titles:
        message = "this is no output of nccl-tests: it has no line of column names that begins `# size count`"
        raise BadInputError(message, hint=FOREIGN_HINT, where=where)
    if len(titles) > 1:
        message = "a second table begins here, and one file holds one test"
        raise BadInputError(message, hint=SPLIT_HINT, where=f"{where}:{titles[1] + 1}")
    return titles[0]


def _parse_titles(lines: list[str], number: int, where: str) -> _Columns:
    names = lines[number].lstrip("# ").split()
    starts = [place for place, name in enumerate(names) if name in _TIMES]
    if not 1 <= len(starts) <= 2:
        message = "the column names have no `time` for each placement"
        raise BadInputError(message, hint=FOREIGN_HINT, where=f"{where}:{number + 1}")
    timestamps = names[-1] == "timestamp"
    blocks = [names[start:end] for start, end in pairwise([*starts, len(names) - timestamps])]
    above = next((line for line in reversed(lines[:number]) if line.startswith("#")), "")
    placements: list[Placement] = ["out_of_place", "in_place"]
    if len(blocks) == 1 and "in-place" in above and "out-of" not in above:
        placements = ["in_place"]
    return _Columns(names[: starts[0]], dict(zip(placements, blocks, strict=False)), timestamps)


def _parse_rows(lines: list[str], table: range, columns: _Columns) -> tuple[list[NcclRow], list[tuple[int, str]]]:
    """Rows, and the lines (from 1) that are no whole rows with the rule that each breaks."""
    rows: list[NcclRow] = []
    broken: list[tuple[int, str]] = []
    redop = columns.shared.index("redop") if "redop" in columns.shared else None
    for number in table:
        if not _looks_like_row(lines[number]):
            continue
        cells = lines[number].split()
        if redop is not None and len(cells) == columns.width - 1 and _is_whole(cells[redop]):
            cells.insert(redop, "none")  # some programs print nothing where there is no reduction
        try:
            if len(cells) != columns.width:
                raise ValueError(f"the row has {len(cells)} cells, and the column names say {columns.width}")
            rows += _parse_row(cells, columns, f"line {number + 1}")
        except ValueError as error:
            broken.append((number + 1, str(error)))
    return rows, broken


def _version(code: str | None) -> str | None:
    return format_version_code(int(code)) if code is not None else None


def _looks_like_row(line: str) -> bool:
    """Size and count are whole numbers; what the library says in between does not begin so."""
    cells = line.split(maxsplit=2)
    return bool(cells) and cells[0].isdecimal() and (len(cells) == 1 or cells[1].isdecimal())


def _is_whole(cell: str) -> bool:
    return cell.removeprefix("-").isdecimal()


def _parse_row(cells: list[str], columns: _Columns, where: str) -> list[NcclRow]:
    """One row per placement. Raises ValueError with the rule that a cell breaks."""
    start = len(columns.shared)
    shared = dict(zip(columns.shared, cells, strict=False))
    rows = []
    for placement, names in columns.blocks.items():
        block = dict(zip(names, cells[start:], strict=False))
        rows.append(_parse_block(shared, block, where, placement))
        start += len(names)
    return rows


def _parse_block(shared: Mapping[str, str], block: Mapping[str, str], where: str, placement: Placement) -> NcclRow:
    time_name = next(name for name in _TIMES if name in block)
    wrong, exceeds = _parse_wrong(block)
    stats = {
        name: parse_number(cell, column) * scale
        for column, (name, scale) in _OF_ITERATIONS.items()
        if (cell := block.get(column)) is not None
    }
    root = shared.get("root", "-1")
    if not _is_whole(root):
        raise ValueError(f"{root!r} under root is no rank")
    return NcclRow(
        where=where,
        placement=placement,
        size_bytes=int(shared["size"]),
        count=int(shared["count"]),
        dtype=shared.get("type", "unknown"),
        redop=shared.get("redop", "none"),
        root=int(root),
        time_s=parse_number(block[time_name], time_name) * 1e-6,
        algbw_bytes_per_s=parse_rate(block.get("algbw", "nan")),
        busbw_bytes_per_s=parse_rate(block.get("busbw", "nan")),
        wrong=wrong,
        exceeds=exceeds,
        iteration_stats={name: value for name, value in stats.items() if math.isfinite(value)},
    )


def _parse_wrong(block: Mapping[str, str]) -> tuple[int | None, bool]:
    """Elements that are wrong, and whether the row is marked as beyond the threshold.

    Older versions print the largest deviation instead: none means that no element is wrong, any other is no count.
    """
    cell = block.get("#wrong", block.get("error", "N/A"))
    if cell == "N/A":
        return None, False
    value = parse_number(cell.rstrip("*"), "#wrong")
    if not math.isfinite(value):
        raise ValueError(f"{cell!r} under #wrong is no count")
    if "#wrong" in block:
        return int(value), False
    return (0 if value == 0 else None), cell.endswith("*")


AVERAGES = {"0": "rank 0", "1": "mean over ranks", "2": "fastest rank", "3": "slowest rank"}
"""What `-a` chooses."""

_RESULTS = re.compile(r'"results"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
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
    sides: tuple[tuple[Placement, _Placed | None, _Iterations | None], ...] = (
        ("out_of_place", item.out_of_place, item.out_of_place_per_iter),
        ("in_place", item.in_place, item.in_place_per_iter),
    )
    for placement, placed, iterations in sides:
        if placed is None:
            continue
        try:
            time_us = placed.time if placed.time is not None else placed.cpu_time
            if time_us is None:
                raise ValueError("`time` is missing")
            yield NcclRow(
                where=f"{place}.{placement}",
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
