"""A traced job as one page that needs nothing else: the answer, a timeline to zoom into, plots and sortable tables.

Whatever the size of the trace, the page stays small: rectangles, rows and names are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope._version import __version__
from stepscope.analyze.analyses import make_sections
from stepscope.analyze.answers.compose import Answer
from stepscope.analyze.answers.facts import compare_ranks
from stepscope.analyze.job import JobReport
from stepscope.analyze.job_section import all_notes, count_ranks, describe_choice, name_source
from stepscope.analyze.ranks.section import describe_clocks
from stepscope.analyze.section import Section, SectionColumn, Table
from stepscope.core.files import write_output
from stepscope.core.units import cut_text
from stepscope.formats.timeline import Timeline
from stepscope.report.template import render_template
from stepscope.report.trace_charts import Figure, draw_chart
from stepscope.report.trace_overview import COLOURS
from stepscope.report.trace_ranks import NAMED_RANK, RankTimeline, TimelineOf, draw_timelines
from stepscope.report.values import format_value, keep_units

if TYPE_CHECKING:
    from markupsafe import Markup

MOST_NOTES = 60
MOST_FILES = 12
LONGEST_TEXT, LONG_TEXT = 400, 28
SCRIPTS = ("trace.js", "timeline_data.js", "timeline_draw.js", "timeline.js")
"""In the order in which they build on each other."""

_COLOUR_WORDS = {
    "matrix": "matrix products, convolutions, attention",
    "elementwise": "elementwise, norms, reductions",
    "compute": "other kernels; compute on the path",
    "communication": "communication",
    "copy": "copies and fills",
    "annotation": "annotations",
    "operator": "operators",
    "runtime": "runtime calls",
    "host": "host on the path",
    "delay": "delays on the path",
}


class PageCell(NamedTuple):
    text: str
    sort: float | None = None
    """What a sortable table orders by; None goes last, or the text decides."""
    title: str = ""
    """Shown when the pointer rests on it."""


def write_page(job: JobReport, answer: Answer, timeline_of: TimelineOf, path: Path) -> int:
    """Writes the page and gives its size in bytes. `timeline_of` reads the timeline of a rank; few ranks are asked
    for, one after the other."""
    content = render_page(job, answer, timeline_of).encode()
    write_output(path, content, make_folders=True)
    return len(content)


def render_page(job: JobReport, answer: Answer, timeline_of: TimelineOf) -> str:
    from markupsafe import Markup

    timeline = timeline_of(job.telling_rank)
    ranks, data = draw_timelines(job, answer, timeline_of, timeline)
    shown = {one.rank for one in ranks} if len(ranks) > 1 else set()
    return render_template(
        "trace.html.j2",
        styles=["report.css", "trace.css"],
        scripts=SCRIPTS,
        filters={"prose": partial(_format_prose, shown=shown)},
        name=name_source(job),
        chips=_chips(job),
        damage=job.damage,
        answer=answer,
        sections=[_lay_out(one, shown) for one in make_sections(job) if one.has_content],
        ranks=ranks,
        telling=next(one for one in ranks if one.rank == job.telling_rank),
        rank_remark=_remark_ranks(job, ranks),
        timeline_legend=_legend(ranks),
        overview=Markup(embed_json(data)),
        notes=all_notes(job)[:MOST_NOTES],
        provenance=_provenance(job, timeline),
        version=__version__,
    )


def _format_prose(text: str, shown: Collection[int]) -> Markup:
    """Escaped; numbers stay with their units, and a rank that has a timeline is a link to it."""
    from markupsafe import Markup, escape

    def link(found: re.Match[str]) -> str:
        return f'<a href="#rank-{found[1]}">{found[0]}</a>' if int(found[1]) in shown else found[0]

    return Markup(NAMED_RANK.sub(link, str(escape(keep_units(text)))))


def embed_json(data: object) -> str:
    """As JSON that can stand in a script element: names from the trace cannot end it."""
    text = msgspec.json.encode(data).decode()
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _lay_out(section: Section, linked: Collection[int]) -> tuple[Section, list[Figure], list[tuple[Table, list[bool]]]]:
    """With its figures, and its tables with what stands in their cells and which columns have long texts."""
    figures = [figure for chart in section.charts if (figure := draw_chart(chart, linked)) is not None]
    return section, figures, [_fill(table) for table in section.tables if table.rows]


def _fill(table: Table) -> tuple[Table, list[bool]]:
    rows = [[_cell(value, column) for value, column in zip(row, table.columns, strict=True)] for row in table.rows]
    longest = [max(len(cell.text) for cell in cells) for cells in zip(*rows, strict=True)]
    return table._replace(rows=rows), [length > LONG_TEXT for length in longest]


def _cell(value: Any, column: SectionColumn) -> PageCell:
    text = format_value(value, column.unit)
    if column.is_numeric:
        return PageCell(text, value)
    whole = cut_text(value, LONGEST_TEXT) if column.unit == "name" and text not in ("-", value) else ""
    return PageCell(cut_text(text, LONGEST_TEXT), title=whole)


def _chips(job: JobReport) -> list[str]:
    told = f"representative: rank {job.telling_rank}" if len(job.ranks) > 1 else ""
    devices = ", ".join(job.devices[:3])
    parts = [job.format, devices, count_ranks(job), told, describe_choice(job)]
    return [part for part in parts if part]


def _remark_ranks(job: JobReport, ranks: Sequence[RankTimeline]) -> str:
    if len(ranks) == len(job.ranks):
        return ""
    return (
        f"{len(ranks)} of {len(job.ranks)} ranks have a timeline here: the representative one, stragglers, those that "
        "the text names, and the longest, median and shortest step."
    )


def _legend(ranks: Sequence[RankTimeline]) -> list[tuple[str, str]]:
    used = {COLOURS[code] for one in ranks for code in set(one.overview.blocks.colour.tolist())}
    return [(name, _COLOUR_WORDS[name]) for name in COLOURS if name in used]


def _provenance(job: JobReport, timeline: Timeline) -> list[tuple[str, str]]:
    names = [Path(one.source).name for one in job.ranks]
    listed = ", ".join(names[:MOST_FILES]) + (f" and {len(names) - MOST_FILES} more" if len(names) > MOST_FILES else "")
    versions = timeline.metadata.get("versions")
    told = versions.items() if isinstance(versions, dict) else ()
    facts = [
        ("Source", job.source),
        ("Files", listed),
        ("Format", job.format),
        ("Step", describe_choice(job)),
        ("Steps found by", job.detail.step_marker),
        ("Representative rank", compare_ranks(job).removeprefix(" on rank ") or str(job.telling_rank)),
        ("Devices", ", ".join(job.devices) or "not named"),
        ("Events of this rank", str(len(timeline))),
        ("Clocks of ranks", describe_clocks(job)),
        ("Versions", ", ".join(f"{name} {value}" for name, value in told)),
        ("Tool", f"stepscope {__version__}"),
    ]  # fmt: skip
    return [(name, value) for name, value in facts if value]
