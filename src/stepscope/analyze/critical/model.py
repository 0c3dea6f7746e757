"""The dependency graph of a step: every event's start and end, and everything that had to happen before.

Edges carry the least delay that a dependency costs. What the trace shows beyond that is put on the edge that bound, as
delay usual for such an edge or as unexplained. So the graph gives back every time of the trace exactly, and says how
much of it it cannot explain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stepscope.analyze.critical import edges, kinds, waits
from stepscope.analyze.critical.draft import Constants, Draft, EdgeBuffer
from stepscope.analyze.critical.kinds import GRAPH_EDGE_KINDS
from stepscope.analyze.critical.rows import StepRows
from stepscope.analyze.critical.schedule import StepGraph, settle
from stepscope.analyze.ranks.clocks import MatchedRanks, match_ranks, usable_offsets_ns
from stepscope.analyze.ranks.digest import common_numbers, list_numbers, pair_numbers
from stepscope.analyze.ranks.matching import Matching
from stepscope.analyze.step.numbers import Whole
from stepscope.analyze.step.view import TraceView, view
from stepscope.core.errors import UsageError
from stepscope.formats.nesting import follow
from stepscope.formats.timeline import RUNTIME, RowEdges, Timeline


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
    # Members whose times do not agree: none may end before the last has begun.
    groups, skipped = [], 0
    for group in matches:
        starts, ends = (
            [int(timelines[index].core[name][row]) + offsets[index] for index, row in group]
            for name in ("start_ns", "end_ns")
        )
        if len(group) >= 2 and min(ends) >= max(starts):
            groups.append(group)
            for index, row in group:
                meets[index][row] = True
        skipped += len(group) >= 2 and min(ends) < max(starts)
    drafts = [
        _find_edges(Draft(view(one), step, mine, constants), step) for one, mine in zip(timelines, meets, strict=True)
    ]
    counts = Counter({"meetings": len(groups), "meetings_skipped": skipped})
    return _assemble(drafts, groups, offsets, step, counts)


def _find_edges(draft: Draft, step: int | None) -> Draft:
    """Adds all edges of one rank."""
    rows = draft.rows
    waits.add_host_waits(draft)
    waits.add_staged_copies(draft)
    waits.add_queue_limits(draft)
    _add_device_edges(draft)
    draft.limit[rows.start_of[np.flatnonzero(draft.meets & (rows.start_of >= 0))] + 1] = 0
    costs = edges.host_costs(draft)
    edges.add_handovers(draft, costs)
    edges.add_helpers(draft, np.isin(costs, (kinds.C_OPERATOR, kinds.C_LAUNCH_CALL, kinds.C_PYTHON)))
    edges.add_chains(draft, costs)
    edges.add_host_pace(draft, step)
    if not rows.source:
        draft.edges.add(0, 1, [rows.window.length_ns], kind=kinds.WINDOW, cost=kinds.C_GAP)
    draft.counts["device_events"] = len(rows.devices)
    draft.counts["host_events"] = len(rows.hosts.rows)
    draft.counts["without_launch"] = int((rows.devices.call < 0).sum())
    return draft


def _add_device_edges(draft: Draft) -> None:
    cost = edges.work_costs(draft)
    edges.add_work(draft, cost)
    ready = edges.add_launches(draft)
    ready = np.maximum(ready, edges.add_stream_order(draft, cost))
    edges.add_borders(draft, ready)
    ready = np.maximum(ready, edges.add_events(draft, *edges.find_event_waits(draft)))
    before, after = edges.find_default_stream_waits(draft)
    ready = np.maximum(ready, edges.add_events(draft, before, after, np.ones_like(before)))
    before, after = edges.find_close_ends(draft, ready)
    edges.add_events(draft, before, after, np.ones_like(before))


def _assemble(
    drafts: Sequence[Draft],
    groups: Sequence[Sequence[tuple[int, int]]],
    offsets: Sequence[int],
    step: int | None,
    counts: Counter[str],
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
        # Ranks begin their windows at different times: that is given, not explained.
        begins = np.array([int(place) + part.source for place, part in zip(first[:-1], parts, strict=True)])
        common.add(source, begins, time[begins], kind=kinds.WINDOW, cost=kinds.C_GAP)
        common.add(begins + 1, source + 1, 0, kind=kinds.WINDOW, cost=kinds.C_GAP)
        more = np.append(more, (0, time.max()))
    columns = _joined(drafts, first, common, rank)
    time = np.concatenate((time, more))
    for draft in drafts:
        counts.update(draft.counts)
    usual = np.array([_usual_delays(draft.constants) for draft in drafts])
    settled = settle(columns, time, usual, borders=(source, source + 1), counts=counts)
    return StepGraph(
        timelines=[draft.trace.timeline for draft in drafts],
        step=step,
        start_ns=begin,
        length_ns=int(time[source + 1]),
        source=source,
        sink=source + 1,
        node_time=time,
        node_rank=np.append(rank, np.zeros(len(more), np.int64)),
        node_row=np.append(row, np.full(len(more), -1)),
        edges=settled,
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


def _usual_delays(constants: Constants) -> list[int]:
    """Per kind of edge: up to which delay beyond the least counts as its own."""
    usual = [0] * len(GRAPH_EDGE_KINDS)
    usual[kinds.LAUNCH] = usual[kinds.GRAPH] = constants.launch_usual_ns
    usual[kinds.STREAM] = constants.stream_usual_ns
    usual[kinds.EVENT] = max(constants.stream_usual_ns, constants.event_usual_ns)
    usual[kinds.SYNC] = usual[kinds.QUEUE] = constants.sync_usual_ns
    return usual


def graph_of_job(
    timelines: Sequence[Timeline],
    step: int | None = None,
    *,
    align_clocks: bool = True,
    matched: MatchedRanks | None = None,
) -> StepGraph:
    """One step (the median step of the first rank, among those that all have, unless named).

    Ranks that number their steps differently are paired by order; `step` counts as the first rank does then. Several
    ranks are put on one clock where their collectives allow it; `align_clocks` False takes their times as they stand.
    `matched`: their collectives, where they are known already.
    """
    if len(timelines) == 1:
        return build_graph(timelines[0], view(timelines[0]).median_step() if step is None else step)
    if (pairs := pair_numbers([_numbers(timeline) for timeline in timelines])) is not None:
        # The graph asks every rank for the same number.
        timelines = [_renumber(timeline, mapping) for timeline, mapping in zip(timelines, pairs, strict=True)]
    number = _choose_step(timelines, step)
    matched = matched or match_ranks(timelines)
    matching, offsets = matched.matching, usable_offsets_ns(matched.clocks)
    places = {rank: place for place, rank in enumerate(matching.ranks.tolist())}
    order = [places[timeline.rank] for timeline in timelines if timeline.rank is not None]
    # The offsets are how far a rank's clock is ahead; the graph takes what is to be added.
    added = [-offsets[place] if align_clocks else 0 for place in order]
    return build_graph_of_ranks(timelines, _meetings(matching, order), step=number, offsets_ns=added)


def _numbers(timeline: Timeline) -> list[int]:
    return [span.number for span in timeline.steps]


def _renumber(timeline: Timeline, mapping: Mapping[int, int]) -> Timeline:
    """Steps without a partner are left out."""
    if all(own == other for own, other in mapping.items()) and len(mapping) == len(timeline.steps):
        return timeline
    before = timeline.core["step"]
    after = np.full_like(before, -1)
    for own, other in mapping.items():
        after[before == own] = other
    steps = tuple(span._replace(number=mapping[span.number]) for span in timeline.steps if span.number in mapping)
    return replace(timeline, core={**timeline.core, "step": after}, steps=steps)


def _choose_step(timelines: Sequence[Timeline], asked: int | None) -> int | None:
    common = common_numbers([_numbers(timeline) for timeline in timelines])
    number = view(timelines[0]).median_step() if asked is None else asked
    if number is None or number in common:
        return number
    if asked is not None:
        lacking = next(one.rank for one in timelines if asked not in _numbers(one))
        raise UsageError(f"rank {lacking} has no step {asked}", hint=f"steps of all ranks: {list_numbers(common)}")
    if not common:
        raise UsageError("the ranks have no step in common", hint="give one of them alone with --rank N")
    trace = view(timelines[0])
    return trace.middle_of([one for one in common if one not in trace.empty_steps] or common)


def _meetings(matching: Matching, order: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Members of each collective as (index of the timeline, row)."""
    index_of = {place: index for index, place in enumerate(order)}
    ranks = [index_of[place] for place in matching.rank[matching.member].tolist()]
    members = list(zip(ranks, matching.of_members("row").tolist(), strict=True))
    runs = zip(matching.first.tolist(), matching.count.tolist(), strict=True)
    return [members[first : first + count] for first, count in runs]


