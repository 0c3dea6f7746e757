"""Communication runs as a table in the manner of nccl-tests: `#` lines, fixed columns, a count of wrong elements a row.

People who know nccl-tests find size, count, type, redop, root, algbw, busbw and #wrong where they expect them; times
stand as percentiles, since single iterations are known.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from stepscope._version import __version__
from stepscope.core.collectives import FACTS
from stepscope.core.units import format_significant
from stepscope.metrics import bandwidth_of
from stepscope.records import Notice, RankPlace, System
from stepscope.records.kinds import (
    CollectiveObserved,
    CollectiveSpec,
    ExchangeObserved,
    MessageObserved,
    OverlapSpec,
    PairSpec,
    PatternObserved,
    PatternSpec,
)
from stepscope.report.labels import format_fact, format_parameter, strip_unit
from stepscope.report.text import plain
from stepscope.report.view import ReportRun
from stepscope.store import MeasuredCase

REDUCING = frozenset(name for name, facts in FACTS.items() if facts.reduces)
ROOTED = frozenset(name for name, facts in FACTS.items() if facts.rooted)
IN_COLUMNS = frozenset({"size_bytes", "dtype", "reduction", "root"})
"""Parameters with a column; the others begin a section."""

NONE = "-"
TIMES = {"p50": None, "p95": None, "p99": "p99_s", "min": "min_s", "max": "max_s"}
"""Columns of time, and where a tool kept the value that one averaged sample does not have."""

_CONVENTIONS = "# sizes: K, M, G are powers of 1024; rates: 1 GB/s is 1e9 bytes a second; times are of one call"
_TIMING = {
    "slowest_rank": "those of the slowest rank in each iteration",
    "slowest_rank_device": "those of the slowest rank's device in each iteration",
    "device": "those of the device",
    "own": "as the tool that measured gives them",
}


class Column(NamedTuple):
    title: str
    unit: str
    width: int


COLUMNS = (
    Column("size", "(B)", 12),
    Column("count", "(elements)", 12),
    Column("type", "", 8),
    Column("redop", "", 6),
    Column("root", "", 6),
    *(Column(name, "(us)", 8) for name in TIMES),
    Column("algbw", "(GB/s)", 7),
    Column("busbw", "(GB/s)", 7),
    Column("skew", "(us)", 8),
    Column("last", "rank", 4),
    Column("#wrong", "", 6),
)
_GAP = "  "
_SHARED = 5
"""Columns before the times."""


def has_collectives(run: ReportRun) -> bool:
    return any(is_collective(case) for case in run.cases)


COMMUNICATION = (CollectiveSpec, PairSpec, OverlapSpec, PatternSpec)
"""Kinds that belong into this table."""


def _observed(measured: MeasuredCase) -> ExchangeObserved:
    found = measured.result.observed
    return found if isinstance(found, ExchangeObserved) else ExchangeObserved()


def is_collective(measured: MeasuredCase) -> bool:
    return isinstance(measured.result.case.spec, COMMUNICATION)


def format_collective_table(runs: Sequence[ReportRun]) -> str:
    """One table a run; cases that are no communication are left out, and a line says how many."""
    blocks = [_format_run(run) for run in runs]
    return "\n#\n".join("\n".join(line.rstrip() for line in lines) for lines in blocks) + "\n"


def _format_run(run: ReportRun) -> list[str]:
    cases = [case for case in run.cases if is_collective(case)]
    lines = [*_format_head(run, cases), "#", *_format_titles()]
    for section, members in _find_sections(cases).items():
        lines.append(f"# {section}")
        for measured in members:
            lines += _format_case(measured)
    return [*lines, *_format_foot(run, cases)]


# What stands above the table


def _format_head(run: ReportRun, cases: Sequence[MeasuredCase]) -> list[str]:
    status = "" if run.status == "complete" else f", {plain(run.status)}"
    lines = [
        f"# stepscope {__version__}",
        f"# run {plain(run.id)} ({plain(run.created_at)}{status}): {plain(shlex.join(run.command))}",
        *_format_libraries(run),
        *_format_request(run.request),
        _CONVENTIONS,
    ]
    kinds = dict.fromkeys(measured.result.timing for measured in cases if measured.samples)
    lines += [f"# times are {' or '.join(_TIMING[kind] for kind in kinds)}"] if kinds else []
    checked = [_observed(measured).checked for measured in cases]
    looked_at = {int(count) for count in checked if count is not None}
    if looked_at:
        span = str(min(looked_at)) if len(looked_at) == 1 else f"{min(looked_at)} to {max(looked_at)}"
        lines.append(f"# check: #wrong counts elements over {span} iterations a row that were looked at")
    return [*lines, "# Using devices", *_format_ranks(run)]


def _format_libraries(run: ReportRun) -> list[str]:
    lines = []
    if run.system is not None:
        versions = ", ".join(f"{plain(name)} {plain(version)}" for name, version in run.system.libraries.items())
        lines.append(f"# libraries as loaded: {versions or 'not known'}")
    communication = run.communication
    if communication is not None:
        library = communication.library
        name = " ".join(filter(None, (library.get("name"), library.get("version"))))
        file = f" ({plain(library['file'])})" if "file" in library else ""
        lines.append(f"# backend {plain(communication.backend)}: {plain(name)}{file}")
        lines += [f"# {plain(name)}={plain(value)}" for name, value in communication.settings.items()]
    elif "backend" in run.request:
        lines.append(f"# backend {plain(str(run.request['backend']))}")
    return lines


_TOLD_ELSEWHERE = frozenset({"backend", "ranks", "cluster"})


def _format_request(request: Mapping[str, Any]) -> list[str]:
    """Everything that was asked for, one line for it and one for each part of it that has parts."""
    told = {name: value for name, value in request.items() if name not in _TOLD_ELSEWHERE}
    lines = [("asked for", told), *((name, value) for name, value in told.items() if isinstance(value, Mapping))]
    formatted = [(name, ", ".join(_format_values(values))) for name, values in lines]
    return [f"# {plain(name.replace('_', ' '))}: {text}" for name, text in formatted if text]


def _format_values(values: Mapping[str, Any]) -> Iterable[str]:
    for name, value in values.items():
        if isinstance(value, bool | int | float | str):
            yield plain(f"{strip_unit(name)}={format_fact(name, value)}")


def _format_ranks(run: ReportRun) -> list[str]:
    """One line a rank; where nothing is known of ranks, one a host."""
    listed = run.request.get("ranks")
    if isinstance(listed, list) and listed:
        return [_format_rank(entry) for entry in listed if isinstance(entry, Mapping)]
    if run.communication is not None and run.communication.ranks:
        return [_format_rank(_as_entry(place)) for place in run.communication.ranks]
    return _format_hosts(run.system) if run.system is not None else ["#  not known"]


def _as_entry(place: RankPlace) -> dict[str, Any]:
    return {"rank": place.rank, "pid": place.pid, "host": place.host, "device": place.device, "name": place.name}


def _format_rank(entry: Mapping[str, Any]) -> str:
    """`#  Rank  0 Group  0 Pid   1655 on      node-1 device  0 [0000:06:00] NVIDIA H100`, as far as it is known."""
    words = (("Rank", "rank", 2), ("Group", "group", 2), ("Pid", "pid", 6), ("on", "host", 10), ("device", "device", 2))
    parts = [f"{word} {plain(str(entry[name])):>{width}}" for word, name, width in words if entry.get(name) is not None]
    parts += [f"[{plain(str(entry['pci_address']))}]"] if entry.get("pci_address") else []
    parts += [plain(str(entry["name"]))] if entry.get("name") else []
    return f"#  {' '.join(parts)}"


def _format_hosts(system: System) -> list[str]:
    lines = []
    for host in system.hosts:
        gpus = Counter(gpu.name for gpu in host.gpus)
        devices = ", ".join(f"{count} × {name}" for name, count in gpus.items()) or host.cpu.model
        lines.append(f"#  Host {plain(host.name)}: {plain(devices)}")
    return lines


def _format_titles() -> list[str]:
    shared = sum(column.width + len(_GAP) for column in COLUMNS[:_SHARED])
    times = sum(column.width + len(_GAP) for column in COLUMNS[_SHARED : _SHARED + len(TIMES)])
    names, units = (_format_cells([getattr(column, field) for column in COLUMNS]) for field in ("title", "unit"))
    # The mark stands where the first column has its widest numbers.
    return [f"#{' ' * (shared - 1)}{'time of one call':^{times}}", *(f"#{line[1:]}" for line in (names, units))]


def _format_cells(cells: Sequence[str]) -> str:
    return _GAP.join(f"{plain(cell):>{column.width}}" for cell, column in zip(cells, COLUMNS, strict=True))


# Rows


def _find_sections(cases: Sequence[MeasuredCase]) -> dict[str, list[MeasuredCase]]:
    """By everything that has no column, in the order of first appearance."""
    sections: dict[str, list[MeasuredCase]] = {}
    for measured in cases:
        sections.setdefault(_name_section(measured), []).append(measured)
    return sections


def _name_section(measured: MeasuredCase) -> str:
    case = measured.result.case
    benchmark = case.benchmark
    version = f" (version {benchmark.version})" if benchmark.version > 1 else ""
    more = [plain(format_parameter(n, value)) for n, value in case.parameters.items() if n not in IN_COLUMNS]
    ranks = f"{case.world_size} rank{'' if case.world_size == 1 else 's'}"
    observed = measured.result.observed
    composed = observed.composed if isinstance(observed, CollectiveObserved | PatternObserved) else None
    more += [f"composed of {plain(str(composed))}"] if composed else []
    return ", ".join([f"{benchmark.model}{version}", benchmark.mode, ranks, *more])


def _format_case(measured: MeasuredCase) -> list[str]:
    result = measured.result
    lines = [_format_cells(_make_cells(measured))]
    if result.failure is not None:
        lines.append(f"# {result.status}: {plain(result.failure.kind)}: {plain(result.failure.message)}")
        lines += [f"#   next: {plain(result.failure.hint)}"] if result.failure.hint else []
    return lines


def _make_cells(measured: MeasuredCase) -> list[str]:
    result, observed = measured.result, _observed(measured)
    latency, several = measured.latency_s(), len(measured.seconds()) > 1
    spec, wrong = result.case.spec, result.wrong
    model = result.case.benchmark.model
    told = observed.iteration if isinstance(observed, CollectiveObserved) else {}
    rates = [fit_number(rate, 1e-9, 7) for rate in _find_rates(measured, latency.get("p50"))]
    return [
        _whole(result.size_bytes),
        _whole(observed.count if isinstance(observed, MessageObserved) else None),
        spec.dtype or NONE,
        spec.reduction if isinstance(spec, CollectiveSpec) and model in REDUCING else "none",
        str(spec.root if isinstance(spec, CollectiveSpec) and model in ROOTED else -1),
        *(
            # One sample has no percentiles of its own.
            fit_number(latency.get(name) if several or name == "p50" else told.get(kept or ""), 1e6, 8)
            for name, kept in TIMES.items()
        ),
        *rates,
        fit_number(measured.skew_s(), 1e6, 8),
        _whole(measured.straggler_rank()),
        _whole(wrong) if wrong is not None else ("N/A" if result.status != "skipped" else NONE),
    ]


def _find_rates(measured: MeasuredCase, median_s: float | None) -> tuple[float | None, float | None]:
    """None for what moves nothing."""
    algbw, busbw = (bandwidth_of(measured.result, median_s, bus=bus) for bus in (False, True))
    return (algbw, busbw) if busbw else (None, None)


def _whole(value: float | None) -> str:
    return str(int(value)) if value is not None else NONE


def fit_number(value: float | None, scale: float, width: int) -> str:
    """Two decimals, fewer where the width is too small for them, more below 1, where two would say nothing.

    What is larger than the width stays whole: a table may bend, a number may not.
    """
    if value is None or not math.isfinite(value):
        return NONE
    scaled = value * scale
    if scaled == 0:
        return "0.00"
    magnitude = math.floor(math.log10(abs(scaled)))
    decimals = 2 if magnitude >= 0 else 2 - magnitude
    text = format_significant(scaled, magnitude + 1 + decimals)
    while len(text) > width and decimals:
        decimals -= 1
        text = format_significant(scaled, magnitude + 1 + decimals)
    return text


# What stands below the table


def _format_foot(run: ReportRun, cases: Sequence[MeasuredCase]) -> list[str]:
    counts = [measured.result.wrong for measured in cases]
    checked = [int(count) for count in counts if count is not None]
    failed = any(m.result.failure is not None and m.result.failure.kind == "wrong_result" for m in cases)
    count = str(sum(checked)) if any(checked) or not failed else "N/A"
    verdict = f"{count} {'FAILED' if failed or any(checked) else 'OK'}" if checked or failed else "N/A"
    rates = [_find_rates(measured, measured.latency_s().get("p50"))[1] for measured in cases]
    known = [rate for rate in rates if rate is not None]
    average = fit_number(math.fsum(known) / len(known), 1e-9, 10) if known else NONE
    lines = [
        f"# {'Out of bounds values':<20} : {verdict}",
        f"# {'Avg bus bandwidth':<20} : {average}",
        *_format_straggler(cases),
    ]
    others = len(run.cases) - len(cases)
    told = "1 case that is" if others == 1 else f"{others} cases that are"
    lines += [f"# left out: {told} no communication"] if others else []
    return lines + _format_notices(cases)


def _format_notices(cases: Sequence[MeasuredCase]) -> list[str]:
    """One entry a kind: on a noisy machine every row says the same with other numbers."""
    by_kind: dict[str, list[Notice]] = {}
    for measured in cases:
        for notice in measured.result.notices:
            by_kind.setdefault(notice.kind, []).append(notice)
    lines = []
    for said in by_kind.values():
        count = f"{len(said)} rows, for example: " if len(said) > 1 else ""
        lines.append(f"# notice: {count}{plain(said[0].message)}")
        lines += [f"#   next: {plain(said[0].hint)}"] if said[0].hint else []
    return lines


def _format_straggler(cases: Sequence[MeasuredCase]) -> list[str]:
    lasts = Counter(rank for measured in cases if (rank := measured.straggler_rank()) is not None)
    if not lasts:
        return []
    rank = min(lasts, key=lambda rank: (-lasts[rank], rank))
    return [f"# {'Last to begin':<20} : rank {rank} in {lasts[rank]} of {lasts.total()} rows"]
