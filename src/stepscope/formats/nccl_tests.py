"""Output of nccl-tests and rccl-tests: what one test gave, as plain values, and the reader of its text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

import msgspec

from stepscope.core.collectives import FACTS, bus_factor
from stepscope.core.errors import BadInputError

Placement = Literal["out_of_place", "in_place"]

SPLIT_HINT = "split the file: one test per file"
PARTIAL_HINT = "repeat the test, or keep the whole rows with --partial"
FOREIGN_HINT = "give the standard output of all_reduce_perf and the like, or the file it wrote with -J"

LARGEST = 2**63 - 1
"""Largest size or count."""


class NcclTest(NamedTuple):
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


OPERATIONS: dict[str, NcclTest] = {
    "all_reduce": NcclTest("all_reduce", usual="in_place"),
    "reduce": NcclTest("reduce", usual="in_place"),
    "broadcast": NcclTest("broadcast", usual="in_place"),
    "all_gather": NcclTest("all_gather"),
    "reduce_scatter": NcclTest("reduce_scatter"),
    "alltoall": NcclTest("all_to_all"),
    "alltoallv": NcclTest("all_to_allv", splits="nccl-tests"),
    "gather": NcclTest("gather"),
    "scatter": NcclTest("scatter"),
    "sendrecv": NcclTest("send_recv"),
    # Its own algorithmic bandwidth leaves out the rank's own piece; the bus bandwidth is the same either way.
    "hypercube": NcclTest("hypercube"),
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
        """As `bench comms --groups` takes them; of ranks that are not listed only the number of groups is known."""
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


def _parse_number(cell: object, column: str) -> float:
    try:
        return float(str(cell))
    except ValueError:
        raise ValueError(f"{str(cell)!r} under {column} is no number") from None


def parse_rate(cell: object) -> float | None:
    """GB/s in bytes per second; None for what is no rate."""
    try:
        value = float(str(cell)) * 1e9
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def make_row(where: str, placement: Placement, shared: Mapping[str, Any], block: Mapping[str, Any]) -> NcclRow:
    """A row from the cells that both placements share and those of one, by their titles in the text.

    Raises ValueError with the rule that a cell breaks.
    """
    time_name = next((name for name in _TIMES if block.get(name) is not None), None)
    if time_name is None:
        raise ValueError("`time` is missing")
    root = str(shared.get("root", "-1")).strip()
    if not _is_whole(root):
        raise ValueError(f"{root!r} under root is no rank")
    wrong, exceeds = _parse_wrong(block)
    stats = {
        name: _parse_number(block[column], column) * scale
        for column, (name, scale) in _OF_ITERATIONS.items()
        if column in block
    }
    return NcclRow(
        where=where,
        placement=placement,
        size_bytes=int(shared["size"]),
        count=int(shared["count"]),
        dtype=shared.get("type", "unknown"),
        redop=shared.get("redop", "").strip() or "none",
        root=int(root),
        time_s=_parse_number(block[time_name], time_name) * 1e-6,
        algbw_bytes_per_s=parse_rate(block.get("algbw", "nan")),
        busbw_bytes_per_s=parse_rate(block.get("busbw", "nan")),
        wrong=wrong,
        exceeds=exceeds,
        iterations=shared.get("iterations"),
        iteration_s=[time * 1e-6 for time in block.get("times_us", ())],
        iteration_stats={name: value for name, value in stats.items() if math.isfinite(value)},
    )


def _parse_wrong(block: Mapping[str, Any]) -> tuple[int | None, bool]:
    """Elements that are wrong, and whether the row is marked as beyond the threshold.

    Older versions print the largest deviation instead: none means that no element is wrong, any other is no count.
    """
    cell = str(block.get("#wrong", block.get("error", "N/A")))
    if cell == "N/A":
        return None, False
    value = _parse_number(cell.rstrip("*"), "#wrong")
    if not math.isfinite(value):
        raise ValueError(f"{cell!r} under #wrong is no count")
    if "#wrong" in block:
        return int(value), False
    return (0 if value == 0 else None), cell.endswith("*")


def _is_whole(cell: str) -> bool:
    return cell.removeprefix("-").isdecimal()


# Text: a table is read by its own line of column names, so that versions with other columns (no `root`, `error` for
# `#wrong`, per-iteration columns, timestamps) need no code of their own.

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
_ROW = re.compile(r"\d+\s*$|\d+\s+\d+(?:\s|$)")
"""Size and count are whole numbers; what the library says in between does not begin so."""
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

    Raises BadInputError with the place and the rule it breaks. With `partial`, rows that are not whole are left out
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
        at = max((number for number in range(titles + 1, last) if _ROW.match(lines[number])), default=-1) + 1
        faults.append((at, rule, rule))
    if faults and not partial:
        raise BadInputError(faults[0][1], hint=PARTIAL_HINT, where=f"{where}:{faults[0][0]}")
    mentioned = set(_MENTION.findall("\n".join(lines[:titles]))) & OPERATIONS.keys()
    said = next((line for line in lines if line.startswith("# nThread")), "")
    numbers = {name: int(found[1]) for name, rule in _PARAMETERS.items() if (found := re.search(rule, said))}
    versions = {name: format_version_code(int(facts[name])) for name in ("library", "headers") if name in facts}
    return NcclOutput(
        format="text",
        tool="rccl-tests" if re.search(r"^rccl-tests: Version", text, re.MULTILINE) else "nccl-tests",
        tool_version=facts.get("tool_version"),
        program=find_program(facts.get("program", "")) or (mentioned.pop() if len(mentioned) == 1 else None),
        library_version=facts.get("library_text") or versions.get("library"),
        headers_version=versions.get("headers"),
        cuda_version=facts.get("cuda"),
        ranks=[ranks[rank] for rank in sorted(ranks)],
        parameters=numbers | ({"blocking": facts["blocking"].strip()} if "blocking" in facts else {}),
        host_time=any("cputime" in block for block in columns.blocks.values()),
        rows=rows,
        out_of_bounds=int(end[1]) if end else None,
        average_busbw_bytes_per_s=parse_rate(facts.get("average", "nan")),
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
    """Rows, one per placement, and the lines (from 1) that are no whole rows with the rule that each breaks."""
    rows: list[NcclRow] = []
    broken: list[tuple[int, str]] = []
    redop = columns.shared.index("redop") if "redop" in columns.shared else None
    for number in table:
        if not _ROW.match(lines[number]):
            continue
        cells = lines[number].split()
        if redop is not None and len(cells) == columns.width - 1 and _is_whole(cells[redop]):
            cells.insert(redop, "none")  # some programs print nothing where there is no reduction
        try:
            if len(cells) != columns.width:
                raise ValueError(f"the row has {len(cells)} cells, and the column names say {columns.width}")
            shared, start, found = dict(zip(columns.shared, cells, strict=False)), len(columns.shared), []
            for placement, names in columns.blocks.items():
                block = dict(zip(names, cells[start:], strict=False))
                found.append(make_row(f"line {number + 1}", placement, shared, block))
                start += len(names)
            rows += found
        except ValueError as error:
            broken.append((number + 1, str(error)))
    return rows, broken
