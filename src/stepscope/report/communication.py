"""Communication runs as tables: in the manner of nccl-tests, messages between pairs, averages per rank.

The first has `#` lines, fixed columns and a count of wrong elements per row. People who know nccl-tests find size,
count, type, redop, root, algbw, busbw and #wrong where they expect them; times stand as percentiles, since single
iterations are known.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from stepscope._version import __version__
from stepscope.core.collectives import FACTS
from stepscope.core.units import count_of, format_bytes, format_duration, format_significant
from stepscope.metrics import bandwidth_of
from stepscope.records import CaseResult, ImportRequest, Request, System, WorkloadRequest
from stepscope.records.kinds import (
    CollectiveObserved,
    CollectiveSpec,
    ExchangeObserved,
    MessageObserved,
    OverlapSpec,
    PairSpec,
    PatternObserved,
    PatternSpec,
    PointToPointSpec,
)
from stepscope.report.labels import format_fact, format_parameter, strip_unit
from stepscope.report.table import NONE, Column, Row, format_notices, format_table, lay_out, plain, show
from stepscope.report.view import ReportRun
from stepscope.store import MeasuredCase

REDUCING = frozenset(name for name, facts in FACTS.items() if facts.reduces)
ROOTED = frozenset(name for name, facts in FACTS.items() if facts.rooted)
IN_COLUMNS = frozenset({"size_bytes", "dtype", "reduction", "root"})
"""Parameters with a column; the others begin a section."""

_CONVENTIONS = "# sizes: K, M, G are powers of 1024; rates: 1 GB/s is 1e9 bytes per second; times are of one call"
_TIMING = {
    "slowest_rank": "those of the slowest rank in each iteration",
    "slowest_rank_device": "those of the slowest rank's device in each iteration",
    "device": "those of the device",
    "own": "as the tool that measured gives them",
}


def has_collectives(run: ReportRun) -> bool:
    return any(is_collective(case) for case in run.cases)


COMMUNICATION = (CollectiveSpec, PairSpec, OverlapSpec, PatternSpec)
"""Kinds that belong into this table."""


def _observed(measured: MeasuredCase) -> ExchangeObserved:
    found = measured.result.observed
    return found if isinstance(found, ExchangeObserved) else ExchangeObserved()


def is_collective(measured: MeasuredCase) -> bool:
    return isinstance(measured.result.case.spec, COMMUNICATION)


def format_collective_table(runs: Sequence[ReportRun], *, width: int | None = None) -> str:
    """One table per run; cases that are no communication are left out, and a line says how many."""
    blocks = [_format_run(run, width) for run in runs]
    return "\n#\n".join("\n".join(line.rstrip() for line in lines) for lines in blocks) + "\n"


def _format_run(run: ReportRun, width: int | None) -> list[str]:
    sections = _find_sections([case for case in run.cases if is_collective(case)])
    cases = [case for members in sections.values() for case in members]
    layout = lay_out(COLUMNS, cases, width=width)
    lines = _format_head(run, cases)
    if layout.constants:
        lines.append(f"# all rows: {', '.join(f'{title} {text}' for title, text in layout.constants)}")
    # The mark stands where the first column has its widest numbers.
    lines += ["#", *(f"#{line[1:]}" for line in layout.head)]
    rows = iter(layout.rows)
    for section, members in sections.items():
        lines.append(f"# {section}")
        for measured in members:
            lines += [*next(rows), *_describe_failure(measured.result)]
    if layout.left_out:
        lines.append(f"# left out for width: {', '.join(column.title for column in layout.left_out)}")
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
        lines.append(f"# check: #wrong counts elements over {span} iterations per row that were looked at")
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
    elif run.request is not None and run.request.backend is not None:
        lines.append(f"# backend {plain(run.request.backend)}")
    return lines


_TOLD_ELSEWHERE = frozenset({"kind", "backend", "ranks", "cluster"})


def _format_request(request: Request | None) -> list[str]:
    """Everything that was asked for, one line for it and one for each part of it that has parts."""
    asked = msgspec.to_builtins(request) if request is not None else {}
    # Of another tool's output there is only what the tool says.
    ours = set(ImportRequest.__struct_fields__) & set(WorkloadRequest.__struct_fields__) - {"device"}
    hidden = _TOLD_ELSEWHERE | (ours if isinstance(request, ImportRequest) else set())
    told = {name: value for name, value in asked.items() if name not in hidden}
    lines = [("asked for", told), *((name, value) for name, value in told.items() if isinstance(value, Mapping))]
    formatted = {
        title: [
            plain(f"{strip_unit(name)}={format_fact(name, value)}")
            for name, value in values.items()
            if isinstance(value, bool | int | float | str)
        ]
        for title, values in lines
    }
    return [f"# {plain(title.replace('_', ' '))}: {', '.join(texts)}" for title, texts in formatted.items() if texts]


def _format_ranks(run: ReportRun) -> list[str]:
    """One line per rank; where nothing is known of ranks, one a host."""
    if isinstance(run.request, ImportRequest) and run.request.ranks:
        return [_format_rank(msgspec.structs.asdict(rank)) for rank in run.request.ranks]
    if run.communication is not None and run.communication.ranks:
        return [_format_rank(msgspec.structs.asdict(place)) for place in run.communication.ranks]
    return _format_hosts(run.system) if run.system is not None else ["#  not known"]


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
    ranks = count_of(case.world_size, "rank")
    observed = measured.result.observed
    composed = observed.composed if isinstance(observed, CollectiveObserved | PatternObserved) else None
    more += [f"composed of {plain(str(composed))}"] if composed else []
    return ", ".join([f"{benchmark.model}{version}", benchmark.mode, ranks, *more])


def _describe_failure(result: CaseResult) -> list[str]:
    if result.failure is None:
        return []
    lines = [f"# {result.status}: {plain(result.failure.kind)}: {plain(result.failure.message)}"]
    return lines + ([f"#   next: {plain(result.failure.hint)}"] if result.failure.hint else [])


def _time_column(name: str, kept: str | None) -> Column[MeasuredCase]:
    """`kept`: where a tool left the value that one averaged sample does not have."""

    def cell(measured: MeasuredCase) -> str:
        latency, observed = measured.latency_s(), measured.result.observed
        told = observed.iteration if isinstance(observed, CollectiveObserved) else {}
        own = name == "p50" or len(measured.seconds()) > 1
        return fit_number(latency.get(name) if own else told.get(kept or ""), 1e6, 8)

    drop = {"p50": 0, "p95": 1, "p99": 3}.get(name, 4)
    return Column(name, cell, numeric=True, unit="us", drop=drop, width=8)


def _rate_column(title: str, place: int) -> Column[MeasuredCase]:
    return Column(
        title, lambda measured: fit_number(_find_rates(measured)[place], 1e-9, 7), numeric=True, unit="GB/s", width=7
    )


def _root(measured: MeasuredCase) -> str:
    spec = measured.result.case.spec
    if not isinstance(spec, CollectiveSpec):
        return "-1"
    # An operation of another package shows what it was asked for.
    return str(spec.root if spec.operation in ROOTED or (spec.operation not in FACTS and spec.root) else -1)


def _reduction(measured: MeasuredCase) -> str:
    spec = measured.result.case.spec
    if not isinstance(spec, CollectiveSpec):
        return "none"
    asked = spec.operation in REDUCING or (spec.operation not in FACTS and spec.reduction != "sum")
    return spec.reduction if asked else "none"


def _wrong(measured: MeasuredCase) -> str:
    wrong = measured.result.wrong
    return _whole(wrong) if wrong is not None else ("N/A" if measured.result.status != "skipped" else NONE)


def _count(measured: MeasuredCase) -> str:
    observed = measured.result.observed
    return _whole(observed.count if isinstance(observed, MessageObserved) else None)


COLUMNS: tuple[Column[MeasuredCase], ...] = (
    Column("size", lambda measured: _whole(measured.result.size_bytes), True, "B", role="case", width=12),
    Column("count", _count, True, "elements", drop=3, width=12),
    Column("type", lambda measured: measured.result.case.spec.dtype or NONE, True, role="setting", width=8),
    Column("redop", _reduction, True, role="setting", width=6),
    Column("root", _root, True, role="setting", width=6),
    *(_time_column(*one) for one in (("p50", None), ("p95", None), ("p99", "p99_s"), ("min", "min_s"),
                                     ("max", "max_s"))),
    _rate_column("algbw", 0),
    _rate_column("busbw", 1),
    Column("skew", lambda measured: fit_number(measured.skew_s(), 1e6, 8), True, "us", drop=2, width=8),
    Column("last", lambda measured: _whole(measured.straggler_rank()), True, "rank", drop=2, width=6),
    Column("#wrong", _wrong, True, width=6),
)  # fmt: skip


def _find_rates(measured: MeasuredCase) -> tuple[float | None, float | None]:
    """Algorithm and bus bandwidth; None for what moves nothing."""
    median_s = measured.latency_s().get("p50")
    algbw, busbw = (bandwidth_of(measured.result, median_s, bus=bus) for bus in (False, True))
    return (algbw, busbw) if busbw else (None, None)


def _whole(value: float | None) -> str:
    return show(value, lambda known: str(int(known)))


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
    rates = [_find_rates(measured)[1] for measured in cases]
    known = [rate for rate in rates if rate is not None]
    average = fit_number(math.fsum(known) / len(known), 1e-9, 10) if known else NONE
    lines = [
        f"# {'Out of bounds values':<20} : {verdict}",
        f"# {'Avg bus bandwidth':<20} : {average}",
        *_format_straggler(cases),
    ]
    others = len(run.cases) - len(cases)
    told = count_of(others, "case that is", "cases that are")
    lines += [f"# left out: {told} no communication"] if others else []
    notices = [(notice, "") for measured in cases for notice in measured.result.notices]
    return lines + format_notices(notices, "{} rows, for example: ")


def _format_straggler(cases: Sequence[MeasuredCase]) -> list[str]:
    lasts = Counter(rank for measured in cases if (rank := measured.straggler_rank()) is not None)
    if not lasts:
        return []
    rank = min(lasts, key=lambda rank: (-lasts[rank], rank))
    return [f"# {'Last to begin':<20} : rank {rank} in {lasts[rank]} of {lasts.total()} rows"]


# Messages between pairs of ranks


class MessageFigures(NamedTuple):
    """Medians of one message size; None where it was not measured. Bandwidths in bytes per second."""

    size_bytes: int
    dtype: str
    sources: list[int]
    targets: list[int]
    one_way_s: float | None
    """One message at a time."""
    round_trip_s: float | None
    one_way_bandwidth: float | None
    """Rate of one pair, averaged over the pairs, with a window of outstanding messages."""
    both_ways_bandwidth: float | None
    """The same, both directions together."""
    one_way_total: float | None
    """Rate of all pairs at once."""
    both_ways_total: float | None


def read_message_figures(cases: Sequence[MeasuredCase]) -> list[MessageFigures]:
    """One entry for each size of pairs that were named; empty where none were."""
    found: dict[bytes, tuple[PointToPointSpec, dict[str, MeasuredCase]]] = {}
    for case in cases:
        spec = case.result.case.spec
        if isinstance(spec, PointToPointSpec) and spec.sources is not None:
            shared = msgspec.structs.replace(spec, pattern=None, window=1)
            found.setdefault(msgspec.json.encode(shared), (shared, {}))[1][_name_kind(spec)] = case
    return [_read_figures(spec, kinds) for spec, kinds in found.values()]


def _name_kind(spec: PointToPointSpec) -> str:
    pattern = "one_way" if spec.pattern in {None, "one_to_one", "pairwise"} else spec.pattern
    return f"{pattern}_window" if spec.window > 1 else str(pattern)


def _read_figures(spec: PointToPointSpec, kinds: dict[str, MeasuredCase]) -> MessageFigures:
    size_bytes, pairs = spec.size_bytes, len(spec.pairs)
    times = {kind: case.latency_s().get("p50") for kind, case in kinds.items()}

    def total(kind: str, messages: int) -> float | None:
        seconds = times.get(kind)
        return size_bytes * messages / seconds if seconds else None

    uni, bi = total("one_way_window", pairs), total("bidirectional_window", 2 * pairs)
    half_s = times.get("ping_pong")
    return MessageFigures(
        size_bytes=size_bytes,
        dtype=spec.dtype,
        sources=spec.sources or [],
        targets=spec.targets or [],
        one_way_s=times.get("one_way"),
        round_trip_s=2 * half_s if half_s else None,
        one_way_bandwidth=uni / pairs if uni else None,
        both_ways_bandwidth=bi / pairs if bi else None,
        one_way_total=uni,
        both_ways_total=bi,
    )


def _figure(title: str, field: str, unit: str, factor: float, drop: int = 0) -> Column[MessageFigures]:
    def cell(one: MessageFigures) -> str:
        return show(getattr(one, field), lambda value: format_significant(value * factor))

    return Column(title, cell, numeric=True, unit=unit, drop=drop)


MESSAGES: tuple[Column[MessageFigures], ...] = (
    Column("size", lambda one: format_bytes(one.size_bytes), True, role="case"),
    Column("dtype", lambda one: one.dtype, role="setting"),
    _figure("one way", "one_way_s", "us, p50", 1e6),
    _figure("round trip", "round_trip_s", "us, p50", 1e6),
    _figure("one-way bw", "one_way_bandwidth", "GB/s", 1e-9),
    _figure("two-way bw", "both_ways_bandwidth", "GB/s", 1e-9),
    _figure("one-way total", "one_way_total", "GB/s", 1e-9, drop=1),
    _figure("two-way total", "both_ways_total", "GB/s", 1e-9, drop=1),
)


def format_message_table(figures: Sequence[MessageFigures], *, width: int | None = None) -> str:
    """`#` lines, as they stand below the table of all cases."""
    if not figures:
        return ""
    pairs = ", ".join(f"{source}→{target}" for source, target in zip(*figures[0][2:4], strict=True))
    head = f"# messages {pairs}: bandwidths are averages per pair, totals of all pairs at once"
    return "\n".join([head, *_comment_table(MESSAGES, figures, width)])


def _comment_table(columns: Sequence[Column[Row]], rows: Sequence[Row], width: int | None) -> list[str]:
    """A table that stands below another one, so that none of its lines is taken for a row of that."""
    return [f"# {line.removeprefix('# ').removeprefix('  ')}" for line in format_table(columns, rows, width=width)]


# Average times of each rank, beside the table whose times are those of the slowest one

_RankMeans = tuple[MeasuredCase, dict[int, float]]


def format_rank_averages(cases: Sequence[MeasuredCase], *, width: int | None = None) -> str:
    """`#` lines: one row per case with times, one column per rank, then the average over the ranks and the total."""
    means = [(case, found) for case in cases if (found := case.rank_means_s())]
    if not means:
        return ""

    def in_us(seconds: float) -> str:
        return format_significant(seconds * 1e6)

    columns: list[Column[_RankMeans]] = [
        Column("operation", lambda one: one[0].result.case.benchmark.model, role="benchmark"),
        Column("size", lambda one: show(one[0].result.case.spec.size_bytes, format_bytes), True, role="case"),
        Column("dtype", lambda one: one[0].result.case.spec.dtype or NONE, role="setting"),
        *(
            Column(f"rank {rank}", lambda one, rank=rank: show(one[1].get(rank), in_us), True, drop=1)  # type: ignore[misc]
            for rank in sorted({rank for _, found in means for rank in found})
        ),
        Column("all ranks", lambda one: in_us(math.fsum(one[1].values()) / len(one[1])), True),
        Column("total", lambda one: format_duration(math.fsum(one[0].seconds())), True),
    ]
    head = "# average time of one call per rank (us); total: all timed calls, by the slowest rank of each"
    return "\n".join([head, *_comment_table(columns, means, width)])
