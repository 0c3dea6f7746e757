"""The critical path: what was waited for, from the end of the window back to its start; its track in a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.critical import kinds
from stepscope.analyze.critical.draft import Constants
from stepscope.analyze.critical.kinds import COSTS, DELAYS, HOST_COSTS, WORK_COSTS
from stepscope.analyze.critical.model import build_graph
from stepscope.analyze.critical.schedule import Checks, Schedule, StepGraph, check_graph, find_slack, path_edges, retime
from stepscope.analyze.section import Section, field, make_table
from stepscope.analyze.step.numbers import Whole, make_rows, seconds, sum_by
from stepscope.core.units import format_duration, format_share
from stepscope.formats.classify import short_name
from stepscope.formats.timeline import Timeline

if TYPE_CHECKING:
    from stepscope.analyze.job import JobReport

NO_EVENT = "(no event)"
MOST_NAMES = 40
"""How many names are listed: those that take longest."""
MUCH_UNEXPLAINED = 0.05


class PathSegment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A segment of the path that belongs to one event."""

    name: str
    kind: str
    """One of COSTS."""
    start_ns: int
    end_ns: int
    row: int | None
    """In the timeline of its rank; None: no event."""
    rank: int
    """Index of the timeline."""


class PathShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one name takes of the path, for one kind of time."""

    name: str
    kind: str
    time_s: float
    share: float
    count: int


class NameSlack(msgspec.Struct, frozen=True, kw_only=True):
    """How near to the path the device work of one name is."""

    name: str
    kind: str
    count: int
    time_s: float
    on_path_s: float
    least_slack_s: float
    """The smallest time by which one of them could end later without making the step longer."""


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True):
    """The critical path of a profiled step; its length is that of the window."""

    step: int | None
    """None: the whole trace."""
    ranks: list[int | None]
    window_start_ns: int
    window_end_ns: int
    length_s: float
    host_s: float
    """On the path, of the host; the rest is device work, delays between the two, and unexplained."""
    device_s: float
    by_kind_s: dict[str, float]
    """Every one of COSTS; they sum to the length."""
    by_rank_s: list[float]
    """How long the path runs on each rank."""
    by_name: list[PathShare]
    segments: list[PathSegment]
    """In order of time; empty where only the sums were asked for."""
    slack: list[NameSlack]
    checks: Checks
    constants: list[Constants]
    """Delays, one set per rank."""
    notes: list[str]
    """What to know before believing it."""


class PathColumns(NamedTuple):
    """The path as columns: what was spent between two nodes, split where a part of it is unexplained."""

    start: Whole
    length: Whole
    cost: Whole
    row: Whole
    rank: Whole


def critical_path(timeline: Timeline, step: int | None = None, *, constants: Constants | None = None) -> CriticalPath:
    """The path of one rank's step, or of the whole trace."""
    return describe_path(build_graph(timeline, step, constants=constants))


def describe_path(graph: StepGraph, schedule: Schedule | None = None, *, segments: bool = True) -> CriticalPath:
    """The path of a schedule (that of the trace unless one is given) as a record."""
    measured = retime(graph)
    edges = path_edges(graph, measured)
    checks = check_graph(graph, measured, edges)
    shown = measured
    if schedule is not None:
        shown, edges = schedule, path_edges(graph, schedule)
    columns = path_columns(graph, shown, edges)
    by_kind = dict(zip(COSTS, sum_by(columns.cost, columns.length, len(COSTS)).tolist(), strict=True))
    by_rank = sum_by(columns.rank, columns.length, len(graph.timelines))
    return CriticalPath(
        step=graph.step,
        ranks=[timeline.rank for timeline in graph.timelines],
        window_start_ns=graph.start_ns,
        window_end_ns=graph.start_ns + shown.length_ns,
        length_s=seconds(shown.length_ns),
        host_s=seconds(sum(by_kind[COSTS[cost]] for cost in HOST_COSTS)),
        device_s=seconds(sum(by_kind[COSTS[cost]] for cost in WORK_COSTS)),
        by_kind_s={kind: seconds(total) for kind, total in by_kind.items()},
        by_rank_s=[seconds(total) for total in by_rank.tolist()],
        by_name=_by_name(graph, columns),
        segments=_segments(graph, columns) if segments else [],
        slack=_slack_by_name(graph, shown, edges),
        checks=checks,
        constants=list(graph.constants),
        notes=_notes(graph, checks),
    )


