"""What `stepscope runs resume` may do: a run folder is data, and only a command line makes it work.

The plan in the folder is never believed. The command that it shows is planned again by the same parser that planned it
first, without measuring; the run goes on if both plans are the same. Which function measures is looked up by the verb.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from pathlib import Path

import click

from stepscope.core.errors import StepscopeError, UsageError
from stepscope.records import OperatorRequest
from stepscope.records.kinds import UserModelSpec
from stepscope.run.plan import Job, find_differences
from stepscope.store import StoredRun
from stepscope.store.folder import require_plain_folder

INNER_LAUNCHERS = ("inline", "self")
"""Those that need nobody else to start the ranks."""

_rehearsal: ContextVar[bool] = ContextVar("rehearsal", default=False)


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


def plan_again(run: StoredRun, *, trust: bool) -> Job:
    """The job of the run's own command. Raises UsageError with the reason where the run must not go on."""
    require_plain_folder(run.folder)
    command = run.plan.command
    shown = shlex.join(command)
    if run.plan.launcher not in INNER_LAUNCHERS:
        ranks = f"{run.plan.launcher} started its {run.plan.world_size} ranks"
        raise _refuse(run, ranks, f"start them the same way: … {shown} --resume {run.id}")
    try:
        job = rehearse(command)
    except (StepscopeError, click.ClickException) as error:
        message = error.message if isinstance(error, StepscopeError) else error.format_message()
        raise _refuse(run, f"its command cannot be planned here ({message})", f"the command was: {shown}") from error
    if job is None:
        raise _refuse(run, "its command measures nothing", f"the command was: {shown}")
    _require_same_files(run, job)
    differences = find_differences(run, job)
    if differences:
        raise _refuse(
            run,
            f"its plan is not what its command asks for: {', '.join(differences)} differ",
            f"start anew, in the folder where it was started: {shown}",
        )
    effects = find_effects(job)
    if effects and not trust:
        raise _refuse(
            run,
            f"its command {' and '.join(effects)}",
            f"if that is what you want: stepscope runs resume {shlex.quote(str(run.folder))} --trust",
        )
    return job


def rehearse(command: Sequence[str]) -> Job | None:
    """What a `bench` command would measure; None for one that measures nothing. Nothing is written or shown."""
    from stepscope.cli.main import app

    if list(command[:2]) != ["stepscope", "bench"]:
        raise UsageError("it was not made by `stepscope bench`")
    with rehearsing(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            app.main(args=list(command[1:]), prog_name="stepscope", standalone_mode=False)
        except RehearsedError as planned:
            return planned.job
    return None


def _require_same_files(run: StoredRun, job: Job) -> None:
    """Said apart from other differences, as files of users change often."""
    from stepscope.bench.workloads.user import require_unchanged

    for stored, asked in zip(run.plan.cases, job.cases, strict=False):
        wanted, kept = asked.spec, stored.spec
        if isinstance(wanted, UserModelSpec) and isinstance(kept, UserModelSpec) and wanted.file == kept.file:
            require_unchanged(Path(wanted.file), kept.sha256)


def find_table(job: Job) -> Path | None:
    """The kernel table that is written when all is measured."""
    name = job.request.table if isinstance(job.request, OperatorRequest) else None
    return Path(name) if name else None


def find_effects(job: Job) -> list[str]:
    """What measuring would do to this user outside the run folder; a table that is new harms nobody."""
    files = dict.fromkeys(case.spec.file for case in job.cases if isinstance(case.spec, UserModelSpec))
    table = find_table(job)
    replaced = [f"replaces the file {table}"] if table is not None and table.exists() else []
    return [*(f"runs the file {path}" for path in files), *replaced]


def _refuse(run: StoredRun, reason: str, hint: str) -> UsageError:
    return UsageError(f"run {run.id} is not continued: {reason}", hint=hint, where=str(run.folder))
