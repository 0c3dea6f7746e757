"""Tables that `nsys stats --format csv` prints: sums per kernel or call (no timeline), and the trace of the device.

Units stand in the header (`Total Time (ns)`) or in every cell (`94.645 ms`), thousands may be set apart with commas,
and lines of narration may stand before the header.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.core.errors import BadInputError
from stepscope.formats.classify import CATEGORIES, classify_names
from stepscope.formats.readers import TraceFormat
from stepscope.formats.source import rank_in_name, read_bounded
from stepscope.formats.timeline import COPY, KERNEL, SET, Timeline, TimelineBuilder

_LINES_BEFORE_HEADER = 200
_SECONDS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "μs": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NANOSECONDS = {"s": 1e9, "sec": 1e9, "ms": 1e6, "us": 1e3, "μs": 1e3, "µs": 1e3, "ns": 1.0}
_BYTES = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_NUMBER = re.compile(r"([-+]?[\d,_\u202f\u00a0' ]*\.?\d+(?:[eE][-+]?\d+)?)\s*([A-Za-zμµ%]*)")
_HEADER_UNIT = re.compile(r"^(.*?)\s*\(([^()]*)\)$")
_DEVICE_NUMBER = re.compile(r"\((\d{1,6})\)\s*$")
_DIRECTION = re.compile(r"\[CUDA (?:Unified Memory )?memcpy (\w)\w*-to-(\w)", re.IGNORECASE)
_LATEST_NS = 1 << 61
_LONGEST_NUMBER = 64


class SummaryRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one kernel (or call) took in the whole recording."""

    name: str
    count: int
    total_s: float
    mean_s: float
    min_s: float | None = None
    max_s: float | None = None
    median_s: float | None = None
    std_s: float | None = None


class KernelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A recording without its timeline: totals by name. Devices, duration and overlap are not in it."""

    source: str
    report: str
    """kernels or calls."""
    rows: list[SummaryRow]
    """In the order of the file."""
    repairs: dict[str, int]

    @property
    def total_s(self) -> float:
        return sum(row.total_s for row in self.rows)

    def seconds_by_category(self) -> dict[str, float]:
        """Sums by class of kernel; they may overlap in time, so shares are of summed kernel time."""
        sums = dict.fromkeys(CATEGORIES, 0.0)
        for row, category in zip(self.rows, classify_names([row.name for row in self.rows]), strict=True):
            sums[CATEGORIES[category]] += row.total_s
        return {category: seconds for category, seconds in sums.items() if seconds}


class _Column(NamedTuple):
    place: int
    unit: str | None


class _Table(NamedTuple):
    kind: str
    """kernels, calls or trace."""
    columns: dict[str, _Column]
    """By lower-case title without its unit."""
    line: int
    """Line of the header."""


def sniff(head: bytes, path: Path) -> bool:
    """Whether it is a CSV of the device's trace (`cuda_gpu_trace`)."""
    return _kind_of(head) == "trace"


def sniff_summary(head: bytes, path: Path) -> bool:
    """Whether it is a CSV of sums (`cuda_gpu_kern_sum`, `cuda_api_sum`)."""
    return _kind_of(head) in ("kernels", "calls")


def read(path: Path) -> list[Timeline]:
    """The device's rows of a `cuda_gpu_trace` table; calls of the host and steps are not in it."""
    table, rows, repairs = _open(path, ("trace",))
    reader = _TraceReader(path, table)
    reader.builder.repairs.update(repairs)
    return [reader.read(rows)]


def read_summary(path: Path) -> KernelSummary:
    """Sums per name. Of several tables in one file the one of kernels, else the one of calls."""
    table, rows, repairs = _open(path, ("kernels", "calls"))
    read = [_read_sum(table, cells) for cells in rows]
    found = [row for row in read if row is not None]
    if len(found) < len(read):
        repairs["rows without a usable name, count or time were left out"] = len(read) - len(found)
    if not found:
        raise BadInputError("has a header but no usable row", where=f"{path}: line {table.line}")
    return KernelSummary(source=str(path), report=table.kind, rows=found, repairs=repairs)


def _kind_of(head: bytes) -> str | None:
    if b"," not in head or b"\0" in head[:1024] or head.lstrip()[:1] in (b"{", b"["):
        return None
    lines = head.decode("utf-8-sig", errors="replace").splitlines()[:_LINES_BEFORE_HEADER]
    kinds = [table.kind for number, line in enumerate(lines) if (table := _parse_header(line, number + 1))]
    return kinds[0] if kinds else None


