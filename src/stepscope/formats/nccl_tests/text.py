"""The standard output of nccl-tests and rccl-tests.

A table is read by its own line of column names, so that versions with other columns (no `root`, `error` for `#wrong`,
per-iteration columns, timestamps) need no code of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from stepscope.core.errors import BadInputError
from stepscope.formats.nccl_tests.output import (
    FOREIGN_HINT,
    OPERATIONS,
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

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LABEL = re.compile(r"^\s*(?:\[\d+,\d+\]<std(?:out|err)>:|\d+:(?=\s))")
"""What `mpirun --tag-output` and `srun --label` put before each line."""
_TOOL = re.compile(r"#\s*nccl-tests version (\S+)(?: nccl-headers=(\d+))?(?: nccl-library=(\d+))?")
_RCCL = re.compile(r"rccl-tests: Version (\S+)")
_PROGRAM = re.compile(r"# Collective test starting: (\S+)")
_MENTION = re.compile(r"\b([a-z_]+)_perf\b")
_RANK = re.compile(
    r"#\s+Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+(\d+)\s+on\s+(\S+)\s+device\s+(\d+)\s+\[([^\]]*)\]\s*(.*)"
)
_LIBRARY = re.compile(r"(?<![A-Za-z])[NR]CCL version\s*:?\s*(\d+(?:\.\d+)+)\S*?(?:\+cuda([\d.]+))?(?:\s|$)")
_OUT_OF_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)")
_AVERAGE = re.compile(r"#\s*Avg bus bandwidth\s*:\s*(\S+)")
_LAST_ERROR = re.compile(r"#\s*error:\s*(\S.*)")
_DIED = re.compile(r"Test (?:\w+ )?failure\b.*")
_PARAMETERS = {
    "threads": re.compile(r"nThread (\d+)"),
    "gpus_per_thread": re.compile(r"nGpus (\d+)"),
    "warmup_iterations": re.compile(r"warmup iters: (\d+)"),
    "iterations": re.compile(r"(?<!warmup )(?<!agg )iters: (\d+)"),
    "aggregated_iterations": re.compile(r"agg iters: (\d+)"),
    "check_iterations": re.compile(r"validation: (\d+)"),
    "graph_launches": re.compile(r"graph: (\d+)"),
}
_TIMES = ("time", "cputime")
_OF_ITERATIONS = {"i_min": ("min_s", 1e-6), "i_max": ("max_s", 1e-6), "i_p99": ("p99_s", 1e-6), "i_cv%": ("cv", 1e-2)}


class _Columns(NamedTuple):
    """How the cells of a row lie, from the line that names them."""

    shared: list[str]
    """size, count, type, …: what both placements have in common."""
    blocks: list[list[str]]
    """time, algbw, …: one list a placement."""
    placements: list[Placement]
    timestamps: bool

    @property
    def width(self) -> int:
        return len(self.shared) + sum(map(len, self.blocks)) + 2 * self.timestamps


def parse_nccl_text(text: str, *, where: str, partial: bool = False) -> NcclOutput:
    """The standard output of one test, with whatever the library and launchers wrote in between.

    Raises BadInputError with the line and the rule that it breaks. With `partial`, rows that are not whole are left out
    and a missing end is forgiven; both are told in `remarks`.
    """
    reader = _TextReader(where, partial)
    for number, line in enumerate(_ESCAPE.sub("", text).split("\n"), start=1):
        reader.take(number, _LABEL.sub("", line, count=1).strip())
    return reader.finish()


class _TextReader:
    """Line by line; what a line is shows in how it begins."""

    def __init__(self, where: str, partial: bool) -> None:
        self._where, self._partial = where, partial
        self._facts: dict[str, str] = {}
        self._mentioned: set[str] = set()
        self._parameters: dict[str, int | str] = {}
        self._ranks: dict[int, NcclRank] = {}
        self._columns: _Columns | None = None
        self._above = ""
        self._rows: list[NcclRow] = []
        self._last_line = 0
        self._broken: list[tuple[int, str]] = []
        self._remarks: list[str] = []
        self._died: str | None = None
        self._ended = False

    def take(self, number: int, line: str) -> None:
        if line.startswith("#"):
            self._take_comment(number, line)
            self._above = line
        elif self._columns is not None and not self._ended and _looks_like_row(line):
            self._take_row(number, line, self._columns)
            self._last_line = number
        else:
            self._take_other(line)

    def _take_comment(self, number: int, line: str) -> None:
        if line.lstrip("# ").split()[:2] == ["size", "count"]:
            self._begin_table(number, line.lstrip("# "))
        elif found := _TOOL.match(line):
            names = ("tool_version", "headers", "library")
            self._facts.update({name: value for name, value in zip(names, found.groups(), strict=True) if value})
        elif found := _PROGRAM.match(line):
            self._facts["program"] = found[1]
        elif found := _RANK.match(line):
            self._take_rank(number, found)
        elif line.startswith("# nThread"):
            values = {name: pattern.search(line) for name, pattern in _PARAMETERS.items()}
            self._parameters |= {name: int(value[1]) for name, value in values.items() if value}
        elif line.startswith("# Blocking Enabled"):
            self._parameters["blocking"] = line.partition(":")[2].strip()
        else:
            self._take_end(line)

    def _take_end(self, line: str) -> None:
        if found := _OUT_OF_BOUNDS.match(line):
            self._facts["out_of_bounds"] = found[1]
            self._ended = True
        elif found := _AVERAGE.match(line):
            self._facts["average"] = found[1]
        elif found := _LAST_ERROR.match(line):
            self._remarks.append(f"the library's last error: {found[1]}")

    def _take_rank(self, number: int, found: re.Match[str]) -> None:
        rank, group, pid, host, device, address, name = found.groups()
        if int(rank) in self._ranks:
            hint = f"{SPLIT_HINT}; where all processes are rank 0, the tests were built without MPI"
            raise self._bad(number, f"rank {rank} is listed twice, so more than one test wrote here", hint=hint)
        self._ranks[int(rank)] = NcclRank(
            rank=int(rank),
            group=int(group or 0),
            pid=int(pid),
            host=host,
            device=int(device),
            pci_address=address,
            name=name.strip(),
        )

    def _begin_table(self, number: int, line: str) -> None:
        if self._columns is not None:
            raise self._bad(number, "a second table begins here, and one file holds one test", hint=SPLIT_HINT)
        names = line.split()
        starts = [i for i, name in enumerate(names) if name in _TIMES]
        if not 1 <= len(starts) <= 2:
            raise self._bad(number, "the column names have no `time` for each placement", hint=FOREIGN_HINT)
        timestamps = names[-1] == "timestamp"
        single: Placement = "in_place" if "in-place" in self._above and "out-of" not in self._above else "out_of_place"
        self._columns = _Columns(
            shared=names[: starts[0]],
            blocks=[names[start:end] for start, end in pairwise([*starts, len(names) - timestamps])],
            placements=["out_of_place", "in_place"] if len(starts) == 2 else [single],
            timestamps=timestamps,
        )

    def _take_row(self, number: int, line: str, columns: _Columns) -> None:
        cells = line.split()
        place = columns.shared.index("redop") if "redop" in columns.shared else None
        if place is not None and len(cells) == columns.width - 1 and _is_whole(cells[place]):
            cells.insert(place, "none")  # some programs print nothing where there is no reduction
        if len(cells) != columns.width:
            self._broken.append((number, f"the row has {len(cells)} cells, and the column names say {columns.width}"))
            return
        try:
            self._rows += _parse_row(cells, columns, f"line {number}")
        except ValueError as error:
            self._broken.append((number, str(error)))

    def _take_other(self, line: str) -> None:
        if found := _LIBRARY.search(line):
            self._facts.setdefault("library_text", found[1])
            if found[2]:
                self._facts.setdefault("cuda", found[2])
        if found := _RCCL.match(line):
            self._facts |= {"tool": "rccl-tests", "tool_version": found[1]}
        if found := _DIED.search(line):
            self._died = self._died or found[0].strip()
        if self._columns is None:
            self._mentioned |= {name for name in _MENTION.findall(line) if name in OPERATIONS}

    def finish(self) -> NcclOutput:
        if self._columns is None:
            message = "this is no output of nccl-tests: it has no line of column names that begins `# size count`"
            raise BadInputError(message, hint=FOREIGN_HINT, where=self._where)
        if not self._rows and (self._partial or not self._broken):
            raise BadInputError("the table has no whole row", hint="repeat the test", where=self._where)
        self._require_whole()
        facts = self._facts
        named = find_program(facts["program"]) if "program" in facts else None
        mentioned = next(iter(self._mentioned)) if len(self._mentioned) == 1 else None
        return NcclOutput(
            format="text",
            tool=facts.get("tool", "nccl-tests"),
            tool_version=facts.get("tool_version"),
            program=named or mentioned,
            library_version=facts.get("library_text") or _version(facts.get("library")),
            headers_version=_version(facts.get("headers")),
            cuda_version=facts.get("cuda"),
            ranks=[self._ranks[rank] for rank in sorted(self._ranks)],
            parameters=self._parameters,
            host_time="cputime" in self._columns.blocks[0],
            rows=self._rows,
            out_of_bounds=int(facts["out_of_bounds"]) if "out_of_bounds" in facts else None,
            average_busbw_bytes_per_s=parse_rate(facts["average"]) if "average" in facts else None,
            remarks=self._remarks,
        )

    def _require_whole(self) -> None:
        """Refuse what is broken, or with `partial` tell of it; why the test died is the likeliest cause."""
        cause = f" ({self._died})" if self._died else ""
        found = [(number, rule, f"line {number} was left out: {rule}") for number, rule in self._broken]
        if not self._ended:
            rule = f"the table has no end: the line `# Out of bounds values` is missing{cause}"
            found.append((self._last_line, rule, rule))
        if found and not self._partial:
            number, rule, _ = found[0]
            raise self._bad(number, rule if cause in rule else f"{rule}{cause}", hint=PARTIAL_HINT)
        self._remarks += [remark for _, _, remark in found]

    def _bad(self, number: int, rule: str, *, hint: str) -> BadInputError:
        return BadInputError(rule, hint=hint, where=f"{self._where}:{number}")


def _version(code: str | None) -> str | None:
    return format_version_code(int(code)) if code is not None else None


def _looks_like_row(line: str) -> bool:
    """Size and count are whole numbers; what the library says in between does not begin so."""
    cells = line.split(maxsplit=2)
    return bool(cells) and cells[0].isdecimal() and (len(cells) == 1 or cells[1].isdecimal())


def _is_whole(cell: str) -> bool:
    return cell.removeprefix("-").isdecimal()


def _parse_row(cells: list[str], columns: _Columns, where: str) -> list[NcclRow]:
    """One row a placement. Raises ValueError with the rule that a cell breaks."""
    start = len(columns.shared)
    shared = dict(zip(columns.shared, cells[:start], strict=True))
    rows = []
    for names, placement in zip(columns.blocks, columns.placements, strict=True):
        block = dict(zip(names, cells[start : start + len(names)], strict=True))
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
