"""The timelines of a page: which ranks have one, their rectangles within a bound on its size, and lanes of values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from stepscope.analyze.answers.compose import Answer
from stepscope.analyze.answers.facts import own_path
from stepscope.analyze.critical.path import CriticalPath, critical_path
from stepscope.analyze.job import JobReport
from stepscope.analyze.job_section import by_step_time, median_rank
from stepscope.analyze.over_time import collective_bandwidth, copy_bandwidth, queue_length
from stepscope.analyze.step.device_work import Window
from stepscope.analyze.step.intervals import StepFunction
from stepscope.analyze.step.view import TraceView, view
from stepscope.core.errors import StepscopeError
from stepscope.core.units import cut_text, format_duration
from stepscope.formats.timeline import Timeline
from stepscope.report.trace_overview import COLOURS, MOST_RECTANGLES, Overview, TextTable, draw_overview, used_names

TimelineOf = Callable[[int], Timeline]
"""Reads the timeline of a rank."""

MOST_RANKS = 8
"""Ranks with a timeline. A job of no more has one for each, unless its traces are large."""
MOST_STRAGGLERS = 4
"""Those that kept others waiting longest: ranks to compare them with need room too."""
LARGE_TRACE = 1_000_000
"""Events of a rank from which only ranks that matter are read again."""
ALL_RECTANGLES = 32_000
"""Events in all timelines together: the representative rank has its full number, the others share the rest."""
MOST_NAMES = 12_000
"""Names in all timelines together: where there are more, blocks of several events list one name each."""
NAMES_BYTES, SHORTEST_CUT = 300_000, 12
"""Bytes of all names together: where they are longer, each is cut to its share."""

NAMED_RANK = re.compile(r"\brank (\d+)")

MOST_POINTS = 500
"""Points of one lane; a curve with more changes is drawn as means over so many equal parts of the step."""
FULL_SCALE = 1000
"""Values are whole numbers from 0 to this, which stands for the peak."""


class Track(NamedTuple):
    label: str
    unit: str
    """What a value counts: `activities` or `B/s`."""
    peak: float
    """The highest value in the window, before anything was averaged."""
    cell_ns: int
    """Values are means over this time; 0: exact."""
    points: list[int]
    """Time since the point before and value, one after the other; a value holds until the next point."""


class RankTimeline(NamedTuple):
    rank: int
    reasons: list[str]
    """Why this rank is shown."""
    where: str
    """What of the rank is drawn."""
    overview: Overview
    tracks: list[Track]

    @property
    def caption(self) -> str:
        """What is drawn, and what is not."""
        overview = self.overview
        drawn, several = overview.count_rectangles()
        length = format_duration(overview.window.length_ns / 1e9)
        said = [f"{self.where}: {length}, {overview.events} events"]
        if several:
            said.append(f"drawn as {drawn} rectangles, {several} of which hold several short neighbours (striped)")
        if overview.hidden:
            said.append(f"{overview.hidden} host events nested deeper or on other threads are not drawn")
        return "; ".join(said)


def choose_ranks(job: JobReport, answer: Answer, *, only_reasons: bool = False) -> dict[int, list[str]]:
    """Rank → why it is shown, the most telling first; ranks without a reason fill up small jobs."""
    known = {one.rank for one in job.ranks}
    chosen: dict[int, list[str]] = {}
    for rank, reason in _reasons(job, answer):
        if rank in known and (rank in chosen or len(chosen) < MOST_RANKS):
            reasons = chosen.setdefault(rank, [])
            if reason not in reasons and not (reason == NAMED and reasons):
                reasons.append(reason)
    if len(job.ranks) <= MOST_RANKS and not only_reasons:
        chosen = {**chosen, **{one.rank: [] for one in job.ranks if one.rank not in chosen}}
    return chosen


NAMED = "named above"


def _reasons(job: JobReport, answer: Answer) -> Iterator[tuple[int, str]]:
    if len(job.ranks) < 2:
        yield job.telling_rank, ""
        return
    yield job.telling_rank, "representative"
    said = [answer.sentence, answer.evidence, answer.try_first.action, answer.try_first.because]
    named = [int(rank) for text in [*said, *(one.text for one in answer.points)] for rank in NAMED_RANK.findall(text)]
    late = [one for one in job.across.stragglers.ranks if one.straggler] if job.across is not None else []
    by_waiting = [one.rank for one in sorted(late, key=lambda one: -one.caused_s)]
    # What the advice is about comes before other stragglers: a page has room for few ranks.
    for rank in dict.fromkeys(named):
        yield rank, "straggler" if rank in by_waiting else NAMED
    yield from ((rank, "straggler") for rank in by_waiting[:MOST_STRAGGLERS])
    path = job.critical
    if path is not None and len(path.ranks) > 1:
        most = max(range(len(path.ranks)), key=lambda place: path.by_rank_s[place])
        yield path.ranks[most] or 0, "most of the critical path"
    ordered = by_step_time(job.ranks)
    yield ordered[0].rank, "longest step"
    yield median_rank(job.ranks).rank, "median step"
    yield ordered[-1].rank, "shortest step"


def draw_timelines(
    job: JobReport, answer: Answer, timeline_of: TimelineOf, telling: Timeline
) -> tuple[list[RankTimeline], dict[str, Any]]:
    """Timelines by rank, and the same as data for the page's script. One trace after the other is read."""
    names = TextTable()
    chosen = choose_ranks(job, answer, only_reasons=len(telling) >= LARGE_TRACE)
    summaries = {one.rank: one for one in job.ranks}
    share = min(MOST_RECTANGLES, (ALL_RECTANGLES - MOST_RECTANGLES) // max(1, len(chosen) - 1))
    timelines = []
    for rank in sorted(chosen):
        is_telling = rank == job.telling_rank
        timeline = telling if is_telling else timeline_of(rank)
        step = summaries[rank].step if timeline.steps else None
        path = own_path(job) if is_telling else _find_path(timeline, step)
        window = _launch_to_completion(view(timeline), step)
        overview = draw_overview(timeline, window, path, names, most=MOST_RECTANGLES if is_telling else share)
        reasons = [reason for reason in chosen[rank] if reason]
        timelines.append(
            RankTimeline(rank, reasons, _say_where(view(timeline), rank, step), overview, draw_tracks(timeline, window))
        )
    used = used_names([one.overview for one in timelines])
    if len(used) > MOST_NAMES:
        timelines = [one._replace(overview=one.overview.with_fewer_names()) for one in timelines]
        used = used_names([one.overview for one in timelines])
    longest = max(SHORTEST_CUT, NAMES_BYTES // max(1, len(used)))
    data = {
        "names": [cut_text(names.texts[code], longest) for code in used],
        "colours": list(COLOURS),
        "telling": job.telling_rank,
        "ranks": [
            {
                "rank": one.rank,
                "caption": one.caption,
                **one.overview.to_data(used),
                "tracks": [track._asdict() for track in one.tracks],
            }
            for one in timelines
        ],
    }
    return timelines, data


def _launch_to_completion(trace: TraceView, step: int | None) -> Window:
    """From the start of the step on the host to the end of its device work, so that launches are drawn with what they
    launched even where the host runs ahead."""
    window = trace.window(step)
    return window if step is None else window._replace(start_ns=min(window.start_ns, trace.span(step).start_ns))


def _say_where(trace: TraceView, rank: int, step: int | None) -> str:
    if step is None:
        return f"rank {rank}, the whole trace"
    until = " from its start on the host to the end of its device work" if trace.works else ""
    return f"rank {rank}, step {step}{until}"


def _find_path(timeline: Timeline, step: int | None) -> CriticalPath | None:
    """The critical path of one rank; None where it cannot be found, which the notes say of the representative rank."""
    try:
        return critical_path(timeline, step)
    except StepscopeError:
        return None


# Lanes of values over time


def draw_tracks(timeline: Timeline, window: Window) -> list[Track]:
    """Those that have anything to show."""
    tracks = (
        sample("queue length", "activities", queue_length(timeline), window),
        sample("host copies", "B/s", copy_bandwidth(timeline, with_host=True), window),
        sample("device copies", "B/s", copy_bandwidth(timeline, with_host=False), window),
        sample("collectives, algbw", "B/s", collective_bandwidth(timeline), window),
    )
    return [track for track in tracks if track.peak > 0]


def sample(label: str, unit: str, function: StepFunction, window: Window) -> Track:
    inside = (function.time > window.start_ns) & (function.time < window.end_ns)
    before = int(np.searchsorted(function.time, window.start_ns, side="right")) - 1
    time = np.concatenate(([window.start_ns], function.time[inside]))
    value = np.concatenate(([function.value[before] if before >= 0 else 0], function.value[inside])).astype(np.float64)
    peak, cell = float(value.max()), 0
    if len(time) > MOST_POINTS:
        cell = -(-window.length_ns // MOST_POINTS)
        time, value = _average(time, value, np.arange(window.start_ns, window.end_ns, cell), window.end_ns)
    scaled = np.rint(value * FULL_SCALE / peak).astype(np.int64) if peak > 0 else np.zeros(len(value), np.int64)
    changes = np.flatnonzero(np.r_[True, scaled[1:] != scaled[:-1]])
    since = np.diff(time[changes], prepend=window.start_ns)
    return Track(label, unit, peak, cell, np.stack((since, scaled[changes]), axis=1).reshape(-1).tolist())


def _average(time: Any, value: Any, cells: Any, end_ns: int) -> tuple[Any, Any]:
    """Means between the starts of cells, weighted by time."""
    edges = np.append(cells, end_ns)
    area = np.concatenate(([0.0], np.cumsum(value[:-1] * np.diff(time))))
    place = np.searchsorted(time, edges, side="right") - 1
    until = area[place] + value[place] * (edges - time[place])
    return cells, np.diff(until) / np.diff(edges)