def _parse_header(line: str, number: int) -> _Table | None:
    if "," not in line or "name" not in line.lower():
        return None
    try:
        titles = next(csv.reader([line]))
    except (csv.Error, StopIteration):
        return None
    columns: dict[str, _Column] = {}
    for place, title in enumerate(titles):
        found = _HEADER_UNIT.match(title.strip())
        plain, unit = (found[1], found[2]) if found else (title.strip(), None)
        columns.setdefault(plain.lower(), _Column(place, unit))
    if {"start", "duration", "name"} <= columns.keys() and ("strm" in columns or "corrid" in columns):
        return _Table("trace", columns, number)
    if {"total time", "name"} <= columns.keys():
        for title, kind in (("instances", "kernels"), ("num calls", "calls"), ("calls", "calls")):
            if title in columns:
                columns["count"] = columns[title]
                return _Table(kind, columns, number)
    return None


def _open(path: Path, kinds: tuple[str, ...]) -> tuple[_Table, Iterator[list[str]], dict[str, int]]:
    """The first table of the first of these kinds, its rows, and what was repaired."""
    data, cut_short = read_bounded(path)
    lines = data.decode("utf-8-sig", errors="replace").splitlines(keepends=True)
    repairs: dict[str, int] = {}
    if cut_short:
        repairs[f"the packed file ends too early ({cut_short}): the rows before were read"] = 1
        if lines and not lines[-1].endswith(("\n", "\r")):
            # Its last number may have lost digits.
            lines.pop()
            repairs["rows without an end were left out"] = 1
    tables = [
        table for number, line in enumerate(lines, start=1) if (table := _parse_header(line.rstrip("\r\n"), number))
    ]
    for kind in kinds:
        for table in tables:
            if table.kind == kind:
                end = min((other.line for other in tables if other.line > table.line), default=len(lines) + 1)
                return table, _rows(lines[table.line : end - 1], table.line, path), repairs
    wanted = "Start, Duration, …, Strm, Name" if "trace" in kinds else "Total Time, Instances (or Num Calls), …, Name"
    hint = "this file holds sums, which have no timeline" if tables and "trace" in kinds else None
    raise BadInputError(
        f"has no header line with {wanted}",
        hint=hint or "write it with: nsys stats --format csv --report cuda_gpu_trace REPORT",
        where=str(path),
    )


def _rows(lines: list[str], before: int, path: Path) -> Iterator[list[str]]:
    reader = csv.reader(lines)
    try:
        yield from (cells for cells in reader if len(cells) > 2)  # narration between tables has no commas
    except csv.Error as error:
        raise BadInputError(f"is no CSV: {error}", where=f"{path}: line {before + reader.line_num}") from error


def parse_quantity(text: str, unit: str | None, scales: dict[str, float]) -> float | None:
    """A number with a unit of its own, or of its column; None where it is neither."""
    found = _NUMBER.fullmatch(text.strip()) if len(text) < _LONGEST_NUMBER else None
    if found is None:
        return None
    scale = scales.get(found[2] or unit or "")
    if scale is None:
        return None
    try:
        return float(re.sub(r"[,_\u202f\u00a0' ]", "", found[1])) * scale
    except ValueError:
        return None


def _cell(table: _Table, cells: list[str], title: str) -> tuple[str, str | None]:
    column = table.columns.get(title)
    if column is None or column.place >= len(cells):
        return "", None
    return cells[column.place], column.unit


def _seconds(table: _Table, cells: list[str], *titles: str) -> float | None:
    for title in titles:
        text, unit = _cell(table, cells, title)
        value = parse_quantity(text, unit or "ns", _SECONDS) if text else None
        if value is not None and 0 <= value < 1e12:
            return value
    return None


def _whole(table: _Table, cells: list[str], title: str) -> int | None:
    value = parse_quantity(_cell(table, cells, title)[0], "", {"": 1.0})
    return int(value) if value is not None and 0 <= value < 1 << 53 else None