def path_columns(graph: StepGraph, schedule: Schedule, edges: Whole) -> PathColumns:
    """Edges of the path as columns of segments, in order; those of no length are left out."""
    own, rest = schedule.weight[edges], schedule.unexplained[edges]
    begin = schedule.time[graph.edges.source[edges]]
    # What is unexplained comes first: the delay that is known leads up to the event.
    start = np.stack((begin, begin + rest), 1).ravel()
    length = np.stack((rest, own), 1).ravel()
    cost = np.stack((np.full(len(edges), kinds.C_UNEXPLAINED), graph.edges.cost[edges]), 1).ravel()
    row, rank = np.repeat(graph.edges.row[edges], 2), np.repeat(graph.edges.rank[edges], 2)
    there = length != 0
    return PathColumns(*(column[there] for column in (start, length, cost, row, rank)))


def _names(graph: StepGraph, rank: int, rows: Whole) -> Whole:
    """Codes of names; −1 where there is no event."""
    names = graph.timelines[rank].core["name"]
    return np.where(rows >= 0, names[rows], -1).astype(np.int64)


def _by_name_and_kind(graph: StepGraph, rank: Whole, row: Whole, cost: Whole) -> tuple[list[tuple[str, str]], Whole]:
    """The different names of events and kinds of time over all ranks, and which of them each entry is."""
    found: dict[tuple[str, str], int] = {}
    which = np.zeros(len(row), np.int64)
    for index, timeline in enumerate(graph.timelines):
        mine = np.flatnonzero(rank == index)
        key = (_names(graph, index, row[mine]) + 1) * len(COSTS) + cost[mine]
        codes, place = np.unique(key, return_inverse=True)
        local = []
        for name, kind in (divmod(code, len(COSTS)) for code in codes.tolist()):
            entry = timeline.texts[name - 1] if name else NO_EVENT, COSTS[kind]
            local.append(found.setdefault(entry, len(found)))
        which[mine] = np.array(local, np.int64)[place]
    return list(found), which


def _by_name(graph: StepGraph, columns: PathColumns) -> list[PathShare]:
    keys, which = _by_name_and_kind(graph, columns.rank, columns.row, columns.cost)
    total, count = sum_by(which, columns.length, len(keys)), np.bincount(which, minlength=len(keys))
    order = np.argsort(-total, kind="stable")[:MOST_NAMES]
    times = {"time_s": total[order] / 1e9, "count": count[order], "share": total[order] / (int(total.sum()) or 1)}
    return make_rows(PathShare, _named(keys, order) | times)


def _named(keys: Sequence[tuple[str, str]], order: Whole) -> dict[str, Any]:
    """The columns `name` and `kind`."""
    return {what: [keys[place][number] for place in order.tolist()] for number, what in enumerate(("name", "kind"))}


def _segments(graph: StepGraph, columns: PathColumns) -> list[PathSegment]:
    """Segments that follow each other and are of one event and kind become one."""
    start, length, cost, row, rank = columns
    if not len(start):
        return []
    same = (row[1:] == row[:-1]) & (cost[1:] == cost[:-1]) & (rank[1:] == rank[:-1])
    same &= start[1:] == (start + length)[:-1]
    first = np.flatnonzero(np.append(True, ~same))
    last = np.append(first[1:], len(start)) - 1
    codes = np.zeros(len(first), np.int64)
    for index in range(len(graph.timelines)):
        mine = rank[first] == index
        codes[mine] = _names(graph, index, row[first][mine])
    columns_of = graph.start_ns + start[first], graph.start_ns + (start + length)[last], cost[first], row[first]
    return [
        PathSegment(
            name=graph.timelines[member].texts[code] if code >= 0 else NO_EVENT,
            kind=COSTS[kind],
            start_ns=begin,
            end_ns=end,
            row=number if number >= 0 else None,
            rank=member,
        )
        for begin, end, kind, number, member, code in zip(
            *(column.tolist() for column in (*columns_of, rank[first], codes)), strict=True
        )
    ]


