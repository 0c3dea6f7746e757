"""From a plan to a finished run, in the way the plan says: in this process, on ranks, or in fresh processes."""

from __future__ import annotations

from collections.abc import Callable

from stepscope.core.errors import RankDiedError, UsageError
from stepscope.launch import detect_rank_context, launch_local
from stepscope.launch.worker import RankSession, Session
from stepscope.measure.progress import SilentProgress
from stepscope.records import System
from stepscope.run.processes import RunSide, measure_in_processes
from stepscope.run.producer import find_producer
from stepscope.run.rank import AnyProgress, give_up_case, run_rank
from stepscope.store import JournalTail, MeasuredCase, StoredRun
from stepscope.store.folder import hold_run, release_run

RANK_FUNCTION = "stepscope.run.execute:run_started_rank"
"""What each rank that is started here calls."""


def execute(
    stored: StoredRun,
    *,
    progress: AnyProgress | None = None,
    count_wanted: Callable[[list[MeasuredCase], System | None], int] = lambda cases, system: 0,
) -> StoredRun:
    """Measure what the plan still lacks; an interrupted run goes on where it stopped.

    `count_wanted` may ask for more fresh processes than the plan has, from what they measured so far.
    """
    hold_run(stored.folder)
    try:
        shown = progress or SilentProgress()
        plan = stored.plan
        if plan.request.processes > 1:
            measure_in_processes([RunSide(stored)], plan.request.processes, progress=shown, count_wanted=count_wanted)
        elif plan.launcher == "inline":
            require_one_process(plan.verb)
            session = Session(verb=plan.verb, request=plan.request, world_size=plan.world_size, folder=stored.folder)
            run_rank(session, progress=shown)
        else:
            execute_on_ranks(stored, shown)
    finally:
        release_run(stored.folder)
    return StoredRun(stored.folder)


def require_one_process(verb: str) -> None:
    """Asked before a run is made: each rank of a launcher would leave an empty one behind."""
    context = detect_rank_context()
    if context.world_size > 1:
        raise UsageError(
            f"`bench {verb}` measures in one process; {context.launcher} started {context.world_size}",
            hint="start it without the launcher",
        )


def execute_on_ranks(stored: StoredRun, progress: AnyProgress) -> None:
    """Start the ranks here and follow what rank 0 writes."""
    plan = stored.plan
    tail = JournalTail(stored)
    done, total = len(stored.results), len(plan.cases)
    with progress:

        def show_finished() -> None:
            nonlocal done
            for case in tail.read_new():
                done += 1
                progress.case_started(case.result.case, done, total)
                progress.case_done(case.result, case.samples)

        try:
            launch_local(
                folder=stored.folder,
                target=RANK_FUNCTION,
                ranks=plan.world_size,
                hang_limit_s=plan.request.hang_timeout_s,
                on_poll=show_finished,
            )
        except RankDiedError:
            give_up_case(stored.folder)
            raise


def load_before_fork(verb: str) -> None:
    """See `stepscope.launch.server`."""
    find_producer(verb)


def load_before_watched(verb: str, *, uses_torch: bool) -> None:
    """Import what a rank needs before others watch it: that takes seconds, in which it sends no heartbeat."""
    find_producer(verb)
    if uses_torch:
        import torch.distributed  # noqa: F401


def run_started_rank(session: RankSession) -> None:
    run_rank(session)
