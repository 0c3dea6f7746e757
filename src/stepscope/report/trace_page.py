"""A traced job as one page that needs nothing else: the answer, a timeline to zoom into, plots and sortable tables.

Whatever the size of the trace, the page stays small: rectangles, rows and names are bounded.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope._version import __version__
from stepscope.analyze.answers.compose import Answer
from stepscope.analyze.answers.facts import compare_ranks, is_cpu
from stepscope.analyze.job import JobReport
from stepscope.analyze.step.breakdown import SHARES
from stepscope.analyze.step.rescale import rescale
from stepscope.core.files import write_output
from stepscope.core.units import format_bytes, format_duration, format_share, format_significant
from stepscope.formats.timeline import Timeline
from stepscope.report import trace_tables as tables
from stepscope.report.trace_charts import MOST_BARS, Bar, draw_bars, draw_memory, rank_bars
from stepscope.report.trace_overview import COLOURS
from stepscope.report.trace_ranks import NAMED_RANK, RankTimeline, TimelineOf, draw_timelines
from stepscope.report.trace_roofline import TraceRoofline, make_roofline
from stepscope.report.trace_tables import PageTable
from stepscope.report.trace_waiting import caption_waiting, draw_waiting, table_of_waiting
from stepscope.report.trace_words import (
    all_notes,
    describe_choice,
    describe_clocks,
    keep_units,
    name_source,
    share_values,
    share_words,
)

if TYPE_CHECKING:
    from markupsafe import Markup

MOST_NOTES = 60
MOST_FILES = 12
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


class Figure(NamedTuple):
    caption: str
    plot: Markup
    legend: list[tuple[str, str]]
    """Classes of the mark, and its word."""
    wide: bool = True


class Section(NamedTuple):
    id: str
    title: str
    lead: str = ""
    figures: Sequence[Figure] = ()
    facts: Sequence[tuple[str, str]] = ()
    open: Sequence[PageTable] = ()
    folded: Sequence[PageTable] = ()

    @property
    def has_content(self) -> bool:
        return bool(self.lead or self.figures or self.facts or self.open or self.folded)


def write_page(job: JobReport, answer: Answer, timeline_of: TimelineOf, path: Path) -> int:
    """Writes the page and gives its size in bytes. `timeline_of` reads the timeline of a rank; few ranks are asked
    for, one after the other."""
    content = render_page(job, answer, timeline_of).encode()
    write_output(path, content, make_folders=True)
    return len(content)


def render_page(job: JobReport, answer: Answer, timeline_of: TimelineOf) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("stepscope.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    timeline = timeline_of(job.telling_rank)
    ranks, data = draw_timelines(job, answer, timeline_of, timeline)
    shown = {one.rank for one in ranks} if len(ranks) > 1 else set()
    environment.filters["prose"] = partial(_format_prose, shown=shown)
    script = "".join(map(_read_asset, SCRIPTS))
    return environment.get_template("trace.html.j2").render(
        name=name_source(job),
        chips=_chips(job),
        damage=job.damage,
        answer=answer,
        sections=_sections(job, timeline, shown),
        ranks=ranks,
        telling=next(one for one in ranks if one.rank == job.telling_rank),
        rank_remark=_remark_ranks(job, ranks),
        timeline_legend=_legend(ranks),
        overview=Markup(embed_json(data)),
        notes=all_notes(job)[:MOST_NOTES],
        provenance=_provenance(job, timeline),
        style=Markup(_read_asset("report.css") + _read_asset("trace.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
    )


def _format_prose(text: str, shown: Collection[int]) -> Markup:
    """Escaped; numbers stay with their units, and a rank that has a timeline is a link to it."""
    from markupsafe import Markup, escape

    def link(found: re.Match[str]) -> str:
        return f'<a href="#rank-{found[1]}">{found[0]}</a>' if int(found[1]) in shown else found[0]

    return Markup(NAMED_RANK.sub(link, str(escape(keep_units(text)))))


def _read_asset(name: str) -> str:
    """Style and script are part of the package; they hold no data."""
    return (files("stepscope.report") / "templates" / name).read_text(encoding="utf-8")


def embed_json(data: object) -> str:
    """As JSON that can stand in a script element: names from the trace cannot end it."""
    text = msgspec.json.encode(data).decode()
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _chips(job: JobReport) -> list[str]:
    ranks = len(job.ranks)
    of = f" of {job.world_size}" if job.world_size is not None and job.world_size != ranks else ""
    told = f"representative: rank {job.telling_rank}" if ranks > 1 else ""
    devices = ", ".join(job.devices[:3])
    parts = [job.format, devices, f"{ranks} rank{'s' if ranks != 1 else ''}{of}", told, describe_choice(job)]
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


# Sections


def _sections(job: JobReport, timeline: Timeline, shown: Collection[int]) -> list[Section]:
    made = [
        _breakdown(job),
        _path(job),
        _device(job),
        _roofline(make_roofline(msgspec.structs.replace(job, step=job.detail.step), timeline)),
        _idle(job),
        _collectives(job, shown),
        _host(job),
        _memory(job),
        _counters(job),
    ]
    return [section for section in made if section is not None and section.has_content]


def _kept(*found: PageTable) -> list[PageTable]:
    return [table for table in found if table.rows]


def _breakdown(job: JobReport) -> Section:
    words = share_words(job)
    many = len(job.ranks) > MOST_BARS
    caption = "Profiled step of each rank; lengths are times"
    if many:
        caption = "Profiled steps: the slowest, median and fastest rank, then means of neighbouring ranks"
    figures = []
    if len(job.ranks) > 1 or not job.unprofiled_step_s:
        figures.append(_bars(rank_bars(job.ranks), words, caption, "Breakdown of the profiled step by rank"))
    if job.unprofiled_step_s:
        figures.append(_without_profiler(job, job.unprofiled_step_s))
    steps = job.detail.variation.steps
    if len(steps) > 1:
        shown = steps[:MOST_BARS]
        bars = [Bar(f"step {one.step}", one.step_s, share_values(one.breakdown_s)) for one in shown]
        title = f"Steps of rank {job.telling_rank}" + (f", the first {len(shown)}" if len(shown) < len(steps) else "")
        figures.append(_bars(bars, words, title, "Breakdown by step"))
    ranks = _kept(tables.table_of_ranks(job))
    return Section(
        id="breakdown",
        title="Breakdown",
        figures=figures,
        open=ranks if len(job.ranks) > 1 else (),
        folded=_kept(tables.table_of_steps(job)) if len(steps) > 1 else (),
    )


def _without_profiler(job: JobReport, unprofiled_s: float) -> Figure:
    """The profiled step and an estimate of the one without the profiler, on one axis."""
    # Where the host runs ahead, only the exclusive time of a step compares with one that was measured alone.
    steps = {one.step: one for one in job.detail.variation.steps}
    profiled = steps.get(job.detail.step) or job.detail.breakdown
    on_device = not is_cpu(job.detail)
    estimate = rescale(profiled.breakdown_s, unprofiled_s, on_device=on_device)
    bars = [
        Bar("profiled", profiled.step_s, share_values(profiled.breakdown_s)),
        Bar("unprofiled", unprofiled_s, share_values(estimate)),
    ]
    how = "the device's busy time as profiled, idle time scaled to fit" if on_device else "all parts scaled alike"
    whose = f" of rank {job.telling_rank}" if len(job.ranks) > 1 else ""
    caption = (
        f"Exclusive time of the step{whose} with and without the profiler: {format_duration(unprofiled_s)} were "
        f"measured without it; how they divide is an estimate ({how})"
    )
    return _bars(bars, share_words(job), caption, "Breakdown with and without the profiler")


def _bars(bars: Sequence[Bar], words: dict[str, str], caption: str, name: str) -> Figure:
    from markupsafe import Markup

    used = [share for place, share in enumerate(SHARES) if any(bar.parts_s[place] > 0 for bar in bars)]
    legend = [(f"square f-{share.replace('_', '-')}", words[share]) for share in used]
    return Figure(caption, Markup(draw_bars(bars, words, name)), legend)


def _path(job: JobReport) -> Section | None:
    if job.critical is None:
        return None
    path = job.critical
    whole = path.length_s or 1.0
    by_kind, by_name, slack = tables.tables_of_path(job)
    facts = [
        ("Ranks", _ranks_of_path(job)),
        ("Length", format_duration(path.length_s)),
        ("On the host", f"{format_duration(path.host_s)} ({format_share(path.host_s / whole)})"),
        ("On the device", f"{format_duration(path.device_s)} ({format_share(path.device_s / whole)})"),
    ]
    return Section(
        id="path",
        title="Critical path through all ranks" if len(path.ranks) > 1 else "Critical path",
        lead="What the step could not do without: only what is on it makes the step shorter when it gets faster.",
        facts=facts,
        open=_kept(by_name),
        folded=_kept(by_kind, slack),
    )


def _ranks_of_path(job: JobReport) -> str:
    path = job.critical
    if path is None or len(path.ranks) < 2:
        return f"rank {job.telling_rank} alone"
    whole = path.length_s or 1.0
    shares = zip(path.ranks, path.by_rank_s, strict=True)
    return ", ".join(f"rank {rank} {format_share(spent / whole)}" for rank, spent in shares if spent > 0)


def _device(job: JobReport) -> Section | None:
    kernels = job.detail.kernels
    found = tables.tables_of_kernels(kernels)
    if not found:
        return None
    facts = [
        ("Kernels", str(kernels.kernels)),
        ("Copies and fills", str(kernels.copies)),
        ("Sum of durations", format_duration(kernels.sum_s)),
        ("Busy", format_duration(job.detail.breakdown.device_busy_s)),
    ]
    return Section(
        id="device",
        title="Device work",
        facts=facts,
        open=found[:1],
        folded=[*found[1:], *_kept(tables.table_of_transfers(kernels), tables.table_of_sequences(job))],
    )


def _roofline(roofline: TraceRoofline) -> Section:
    from markupsafe import Markup

    if roofline.plot is None:
        folded = [tables.table_of_rates(roofline.rates, roofline.peaks)] if roofline.rates else []
        return Section(id="roofline", title="Roofline", lead=roofline.why_not or "", folded=folded)
    figure = Figure(roofline.caption, Markup(roofline.plot), roofline.legend, wide=False)
    table = tables.table_of_rates(roofline.rates, roofline.peaks)
    return Section(id="roofline", title="Roofline", figures=[figure], folded=[table])


def _idle(job: JobReport) -> Section | None:
    if not job.detail.idle.gaps:
        return None
    reasons, responsible, longest = tables.tables_of_idle(job)
    return Section(id="idle", title="Idle time", open=_kept(reasons, responsible), folded=_kept(longest))


def _collectives(job: JobReport, shown: Collection[int]) -> Section | None:
    from markupsafe import Markup

    if job.across is None:
        return None
    found, figures, waiting = _kept(*tables.tables_of_collectives(job)), [], job.across.waiting_map
    if waiting is not None:
        plot = Markup(draw_waiting(waiting, shown, "Waiting by rank and collective"))
        figures.append(Figure(caption_waiting(waiting), plot, []))
        found.append(table_of_waiting(waiting))
    over = job.across.over_steps
    facts = []
    if over.wait_s is not None:
        facts.append(("Waiting of a rank in a step", f"{format_duration(over.wait_s)} (median)"))
    if over.skew_s is not None:
        facts.append(("Arrival skew in a step", format_duration(over.skew_s)))
    if job.across.balance.imbalance is not None:
        facts.append(("Busiest rank over mean", format_significant(job.across.balance.imbalance, 4)))
    late = job.across.stragglers.stragglers
    if len(job.ranks) > 1:
        facts.append(("Stragglers", ", ".join(f"rank {rank}" for rank in late[:8]) or "none"))
    return Section(
        id="collectives", title="Collectives", figures=figures, facts=facts, open=found[:1], folded=found[1:]
    )


def _host(job: JobReport) -> Section:
    calls, *others = tables.tables_of_launches(job)
    launches = job.detail.launches
    facts = []
    if launches.calls:
        facts = [
            ("Launches", f"{launches.calls} for {launches.launched} pieces of work"),
            ("Time inside", format_duration(launches.call_s)),
            ("Work without a launch in the trace", str(launches.without_launch)),
            ("Waited for room in the queue", f"{launches.blocked.calls} ({format_duration(launches.blocked.total_s)})"),
        ]
    operators = tables.table_of_host_operators(job.detail.kernels)
    return Section(
        id="host",
        title="Host: launches and overheads",
        facts=facts,
        open=_kept(calls) or _kept(operators),
        folded=_kept(*others, *tables.tables_of_overheads(job), *([operators] if calls.rows else [])),
    )


def _memory(job: JobReport) -> Section | None:
    from markupsafe import Markup

    if job.detail.memory is None:
        return None
    figures = []
    for device in job.detail.memory.devices:
        where = device.device if device.device == "cpu" else f"device {device.device}"
        caption = (
            f"Memory of {where} in the step: peak {format_bytes(device.peak_bytes)}, from "
            f"{format_bytes(device.start_bytes)} to {format_bytes(device.end_bytes)}"
        )
        legend = [("s0", "allocated"), ("dashed", "held by the allocator")]
        figures.append(Figure(caption, Markup(draw_memory(device, f"Memory of {where}")), legend))
    return Section(id="memory", title="Memory", figures=figures, folded=_kept(*tables.tables_of_memory(job)))


def _counters(job: JobReport) -> Section | None:
    found = _kept(*tables.tables_of_counters(job))
    return Section(id="counters", title="Counters", open=found[:1], folded=found[1:]) if found else None