_BETWEEN_ROWS = (kinds.THREAD, kinds.LAUNCH, kinds.STREAM, kinds.EVENT, kinds.SYNC, kinds.QUEUE, kinds.GRAPH)


def row_edges(timeline: Timeline, step: int | None = None) -> RowEdges:
    """What had to happen before what, row by row, without a cycle even together with `parent`.

    `host` edges lead from one event to the next on its thread, not into what it encloses: that is in `parent`. Where
    device work delays an event that had itself launched it, the edge leads to the next event of the thread.
    """
    graph = build_graph(timeline, step)
    # From an end to the start that follows it on the thread.
    source, target, kind = graph.edges.source, graph.edges.target, graph.edges.kind
    mine = np.flatnonzero((kind == kinds.HOST) & (source & 1 == 1) & (target & 1 == 0))
    ends, starts = graph.node_row[source[mine]], graph.node_row[target[mine]]
    parts = ((ends, starts, kind[mine], np.zeros_like(mine)), _others(view(timeline), graph))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    keep = (columns[0] >= 0) & (columns[1] >= 0) & (columns[0] != columns[1])
    table = np.unique(np.stack([column[keep] for column in columns], 1), axis=0)
    return RowEdges(before=table[:, 0], after=table[:, 1], kind=table[:, 2], inferred=table[:, 3])


