"""A traced job in a terminal: the answer first, then the evidence, then what to know before believing it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from stepscope.analyze.answers.compose import Answer
from stepscope.analyze.job import JobReport, RankSummary
from stepscope.analyze.step.breakdown import SHARES
from stepscope.core.units import format_bytes, format_duration, format_share, format_significant
from stepscope.formats.classify import short_name
from stepscope.report.table import align, plain, text_width
from stepscope.report.trace_words import (
    REASON_WORDS,
    all_notes,
    by_step_time,
    describe_clocks,
    describe_job,
    format_optional_share,
    format_rate,
    format_size,
    fractions,
    keep_units,
    list_repairs,
    median_rank,
    name_source,
    share_words,
)

WIDTH = 110
MOST_LINES = 60
BAR = 40
MARKS = "█▒▪·~ "
"""One for each of SHARES."""
ALL_RANKS = 8
"""Jobs of more ranks show a few of them."""
ENDS = 3
"""Of the slowest ranks then."""
SHOWN = {"kernels": 5, "operators": 3, "idle": 3, "collectives": 4, "late": 3, "calls": 2, "notes": 5}
"""Rows of each table, so that one rank fits a screen of sixty lines."""

Row = Sequence[str]


def format_job(job: JobReport, answer: Answer) -> str:
    """At most 60 lines for one rank and a few more for several; no line is wider than 110 places."""
    sections = [
        _answer(job, answer),
        _breakdown(job),
        _kernels(job),
        _idle(job),
        _collectives(job),
        _ranks(job),
        _launches(job),
        _steps(job),
    ]
    lines = [_fit(line) for section in sections for line in section]
    room = MOST_LINES - len(lines) if len(job.ranks) == 1 else MOST_LINES
    return "\n".join([*lines, *(_fit(line) for line in _notes(job, room))])


def _fit(line: str) -> str:
    """Names come from the trace: their control characters are written out, and what is too long ends in dots."""
    line = plain(line).rstrip()
    if text_width(line) <= WIDTH:
        return line
    while text_width(line) > WIDTH - 1:
        line = line[: WIDTH - 1] if len(line) > WIDTH - 1 else line[:-1]
    return line + "…"


def _wrap(text: str, first: str = "", rest: str = "  ") -> list[str]:
    """A number and its unit stay on one line."""
    lines = textwrap.wrap(
        keep_units(plain(text)), WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _answer(job: JobReport, answer: Answer) -> Iterator[str]:
    if job.damage is not None:
        yield from _wrap(job.damage, "! ")
    yield from _wrap(answer.sentence, rest="")
    yield from _wrap(answer.evidence, rest="")
    yield from _wrap(answer.try_first.action, "Try first: ")
    yield from _wrap(answer.try_first.because, "  because ")
    for point in answer.points:
        yield from _wrap(point.text, "- ")
    if answer.caution is not None:
        yield from _wrap(answer.caution, "! ")
    yield from _wrap(f"{name_source(job)}: {describe_job(job)}", "# ", "# ")


def _table(titles: Row, rows: Sequence[Row], numeric: str) -> Iterator[str]:
    """`numeric` has an r for every column that is aligned to the right."""
    for line in align([titles, *rows], [letter == "r" for letter in numeric]):
        yield "  " + line


def _more(shown: int, of: int, what: str) -> str:
    return f" (longest {shown} of {of} {what})" if shown < of else ""


# Breakdown


def _breakdown(job: JobReport) -> Iterator[str]:
    words = {**share_words(job), "exposed_comm": "exposed comm."}
    used = [name for name in SHARES if any(getattr(one.breakdown_s, name) > 0 for one in job.ranks)]
    legend = "  ".join(f"{MARKS[SHARES.index(name)].replace(' ', '␣')} {words[name]}" for name in used)
    yield from _wrap(f"Steps: {legend}")
    chosen = _choose_ranks(job)
    titles = [
        "rank",
        "step",
        "|" + " " * BAR + "|",
        *(f"{MARKS[SHARES.index(name)].replace(' ', '␣')}" for name in used),
    ]
    rows = []
    for label, summary in chosen:
        shares = dict(zip(SHARES, fractions(summary), strict=True))
        name = f"{summary.rank}{label}"
        rows.append(
            [name, format_duration(summary.step_s), f"|{_bar(summary)}|", *(format_share(shares[one]) for one in used)]
        )
    yield from _table(titles, rows, "lrl" + "r" * len(used))
    if len(job.ranks) > ALL_RANKS:
        ordered = by_step_time(job.ranks)
        yield (
            f"  {len(ordered)} ranks, profiled step {format_duration(ordered[-1].step_s)} to "
            f"{format_duration(ordered[0].step_s)}"
        )


def _choose_ranks(job: JobReport) -> list[tuple[str, RankSummary]]:
    if len(job.ranks) <= ALL_RANKS:
        return [("", one) for one in job.ranks]
    ordered = by_step_time(job.ranks)
    return [
        *((" slow", one) for one in ordered[:ENDS]),
        (" median", median_rank(job.ranks)),
        (" fast", ordered[-1]),
    ]


def _bar(summary: RankSummary) -> str:
    """Borders are rounded, not widths, so that the bar is always full."""
    bar, reached = "", 0.0
    for mark, part in zip(MARKS, fractions(summary), strict=True):
        reached += part
        bar += mark * (min(BAR, round(reached * BAR)) - len(bar))
    return bar.ljust(BAR)


# Device work


def _kernels(job: JobReport) -> Iterator[str]:
    kernels = job.detail.kernels
    if not kernels.by_name.rows:
        yield from _host_operators(job)
        return
    rows = kernels.by_name.rows[: SHOWN["kernels"]]
    more = _more(len(rows), len(kernels.by_name.rows), "names")
    counts = f"{kernels.kernels} kernels, {kernels.copies} copies and fills"
    yield f"Device work: {counts}, {format_duration(kernels.sum_s)} in sum{more}"
    yield from _table(
        ["time", "share", "count", "median", "class", "kernel"],
        [
            [format_duration(row.total_s), format_share(row.share), str(row.count), format_duration(row.median_s),
             kernels.names[row.name].category, short_name(row.name)]
            for row in rows
        ],
        "rrrrll",
    )  # fmt: skip
    operators = kernels.by_operator.rows[: SHOWN["operators"]]
    yield f"Device time by operator{_more(len(operators), len(kernels.by_operator.rows), 'operators')}"
    yield from _table(
        ["time", "share", "count", "operator"],
        [[format_duration(row.total_s), format_share(row.share), str(row.count), row.name] for row in operators],
        "rrrl",
    )


def _host_operators(job: JobReport) -> Iterator[str]:
    operators = job.detail.kernels.host_operators
    rows = operators[: SHOWN["kernels"]]
    if rows:
        yield f"Operators on the host{_more(len(rows), len(operators), 'operators')}"
        yield from _table(
            ["own time", "share", "count", "whole", "operator"],
            [
                [format_duration(row.self_s), format_share(row.share), str(row.count), format_duration(row.total_s),
                 row.name]
                for row in rows
            ],
            "rrrrl",
        )  # fmt: skip


def _idle(job: JobReport) -> Iterator[str]:
    idle = job.detail.idle
    if not idle.gaps:
        return
    reasons = [
        f"{REASON_WORDS[name]} {format_duration(spent)}"
        for name, spent in sorted(idle.by_reason_s.items(), key=lambda item: -item[1])
        if spent > 0
    ]
    yield from _wrap(f"Idle {format_duration(idle.idle_s)} in {idle.gaps} gaps: {', '.join(reasons)}")
    rows = idle.by_operator[: SHOWN["idle"]]
    yield from _table(
        ["time", "share", "gaps", "longest", "the host was in"],
        [
            [format_duration(one.total_s), format_share(one.share), str(one.gaps), format_duration(one.longest_s),
             one.operator]
            for one in rows
        ],
        "rrrrl",
    )  # fmt: skip


# Ranks


def _collectives(job: JobReport) -> Iterator[str]:
    table = job.across.table if job.across is not None else []
    if not table:
        return
    rows = sorted(table, key=lambda row: -row.total_s)[: SHOWN["collectives"]]
    over = f" in {len(job.steps)} steps" if len(job.steps) > 1 else ""
    if job.across is not None and job.across.step is not None:
        over = f" in step {job.across.step}"
    yield f"Collectives{over}{_more(len(rows), len(table), 'kinds')}"
    yield from _table(
        ["time", "count", "median", "waiting", "bus", "size", "ranks", "collective"],
        [
            [format_duration(row.total_s), str(row.count), format_duration(row.median_s),
             format_optional_share(row.wait_share), format_rate(row), format_size(row),
             "-" if row.group_size is None else str(row.group_size),
             row.collective + (f" {row.dtype}" if row.dtype else "")]
            for row in rows
        ],
        "rrrrrrrl",
    )  # fmt: skip


def _ranks(job: JobReport) -> Iterator[str]:
    if job.across is None or len(job.ranks) < 2:
        return
    late = [one for one in job.across.stragglers.ranks if one.stands_out]
    late.sort(key=lambda one: (-one.straggler, -one.caused_s))
    if not late and job.across.stragglers.ranks:
        yield "Late ranks: none is later than noise, or there is too little to decide"
    if late:
        count = len(job.across.stragglers.stragglers)
        yield f"Late ranks: {count} straggler{'s' if count != 1 else ''}{_more(len(late[:3]), len(late), 'late ones')}"
        yield from _table(
            ["rank", "last to", "others waited in sum", "share", "median lateness", "verdict"],
            [
                [str(one.rank), str(one.last_calls), format_duration(one.caused_s),
                 format_optional_share(one.last_share),
                 "-" if one.median_s is None else format_duration(one.median_s), one.verdict]
                for one in late[: SHOWN["late"]]
            ],
            "rrrrrl",
        )  # fmt: skip
    over = job.across.over_steps
    parts = []
    if over.wait_s is not None:
        parts.append(f"a rank waits {format_duration(over.wait_s)} in collectives of a step (median)")
    if job.across.balance.imbalance is not None:
        parts.append(f"busiest rank over mean {format_significant(job.across.balance.imbalance, 3)}")
    parts.append(f"times compared {describe_clocks(job)}")
    yield from _wrap(f"Ranks: {'; '.join(parts)}")


# Host


def _launches(job: JobReport) -> Iterator[str]:
    launches = job.detail.launches
    if not launches.calls:
        return
    yield f"Launches: {launches.calls} calls for {launches.launched} pieces of work, {format_duration(launches.call_s)}"
    rows = [
        [call.name, str(call.calls), format_duration(call.call.median_s), format_duration(call.call.p95_s),
         "-" if call.latency is None else format_duration(call.latency.median_s),
         "-" if call.queueing is None else format_duration(call.queueing.median_s)]
        for call in launches.by_call[: SHOWN["calls"]]
    ]  # fmt: skip
    yield from _table(["call", "calls", "median", "p95", "to empty stream", "in queue"], rows, "lrrrrr")
    queue = next((one for one in launches.queue if one.stream is None), None)
    if queue is not None:
        blocked = f"; {launches.blocked.calls} launches waited for room" if launches.blocked.calls else ""
        yield (
            f"  waiting in the device's queues: {format_significant(queue.pending_mean, 3)} on average, "
            f"{queue.pending_max} at most{blocked}"
        )


def _steps(job: JobReport) -> Iterator[str]:
    variation = job.detail.variation
    if variation.judged > 1 and variation.median_s is not None and variation.min_s is not None and variation.max_s:
        slow = f", {len(variation.slow_steps)} over 5 % slower than the median" if variation.slow_steps else ""
        why = f" ({share_words(job)[variation.explained_by]})" if variation.explained_by else ""
        left_out = len(variation.steps) - variation.judged
        of = f"{variation.judged} of {len(variation.steps)}" if left_out else str(variation.judged)
        yield from _wrap(
            f"{of} profiled steps: median step time {format_duration(variation.median_s)}, "
            f"{format_duration(variation.min_s)} to {format_duration(variation.max_s)}{slow}{why}"
        )
    for device in job.detail.memory.devices if job.detail.memory is not None else []:
        where = device.device if device.device == "cpu" else f"device {device.device}"
        holder = f", most of it from {device.at_peak[0].operator}" if device.at_peak else ""
        yield f"Memory of {where}: peak {format_bytes(device.peak_bytes)}{holder}"


def _notes(job: JobReport, room: int) -> list[str]:
    """As many as there is room for; at least the number of those that are left out."""
    notes = all_notes(job)
    wrapped = [_wrap(note, "  ", "    ") for note in notes]
    kept = wrapped if len(notes) <= SHOWN["notes"] + 1 else wrapped[: SHOWN["notes"]]
    # What was mended while reading is told whatever the room.
    least = len(list_repairs(job))
    while len(kept) > least and sum(map(len, kept)) + 2 > room:
        kept = kept[:-1]
    left_out = [f"  and {len(notes) - len(kept)} more, see --json"] if len(kept) < len(notes) else []
    lines = [line for note in kept for line in note]
    return ["Notes", *lines, *left_out] if notes else []
