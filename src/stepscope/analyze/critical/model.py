"""The dependency graph of a step: every event's start and end, and everything that had to happen before.

Edges carry the least delay that a dependency costs. What the trace shows beyond that is put on the edge that bound, as
delay usual for such an edge or as unexplained. So the graph gives back every time of the trace exactly, and says how
much of it it cannot explain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stepscope.analyze.critical import device, host, kinds, waits
from stepscope.analyze.critical.device import find_event_waits
from stepscope.analyze.critical.draft import Constants, Draft, EdgeBuffer, begin_draft
from stepscope.analyze.critical.kinds import GRAPH_EDGE_KINDS
from stepscope.analyze.critical.rows import StepRows
from stepscope.analyze.critical.settle import Settled, settle
from stepscope.analyze.step.numbers import Mask, Whole
from stepscope.core.errors import UsageError
from stepscope.formats.timeline import Timeline

COMPILED_FROM = 80_000
"""Edges from which loading the compiled loops pays."""


@dataclass(frozen=True)
class StepGraph:
    """Nodes are numbers, edges are columns. Times are ns from the window's start."""

    timelines: Sequence[Timeline]
    step: int | None
    start_ns: int
    length_ns: int
    source: int
    sink: int
    node_time: Whole
    node_rank: Whole
    """Index into timelines."""
    node_row: Whole
    """−1: the window's borders and the meetings of ranks. A row's end is the node after its start."""
    edges: Settled
    constants: Sequence[Constants]
    """One set a rank."""
    counts: Mapping[str, int]
    """What was left out and what is loose; see Checks."""

    @property
    def is_large(self) -> bool:
        return len(self.edges.source) >= COMPILED_FROM

    @cached_property
    def edge_lists(self) -> tuple[list[int], list[int]]:
        """Source and target of the edges for the loops that are not compiled."""
        return self.edges.source.tolist(), self.edges.target.tolist()


def build_graph(timeline: Timeline, step: int | None = None, *, constants: Constants | None = None) -> StepGraph:
    """The graph of one rank. `step`: None takes the whole trace. `constants`: else measured in the trace."""
    return build_graph_of_ranks([timeline], [], step=step, constants=constants)


def build_graph_of_ranks(
    timelines: Sequence[Timeline],
    matches: Sequence[Sequence[tuple[int, int]]],
    *,
    step: int | None = None,
    offsets_ns: Sequence[int] | None = None,
    constants: Constants | None = None,
) -> StepGraph:
    """All ranks in one graph: members of a collective meet before data moves.

    `matches`: for each collective its members as (index of the timeline, row). `offsets_ns` is what to add to each
    rank's times to have them on one clock.
    """
    offsets = [0] * len(timelines) if offsets_ns is None else list(offsets_ns)
    if len(offsets) != len(timelines) or not timelines:
        raise UsageError(f"{len(timelines)} traces and {len(offsets)} clock offsets", hint="give one offset a trace")
    meets = [np.zeros(len(timeline), bool) for timeline in timelines]
    groups, skipped = _usable_matches(timelines, matches, offsets)
    for group in groups:
        for index, row in group:
            meets[index][row] = True
    drafts = [_find_edges(timeline, step, mine, constants) for timeline, mine in zip(timelines, meets, strict=True)]
    counts = {"meetings": len(groups), "meetings_skipped": skipped}
    return _assemble(drafts, groups, offsets, step, counts)


def _find_edges(timeline: Timeline, step: int | None, meets: Mask, constants: Constants | None) -> Draft:
    """All edges of one rank."""
    draft = begin_draft(timeline, step, meets, constants)
    rows = draft.rows
    waits.add_host_waits(draft)
    waits.add_staged_copies(draft)
    waits.add_queue_limits(draft)
    _add_device_edges(draft)
    draft.limit[rows.start_of[np.flatnonzero(meets & (rows.start_of >= 0))] + 1] = 0
    costs = host.host_costs(draft)
    host.add_handovers(draft, costs)
    host.add_helpers(draft, np.isin(costs, (kinds.C_OPERATOR, kinds.C_LAUNCH_CALL, kinds.C_PYTHON)))
    host.add_chains(draft, costs)
    host.add_host_pace(draft, step)
    if not rows.source:
        draft.edges.add(0, 1, [rows.window.length_ns], kind=kinds.WINDOW, cost=kinds.C_GAP)
    draft.counts["device_events"] = len(rows.devices)
    draft.counts["host_events"] = len(rows.hosts.rows)
    draft.counts["without_launch"] = int((rows.devices.call < 0).sum())
    return draft


def _add_device_edges(draft: Draft) -> None:
    cost = device.work_costs(draft)
    device.add_work(draft, cost)
    ready = device.add_launches(draft)
    ready = np.maximum(ready, device.add_stream_order(draft, cost))
    device.add_borders(draft, ready)
    ready = np.maximum(ready, device.add_events(draft, *find_event_waits(draft)))
    before, after = device.find_default_stream_waits(draft)
    ready = np.maximum(ready, device.add_events(draft, before, after, np.ones_like(before)))
    before, after = device.find_close_ends(draft, ready)
    device.add_events(draft, before, after, np.ones_like(before))


def _usable_matches(
    timelines: Sequence[Timeline], matches: Sequence[Sequence[tuple[int, int]]], offsets: Sequence[int]
) -> tuple[list[list[tuple[int, int]]], int]:
    """Groups of at least two members whose times agree: no member may end before the last has begun."""
    groups, skipped = [], 0
    for group in matches:
        starts = [int(timelines[index].core["start_ns"][row]) + offsets[index] for index, row in group]
        ends = [int(timelines[index].core["end_ns"][row]) + offsets[index] for index, row in group]
        if len(group) < 2:
            continue
        if min(ends) < max(starts):
            skipped += 1
        else:
            groups.append(list(group))
    return groups, skipped


