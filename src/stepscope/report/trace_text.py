"""A traced job in a terminal: the answer first, then the evidence, then what to know before believing it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from stepscope.analyze.analyses import make_sections
from stepscope.analyze.answers.compose import Answer
from stepscope.analyze.job import JobReport
from stepscope.analyze.job_section import all_notes, count_ranks, describe_choice, list_repairs, name_source
from stepscope.analyze.section import Bars, Brief, Section, Table
from stepscope.core.units import format_duration, format_share
from stepscope.report.table import align, plain, text_width
from stepscope.report.values import format_value, keep_units

WIDTH = 110
"""Where there is no terminal."""
MOST_LINES = 60
LEAST_ROWS = 2
"""Tables are not made shorter than this to keep within the lines."""
LONGEST_BAR, LEAST_BAR = 40, 10
MARKS = "█▒▪·~ "
"""One for each part of a bar."""
MOST_NOTES = 5
SHORTEST_TEXT = 12


def format_job(job: JobReport, answer: Answer, width: int = WIDTH) -> str:
    """At most 60 lines for one rank and a few more for several; no line is wider than `width` places."""
    head, sections = list(_answer(job, answer, width)), list(make_sections(job, for_summary=True))
    rows = max((part.rows for one in sections for part in one.summary if isinstance(part, Brief)), default=0)
    body = _body(sections, rows, width)
    while len(job.ranks) == 1 and rows > LEAST_ROWS and len(head) + len(body) + 2 > MOST_LINES:
        rows -= 1
        body = _body(sections, rows, width)
    room = MOST_LINES - (len(head) + len(body) if len(job.ranks) == 1 else 0)
    return "\n".join(_fit(line, width) for line in (*head, *body, *_notes(job, room, width)))


def _body(sections: Sequence[Section], rows: int, width: int) -> list[str]:
    return [line for section in sections for line in format_summary(section, rows, width)]


def _fit(line: str, width: int) -> str:
    """Names come from the trace: their control characters are written out, and what is too long ends in dots."""
    line = plain(line).rstrip()
    if text_width(line) <= width:
        return line
    while text_width(line) > width - 1:
        line = line[: width - 1] if len(line) > width - 1 else line[:-1]
    return line + "…"


def _wrap(text: str, width: int, first: str = "", rest: str = "  ") -> list[str]:
    """A number and its unit stay on one line."""
    lines = textwrap.wrap(
        keep_units(plain(text)), width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _answer(job: JobReport, answer: Answer, width: int) -> Iterator[str]:
    if job.damage is not None:
        yield from _wrap(job.damage, width, "! ")
    yield from _wrap(answer.sentence, width, rest="")
    yield from _wrap(answer.evidence, width, rest="")
    yield from _wrap(answer.try_first.action, width, "Try first: ")
    yield from _wrap(answer.try_first.because, width, "  because ")
    for point in answer.points:
        yield from _wrap(point.text, width, "- ")
    if answer.caution is not None:
        yield from _wrap(answer.caution, width, "! ")
    devices = ", ".join(job.devices) or "no device named"
    what = "; ".join((job.format or "unknown format", devices, count_ranks(job), describe_choice(job)))
    yield from _wrap(f"{name_source(job)}: {what}", width, "# ", "# ")


def format_summary(section: Section, rows: int = MOST_LINES, width: int = WIDTH) -> Iterator[str]:
    """What a section shows in a terminal, with no more rows of a table than these."""
    for part in section.summary:
        if isinstance(part, str):
            indent = part[: len(part) - len(part.lstrip())]
            yield from _wrap(part.lstrip(), width, indent, indent + "  ")
        elif isinstance(part, Bars):
            yield from _bars(part, width)
        else:
            yield from _brief(part, min(rows, part.rows), width)


def _brief(part: Brief, rows: int, width: int) -> Iterator[str]:
    """Where there is little room some columns are left out, and then the widest column of texts is cut."""
    table = part.table
    count = len(table.rows) + table.left_out
    shown = table.rows[:rows]
    if part.heading:
        some = f" (first {len(shown)} of {count} {part.what})" if part.what and len(shown) < count else ""
        yield from _wrap(part.heading + some, width)
    places = [place for place, column in enumerate(table.columns) if column.brief and _has_values(table, place)]
    lines = _align(table, places, shown)
    if 2 + max(map(text_width, lines)) > width:
        places = [place for place in places if table.columns[place].brief == 1]
        lines = _align(table, places, shown)
    over = 2 + max(map(text_width, lines)) - width
    if over > 0:
        lines = _align(table, places, shown, shorten=over)
    yield from ("  " + line for line in lines)


def _has_values(table: Table, place: int) -> bool:
    return any(row[place] != "" for row in table.rows)


def _align(table: Table, places: Sequence[int], shown: Sequence[Sequence[Any]], shorten: int = 0) -> list[str]:
    columns = []
    for place in places:
        column = table.columns[place]
        title = column.title[:1].lower() + column.title[1:]
        columns.append([title, *(plain(format_value(row[place], column.unit)) for row in shown)])
    numeric = [table.columns[place].is_numeric for place in places]
    if shorten and not all(numeric):
        widths = [0 if is_number else max(map(len, texts)) for is_number, texts in zip(numeric, columns, strict=True)]
        place = widths.index(max(widths))
        most = max(SHORTEST_TEXT, widths[place] - shorten)
        columns[place] = [_fit(text, most) for text in columns[place]]
    return align(list(zip(*columns, strict=True)), numeric)


def _bars(part: Bars, width: int) -> Iterator[str]:
    """Bars of one length with the fraction of each part beside them."""
    used = [place for place in range(len(part.words)) if any(bar.parts_s[place] > 0 for bar in part.bars)]
    marks = [MARKS[place].replace(" ", "␣") for place in used]
    words = list(part.words.values())
    legend = "  ".join(f"{mark} {words[place]}" for mark, place in zip(marks, used, strict=True))
    yield from _wrap(f"{part.name}: {legend}", width)
    room = width - 2 - max(len(bar.label) for bar in part.bars) - len("  1234.5 ms  ||") - len("  100.0 %") * len(used)
    long = max(LEAST_BAR, min(LONGEST_BAR, room))
    rows = [["rank", "step", "|" + " " * long + "|", *marks]]
    for bar in part.bars:
        fractions = [spent / bar.whole_s if bar.whole_s > 0 else 0.0 for spent in bar.parts_s]
        shares = [format_share(fractions[place]) for place in used]
        rows.append([bar.label, format_duration(bar.whole_s), f"|{_bar(fractions, long)}|", *shares])
    yield from ("  " + line for line in align(rows, [False, *(True for _ in rows[0][1:])]))


def _bar(fractions: Sequence[float], long: int) -> str:
    """Borders are rounded, not widths, so that the bar is always full."""
    bar, reached = "", 0.0
    for mark, part in zip(MARKS, fractions, strict=True):
        reached += part
        bar += mark * (min(long, round(reached * long)) - len(bar))
    return bar.ljust(long)


def _notes(job: JobReport, room: int, width: int) -> list[str]:
    """As many as there is room for; at least the number of those that are left out."""
    notes = all_notes(job)
    wrapped = [_wrap(note, width, "  ", "    ") for note in notes]
    kept = wrapped if len(notes) <= MOST_NOTES + 1 else wrapped[:MOST_NOTES]
    # What was repaired while reading is shown whatever the room.
    least = len(list_repairs(job))
    while len(kept) > least and sum(map(len, kept)) + 2 > room:
        kept = kept[:-1]
    left_out = [f"  and {len(notes) - len(kept)} more, see --json"] if len(kept) < len(notes) else []
    lines = [line for note in kept for line in note]
    return ["Notes", *lines, *left_out] if notes else []
