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
