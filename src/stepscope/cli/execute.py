"""From a request to a finished run: new or resumed, and what is shown of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from stepscope.cli.options import NEWEST
from stepscope.cli.output import emit, narrate
from stepscope.core.errors import ExitCode, RankDiedError, UsageError
from stepscope.records import Case, System
from stepscope.store import (
    MeasuredCase,
    StoredRun,
    create_run,
    find_ceilings,
    find_run,
    list_runs,
)
from stepscope.store.folder import require_plain_folder

NOT_MEASURING = frozenset({"table", "per_rank", "tag", "worker", "cluster"})
"""Of a request: what may differ when a run is continued, as it does not decide what is measured."""
WORKERS = {
    "comms": "stepscope.bench.comms.worker:run",
    "bisect": "stepscope.cli.pairs:run_bisection",
    "workload": "stepscope.bench.workloads.ranks:run",
}
"""What each rank calls. Never read from a run: a run folder is data."""
_rehearsal: ContextVar[bool] = ContextVar("rehearsal", default=False)


class Job(NamedTuple):
    """What a bench command asks for."""

    verb: str
    name: str
    """Part of the run's id, for people."""
    cases: list[Case]
    request: dict[str, Any]
    launcher: str = "inline"
    world_size: int = 1


class RehearsedError(Exception):
    """A command got as far as it may while it is only planned: to its job."""

    def __init__(self, job: Job | None) -> None:
        super().__init__("planned")
        self.job = job


@contextmanager
def rehearsing() -> Iterator[None]:
    """Commands inside are planned and no more: `open_job` raises RehearsedError."""
    token = _rehearsal.set(True)
    try:
        yield
    finally:
        _rehearsal.reset(token)


def is_rehearsal() -> bool:
    return _rehearsal.get()


def find_worker(verb: str, request: Mapping[str, Any]) -> str:
    return WORKERS["bisect" if "bisect" in request else verb]


def command_line() -> list[str]:
    """As typed, for the plan."""
    context = click.get_current_context(silent=True)
    typed = context.find_root().obj if context is not None else None
    return ["stepscope", *(typed if typed is not None else sys.argv[1:])]


def open_job(job: Job | None, *, store: Path, resume: str | None, verb: str) -> StoredRun:
    """The run to measure into: a new one, or the interrupted one that `--resume` means."""
    if is_rehearsal():
        raise RehearsedError(job)
    if resume is not None and resume != NEWEST:
        stored = find_run(store, resume)
        require_plain_folder(stored.folder)
        if stored.plan.verb != verb:
            raise UsageError(
                f"run {stored.id} was made by `bench {stored.plan.verb}`, not `bench {verb}`",
                hint=f"stepscope runs resume {stored.id}",
                where="--resume",
            )
        if job is not None and not _is_same(stored, job):
            raise UsageError(
                f"run {stored.id} was asked for other cases or settings",
                hint=f"stepscope runs resume {stored.id} continues it as it was asked",
                where="--resume",
            )
        if job is None:
            from stepscope.cli.resume import plan_again

            plan_again(stored, trust=False)
        return stored
    if job is None:
        raise UsageError("nothing to measure was named", hint=f"stepscope bench {verb} --help")
    if resume == NEWEST:
        found = [run for run in list_runs(store)[0] if run.status == "interrupted" and _is_same(run, job)]
        if found:
            narrate(f"continuing {found[-1].id}")
            require_plain_folder(found[-1].folder)
            return found[-1]
        narrate("no interrupted run with these cases: starting a new one")
    _find_baseline(store, job.request)  # a wrong name is said before anything is measured
    if job.launcher == "inline" and job.verb != "comms":
        require_one_process(job.verb)
    folder = create_run(
        store,
        verb=job.verb,
        name=job.name,
        command=command_line(),
        request=job.request,
        cases=job.cases,
        launcher=job.launcher,
        world_size=job.world_size,
    )
    return StoredRun(folder)


def _is_same(stored: StoredRun, job: Job) -> bool:
    """Whoever starts the ranks: the same number of them."""
    return set(find_differences(stored, job)) <= {"launcher"}


def find_differences(run: StoredRun, job: Job) -> list[str]:
    """What of the stored plan a command does not ask for; a plan says more about a case than its key does."""
    plan = run.plan
    asked = msgspec.json.decode(msgspec.json.encode(job.request))
    names = (asked.keys() | plan.request.keys()) - NOT_MEASURING
    pairs = {
        "verb": (plan.verb, job.verb),
        "launcher": (plan.launcher, job.launcher),
        "ranks": (plan.world_size, job.world_size),
        "cases": (_measured_parts(plan.cases), _measured_parts(job.cases)),
        **{name: (plan.request.get(name), asked.get(name)) for name in sorted(names)},
    }
    return [name for name, (stored, wanted) in pairs.items() if stored != wanted]


def _measured_parts(cases: Sequence[Case]) -> list[tuple[Any, ...]]:
    return [
        (case.benchmark.id, case.benchmark.version, case.parameters, case.batch_size, case.world_size) for case in cases
    ]


class Addition(NamedTuple):
    """What a verb shows beside the cases of its run."""

    data: dict[str, Any]
    text: str


def add_nothing(run: StoredRun) -> Addition:
    return Addition({}, "")


def run_stored(stored: StoredRun, *, as_json: bool, finish: Callable[[StoredRun], Addition] = add_nothing) -> int:
    """Measure what the run's plan still lacks, in the way its verb needs; `finish` with it, and show it."""
    measured = measure_stored(stored)
    return show_run(measured.folder, as_json=as_json, addition=finish(measured))