def _slack_by_name(graph: StepGraph, schedule: Schedule, edges: Whole) -> list[NameSlack]:
    """Device work by name, the longest first."""
    work = _work_edges(graph)
    keys, which = _by_name_and_kind(graph, graph.edges.rank[work], graph.edges.row[work], graph.edges.cost[work])
    total = sum_by(which, schedule.weight[work], len(keys))
    on_path = sum_by(which, np.where(np.isin(work, edges), schedule.weight[work], 0), len(keys))
    least = np.full(len(keys), np.iinfo(np.int64).max)
    np.minimum.at(least, which, find_slack(graph, schedule)[graph.edges.target[work]])
    count, order = np.bincount(which, minlength=len(keys)), np.argsort(-total, kind="stable")[:MOST_NAMES]
    times = {"time_s": total, "on_path_s": on_path, "least_slack_s": least}
    columns = {name: values[order] / 1e9 for name, values in times.items()}
    return make_rows(NameSlack, _named(keys, order) | columns | {"count": count[order]})


def _work_edges(graph: StepGraph) -> Whole:
    """One edge for each piece of device work: that into its end which carries its time."""
    kind, target = graph.edges.kind, graph.edges.target
    moved = (kind == kinds.COLLECTIVE) & (graph.node_row[target] >= 0)
    met = np.zeros(len(graph.node_row), bool)
    met[target[moved]] = True
    return np.flatnonzero(moved | ((kind == kinds.WORK) & ~met[target]))


def _notes(graph: StepGraph, checks: Checks) -> list[str]:
    notes = list(checks.failures)
    if not checks.device_events:
        notes.append("no device work in this window: the path is that of the host")
    if checks.window_ns and checks.unexplained_on_path_ns > MUCH_UNEXPLAINED * checks.window_ns:
        share = format_share(checks.unexplained_on_path_ns / checks.window_ns)
        notes.append(f"{share} of the path is unexplained: dependencies are missing in the trace")
    if checks.without_launch:
        notes.append(
            f"{checks.without_launch} of {checks.device_events} device events have no launching call in the trace"
        )
    if checks.meetings_skipped:
        notes.append(f"{checks.meetings_skipped} collectives left out: their members' times do not overlap")
    if checks.contradicted:
        listed = ", ".join(f"{count} {kind}" for kind, count in checks.contradicted.items())
        notes.append(f"dependencies that the times contradict were left out: {listed}")
    if graph.step is None and any(len(timeline.steps) > 1 for timeline in graph.timelines):
        notes.append("the whole trace as one window")
    return notes


PROCESS = "Critical path"
_LANES = ("host", "delays", "device")
_LANE_OF = {kind: 0 if cost in HOST_COSTS else 2 if cost in WORK_COSTS else 1 for cost, kind in enumerate(COSTS)}
_FLOW = "critical_path"


def path_records(path: CriticalPath) -> list[PathSegment]:
    """The segments of the path in order of time, without those of negative length (clocks that differ by a little)."""
    return [segment for segment in path.segments if segment.end_ns > segment.start_ns]


def path_events(path: CriticalPath, *, base_ns: int = 0) -> list[dict[str, Any]]:
    """Events for the `traceEvents` of a Chrome trace: one process, for each rank a track for host, delays and device.

    Times are µs after `base_ns`, which must be the one that the trace's own events count from.
    """
    segments = path_records(path)
    slices = [(segment, segment.rank * len(_LANES) + _LANE_OF[segment.kind]) for segment in segments]
    events = _named_tracks(path, {track for _, track in slices})
    common = {"cat": _FLOW, "pid": PROCESS}
    for number, (segment, track) in enumerate(slices):
        begins, length = (segment.start_ns - base_ns) / 1000, (segment.end_ns - segment.start_ns) / 1000
        times = {"ts": begins, "dur": length, "args": {"kind": segment.kind, "row": segment.row}}
        events.append({**common, "ph": "X", "name": segment.name, "tid": track, **times})
        if number and slices[number - 1][1] != track:
            before, left = slices[number - 1]
            # From the last moment of one slice to the first of the next: viewers want both ends inside a slice.
            arrow = {**common, "name": _FLOW, "id": number}
            events.append({**arrow, "ph": "s", "tid": left, "ts": (before.end_ns - 1 - base_ns) / 1000})
            events.append({**arrow, "ph": "f", "bp": "e", "tid": track, "ts": begins})
    return events


