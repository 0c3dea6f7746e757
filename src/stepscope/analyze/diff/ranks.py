"""Which ranks of two jobs to compare: what each rank's step takes in both."""

from __future__ import annotations
from stepscope.formats.timeline import Timeline
import numpy as np

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepscope.analyze.diff.exposure import complete_steps, known_steps
from stepscope.analyze.diff.noise import middle_steps
from stepscope.analyze.diff.records import RankSteps
from stepscope.analyze.step.numbers import seconds
from stepscope.analyze.step.view import view
from stepscope.core.errors import UsageError


class ChosenRanks(NamedTuple):
    rank_a: int
    rank_b: int
    ranks: list[RankSteps]
    """All ranks, in order."""
    why: str
    """In words."""


def step_time_s(timeline: Timeline, steps: Sequence[int] | None = None) -> float:
    """What a comparison takes as the profiled step of a trace, without looking at what is in it."""
    trace = view(timeline)
    if not timeline.steps:
        raise UsageError("the trace has no events to compare", where=trace.source)
    numbers = complete_steps(trace) if steps is None else known_steps(trace, steps)
    lengths = np.array([trace.windows[number].length_ns for number in numbers], np.int64)
    return seconds(float(lengths[middle_steps(lengths)].mean()))


def choose_ranks(a: Mapping[int, float], b: Mapping[int, float]) -> ChosenRanks:
    """From each rank's step in A and in B.

    Jobs of the same ranks: the rank whose step changed most. Else the slowest rank of each side, of those that both
    have if there are any.
    """
    ranks = [_of_rank(rank, a.get(rank), b.get(rank)) for rank in sorted({*a, *b})]
    common = sorted({*a} & {*b})
    if len(common) == len(ranks):
        most = max(common, key=lambda rank: (abs(b[rank] - a[rank]), -rank))
        return ChosenRanks(most, most, ranks, f"of {len(ranks)} ranks the one whose step changed most")
    slowest = [max(common or side, key=lambda rank: (side[rank], -rank)) for side in (a, b)]
    return ChosenRanks(slowest[0], slowest[1], ranks, _say_slowest(len(common)))


def _say_slowest(common: int) -> str:
    if common == 1:
        return "the only rank that both have"
    return f"the slowest of the {common} ranks that both have" if common else "the slowest, as no rank is in both"


def _of_rank(rank: int, a_s: float | None, b_s: float | None) -> RankSteps:
    change_s = None if a_s is None or b_s is None else b_s - a_s
    return RankSteps(rank=rank, a_s=a_s, b_s=b_s, change_s=change_s)
