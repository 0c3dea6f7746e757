"""The tables of a traced job's page: cells as text with the number that a click on the title sorts by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from stepscope.analyze.job import JobReport
from stepscope.analyze.step.breakdown import SHARES
from stepscope.analyze.step.group_times import TimesTable
from stepscope.analyze.step.kernels import KernelReport
from stepscope.analyze.step.launches import SlowLaunch, Spread
from stepscope.analyze.step.operator_rates import OperatorRate
from stepscope.analyze.step.overheads import Sample
from stepscope.core.units import format_bandwidth, format_bytes, format_duration, format_share, format_significant
from stepscope.formats.classify import short_name
from stepscope.report.labels import format_byte_rate, format_flop_rate, format_flops
from stepscope.report.trace_words import (
    REASON_WORDS,
    by_step_time,
    fractions,
    share_words,
    short_on_path,
    spell_path_kind,
)

MOST_ROWS = 40
MOST_RANKS = 64
LONGEST_TEXT, LONG_TEXT = 400, 28

_Row = TypeVar("_Row")


class PageColumn(NamedTuple):
    title: str
    numeric: bool = True
    hint: str = ""
    wide: bool = False
    """Its texts are so long that they may break into lines."""


class Cell(NamedTuple):
    text: str
    sort: float | None = None
    """What a sortable table orders by; None goes last, or the text decides."""
    title: str = ""
    """Shown when the pointer rests on it."""


class PageTable(NamedTuple):
    title: str
    caption: str
    columns: list[PageColumn]
    rows: list[list[Cell]]
    left_out: int
    id: str = ""


class _Field(NamedTuple):
    column: PageColumn
    cell: Callable[[Any], Cell]


def _table(
    title: str, caption: str, fields: Sequence[_Field], rows: Sequence[_Row], *, most: int = MOST_ROWS, id: str = ""
) -> PageTable:
    shown = rows[:most]
    cells = [[field.cell(row) for field in fields] for row in shown]
    longest = [max(map(len, texts)) for texts in zip(*((cell.text for cell in row) for row in cells), strict=True)]
    columns = [
        field.column._replace(wide=not field.column.numeric and length > LONG_TEXT)
        for field, length in zip(fields, longest or [0] * len(fields), strict=True)
    ]
    return PageTable(title, caption, columns, cells, len(rows) - len(shown), id)


def _text(
    title: str, read: Callable[[Any], str | None], hint: str = "", *, whole: Callable[[Any], str] | None = None
) -> _Field:
    def cell(row: Any) -> Cell:
        text = read(row)
        return Cell("-" if text is None else _cut(text), title=_cut(whole(row)) if whole is not None else "")

    return _Field(PageColumn(title, False, hint), cell)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def _number(title: str, read: Callable[[Any], float | None], shape: Callable[[float], str], hint: str = "") -> _Field:
    def cell(row: Any) -> Cell:
        value = read(row)
        return Cell("-") if value is None else Cell(shape(value), value)

    return _Field(PageColumn(title, True, hint), cell)


def _count(title: str, read: Callable[[Any], float | None], hint: str = "") -> _Field:
    return _number(title, read, lambda value: f"{value:.0f}", hint)


def _time(title: str, read: Callable[[Any], float | None], hint: str = "") -> _Field:
    return _number(title, read, format_duration, hint)


def _share(title: str, read: Callable[[Any], float | None], hint: str = "") -> _Field:
    return _number(title, read, format_share, hint)


# Ranks and steps


def table_of_ranks(job: JobReport) -> PageTable:
    """Slowest first."""
    words = share_words(job)
    waiting = {one.rank: one for one in job.across.waiting} if job.across is not None else {}
    lateness = {one.rank: one for one in job.across.stragglers.ranks} if job.across is not None else {}

    def part(name: str) -> _Field:
        place = SHARES.index(name)
        return _share(words[name], lambda one: fractions(one)[place])

    fields = [
        _number("Rank", lambda one: one.rank, lambda value: f"{value:.0f}"),
        _time("Profiled step", lambda one: one.step_s),
        *(part(name) for name in SHARES),
        _share("Hidden", lambda one: one.hidden_comm_share, "Share of communication that ran beside compute"),
        _time("Waiting", lambda one: waiting[one.rank].wait_s if one.rank in waiting else None, "In collectives"),
        _count("Last to", lambda one: lateness[one.rank].last_calls if one.rank in lateness else None,
               "Collectives at which it arrived last"),
        _time("Kept others", lambda one: lateness[one.rank].caused_s if one.rank in lateness else None,
              "How long other ranks waited for it, summed over them"),
        _text("Verdict", lambda one: lateness[one.rank].verdict if one.rank in lateness else None),
    ]  # fmt: skip
    only = job.across.step if job.across is not None else None
    waited = "waiting and lateness over all steps" if only is None else "waiting in it, lateness over all steps"
    caption = f"Shares of each rank's own step; {waited}"
    return _table("Ranks", caption, fields, by_step_time(job.ranks), most=MOST_RANKS)


def table_of_steps(job: JobReport) -> PageTable:
    words = share_words(job)
    variation = job.detail.variation
    fields = [
        _number("Step", lambda one: one.step, lambda value: f"{value:.0f}"),
        _time(
            "Profiled step",
            lambda one: one.step_s,
            "Without device work of the steps before",
        ),
        _time("On the host", lambda one: one.host_s),
        _time("To the next", lambda one: one.period_s),
        *(_time(words[name], lambda one, name=name: getattr(one.breakdown_s, name)) for name in SHARES),  # type: ignore[misc]
        _text("", lambda one: "slow" if one.is_slow else "" if one.is_judged else "not judged"),
    ]
    caption = f"Steps of rank {job.telling_rank}; slow ones take over 5 % more than the median"
    return _table("Steps", caption, fields, variation.steps, most=MOST_RANKS)


# Device work


def tables_of_kernels(kernels: KernelReport) -> list[PageTable]:
    by_name = _times("Kernels", "Device work by name", kernels.by_name, "Kernel", names=kernels)
    grouped = [
        _times("By class", "Device work by class of kernel", kernels.by_category, "Class"),
        _times("By operator", "By the innermost operator around the launch", kernels.by_operator, "Operator"),
        _times("By outermost operator", "The same by the outermost one", kernels.by_top_operator, "Operator"),
        _times("By phase", "Device work by phase of training", kernels.by_phase, "Phase"),
        _times("By annotation", "Device work by the innermost annotation around its launch", kernels.by_annotation,
               "Annotation"),
    ]  # fmt: skip
    if kernels.by_module is not None:
        grouped.append(_times("By module", "Device work by the innermost nn.Module", kernels.by_module, "Module"))
    return [table for table in (by_name, *grouped) if table.rows]


def _times(title: str, caption: str, table: TimesTable, what: str, names: KernelReport | None = None) -> PageTable:
    fields = [
        _time("Time", lambda row: row.total_s),
        _share("Share", lambda row: row.share, "Of the sum of device work"),
        _count("Count", lambda row: row.count),
        _time("Median", lambda row: row.median_s),
        _time("p95", lambda row: row.p95_s),
        _time("Longest", lambda row: row.max_s),
    ]
    if names is not None:
        known = names.names
        fields += [
            _text("Class", lambda row: known[row.name].category),
            _text(
                what,
                lambda row: short_name(row.name),
                "In short; the whole name when the pointer rests on it",
                whole=lambda row: row.name,
            ),
        ]
    else:
        fields.append(_text(what, lambda row: row.name))
    more = f"; the first {table.covering} cover 80 % of the time" if table.rows else ""
    return _table(title, caption + more, fields, table.rows)


def table_of_transfers(kernels: KernelReport) -> PageTable:
    fields = [
        _time("Time", lambda row: row.busy_s),
        _count("Count", lambda row: row.count),
        _number("Bytes", lambda row: row.bytes, format_bytes),
        _number("Rate", lambda row: row.bytes_per_s, format_bandwidth),
        _text("Copy", lambda row: row.name),
    ]
    return _table("Copies and fills", "By direction and kind of memory", fields, kernels.transfers)


def table_of_host_operators(kernels: KernelReport) -> PageTable:
    fields = [
        _time("Own time", lambda row: row.self_s, "Without the operators it calls"),
        _share("Share", lambda row: row.share),
        _count("Count", lambda row: row.count),
        _time("Whole time", lambda row: row.total_s),
        _text("Operator", lambda row: row.name),
    ]
    return _table("Operators on the host", "Profiled host time by operator", fields, kernels.host_operators)


def table_of_sequences(job: JobReport) -> PageTable:
    sequences = job.detail.sequences
    fields = [
        _time("Gaps", lambda row: row.gap_s, "Time between its kernels: what fusion saves at most"),
        _time("Kernels", lambda row: row.kernel_s),
        _count("Times", lambda row: row.count),
        _count("Launches fewer", lambda row: row.launches_saved),
        _count("Length", lambda row: len(row.kernels)),
        _text("Operators", lambda row: " → ".join(name or "?" for name in row.operators)),
        _text("Kernels in order", lambda row: " → ".join(row.kernels)),
    ]
    caption = (
        f"Short kernels (at most {format_duration(sequences.short_s)}) that follow each other again and again: "
        f"{sequences.short_kernels} of {sequences.kernels} kernels are that short"
    )
    return _table("Sequences to fuse", caption, fields, sequences.sequences)


# Idle time and the critical path


def tables_of_idle(job: JobReport) -> list[PageTable]:
    idle = job.detail.idle
    reasons = sorted(
        ((name, spent) for name, spent in idle.by_reason_s.items() if spent > 0), key=lambda item: -item[1]
    )
    whole = idle.idle_s or 1.0
    return [
        _table("Reasons", f"{format_duration(idle.idle_s)} in {idle.gaps} gaps", [
            _time("Time", lambda item: item[1]),
            _share("Share", lambda item: item[1] / whole),
            _text("Reason", lambda item: REASON_WORDS[item[0]]),
        ], reasons),
        _table("Responsible", "What the host was doing during most of each gap", [
            _time("Time", lambda one: one.total_s),
            _share("Share", lambda one: one.share),
            _count("Gaps", lambda one: one.gaps),
            _time("Longest", lambda one: one.longest_s),
            _text("The host was in", lambda one: one.operator),
        ], idle.by_operator),
        _table("Longest gaps", "In the order of their length", [
            _time("At", lambda gap: gap.start_s, "From the start of the step"),
            _time("Length", lambda gap: gap.duration_s),
            _text("Reason", lambda gap: REASON_WORDS[gap.reason]),
            _text("The host was in", lambda gap: gap.operator),
            _text("Call", lambda gap: gap.call),
            _text("Next work", lambda gap: gap.next_name),
        ], idle.longest),
    ]  # fmt: skip


def tables_of_path(job: JobReport) -> list[PageTable]:
    path = job.critical
    if path is None:
        return []
    kinds = sorted(((kind, spent) for kind, spent in path.by_kind_s.items() if spent > 0), key=lambda item: -item[1])
    whole = path.length_s or 1.0
    return [
        _table("Critical path by kind", f"The {format_duration(path.length_s)} of the profiled step, each once", [
            _time("Time", lambda item: item[1]),
            _share("Share", lambda item: item[1] / whole),
            _text("Kind", lambda item: spell_path_kind(item[0])),
        ], kinds),
        _table("Critical path by name", "What lies on it", [
            _time("Time", lambda one: one.time_s),
            _share("Share", lambda one: one.share),
            _count("Stretches", lambda one: one.count),
            _text("Kind", lambda one: spell_path_kind(one.kind)),
            _text("Name", lambda one: short_on_path(one.name, one.kind)),
        ], path.by_name),
        _table("Slack", "How much later device work could end without making the step longer", [
            _time("Least slack", lambda one: one.least_slack_s),
            _time("On the path", lambda one: one.on_path_s),
            _time("Time", lambda one: one.time_s),
            _count("Count", lambda one: one.count),
            _text("Kind", lambda one: one.kind),
            _text("Name", lambda one: short_on_path(one.name, one.kind)),
        ], path.slack),
    ]  # fmt: skip


# Collectives


def tables_of_collectives(job: JobReport) -> list[PageTable]:
    across = job.across
    if across is None:
        return []
    rows = sorted(across.table, key=lambda row: -row.total_s)
    over = "Over all steps" if across.step is None else f"In step {across.step}"
    return [
        _table("Collectives", f"{over}; a matched one counts once, however many ranks took part", [
            _time("Time", lambda row: row.total_s),
            _count("Count", lambda row: row.count),
            _time("Median", lambda row: row.median_s),
            _share("Waiting", lambda row: row.wait_share, "Of all members' time in them"),
            _time("Transfer", lambda row: row.transfer_s, "From the last arrival to the end, median"),
            _number("Size", lambda row: row.size_bytes, format_bytes),
            _number("AlgBW", lambda row: row.algbw_bytes_per_s, format_bandwidth),
            _number("BusBW", lambda row: row.busbw_bytes_per_s, format_bandwidth),
            _text("", lambda row: "at least" if row.includes_waiting and row.busbw_bytes_per_s is not None else "",
                  "Rates are lower bounds where waiting could not be taken out"),
            _text("Collective", lambda row: row.collective),
            _text("Type", lambda row: row.dtype),
            _count("Ranks", lambda row: row.group_size),
            _text("Group", lambda row: row.group),
        ], rows),
        _table("Process groups", "Each over all its collectives", [
            _time("Time of a rank", lambda one: one.per_rank_s),
            _share("Waiting", lambda one: one.wait_share),
            _count("Collectives", lambda one: one.collectives),
            _number("Bytes", lambda one: one.bytes, format_bytes),
            _number("BusBW", lambda one: one.busbw_bytes_per_s, format_bandwidth),
            _count("Size", lambda one: one.size),
            _text("Members", lambda one: one.members),
            _text("Group", lambda one: one.group),
        ], across.groups),
    ]  # fmt: skip


# Launches and overheads


def tables_of_launches(job: JobReport) -> list[PageTable]:
    launches = job.detail.launches
    return [
        _table("Launch calls", "How long the host was inside, and how long until the work began", [
            _text("Call", lambda one: one.name),
            _count("Calls", lambda one: one.calls),
            _count("Launched", lambda one: one.launched),
            _time("Median", lambda one: one.call.median_s),
            _time("p95", lambda one: one.call.p95_s),
            _time("Longest", lambda one: one.call.max_s),
            _time("To empty stream", lambda one: _median(one.latency), "From the call to the start of its work"),
            _time("Behind an event", lambda one: _median(one.held)),
            _time("In queue", lambda one: _median(one.queueing)),
            _count("Longer than work", lambda one: one.longer_than_work, "Calls longer than what they launched"),
            _count("Over 50 µs", lambda one: one.slow_calls),
        ], launches.by_call),
        _slow_launches("Slowest calls", launches.slowest_calls),
        _slow_launches("Latest starts", launches.latest_starts),
        _table("Queues", "Pieces of work launched and not started, weighted by time", [
            _text("Device", lambda one: one.device),
            _text("Stream", lambda one: "all" if one.stream is None else str(one.stream)),
            _number("Waiting, mean", lambda one: one.pending_mean, lambda value: format_significant(value, 3)),
            _count("p95", lambda one: one.pending_p95),
            _count("Most", lambda one: one.pending_max),
            _number("Not finished, mean", lambda one: one.outstanding_mean, lambda value: format_significant(value, 3)),
            _count("Most", lambda one: one.outstanding_max),
        ], launches.queue),
    ]  # fmt: skip


def _slow_launches(title: str, rows: Sequence[SlowLaunch]) -> PageTable:
    return _table(title, "Single launches that stand out", [
        _time("At", lambda one: one.start_s, "From the start of the step"),
        _time("In the call", lambda one: one.call_s),
        _time("Until its start", lambda one: one.delay_s),
        _text("Waited for", lambda one: one.waited_for),
        _text("Call", lambda one: one.call),
        _text("Launched", lambda one: one.launched),
        _text("Operator", lambda one: one.operator),
    ], rows)  # fmt: skip


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median_s


def tables_of_overheads(job: JobReport) -> list[PageTable]:
    overheads = job.detail.overheads
    whole: list[tuple[str, Sample]] = []
    if overheads.t1 is not None:
        whole.append(("T1 between two operators", overheads.t1))
    whole += [(f"T4 {name}", sample) for name, sample in overheads.t4.items()]
    return [
        _table("T1 and T4", "Between top-level operators of a thread, and inside launch calls", [
            _text("Overhead", lambda item: item[0]),
            _count("Count", lambda item: item[1].count),
            _time("Mean", lambda item: item[1].mean_s),
            _time("Median", lambda item: item[1].median_s),
            _time("Trimmed mean", lambda item: item[1].trimmed_mean_s, "Without outliers"),
        ], whole),
        _table("T2, T3 and T5", "By top-level operator; trimmed means", [
            _text("Operator", lambda one: one.name),
            _count("Count", lambda one: one.count),
            _number("Launches", lambda one: one.launches, lambda value: format_significant(value, 3)),
            _number("Events", lambda one: one.events, lambda value: format_significant(value, 3),
                    "Host events recorded inside: each costs the profiler time"),
            _time("T2", lambda one: _trimmed(one.t2), "From its start to its first launch"),
            _time("T3", lambda one: _trimmed(one.t3), "From its last launch to its end"),
            _time("T5", lambda one: _trimmed(one.t5), "Between two launches in it"),
            _time("T5 without launch", lambda one: _trimmed(one.t5_without_launch), "Where it launched nothing"),
        ], overheads.operators),
    ]  # fmt: skip


def _trimmed(sample: Sample | None) -> float | None:
    return None if sample is None else sample.trimmed_mean_s


# Memory, counters, rates


def tables_of_memory(job: JobReport) -> list[PageTable]:
    tables = []
    for device in job.detail.memory.devices if job.detail.memory is not None else []:
        where = device.device if device.device == "cpu" else f"device {device.device}"
        fields = [
            _number("Bytes", lambda one: one.bytes, format_bytes),
            _count("Allocations", lambda one: one.allocations),
            _text("Allocated by", lambda one: one.operator),
        ]
        tables.append(
            _table(f"Held at the peak of {where}", "By the operator that allocated it", fields, device.at_peak)
        )
        tables.append(
            _table(f"Kept by {where}", "Allocated in the step and still held at its end", fields, device.kept)
        )
    return tables


def tables_of_counters(job: JobReport) -> list[PageTable]:
    counters = job.detail.counters
    if counters is None:
        return []
    names = counters.counters[:12]

    def read(name: str) -> Callable[[Any], float | None]:
        return lambda one: one.sums.get(name)

    shape = lambda value: format_significant(value, 4)  # noqa: E731
    return [
        _table("Counters by operator", "Sums over the kernels that each operator launched", [
            _text("Operator", lambda one: one.operator),
            _count("Kernels", lambda one: one.kernels),
            *(_number(name, read(name), shape) for name in names),
        ], counters.by_operator),
        _table("Counters over time", "As recorded", [
            _text("Counter", lambda one: one.name),
            _count("Samples", lambda one: one.samples),
            _number("Mean over time", lambda one: one.time_mean, shape),
            _number("Least", lambda one: one.min, shape),
            _number("Most", lambda one: one.max, shape),
        ], counters.series),
    ]  # fmt: skip


def table_of_rates(rates: Sequence[OperatorRate], peaks: dict[str, float]) -> PageTable:
    def of_peak(rate: OperatorRate) -> float | None:
        return rate.flops_per_s / peaks[rate.dtype] if peaks.get(rate.dtype) else None

    return _table("Operators in the roofline", "Work from shapes, time from kernels", [
        _time("Device time", lambda one: one.total_s),
        _count("Calls", lambda one: one.calls),
        _time("Median call", lambda one: one.median_s),
        _number("Work", lambda one: one.flops, format_flops),
        _number("Rate", lambda one: one.flops_per_s, format_flop_rate),
        _share("Of peak", of_peak, "Of the maker's dense rate for this type"),
        _number("Bytes rate", lambda one: one.bytes_per_s, format_byte_rate),
        _number("Flop per byte", lambda one: one.intensity, lambda value: format_significant(value, 3)),
        _text("Type", lambda one: one.dtype),
        _text("Operator", lambda one: one.name),
        _text("Shapes", lambda one: one.shapes.replace(", []", "")),
    ], rates, most=60, id="rate")  # fmt: skip
