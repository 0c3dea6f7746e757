"""Which step of a job is explained: the same one on every rank, whatever number each of them gives to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from stepscope.analyze.job.tasks import RankAnswer
from stepscope.analyze.ranks.digest import (
    PAIRED_BY_ORDER,
    common_numbers,
    list_numbers,
    pair_numbers,
    pair_steps,
    step_times_ns,
)
from stepscope.core.errors import UsageError


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the job, as profiled."""

    step: int
    step_s: float
    """Of the slowest rank, without the time in which the device still worked on the step before."""
    slowest_rank: int


class ChosenSteps(NamedTuple):
    own: list[int | None]
    """The number that each rank gives to the step."""
    number: int | None
    """As the first rank counts."""
    notes: list[str]


def choose_steps(answers: Sequence[RankAnswer], asked: int | None) -> ChosenSteps:
    """The same step on every rank; `answers` explain it already where nothing stands in the way."""
    numbers = [[entry.number for entry in answer.digest.steps] for answer in answers]
    everyone = sorted({number for own in numbers for number in own})
    if asked is not None and asked not in everyone:
        raise UsageError(
            f"there is no step {asked} in the trace{'s' if len(answers) > 1 else ''}",
            hint=f"steps: {list_numbers(everyone)}",
        )
    if pair_numbers(numbers) is not None:
        own = _by_order(answers, numbers, asked)
        return ChosenSteps(list(own), own[0], [PAIRED_BY_ORDER])
    common = common_numbers(numbers)
    if asked is not None and asked not in common:
        lacking = next(answer.rank for answer, own in zip(answers, numbers, strict=True) if asked not in own)
        raise UsageError(f"rank {lacking} has no step {asked}", hint=f"steps of all ranks: {list_numbers(common)}")
    wanted = asked if asked is not None else answers[0].step
    if common and wanted not in common:
        wanted = _median_of(answers[0], common)
    own_numbers: list[int | None] = [wanted if wanted in own else None for own in numbers]
    return ChosenSteps(own_numbers, wanted, [])


def _by_order(answers: Sequence[RankAnswer], listed: Sequence[list[int]], asked: int | None) -> list[int]:
    """A step that all have, by its place in their order. A number asked for is that of the first rank that has it."""
    shared = min(map(len, listed))
    if asked is None:
        place = listed[0].index(_median_of(answers[0], listed[0][:shared]))
    else:
        place = next(mine.index(asked) for mine in listed if asked in mine)
    if place >= shared:
        lacking = next(answer.rank for answer, mine in zip(answers, listed, strict=True) if place >= len(mine))
        raise UsageError(
            f"rank {lacking} has only {shared} steps, and step {asked} is number {place + 1} of its rank",
            hint=f"steps to choose from: {list_numbers(listed[0][:shared])}",
        )
    return [mine[place] for mine in listed]


def _median_of(answer: RankAnswer, numbers: Sequence[int]) -> int:
    """The step nearest to the median step time (the shorter of two middle ones).

    First and last do not count where there are more, nor do empty ones.
    """
    empty = {entry.number for entry in answer.digest.steps if entry.is_empty}
    judged = list(numbers[1:-1] if len(numbers) > 4 else numbers)
    judged = [number for number in judged if number not in empty] or judged
    lengths = step_times_ns(answer.digest)
    return sorted(judged, key=lambda number: lengths[number])[(len(judged) - 1) // 2]


def list_steps(answers: Sequence[RankAnswer]) -> list[StepTime]:
    """Steps that every rank has, each with its slowest rank."""
    digests, _ = pair_steps([answer.digest for answer in answers])
    by_rank = [{number: length / 1e9 for number, length in step_times_ns(item).items()} for item in digests]
    steps = []
    for number in sorted(common_numbers([list(times) for times in by_rank])):
        length_s, place = max((times[number], -place) for place, times in enumerate(by_rank))
        steps.append(StepTime(step=number, step_s=length_s, slowest_rank=answers[-place].rank))
    return steps
