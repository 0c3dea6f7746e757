"""What is to be measured, before anything is; and the run it is measured into, new or continued."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stepscope.core.errors import UsageError
from stepscope.records import Case, Request
from stepscope.store import StoredRun, create_run, find_run, list_runs
from stepscope.store.folder import require_plain_folder

NEWEST = ""
"""Instead of a run's name: the newest interrupted run that was asked for the same."""
NOT_MEASURING = frozenset({"table", "per_rank", "tag", "cluster"})
"""Options of a request that may differ when a run is continued: they do not decide what is measured."""


class Job(NamedTuple):
    """What one run measures, and how."""

    verb: str
    """Which producer measures it: ops, comms, workload or suite."""
    name: str
    """Part of the run's id, for people."""
    cases: list[Case]
    request: Request
    """How the cases are measured; its type is the producer's."""
    launcher: str = "inline"
    """`inline` in this process, `self` on ranks that are started here, else who started the ranks."""
    world_size: int = 1


def create(job: Job, store: Path, command: Sequence[str]) -> StoredRun:
    """A new run with the job as its plan. `command`: what a person would type to get it."""
    if job.launcher == "inline":
        from stepscope.run.execute import require_one_process

        require_one_process(job.verb)
    return StoredRun(create_run(store, **job._asdict(), command=command, hold=True))


def find_interrupted(job: Job, store: Path) -> StoredRun | None:
    """The newest interrupted run that was asked for the same."""
    found = [run for run in list_runs(store)[0] if run.status == "interrupted" and is_same(run, job)]
    if not found:
        return None
    require_plain_folder(found[-1].folder)
    return found[-1]


def find_resumed(name: str, store: Path, *, verb: str, job: Job | None) -> StoredRun:
    """The run of that name, if it may go on as this job."""
    stored = find_run(store, name)
    require_plain_folder(stored.folder)
    if stored.plan.verb != verb:
        raise UsageError(
            f"run {stored.id} was made by `bench {stored.plan.verb}`, not `bench {verb}`",
            hint=f"stepscope runs resume {stored.id}",
            where="--resume",
        )
    if job is not None and not is_same(stored, job):
        raise UsageError(
            f"run {stored.id} was asked for other cases or settings",
            hint=f"stepscope runs resume {stored.id} continues it as it was asked",
            where="--resume",
        )
    return stored


def is_same(stored: StoredRun, job: Job) -> bool:
    """Whoever starts the ranks: the same number of them."""
    return set(find_differences(stored, job)) <= {"launcher"}


def find_differences(run: StoredRun, job: Job) -> list[str]:
    """What of the stored plan a command does not ask for; a plan says more about a case than its key does."""
    plan = run.plan
    kept, asked = msgspec.to_builtins(plan.request), msgspec.to_builtins(job.request)
    names = (asked.keys() | kept.keys()) - NOT_MEASURING
    pairs = {
        "verb": (plan.verb, job.verb),
        "launcher": (plan.launcher, job.launcher),
        "ranks": (plan.world_size, job.world_size),
        "cases": (_measured_parts(plan.cases), _measured_parts(job.cases)),
        **{name: (kept.get(name), asked.get(name)) for name in sorted(names)},
    }
    return [name for name, (stored, wanted) in pairs.items() if stored != wanted]


def _measured_parts(cases: Sequence[Case]) -> list[tuple[Any, ...]]:
    return [
        (case.benchmark.id, case.benchmark.version, case.parameters, case.batch_size, case.world_size) for case in cases
    ]


def create_sides(jobs: Sequence[Job], store: Path, command: Sequence[str]) -> list[StoredRun]:
    """One run per side of an A/B comparison, on disk before anything is measured; the second names the first."""
    runs: list[StoredRun] = []
    for letter, job in zip("AB", jobs, strict=True):
        request = msgspec.structs.replace(job.request, partner=runs[0].id if runs else None)
        runs.append(create(job._replace(name=f"ab-{letter}", request=request), store, command))
    return runs


def find_interrupted_sides(jobs: Sequence[Job], store: Path, name: str | None) -> list[StoredRun] | None:
    """The newest two interrupted runs that were asked for the same; `name`: only the comparison with that run."""
    runs = {run.id: run for run in list_runs(store)[0]}
    pairs = [
        [runs[partner], run]
        for run in runs.values()
        if run.run is None and (partner := run.plan.request.partner) in runs
    ]
    wanted = find_run(store, name).id if name is not None else None
    for pair in reversed(pairs):
        differ = [find_differences(run, job) for run, job in zip(pair, jobs, strict=True)]
        same = not any(set(one) - {"partner", "processes"} for one in differ)
        if same and wanted in {None, pair[0].id, pair[1].id}:
            for run in pair:
                require_plain_folder(run.folder)
            return pair
    if wanted is not None:
        raise UsageError(
            f"run {wanted} is not an interrupted side of this comparison",
            hint="give the same two sides as before, or leave --resume out",
            where="--resume",
        )
    return None