def _read_sum(table: _Table, cells: list[str]) -> SummaryRow | None:
    name = _cell(table, cells, "name")[0].strip()
    count, total_s = _whole(table, cells, "count"), _seconds(table, cells, "total time")
    if not name or not count or total_s is None:
        return None
    mean_s = _seconds(table, cells, "avg", "average")
    return SummaryRow(
        name=name,
        count=count,
        total_s=total_s,
        mean_s=total_s / count if mean_s is None else mean_s,
        min_s=_seconds(table, cells, "min", "minimum"),
        max_s=_seconds(table, cells, "max", "maximum"),
        median_s=_seconds(table, cells, "med", "median"),
        std_s=_seconds(table, cells, "stddev"),
    )


class _TraceReader:
    def __init__(self, path: Path, table: _Table) -> None:
        self.path = path
        self.table = table
        self.builder = TimelineBuilder()
        self.devices: dict[str, int] = {}

    def read(self, rows: Iterator[list[str]]) -> Timeline:
        for cells in rows:
            self._add(cells)
        if not len(self.builder):
            raise BadInputError("has a header but no usable row", where=f"{self.path}: line {self.table.line}")
        devices = [
            {"id": number, "name": _DEVICE_NUMBER.sub("", name).strip()} for name, number in self.devices.items()
        ]
        metadata = {"format": "nsys-gpu-trace", "source": str(self.path), "devices": devices, "rank_from": "name"}
        return self.builder.build(rank=rank_in_name(self.path), metadata=metadata)

    def _add(self, cells: list[str]) -> None:
        table = self.table
        start, duration = (parse_quantity(*self._timed(cells, title), _NANOSECONDS) for title in ("start", "duration"))
        name = _cell(table, cells, "name")[0].strip()
        if start is None or duration is None or not name or not abs(start) < _LATEST_NS or duration > _LATEST_NS:
            self.builder.count_repair("rows without a usable time or name were left out")
            return
        if duration < 0:
            self.builder.count_repair("negative durations were read as zero")
        lowered = name.lower()
        is_copy = "memcpy" in lowered[:40] and name[0] == "["
        kind = COPY if is_copy else SET if lowered.startswith("[cuda memset") else KERNEL
        start_ns = round(start)
        self.builder.add(
            kind,
            name if kind == KERNEL else self._transfer_name(cells, name, kind),
            start_ns,
            start_ns + max(0, round(duration)),
            device=self._device(_cell(table, cells, "device")[0]),
            stream=_whole(table, cells, "strm"),
            correlation=_whole(table, cells, "corrid"),
            **self._launch(cells) if kind == KERNEL else {"bytes": self._bytes(cells, "bytes")},
        )

    def _timed(self, cells: list[str], title: str) -> tuple[str, str]:
        text, unit = _cell(self.table, cells, title)
        return text, unit or "ns"

    def _bytes(self, cells: list[str], title: str) -> int | None:
        text, unit = _cell(self.table, cells, title)
        value = parse_quantity(text, unit or "B", _BYTES) if text else None
        return round(value) if value is not None and 0 <= value < 1 << 61 else None

    def _launch(self, cells: list[str]) -> dict[str, object]:
        grid = [_whole(self.table, cells, f"grd{axis}") for axis in "xyz"]
        block = [_whole(self.table, cells, f"blk{axis}") for axis in "xyz"]
        shared = [self._bytes(cells, title) for title in ("stcsmem", "dymsmem")]
        return {
            "grid": None if None in grid else str(grid),
            "block": None if None in block else str(block),
            "registers": _whole(self.table, cells, "reg/trd"),
            "shared_memory": None if None in shared else sum(size or 0 for size in shared),
        }

    def _transfer_name(self, cells: list[str], name: str, kind: int) -> str:
        """As Kineto spells it, so that directions are told alike everywhere."""
        source, target = (_cell(self.table, cells, title)[0].strip() or "Unknown" for title in ("srcmemkd", "dstmemkd"))
        if kind == SET:
            return f"Memset ({source if source != 'Unknown' else target})"
        found = _DIRECTION.match(name)
        way = f"{found[1].upper()}to{found[2].upper()}" if found else "unknown"
        return f"Memcpy {way} ({source} -> {target})"

    def _device(self, name: str) -> int:
        if name not in self.devices:
            found = _DEVICE_NUMBER.search(name)
            self.devices[name] = int(found[1]) if found else len(self.devices)
        return self.devices[name]


FORMAT = TraceFormat("nsys_stats", sniff, read)
