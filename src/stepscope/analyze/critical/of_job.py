"""The graph of a step through one rank, or through all ranks of a job and the collectives in which they met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepscope.analyze.critical.model import StepGraph, build_graph, build_graph_of_ranks
from stepscope.analyze.ranks.clocks import find_clocks, usable_offsets_ns
from stepscope.analyze.ranks.digest import digest
from stepscope.analyze.ranks.matching import Matching, match
from stepscope.analyze.trace_view import view

if TYPE_CHECKING:
    from stepscope.traces.timeline import Timeline


def graph_of_job(timelines: Sequence[Timeline], step: int | None = None, *, align_clocks: bool = True) -> StepGraph:
    """One step (the one of median length of the first rank unless named). Several ranks are put on one clock where
    their collectives allow it; `align_clocks` False takes their times as they stand."""
    number = view(timelines[0]).median_step() if step is None else step
    if len(timelines) == 1:
        return build_graph(timelines[0], number)
    digests = [digest(timeline) for timeline in timelines]
    matching = match(digests)
    offsets = usable_offsets_ns(find_clocks(matching, max(item.resolution_ns for item in digests)))
    places = {rank: place for place, rank in enumerate(matching.ranks.tolist())}
    order = [places[timeline.rank] for timeline in timelines if timeline.rank is not None]
    # The offsets say how far a rank's clock is ahead; the graph wants what is to be added.
    added = [-offsets[place] if align_clocks else 0 for place in order]
    return build_graph_of_ranks(timelines, _meetings(matching, order), step=number, offsets_ns=added)


def _meetings(matching: Matching, order: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Members of each collective as (index of the timeline, row)."""
    index_of = {place: index for index, place in enumerate(order)}
    rows, ranks = matching.of_members("row").tolist(), matching.rank[matching.member].tolist()
    meetings = []
    for first, count in zip(matching.first.tolist(), matching.count.tolist(), strict=True):
        members = range(first, first + count)
        meetings.append([(index_of[ranks[member]], rows[member]) for member in members])
    return meetings