def _named_tracks(path: CriticalPath, tracks: Iterable[int]) -> list[dict[str, Any]]:
    def name(what: str, track: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": PROCESS, "tid": track, "args": args}

    named = [name("process_name", 0, {"name": PROCESS})]
    for track in sorted(tracks):
        index, lane = divmod(track, len(_LANES))
        rank = path.ranks[index]
        prefix = f"rank {index if rank is None else rank}: " if len(path.ranks) > 1 else ""
        named.append(name("thread_name", track, {"name": prefix + _LANES[lane]}))
        named.append(name("thread_sort_index", track, {"sort_index": track}))
    return named


LEAD = "What the step could not do without: only what is on it makes the step shorter when it gets faster."
WITHOUT_DEVICE = (
    "Without a device it runs through the program's own thread: what that thread waited for, such as a collective of "
    "another thread or rank, is on it as the call that waited."
)
PATH_WORDS = {
    "gap": "between recorded events",
    "launch": "from launch to start",
    "launch_call": "launch calls",
    "stream": "hand-over on a stream",
    "sync": "return of a blocking call",
}
"""Kinds of time on the critical path whose names say too little."""


def spell_path_kind(kind: str) -> str:
    return PATH_WORDS.get(kind, kind.replace("_", " "))


def short_on_path(name: str, kind: str) -> str:
    """Names of kernels are shortened; what the host did keeps its name, whatever signs are in it."""
    return short_name(name) if kind in ("compute", "communication", "copy", "stream") else name


def path_section(job: JobReport) -> Section | None:
    path = job.critical
    if path is None:
        return None
    whole = path.length_s or 1.0
    delays_s = sum(path.by_kind_s.get(kind, 0.0) for kind in DELAYS)
    kinds = sorted((item for item in path.by_kind_s.items() if item[1] > 0), key=lambda item: -item[1])
    name = field("Name", lambda one: short_on_path(one.name, one.kind))
    by_name = make_table("Critical path by name", "What lies on it", path.by_name, [
        field("Time", "time_s", "s"),
        field("% of path", "share", "share"),
        field("Segments", "count", "count"),
        field("Kind", lambda one: spell_path_kind(one.kind)),
        name,
    ], is_folded=False)  # fmt: skip
    by_kind = make_table(
        "Critical path by kind", f"The {format_duration(path.length_s)} of the profiled step, each once", kinds, [
            field("Time", lambda item: item[1], "s"),
            field("% of path", lambda item: item[1] / whole, "share"),
            field("Kind", lambda item: spell_path_kind(item[0])),
        ]
    )  # fmt: skip
    slack = make_table(
        "Slack", "How much later device work could end without making the step longer", path.slack, [
            field("Least slack", "least_slack_s", "s"),
            field("On the path", "on_path_s", "s"),
            field("Time", "time_s", "s"),
            field("Count", "count", "count"),
            field("Kind", "kind"),
            name,
        ]
    )  # fmt: skip
    return Section(
        id="path",
        title="Critical path through all ranks" if len(path.ranks) > 1 else "Critical path",
        lead=LEAD if job.detail.breakdown.has_device else f"{LEAD} {WITHOUT_DEVICE}",
        facts=[
            ("Ranks", _list_ranks(path) if len(path.ranks) > 1 else f"rank {job.telling_rank} alone"),
            ("Length", format_duration(path.length_s)),
            ("On the host", f"{format_duration(path.host_s)} ({format_share(path.host_s / whole)})"),
            ("On the device", f"{format_duration(path.device_s)} ({format_share(path.device_s / whole)})"),
            ("Delays between them", f"{format_duration(delays_s)} ({format_share(delays_s / whole)})"),
        ],
        tables=[by_name, by_kind, slack],
    )


def _list_ranks(path: CriticalPath) -> str:
    whole = path.length_s or 1.0
    shares = zip(path.ranks, path.by_rank_s, strict=True)
    return ", ".join(f"rank {rank} {format_share(spent / whole)}" for rank, spent in shares if spent > 0)