def _others(trace: TraceView, graph: StepGraph) -> tuple[Whole, Whole, Whole, Whole]:
    mine = np.flatnonzero(np.isin(graph.edges.kind, _BETWEEN_ROWS))
    source, target = graph.edges.source[mine], graph.edges.target[mine]
    before, after = graph.node_row[source], graph.node_row[target]
    is_host = after >= 0
    is_host[is_host] &= trace.thread[after[is_host]] >= 0
    to_end = (target & 1 == 1) & is_host
    # Calls that only wait: what they wait for was launched by another call.
    only_waits = (trace.kind[after] == RUNTIME) & (trace.parent[before] != after)
    moved = to_end & ~only_waits
    after = np.where(moved, _next_started(graph)[target], after)
    # Work that overlaps has an edge from start to start already; that between the ends says nothing about rows.
    keep = is_host | (target & 1 == 0)
    return before[keep], after[keep], graph.edges.kind[mine][keep], graph.edges.inferred[mine][keep]


def _next_started(graph: StepGraph) -> Whole:
    """For each node the row that begins next on its thread; −1 if none does."""
    node = np.arange(len(graph.node_time))
    follows, is_chain = node.copy(), graph.edges.kind == kinds.HOST
    follows[graph.edges.source[is_chain]] = graph.edges.target[is_chain]
    # Ends follow each other as deep as calls nest.
    at = follow(np.where(node & 1 == 1, follows, node))[follows]
    return np.where(at & 1 == 0, graph.node_row[at], -1)
