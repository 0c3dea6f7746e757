"""The report of a job: each rank in short, the representative rank in full, all ranks together, the critical path."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from stepscope.analyze.analyses import compute_more
from stepscope.analyze.critical.model import build_graph, graph_of_job
from stepscope.analyze.critical.path import CriticalPath, describe_path
from stepscope.analyze.critical.what_if import Limit, find_limits
from stepscope.analyze.job.tasks import RankAnswer, RankSummary, RankTask, explain_rank, run_tasks
from stepscope.analyze.ranks.clocks import MatchedRanks, match_ranks
from stepscope.analyze.ranks.digest import (
    PAIRED_BY_ORDER,
    common_numbers,
    list_numbers,
    pair_numbers,
    pair_steps,
    step_times_ns,
)
from stepscope.analyze.ranks.ranks_report import ClockChoice, RanksReport, explain_ranks
from stepscope.analyze.step.report import CHOSEN, StepReport, explain_step
from stepscope.analyze.step.view import view
from stepscope.core.errors import StepscopeError, UsageError
from stepscope.formats.source import describe_damage
from stepscope.formats.timeline import Timeline
from stepscope.traces.read import TraceSet


class JobStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the job, as profiled."""

    step: int
    step_s: float
    """Step time of the slowest rank, without the time in which the device still worked on the step before."""
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


def list_steps(answers: Sequence[RankAnswer]) -> list[JobStep]:
    """Steps that every rank has, each with its slowest rank."""
    digests, _ = pair_steps([answer.digest for answer in answers])
    by_rank = [{number: length / 1e9 for number, length in step_times_ns(item).items()} for item in digests]
    steps = []
    for number in sorted(common_numbers([list(times) for times in by_rank])):
        length_s, place = max((times[number], -place) for place, times in enumerate(by_rank))
        steps.append(JobStep(step=number, step_s=length_s, slowest_rank=answers[-place].rank))
    return steps


FULL_DETAIL_RANKS = 8
"""Jobs of up to this many ranks get the full report of each and a critical path through all; larger ones those of the
representative rank alone."""
JOB_PATH_BYTES = 256 << 20
"""Traces of together more than this get no path through all ranks: it needs all of them in memory at once."""
TELLING_DIFFERENCE = 0.01
"""Steps that differ by less are equally long."""


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the views show."""

    source: str
    """As the user named it."""
    damage: str | None = None
    """What of the traces could not be read, rank by rank; None where all was."""
    format: str
    devices: list[str]
    """Names of the devices, where the traces give them."""
    world_size: int | None
    profiled: bool = True
    steps: list[JobStep]
    """Every step that all ranks have."""
    step: int
    """The one explained."""
    chosen: str
    """Why this one."""
    ranks: list[RankSummary]
    telling_rank: int
    """The rank that `detail` is about: the one with the longest step; of equally long ones the one that computes and
    copies longest."""
    detail: StepReport
    details: list[StepReport]
    """Details of every rank where the job is small; else only of the representative one."""
    across: RanksReport | None
    """None for a single rank without collectives."""
    critical: CriticalPath | None
    """Through all ranks of a small job (`critical.ranks` names them), else of the representative rank alone; None where
    it could not be found, see notes."""
    own_critical: CriticalPath | None = None
    """The path of the representative rank alone, where `critical` runs through several."""
    limits: list[Limit]
    """How short the representative rank's step could become if one kind of time were free."""
    unprofiled_step_s: float | None = None
    """A step of the representative rank without the profiler, where the recording timed some; never from the trace."""
    notes: list[str]
    more: dict[str, Any] = {}
    """Results of analyses that compute something of their own for the representative rank, by name, see `ANALYSES`."""


class Timelines:
    """The timelines of a job: each is read once where all fit into memory together, else the latest one is kept."""

    def __init__(self, traces: TraceSet) -> None:
        self.traces = traces
        size = sum(os.path.getsize(path) for path in set(traces.paths))
        self.fit_together = len(traces) <= FULL_DETAIL_RANKS and size <= JOB_PATH_BYTES
        self._kept: dict[int, Timeline] = {}

    def __call__(self, rank: int) -> Timeline:
        if rank not in self._kept:
            if not self.fit_together:
                self._kept.clear()
            self._kept[rank] = self.traces.timeline(rank)
        return self._kept[rank]


def explain_job(
    traces: TraceSet,
    *,
    step: int | None = None,
    clocks: ClockChoice = "auto",
    engine: str | None = None,
    workers: int | None = None,
    on_done: Callable[[int, int], None] = lambda _done, _of: None,
    timelines: Timelines | None = None,
) -> JobReport:
    """Explain one step of all ranks: the one named, else the median step of those that all have.

    Ranks of large jobs are read and reduced in processes of their own (see `run_tasks` for engines); only small answers
    come together, so that memory does not grow with the size of the traces. `timelines` keeps what this process reads.
    """
    timelines = timelines or Timelines(traces)
    # The median step of the first rank is a good guess of what all ranks have; None: each trace decides.
    first_try = step if step is not None else view(timelines(traces.ranks[0])).median_step()
    tasks = [
        RankTask(path=str(traces.path(rank)), place=traces.place(rank), rank=rank, step=first_try, or_another=True,
                 step_marker=traces.step_marker, cache=traces.cache, in_full=len(traces) <= FULL_DETAIL_RANKS)
        for rank in traces.ranks
    ]  # fmt: skip

    def explain_here(task: RankTask) -> RankAnswer:
        return explain_rank(task, timelines(task.rank))

    # The first timeline is here already.
    answers = [explain_here(tasks[0])]
    on_done(1, len(tasks))
    answers += run_tasks(
        explain_rank, tasks[1:], here=explain_here, engine=engine, workers=workers,
        on_done=lambda done, _of: on_done(done + 1, len(tasks)),
    )  # fmt: skip
    chosen = choose_steps(answers, step)
    again = [place for place, own in enumerate(chosen.own) if own is not None and answers[place].step != own]
    retry = [msgspec.structs.replace(tasks[place], step=chosen.own[place]) for place in again]
    found = run_tasks(explain_rank, retry, here=explain_here, engine=engine, workers=workers)
    for place, answer in zip(again, found, strict=True):
        answers[place] = answer
    return _join(timelines, answers, chosen=chosen, asked=step is not None, clocks=clocks)


