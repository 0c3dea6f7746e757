"""Results as one page that needs nothing else: no network, no fonts, no scripts from elsewhere.

The page's size is bounded: full plots for at most `MAX_FULL_PLOTS` cases, a sparkline for every one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stepscope.core.units import format_duration, format_significant
from stepscope.records import KernelUse, Reading
from stepscope.report.charts import MAX_DRAWN_POINTS, MAX_SERIES
from stepscope.report.columns import choose_columns, describe_target, explain, explain_stars
from stepscope.report.facts import describe_case, describe_peaks, describe_run, describe_system, describe_timing
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
from stepscope.report.series import Roofline, SweepCurves
from stepscope.report.table import Column, Row, read_cell, show
from stepscope.report.template import render_template
from stepscope.report.view import PERCENTILES, CaseView, Report, SystemView, Timing

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


READINGS: tuple[Column[Reading], ...] = (
    Column("Device", lambda one: one.device),
    Column("At", lambda one: one.at),
    Column("Clock", lambda one: show(one.clock_hz, format_frequency, "")),
    Column("Memory clock", lambda one: show(one.memory_clock_hz, format_frequency, "")),
    Column("Power", lambda one: show(one.power_w, lambda value: f"{format_significant(value)} W", "")),
    Column("Temperature", lambda one: show(one.temperature_c, lambda value: f"{format_significant(value, 3)} °C", "")),
    Column("Load", lambda one: show(one.load_1m, lambda value: format_significant(value, 3), "")),
    Column("Throttled by", lambda one: ", ".join(one.throttle)),
)
KERNELS: tuple[Column[KernelUse], ...] = (
    Column("Kernel", lambda one: one.name, role="case"),
    Column("Launches", lambda one: f"{one.count:.3g}", numeric=True),
    Column("Time", lambda one: format_duration(one.duration_s), numeric=True),
)

PERCENTILE_COLUMNS: tuple[Column[Timing], ...] = tuple(
    Column(f"p{percent:g}", lambda one, place=place: format_duration(one.percentiles[place].seconds), numeric=True)  # type: ignore[misc]
    for place, percent in enumerate(PERCENTILES)
)

Page = dict[str, Any]
"""What the template takes; its names are those of the template."""


def _safe(markup: str | None) -> Markup | None:
    """Plots, in which all text is escaped."""
    from markupsafe import Markup

    return Markup(markup) if markup is not None else None


def render_html(report: Report) -> str:
    """Takes a few milliseconds per case."""
    # Pairs of ranks are cells of a matrix, not rows: there may be thousands.
    single = [case for case in report.cases if not is_in_matrix(case)]
    plotted = choose_plotted(single)
    return render_template(
        "report.html.j2",
        styles=["report.css"],
        scripts=["report.js"],
        report=report,
        systems=[_page_system(system, plotted) for system in report.systems],
        across=[_page_sweep(sweep) for sweep in report.sweeps],
        totals=_totals(report.cases),
        plotted=len(plotted),
        measured=sum(case.timing is not None for case in single),
        max_dots=MAX_DRAWN_POINTS,
        open_cases=len(single) <= OPEN_CASES,
        describe_target=describe_target,
        format_duration=format_duration,
    )


def choose_plotted(cases: Sequence[CaseView]) -> frozenset[str]:
    """Anchors of the cases that get full plots."""
    measured = [case for case in cases if case.series.total]
    measured.sort(key=lambda case: not (case.missed_latency or case.result.notices))
    return frozenset(case.anchor for case in measured[:MAX_FULL_PLOTS])


def _totals(cases: Sequence[CaseView]) -> dict[str, int]:
    return {
        "measured": sum(case.result.status == "ok" for case in cases),
        "failed": sum(case.result.status == "failed" for case in cases),
        "skipped": sum(case.result.status == "skipped" for case in cases),
        "missed target": sum(bool(case.missed_latency) for case in cases),
        "notices": sum(len(case.result.notices) for case in cases),
    }


def _page_system(system: SystemView, plotted: frozenset[str]) -> Page:
    single = without_pairs(system)
    columns = choose_columns(single)
    listed = [case for case in system.cases if case.result.failure is not None or not is_in_matrix(case)]
    rooflines = [page for roofline in system.rooflines if (page := _page_roofline(roofline)) is not None]
    return {
        "view": system,
        "columns": columns,
        "rows": [
            {
                "case": case,
                "cells": [read_cell(column, case) for column in columns],
                "spark": _safe(draw_sparkline(case.timing.histogram, case.timing.summary) if case.timing else None),
            }
            for case in single.cases
        ],
        "cases": [_page_case(case, full=case.anchor in plotted) for case in listed],
        "sweeps": [_page_sweep(sweep) for sweep in system.sweeps],
        "rooflines": rooflines[:MAX_ROOFLINES],
        "rooflines_left_out": max(0, len(rooflines) - MAX_ROOFLINES),
        "pairs": [_page_pairs(view) for view in system.pairs],
        "stars": explain_stars(single.cases),
        "remarks": explain(single.cases),
        "groups": describe_system(system.system) if system.system is not None else [],
        "runs": [{"run": run, "facts": describe_run(run)} for run in system.runs],
    }


def _page_case(case: CaseView, *, full: bool) -> Page:
    name, timing = case.name, case.timing
    distribution = timeline = None
    if full and timing is not None:
        distribution = draw_distribution(timing.histogram, timing.summary, case.series, f"Distribution of {name}")
    if full and case.series.total:
        summary = timing.summary if timing is not None else None
        timeline = draw_timeline(case.series, summary, f"Samples over time of {name}")
    longest = sorted(case.result.kernels, key=lambda use: -use.duration_s)[:MAX_KERNELS]
    left_out = max(0, len(case.result.kernels) - MAX_KERNELS)
    shown = f"; the {len(longest)} longest, {left_out} more are left out" if left_out else ""
    measured = [timing] if timing is not None else []
    return {
        "case": case,
        "name": name,
        "timing": describe_timing(case),
        "facts": describe_case(case),
        "distribution": _safe(distribution),
        "timeline": _safe(timeline),
        "tables": [
            _page_table("Percentiles of the samples", PERCENTILE_COLUMNS, measured),
            _page_table("Readings of the devices", READINGS, case.result.readings),
            _page_table(f"What ran in one iteration, as the profiler saw it{shown}", KERNELS, longest, kind="kernels"),
        ],
    }


def _page_table(caption: str, columns: Sequence[Column[Row]], rows: Sequence[Row], *, kind: str = "") -> Page:
    return {
        "kind": kind,
        "caption": caption,
        "columns": columns,
        "rows": [[read_cell(column, row).text for column in columns] for row in rows],
    }


def _page_sweep(sweep: SweepCurves) -> Page:
    drawn = {
        quantity.title: draw_sweep(
            sweep.series, quantity, f"{quantity.title} of {sweep.benchmark} against message size"
        )
        for quantity in (LATENCY, BUS_BANDWIDTH)
    }
    return {
        "benchmark": sweep.benchmark,
        "plots": [(title, _safe(plot)) for title, plot in drawn.items() if plot is not None],
        "legend": [line.label for line in sweep.series[:MAX_SERIES]],
        "left_out": max(0, len(sweep.series) - MAX_SERIES),
    }


def _page_roofline(roofline: Roofline) -> Page | None:
    drawn = draw_roofline(roofline, f"Roofline of {roofline.device} in run {roofline.run_id}")
    if drawn is None:
        return None
    return {
        "view": roofline,
        "plot": _safe(drawn.markup),
        "legend": [(colour, dtype or "no dtype") for dtype, colour in drawn.colours.items()],
        "caches": sorted({point.cache for point in roofline.points}),
        "left_out": len(roofline.points) - drawn.drawn,
        "peaks": describe_peaks(roofline),
    }


def _page_pairs(view: PairView) -> Page:
    maps = []
    for heatmap in make_heatmaps(view, MAX_DRAWN_UNITS):
        units = heatmap.units
        left_out = f"; the {len(units.names)} slowest of {len(units.names) + units.left_out} {units.kind}"
        title = f"{heatmap.title[:1].upper()}{heatmap.title[1:]}, {heatmap.unit}{left_out if units.left_out else ''}"
        name = f"{title}, from every one of the {units.kind} to every other; {describe_matrix(view)}"
        maps.append((title, _safe(draw_heatmap(heatmap, name))))
    return {"view": view, "title": describe_matrix(view), "maps": maps, "findings": describe_findings(view)}
