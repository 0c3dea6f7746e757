"""From a request to a finished run: new or resumed, and what is shown of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from stepscope.cli.output import emit, name_run, narrate, reserve_stdout, suggest, terminal_width
from stepscope.cli.resume import RehearsedError, is_rehearsal, plan_again
from stepscope.core.errors import ExitCode, UsageError
from stepscope.records import Case
from stepscope.records.kinds import CollectiveSpec, UserModelSpec
from stepscope.run.plan import Job
from stepscope.store import MeasuredCase, StoredRun, find_ceilings


def command_line() -> list[str]:
    """As typed, for the plan."""
    context = click.get_current_context(silent=True)
    typed = context.find_root().obj if context is not None else None
    return ["stepscope", *(typed if typed is not None else sys.argv[1:])]


def open_job(job: Job | None, *, store: Path, resume: str | None, verb: str) -> StoredRun:
    """The run to measure into: a new one, or the interrupted one that `--resume` means."""
    from stepscope import api
    from stepscope.run.plan import find_resumed

    if is_rehearsal():
        raise RehearsedError(job)
    if job is None and resume:
        stored = find_resumed(resume, store, verb=verb, job=None)
        plan_again(stored, trust=False)
        return stored
    if job is None:
        raise UsageError("nothing to measure was named", hint=f"stepscope bench {verb} --help")
    return api.start(job, store=store, resume=resumed(resume), command=command_line(), tell=narrate)


def resumed(resume: str | None) -> bool | str:
    """What `--resume` means: a name, True for the newest, or False where it was not given."""
    return resume is not None and (resume or True)


class Addition(NamedTuple):
    """What a verb shows beside the cases of its run."""

    data: dict[str, Any]
    text: str


def add_nothing(run: StoredRun) -> Addition:
    return Addition({}, "")


def run_stored(stored: StoredRun, finish: Callable[[StoredRun], Addition] = add_nothing) -> int:
    """Measure what the run's plan still lacks, in the way its verb needs; `finish` with it, and show it."""
    measured = measure_stored(stored)
    return show_run(measured.folder, finish(measured))


def measure_stored(stored: StoredRun) -> StoredRun:
    from stepscope import api
    from stepscope.measure.progress import open_progress

    if any(isinstance(case.spec, UserModelSpec) for case in stored.plan.cases):
        reserve_stdout()  # files of users print, in threads and at exit as well
    return api.execute(stored, progress=open_progress(), tell=narrate)


def show_run(folder: Path, more: Addition) -> int:
    """Print the results; the exit code is 1 when a case failed, 0 with skips alone."""
    stored = StoredRun(folder)
    cases = stored.cases()
    data = {"run": str(folder), "id": stored.id, **cases_to_dict(cases, folder), **more.data}
    emit(data, lambda: "\n".join(filter(None, [_format_run(stored), more.text])))
    _warn_of_nothing(cases)
    suggest(f"stepscope report {name_run(folder)} -o report.html")
    failed = any(case.result.status == "failed" for case in cases)
    return ExitCode.FAILED if failed else ExitCode.DONE


def _warn_of_nothing(cases: Sequence[MeasuredCase]) -> None:
    """The exit code of skips is 0: whoever looks at nothing else must still be told."""
    if cases and all(case.result.status == "skipped" for case in cases):
        failure = cases[0].result.failure
        every = f"all {len(cases)} cases were" if len(cases) > 1 else "the one case was"
        reason = f" {'The first' if len(cases) > 1 else 'The reason'}: {failure.message}." if failure else ""
        narrate(f"warning: nothing was measured: {every} skipped.{reason}")


def _format_run(stored: StoredRun) -> str:
    from stepscope import api

    # What users of nccl-tests look for, where that table has room for all there is to say.
    plain = all(isinstance(case.spec, CollectiveSpec) for case in stored.plan.cases)
    kind = "nccl" if plain and stored.results else "text"
    text = api.report(stored, kind=kind, width=terminal_width(), tell=narrate)
    return f"{text.rstrip()}\nrun: {stored.folder}"


def name_case(case: Case) -> dict[str, Any]:
    """A case that is not measured yet, as programs see it."""
    return {"key": case.key, "label": case.label, "parameters": case.parameters}


def cases_to_dict(cases: Sequence[MeasuredCase], folder: Path) -> dict[str, Any]:
    """The cases of one run as programs see them, with the ceilings measured in it."""
    from stepscope.metrics import flatten_case, with_peaks

    listed = [{**flatten_case(one), "run": str(folder)} for one in with_peaks(cases)]
    return {"cases": listed, "ceilings": {device: one._asdict() for device, one in find_ceilings(cases).items()}}