def _assemble(
    drafts: Sequence[Draft],
    groups: Sequence[Sequence[tuple[int, int]]],
    offsets: Sequence[int],
    step: int | None,
    counts: dict[str, int],
) -> StepGraph:
    """One numbering for all ranks, the meetings, and the borders of the common window."""
    parts = [draft.rows for draft in drafts]
    starts = [part.window.start_ns + offset for part, offset in zip(parts, offsets, strict=True)]
    begin = min(starts)
    first = np.cumsum([0, *(part.source + 2 for part in parts)])
    nodes = [_nodes_of(part) for part in parts]
    time = np.concatenate([own + start - begin for (own, _), start in zip(nodes, starts, strict=True)])
    row = np.concatenate([own for _, own in nodes])
    rank = np.repeat(np.arange(len(parts)), np.diff(first))
    source = int(first[0]) + parts[0].source
    common = EdgeBuffer()
    more = _add_meetings(common, parts, first, time, groups)
    if len(parts) > 1:
        source = len(time) + len(more)
        _add_common_window(common, parts, first, time, source)
        more = np.append(more, (0, time.max()))
    columns = _joined(drafts, first, common, rank)
    time = np.concatenate((time, more))
    for draft in drafts:
        for name, count in draft.counts.items():
            counts[name] = counts.get(name, 0) + count
    usual = np.array([_usual_delays(draft.constants) for draft in drafts])
    edges = settle(columns, time, usual, borders=(source, source + 1), counts=counts)
    return StepGraph(
        timelines=[draft.timeline for draft in drafts],
        step=step,
        start_ns=begin,
        length_ns=int(time[source + 1]),
        source=source,
        sink=source + 1,
        node_time=time,
        node_rank=np.append(rank, np.zeros(len(more), np.int64)),
        node_row=np.append(row, np.full(len(more), -1)),
        edges=edges,
        constants=[draft.constants for draft in drafts],
        counts=counts,
    )


def _joined(drafts: Sequence[Draft], first: Whole, common: EdgeBuffer, node_rank: Whole) -> list[Whole]:
    """The columns of all edges in one numbering, and the rank of each."""
    tables = []
    for index, draft in enumerate(drafts):
        source, target, *rest = draft.edges.columns()
        tables.append([source + first[index], target + first[index], *rest, np.full(len(source), index)])
    source, target, *rest = common.columns()
    # Edges between ranks have one end that belongs to a rank.
    inner = np.where(target < len(node_rank), target, source)
    tables.append([source, target, *rest, node_rank[np.minimum(inner, len(node_rank) - 1)]])
    return [np.concatenate(column) for column in zip(*tables, strict=True)]


def _nodes_of(rows: StepRows) -> tuple[Whole, Whole]:
    time = np.zeros(rows.source + 2, np.int64)
    events = np.concatenate((rows.hosts.rows, rows.devices.rows))
    time[0 : rows.source : 2] = np.concatenate((rows.hosts.start, rows.devices.start))
    time[1 : rows.source : 2] = np.concatenate((rows.hosts.end, rows.devices.end))
    time[rows.source + 1] = rows.window.length_ns
    row = np.full(rows.source + 2, -1, np.int64)
    row[: rows.source] = np.repeat(events, 2)
    return time, row


def _add_meetings(
    edges: EdgeBuffer,
    parts: Sequence[StepRows],
    first: Whole,
    time: Whole,
    groups: Sequence[Sequence[tuple[int, int]]],
) -> Whole:
    """A node for each collective: all members have come. Returns the nodes' times."""
    members: list[tuple[int, int, int]] = []
    count = 0
    for group in groups:
        here = [(int(parts[index].start_of[row]), index, row) for index, row in group]
        here = [member for member in here if member[0] >= 0]
        members.extend((int(first[index]) + start, row, count) for start, index, row in here)
        count += bool(here)
    start, row, meeting = np.array(members, np.int64).reshape(-1, 3).T
    met = np.zeros(count, np.int64)
    np.maximum.at(met, meeting, time[start])
    node = len(time) + meeting
    edges.add(start, node, 0, kind=kinds.COLLECTIVE, cost=kinds.C_COMMUNICATION, row=row)
    moved = time[start + 1] - met[meeting]
    edges.add(node, start + 1, moved, kind=kinds.COLLECTIVE, cost=kinds.C_COMMUNICATION, row=row)
    return met


def _add_common_window(edges: EdgeBuffer, parts: Sequence[StepRows], first: Whole, time: Whole, source: int) -> None:
    """Ranks begin their windows at different times: that is given, not explained."""
    begins = np.array([int(place) + part.source for place, part in zip(first[:-1], parts, strict=True)])
    edges.add(source, begins, time[begins], kind=kinds.WINDOW, cost=kinds.C_GAP)
    edges.add(begins + 1, source + 1, 0, kind=kinds.WINDOW, cost=kinds.C_GAP)


def _usual_delays(constants: Constants) -> list[int]:
    """Per kind of edge: up to which delay beyond the least counts as its own."""
    usual = [0] * len(GRAPH_EDGE_KINDS)
    usual[kinds.LAUNCH] = usual[kinds.GRAPH] = constants.launch_usual_ns
    usual[kinds.STREAM] = constants.stream_usual_ns
    usual[kinds.EVENT] = max(constants.stream_usual_ns, constants.event_usual_ns)
    usual[kinds.SYNC] = usual[kinds.QUEUE] = constants.sync_usual_ns
    return usual
