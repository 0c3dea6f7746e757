"""The graph of a step through one rank, or through all ranks of a job and the collectives in which they met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stepscope.analyze.critical.model import StepGraph, build_graph, build_graph_of_ranks
from stepscope.analyze.ranks.clocks import find_clocks, usable_offsets_ns
from stepscope.analyze.ranks.digest import common_numbers, digest, list_numbers, pair_numbers
from stepscope.analyze.ranks.matching import Matching, match
from stepscope.analyze.step.view import view
from stepscope.core.errors import UsageError
from stepscope.formats.timeline import Timeline


def graph_of_job(timelines: Sequence[Timeline], step: int | None = None, *, align_clocks: bool = True) -> StepGraph:
    """One step (the median step of the first rank, among those that all have, unless named).

    Ranks that number their steps differently are paired by order; `step` counts as the first rank does then. Several
    ranks are put on one clock where their collectives allow it; `align_clocks` False takes their times as they stand.
    """
    if len(timelines) == 1:
        return build_graph(timelines[0], view(timelines[0]).median_step() if step is None else step)
    timelines = _count_alike(timelines)
    number = _choose_step(timelines, step)
    digests = [digest(timeline) for timeline in timelines]
    matching = match(digests)
    offsets = usable_offsets_ns(find_clocks(matching, max(item.resolution_ns for item in digests)))
    places = {rank: place for place, rank in enumerate(matching.ranks.tolist())}
    order = [places[timeline.rank] for timeline in timelines if timeline.rank is not None]
    # The offsets say how far a rank's clock is ahead; the graph wants what is to be added.
    added = [-offsets[place] if align_clocks else 0 for place in order]
    return build_graph_of_ranks(timelines, _meetings(matching, order), step=number, offsets_ns=added)


def _numbers(timeline: Timeline) -> list[int]:
    return [span.number for span in timeline.steps]


def _count_alike(timelines: Sequence[Timeline]) -> list[Timeline]:
    """The graph asks every rank for the same number."""
    pairs = pair_numbers([_numbers(timeline) for timeline in timelines])
    if pairs is None:
        return list(timelines)
    return [_renumber(timeline, mapping) for timeline, mapping in zip(timelines, pairs, strict=True)]


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
    filled = [one for one in common if one not in trace.empty_steps] or list(common)
    return sorted(filled, key=lambda one: trace.windows[one].length_ns)[(len(filled) - 1) // 2]


def _meetings(matching: Matching, order: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Members of each collective as (index of the timeline, row)."""
    index_of = {place: index for index, place in enumerate(order)}
    rows, ranks = matching.of_members("row").tolist(), matching.rank[matching.member].tolist()
    meetings = []
    for first, count in zip(matching.first.tolist(), matching.count.tolist(), strict=True):
        members = range(first, first + count)
        meetings.append([(index_of[ranks[member]], rows[member]) for member in members])
    return meetings
