"""What is said about a job: each rank in short, the telling rank in full, the ranks together, and the critical path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from stepscope.analyze.breakdown import Shares
from stepscope.analyze.critical.path import CriticalPath
from stepscope.analyze.critical.what_if import Limit
from stepscope.analyze.job.engines import run_tasks
from stepscope.analyze.job.tasks import RankAnswer, RankTask, explain_rank
from stepscope.analyze.ranks.ranks_report import ClockChoice, RanksReport, explain_ranks
from stepscope.analyze.step_report import StepReport
from stepscope.errors import UsageError
from stepscope.traces.read import TraceSet

FULL_DETAIL_RANKS = 8
"""Jobs of up to this many ranks get the full report of each; larger ones that of the telling rank alone."""


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the job, as profiled."""

    step: int
    step_s: float
    """Of the slowest rank."""
    slowest_rank: int


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's step in short. Times are profiled ones."""

    rank: int
    source: str
    step: int
    step_s: float
    breakdown_s: Shares
    device_busy_s: float
    kernels: int
    copies: int
    device: str
    hidden_comm_share: float | None
    """Share of communication that ran beside compute; None without communication."""
    repairs: dict[str, int]
    """What was mended while reading the trace."""


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the views show."""

    source: str
    """As the user named it."""
    format: str
    devices: list[str]
    """Names of the devices, where the traces give them."""
    world_size: int | None
    profiled: bool = True
    steps: list[StepTime]
    """Every step that all ranks have."""
    step: int
    """The one explained."""
    chosen: str
    """Why this one."""
    ranks: list[RankSummary]
    telling_rank: int
    """The rank that `detail` is about: the one with the longest step, else the one busy longest."""
    detail: StepReport
    details: list[StepReport]
    """Of every rank, where the job is small; else only of the telling one."""
    across: RanksReport | None
    """None for a single rank without collectives."""
    critical: CriticalPath | None
    """Of the telling rank; None where it could not be found, see notes."""
    limits: list[Limit]
    """How short the telling rank's step could become if one kind of time were free."""
    notes: list[str]


def explain_job(
    traces: TraceSet,
    *,
    step: int | None = None,
    clocks: ClockChoice = "as recorded",
    engine: str | None = None,
    workers: int | None = None,
    on_done: Callable[[int, int], None] = lambda _done, _of: None,
) -> JobReport:
    """Explain one step of all ranks: the one named, else the one of median length.

    Each rank is read and reduced in a process of its own (see `run_tasks` for engines); only small answers come
    together, so that memory does not grow with the size of the traces.
    """
    full = len(traces) <= FULL_DETAIL_RANKS
    chosen = step if step is not None else _median_step(traces)
    tasks = [
        RankTask(path=str(traces.path(rank)), place=traces.place(rank), rank=rank, step=chosen,
                 step_marker=traces.step_marker, cache=traces.cache, in_full=full)
        for rank in traces.ranks
    ]  # fmt: skip
    answers = run_tasks(explain_rank, tasks, engine=engine, workers=workers, on_done=on_done)
    telling = max(answers, key=lambda answer: (answer.summary_step_s, answer.device_busy_s, -answer.rank))
    if telling.report is None or telling.critical is None:
        place = list(traces.ranks).index(telling.rank)
        telling = run_tasks(explain_rank, [msgspec.structs.replace(tasks[place], in_full=True, critical=True)])[0]
    return _join(traces, answers, telling, chosen=chosen, asked=step is not None, clocks=clocks)


def _median_step(traces: TraceSet) -> int | None:
    """Decided by the first rank, so that all ranks explain the same step; None: the trace decides."""
    from stepscope.analyze.trace_view import view

    return view(traces.timeline(traces.ranks[0])).median_step()


def _join(
    traces: TraceSet,
    answers: Sequence[RankAnswer],
    telling: RankAnswer,
    *,
    chosen: int | None,
    asked: bool,
    clocks: ClockChoice,
) -> JobReport:
    report = telling.report
    if report is None:
        raise UsageError("no rank could be explained", where=str(traces.paths[0]))
    digests = [answer.digest for answer in answers]
    has_collectives = any(item.calls for item in digests)
    across = explain_ranks(digests, step=None, clocks=clocks) if has_collectives or len(answers) > 1 else None
    steps = _step_times(answers)
    return JobReport(
        source=str(traces.paths[0] if len(traces) == 1 else traces.paths[0].parent),
        format=telling.format,
        devices=telling.devices,
        world_size=telling.digest.world_size,
        steps=steps,
        step=report.step,
        chosen="named by the user" if asked else f"step {report.step} of {len(steps)}: the one of median length",
        ranks=[_summarise(answer) for answer in answers],
        telling_rank=telling.rank,
        detail=report,
        details=[answer.report for answer in answers if answer.report is not None] or [report],
        across=across,
        critical=telling.critical,
        limits=telling.limits,
        notes=list(dict.fromkeys([*telling.notes, *_missing_ranks(traces, telling)])),
    )


def _summarise(answer: RankAnswer) -> RankSummary:
    return RankSummary(
        rank=answer.rank,
        source=answer.source,
        step=answer.step,
        step_s=answer.summary_step_s,
        breakdown_s=answer.shares,
        device_busy_s=answer.device_busy_s,
        kernels=answer.kernels,
        copies=answer.copies,
        device=answer.device,
        hidden_comm_share=answer.hidden_comm_share,
        repairs=answer.repairs,
    )


def _step_times(answers: Sequence[RankAnswer]) -> list[StepTime]:
    """Steps that every rank has, each with its slowest rank."""
    by_rank = [{step.number: (step.end_ns - step.start_ns) / 1e9 for step in a.digest.steps} for a in answers]
    common = set.intersection(*(set(times) for times in by_rank)) if by_rank else set()
    steps = []
    for number in sorted(common):
        length_s, place = max((times[number], -place) for place, times in enumerate(by_rank))
        steps.append(StepTime(step=number, step_s=length_s, slowest_rank=answers[-place].rank))
    return steps


def _missing_ranks(traces: TraceSet, telling: RankAnswer) -> list[str]:
    world = telling.digest.world_size
    if world is None or world <= len(traces):
        return []
    return [f"{len(traces)} of the job's {world} ranks are here: waiting for the others cannot be told from transfer"]


def describe_sources(paths: Sequence[Path]) -> str:
    """A few file names, or how many there are."""
    if len(paths) <= 3:
        return ", ".join(path.name for path in paths)
    return f"{paths[0].name} … {paths[-1].name} ({len(paths)} files)"
