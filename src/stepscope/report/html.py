"""Results as one page that needs nothing else: no network, no fonts, no scripts from elsewhere.

The page's size is bounded: full plots for at most `MAX_FULL_PLOTS` cases, a sparkline for every one.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from stepscope.core.units import format_duration, format_significant
from stepscope.report.charts import MAX_DRAWN_POINTS, MAX_SERIES
from stepscope.report.columns import choose_columns, describe_target, explain, explain_stars
from stepscope.report.facts import (
    Fact,
    FactGroup,
    describe_case,
    describe_peaks,
    describe_run,
    describe_system,
    describe_timing,
)
from stepscope.report.heatmap import (
    MAX_DRAWN_UNITS,
    PairView,
    describe_findings,
    describe_matrix,
    draw_heatmap,
    is_in_matrix,
    make_heatmaps,
    without_pairs,
)
from stepscope.report.labels import format_frequency
from stepscope.report.plots import (
    BUS_BANDWIDTH,
    LATENCY,
    draw_distribution,
    draw_roofline,
    draw_sparkline,
    draw_sweep,
    draw_timeline,
)
from stepscope.report.series import Roofline, Sweep
from stepscope.report.table import Cell, Column, read_cell
from stepscope.report.view import CaseView, Report, RunView, SystemView

if TYPE_CHECKING:
    from markupsafe import Markup

MAX_FULL_PLOTS = 80
"""Cases with full plots in one page; those that missed a target or carry notices come first."""
MAX_KERNELS = 12
"""Listed for one case, the longest ones."""
MAX_ROOFLINES = 8
"""Drawn for one system."""
OPEN_CASES = 4
"""A page with no more cases than this shows them unfolded."""


class PageRow(NamedTuple):
    case: CaseView
    cells: list[Cell]
    spark: Markup | None


class PageKernel(NamedTuple):
    name: str
    launches: str
    time: str


class PageCase(NamedTuple):
    case: CaseView
    name: str
    timing: list[Fact]
    facts: list[Fact]
    distribution: Markup | None
    timeline: Markup | None
    percentiles: list[Fact]
    readings: list[list[str]]
    kernels: list[PageKernel]
    kernels_left_out: int


class PageSweep(NamedTuple):
    benchmark: str
    plots: list[tuple[str, Markup]]
    legend: list[str]
    left_out: int


class PageRoofline(NamedTuple):
    view: Roofline
    plot: Markup
    legend: list[tuple[str, str]]
    """Class of the colour and name, of each dtype that is drawn."""
    caches: list[str]
    left_out: int
    peaks: list[Fact]


class PagePairs(NamedTuple):
    view: PairView
    title: str
    maps: list[tuple[str, Markup]]
    findings: list[tuple[str, str]]
    """Sentences and next steps."""


class PageRun(NamedTuple):
    run: RunView
    facts: list[Fact]


class PageSystem(NamedTuple):
    view: SystemView
    columns: list[Column[CaseView]]
    rows: list[PageRow]
    cases: list[PageCase]
    sweeps: list[PageSweep]
    rooflines: list[PageRoofline]
    rooflines_left_out: int
    pairs: list[PagePairs]
    stars: list[str]
    """What each `*` says."""
    remarks: list[str]
    groups: list[FactGroup]
    runs: list[PageRun]


def render_html(report: Report) -> str:
    """Takes a few milliseconds per case."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("stepscope.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    # Pairs of ranks are cells of a matrix, not rows: there may be thousands.
    single = [case for case in report.cases if not is_in_matrix(case)]
    plotted = choose_plotted(single)
    script = _read_asset("report.js")
    return environment.get_template("report.html.j2").render(
        report=report,
        systems=[_page_system(system, plotted) for system in report.systems],
        across=[_page_sweep(sweep) for sweep in report.sweeps],
        style=Markup(_read_asset("report.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        totals=_totals(report.cases),
        plotted=len(plotted),
        measured=sum(case.timing is not None for case in single),
        max_dots=MAX_DRAWN_POINTS,
        open_cases=len(single) <= OPEN_CASES,
        describe_target=describe_target,
        format_duration=format_duration,
    )


def _read_asset(name: str) -> str:
    """Style and script are part of the package; they hold no data."""
    return (files("stepscope.report") / "templates" / name).read_text(encoding="utf-8")


def choose_plotted(cases: Sequence[CaseView]) -> frozenset[str]:
    """Anchors of the cases that get full plots."""
    measured = [case for case in cases if case.series.total]
    measured.sort(key=lambda case: not (case.missed_latency or case.notices))
    return frozenset(case.anchor for case in measured[:MAX_FULL_PLOTS])


def _totals(cases: Sequence[CaseView]) -> dict[str, int]:
    return {
        "measured": sum(case.status == "ok" for case in cases),
        "failed": sum(case.status == "failed" for case in cases),
        "skipped": sum(case.status == "skipped" for case in cases),
        "missed target": sum(bool(case.missed_latency) for case in cases),
        "notices": sum(len(case.notices) for case in cases),
    }


def _page_system(system: SystemView, plotted: frozenset[str]) -> PageSystem:
    single = without_pairs(system)
    columns = choose_columns(single)
    listed = [case for case in system.cases if case.failure is not None or not is_in_matrix(case)]
    rooflines = [page for roofline in system.rooflines if (page := _page_roofline(roofline)) is not None]
    return PageSystem(
        view=system,
        columns=columns,
        rows=[PageRow(case, [read_cell(column, case) for column in columns], _spark(case)) for case in single.cases],
        cases=[_page_case(case, full=case.anchor in plotted) for case in listed],
        sweeps=[_page_sweep(sweep) for sweep in system.sweeps],
        rooflines=rooflines[:MAX_ROOFLINES],
        rooflines_left_out=max(0, len(rooflines) - MAX_ROOFLINES),
        pairs=[_page_pairs(view) for view in system.pairs],
        stars=explain_stars(single.cases),
        remarks=explain(single.cases),
        groups=describe_system(system.system) if system.system is not None else [],
        runs=[PageRun(run, describe_run(run)) for run in system.runs],
    )


def _spark(case: CaseView) -> Markup | None:
    from markupsafe import Markup

    return Markup(draw_sparkline(case.timing.histogram, case.timing.summary)) if case.timing is not None else None


def _page_case(case: CaseView, *, full: bool) -> PageCase:
    from markupsafe import Markup

    name, timing = case.name, case.timing
    distribution = timeline = None
    if full and timing is not None:
        drawn = draw_distribution(timing.histogram, timing.summary, case.series, f"Distribution of {name}")
        distribution = Markup(drawn)
    if full and case.series.total:
        summary = timing.summary if timing is not None else None
        timeline = Markup(draw_timeline(case.series, summary, f"Samples over time of {name}"))
    return PageCase(
        case=case,
        name=name,
        timing=describe_timing(case),
        facts=describe_case(case),
        distribution=distribution,
        timeline=timeline,
        percentiles=[Fact(f"p{p.percent:g}", format_duration(p.seconds)) for p in timing.percentiles] if timing else [],
        readings=_readings(case),
        kernels=_kernels(case),
        kernels_left_out=max(0, len(case.kernels) - MAX_KERNELS),
    )


def _kernels(case: CaseView) -> list[PageKernel]:
    longest = sorted(case.kernels, key=lambda use: -use.duration_s)[:MAX_KERNELS]
    return [PageKernel(use.name, f"{use.count:.3g}", format_duration(use.duration_s)) for use in longest]


def _readings(case: CaseView) -> list[list[str]]:
    return [
        [
            reading.device,
            reading.at,
            format_frequency(reading.clock_hz) if reading.clock_hz is not None else "",
            format_frequency(reading.memory_clock_hz) if reading.memory_clock_hz is not None else "",
            f"{format_significant(reading.power_w)} W" if reading.power_w is not None else "",
            f"{format_significant(reading.temperature_c, 3)} °C" if reading.temperature_c is not None else "",
            f"{format_significant(reading.load_1m, 3)}" if reading.load_1m is not None else "",
            ", ".join(reading.throttle),
        ]
        for reading in case.readings
    ]


def _page_sweep(sweep: Sweep) -> PageSweep:
    from markupsafe import Markup

    plots = []
    for quantity in (LATENCY, BUS_BANDWIDTH):
        drawn = draw_sweep(sweep.series, quantity, f"{quantity.title} of {sweep.benchmark} against message size")
        if drawn is not None:
            plots.append((quantity.title, Markup(drawn)))
    return PageSweep(
        benchmark=sweep.benchmark,
        plots=plots,
        legend=[line.label for line in sweep.series[:MAX_SERIES]],
        left_out=max(0, len(sweep.series) - MAX_SERIES),
    )


def _page_roofline(roofline: Roofline) -> PageRoofline | None:
    from markupsafe import Markup

    drawn = draw_roofline(roofline, f"Roofline of {roofline.device} in run {roofline.run_id}")
    if drawn is None:
        return None
    return PageRoofline(
        view=roofline,
        plot=Markup(drawn.markup),
        legend=[(colour, dtype or "no dtype") for dtype, colour in drawn.colours.items()],
        caches=sorted({point.cache for point in roofline.points}),
        left_out=len(roofline.points) - drawn.drawn,
        peaks=describe_peaks(roofline),
    )


def _page_pairs(view: PairView) -> PagePairs:
    from markupsafe import Markup

    maps = []
    for heatmap in make_heatmaps(view, MAX_DRAWN_UNITS):
        units = heatmap.units
        left_out = f"; the {len(units.names)} slowest of {len(units.names) + units.left_out} {units.kind}"
        title = f"{heatmap.title[:1].upper()}{heatmap.title[1:]}, {heatmap.unit}{left_out if units.left_out else ''}"
        name = f"{title}, from every one of the {units.kind} to every other; {describe_matrix(view)}"
        maps.append((title, Markup(draw_heatmap(heatmap, name))))
    return PagePairs(view, describe_matrix(view), maps, describe_findings(view))