def measure_stored(stored: StoredRun) -> StoredRun:
    processes = int(stored.plan.request.get("processes", 1))
    if processes > 1:
        from stepscope.launch import measure_in_processes

        measure_in_processes(
            stored,
            processes,
            count_wanted=lambda cases, system: _count_wanted(stored, cases, system),
            on_done=lambda done, total: narrate(f"[{done}/{total}] processes"),
        )
    elif stored.plan.launcher != "inline":
        measure_ranks(stored)
    elif stored.plan.verb == "comms":
        measure_alone(stored)
    else:
        measure_inline(stored)
    return StoredRun(stored.folder)


def _find_baseline(store: Path, request: Mapping[str, Any]) -> StoredRun | None:
    """The run that `--until-decided` names."""
    until = request.get("until_decided")
    return find_run(store, str(until["baseline"])) if until else None


def _count_wanted(stored: StoredRun, cases: list[MeasuredCase], system: System | None) -> int:
    """How many processes `--until-decided` wants altogether, by what those so far have shown of the noise."""
    baseline = _find_baseline(stored.folder.parent, stored.plan.request)
    if baseline is None:
        return 0
    from stepscope.compare.planning import plan_candidate

    until = stored.plan.request["until_decided"]
    same_system = system is not None and baseline.system is not None and system.place == baseline.system.place
    planned = plan_candidate(baseline.cases(), cases, resolution=float(until["resolution"]), same_system=same_system)
    for label, count in planned.items():
        if count is None:
            narrate(f"{label}: no number of processes decides; {baseline.id} itself needs more (--processes)")
    return min(max((count for count in planned.values() if count), default=0), int(until["max_processes"]))


def measure_inline(stored: StoredRun) -> None:
    """Measure in this process; an interrupted run goes on where it stopped."""
    from stepscope.bench.ops.worker import run_ops
    from stepscope.bench.workloads.worker import run_workloads
    from stepscope.measure import open_progress

    require_one_process(stored.plan.verb)
    worker = {"ops": run_ops, "workload": run_workloads, "suite": run_workloads}[stored.plan.verb]
    worker(stored.folder, request=stored.plan.request, progress=open_progress())


def require_one_process(verb: str) -> None:
    """Asked before a run is made: each rank of a launcher would leave an empty one behind."""
    from stepscope.launch import detect_rank_context

    context = detect_rank_context()
    if context.world_size > 1:
        raise UsageError(
            f"`bench {verb}` measures in one process; {context.launcher} started {context.world_size}",
            hint="start it without the launcher",
        )


def measure_ranks(stored: StoredRun) -> None:
    """Start the ranks here and follow what rank 0 writes."""
    from stepscope.launch import launch_local
    from stepscope.measure import open_progress
    from stepscope.store import JournalTail

    plan = stored.plan
    tail = JournalTail(stored)
    done, total = len(stored.results), len(plan.cases)
    with open_progress() as progress:

        def show_finished() -> None:
            nonlocal done
            for case in tail.read_new():
                done += 1
                progress.case_started(case.result.case, done, total)
                progress.case_done(case.result, case.samples)

        try:
            launch_local(
                folder=stored.folder,
                target=find_worker(plan.verb, plan.request),
                ranks=plan.world_size,
                hang_limit_s=float(plan.request["hang_timeout_s"]),
                on_poll=show_finished,
            )
        except RankDiedError:
            if plan.verb == "workload":
                from stepscope.bench.workloads.ranks import give_up_case

                give_up_case(stored.folder)
            raise


def measure_alone(stored: StoredRun) -> None:
    """A world of one process, which plays the others (the fake backend)."""
    from stepscope.bench.comms.worker import run
    from stepscope.launch import rank_session

    request = stored.plan.request
    limit_s = float(request["hang_timeout_s"])
    with rank_session(stored.folder, request=request, hang_limit_s=limit_s) as session:
        run(session)


def show_run(folder: Path, *, as_json: bool, addition: Addition | None = None) -> int:
    """Print the results; the exit code is 1 when a case failed, 0 with skips alone."""
    stored = StoredRun(folder)
    cases = stored.cases()
    more = addition or add_nothing(stored)
    text = "" if as_json else "\n".join(filter(None, [_format_run(stored), more.text]))
    emit({"run": str(folder), "id": stored.id, **cases_to_dict(cases, folder), **more.data}, text, as_json=as_json)
    _warn_of_nothing(cases)
    failed = any(case.result.status == "failed" for case in cases)
    return ExitCode.FAILED if failed else ExitCode.DONE


def _warn_of_nothing(cases: Sequence[MeasuredCase]) -> None:
    """The exit code of skips is 0: whoever looks at nothing else must still be told."""
    if cases and all(case.result.status == "skipped" for case in cases):
        failure = cases[0].result.failure
        reason = f" The first: {failure.message}." if failure else ""
        narrate(f"warning: nothing was measured: all {len(cases)} cases were skipped.{reason}")


def _format_run(stored: StoredRun) -> str:
    from stepscope.bench.comms import operations
    from stepscope.cli.report import collective_table_of, render, report_of

    # What users of nccl-tests look for, where that table has room for all there is to say.
    plain = stored.plan.verb == "comms" and all(case.benchmark.model in operations() for case in stored.plan.cases)
    text = collective_table_of([stored]) if plain and stored.results else render(report_of([stored]), "text")
    return f"{text.rstrip()}\nrun: {stored.folder}"


def cases_to_dict(cases: Sequence[MeasuredCase], folder: Path) -> dict[str, Any]:
    """The cases of one run as programs see them, with the ceilings measured in it."""
    from stepscope.metrics import flatten_case, with_peaks

    listed = [{**flatten_case(one), "run": str(folder)} for one in with_peaks(cases)]
    return {"cases": listed, "ceilings": {device: one._asdict() for device, one in find_ceilings(cases).items()}}