def _choose_telling(answers: Sequence[RankAnswer]) -> RankAnswer:
    """Ranks leave their last collective together, so steps are often equally long: who works longest tells most."""
    longest = max(answer.step_s for answer in answers)
    unit = 2e-9 * max(answer.digest.resolution_ns for answer in answers)
    least = longest - max(TELLING_DIFFERENCE * longest, unit)
    slow = [answer for answer in answers if answer.step_s >= least]
    return max(
        slow,
        key=lambda answer: (answer.breakdown_s.compute + answer.breakdown_s.exposed_copy, answer.step_s, -answer.rank),
    )


def _join(
    timelines: Timelines, answers: Sequence[RankAnswer], *, chosen: ChosenSteps, asked: bool, clocks: ClockChoice
) -> JobReport:
    traces, telling = timelines.traces, _choose_telling(answers)
    timeline = timelines(telling.rank)
    own_step = telling.step if timeline.steps else None
    report = telling.report or explain_step(timeline, own_step)
    critical, limits, failed = _path_of_rank(timeline, own_step)
    digests = [answer.digest for answer in answers]
    has_collectives = any(item.calls for item in digests)
    only = chosen.number if asked else None
    matched = match_ranks(digests) if has_collectives or len(answers) > 1 else None
    across = None if matched is None else explain_ranks(matched, step=only, clocks=clocks, map_step=chosen.number)
    steps = list_steps(answers)
    number = report.step if chosen.number is None else chosen.number
    through_all: CriticalPath | None = None
    path_notes: list[str] = []
    if critical is not None and matched is not None and across is not None:
        through_all, path_notes = _path_of_job(timelines, chosen, telling.rank, matched, across.clocks)
    world, notes = telling.digest.world_size, [*chosen.notes, *report.notes, *failed]
    if world is not None and world > len(traces):
        notes.append(
            f"{len(traces)} of the job's {world} ranks are here: waiting for the others cannot be told from transfer"
        )
    repairs = [(answer.rank, describe_damage(answer.repairs)) for answer in answers]
    damaged = [f"rank {rank}: {text}" if len(answers) > 1 else text for rank, text in repairs if text is not None]
    return JobReport(
        source=str(traces.paths[0] if len(traces) == 1 else traces.paths[0].parent),
        damage="Incomplete trace: " + "; ".join(damaged) if damaged else None,
        format=telling.format,
        devices=telling.devices,
        world_size=world,
        steps=steps,
        step=number,
        chosen="named by the user" if asked else CHOSEN.format(step=number, count=len(steps)),
        ranks=[msgspec.convert(answer, RankSummary, from_attributes=True) for answer in answers],
        telling_rank=telling.rank,
        detail=report,
        details=[answer.report for answer in answers if answer.report is not None] or [report],
        across=across,
        critical=through_all or critical,
        own_critical=critical if through_all else None,
        limits=limits,
        more=compute_more(timeline, None if timeline.step_marker == "none" else own_step),
        unprofiled_step_s=_unprofiled_s(traces, telling.rank),
        notes=list(dict.fromkeys([*notes, *path_notes])),
    )


def _unprofiled_s(traces: TraceSet, rank: int) -> float | None:
    if traces.recording is None:
        return None
    from stepscope.traces.recording.evidence import read_recording

    found = [one for one in read_recording(traces.recording).ranks if one.rank == rank]
    return found[0].unprofiled_s() if found else None


def _path_of_rank(timeline: Timeline, step: int | None) -> tuple[CriticalPath | None, list[Limit], list[str]]:
    try:
        graph = build_graph(timeline, step)
        return describe_path(graph), find_limits(graph), []
    except StepscopeError as error:
        return None, [], [f"no critical path: {error.message}"]


def _path_of_job(
    timelines: Timelines, chosen: ChosenSteps, telling: int, matched: MatchedRanks, clocks: str
) -> tuple[CriticalPath | None, list[str]]:
    """The critical path through all ranks, where the job is small enough; else a note that it is of one rank alone."""
    ranks = timelines.traces.ranks
    if len(ranks) == 1:
        return None, []
    alone = f"the critical path is of rank {telling} alone"
    if len(ranks) > FULL_DETAIL_RANKS:
        return None, [f"{alone}: the job has more than {FULL_DETAIL_RANKS} ranks"]
    if not timelines.fit_together:
        return None, [f"{alone}: the traces are too large to be held together"]
    try:
        traces = [timelines(rank) for rank in ranks]
        graph = graph_of_job(traces, chosen.number, align_clocks=clocks != "as recorded", matched=matched)
        return describe_path(graph), []
    except StepscopeError as error:
        return None, [f"{alone}: {error.message}"]
