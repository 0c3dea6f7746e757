"""From a request to a finished run: new or resumed, and what is shown of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stepscope.cli.options import NEWEST
from stepscope.cli.output import emit, narrate
from stepscope.errors import ExitCode, UsageError
from stepscope.records import Case
from stepscope.store import MeasuredCase, StoredRun, create_run, find_run, list_runs


class Job(NamedTuple):
    """What a bench command asks for."""

    verb: str
    name: str
    """Part of the run's id, for people."""
    cases: list[Case]
    request: dict[str, Any]
    launcher: str = "inline"
    world_size: int = 1


def open_job(job: Job | None, *, store: Path, resume: str | None, verb: str) -> StoredRun:
    """The run to measure into: a new one, or the interrupted one that `--resume` means."""
    if resume is not None and resume != NEWEST:
        stored = find_run(store, resume)
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
        return stored
    if job is None:
        raise UsageError("nothing to measure was named", hint=f"stepscope bench {verb} --help")
    if resume == NEWEST:
        found = [run for run in list_runs(store)[0] if run.status == "interrupted" and _is_same(run, job)]
        if found:
            narrate(f"continuing {found[-1].id}")
            return found[-1]
        narrate("no interrupted run with these cases: starting a new one")
    folder = create_run(
        store,
        verb=job.verb,
        name=job.name,
        command=["stepscope", *sys.argv[1:]],
        request=job.request,
        cases=job.cases,
        launcher=job.launcher,
        world_size=job.world_size,
    )
    return StoredRun(folder)


def _is_same(stored: StoredRun, job: Job) -> bool:
    plan = stored.plan
    keys = [case.key for case in plan.cases]
    asked = msgspec.json.decode(msgspec.json.encode(job.request))
    return plan.verb == job.verb and plan.request == asked and keys == [case.key for case in job.cases]


def show_run(folder: Path, *, as_json: bool) -> int:
    """Print the results; the exit code is 1 when a case failed, 0 with skips alone."""
    stored = StoredRun(folder)
    cases = stored.cases()
    text = "" if as_json else _format_run(stored)
    emit({"run": str(folder), "id": stored.id, "cases": [case_to_dict(case, folder) for case in cases]}, text,
         as_json=as_json)  # fmt: skip
    failed = any(case.result.status == "failed" for case in cases)
    return ExitCode.FAILED if failed else ExitCode.DONE


def _format_run(stored: StoredRun) -> str:
    from stepscope.cli.report import render, report_of

    return f"{render(report_of([stored]), 'text').rstrip()}\nrun: {stored.folder}"


def case_to_dict(measured: MeasuredCase, folder: Path) -> dict[str, Any]:
    """One case as programs see it; times in seconds, sizes in bytes."""
    result, summary = measured.result, measured.summary()
    case = result.case
    content: dict[str, Any] = {
        "key": case.key,
        "label": case.label,
        "benchmark": case.benchmark.id,
        "version": case.benchmark.version,
        "parameters": case.parameters,
        "batch_size": case.batch_size,
        "world_size": case.world_size,
        "status": result.status,
        "samples_s": measured.seconds(),
        "device_samples_s": measured.device_seconds(),
        "summary": summary,
        "score": measured.score(),
        "unit": result.score.unit if result.score else None,
        "missed_latency": measured.missed_latency(),
        "notices": result.notices,
        "failure": result.failure,
        "readings": result.readings,
        "run": str(folder),
        **result.observed,
    }
    if "bus_factor" in result.observed:
        size_bytes, factor = float(result.observed["size_bytes"]), float(result.observed["bus_factor"])
        algbw = size_bytes / summary.median_s if summary else None
        content["algbw_bytes_per_s"] = algbw
        content["busbw_bytes_per_s"] = algbw * factor if algbw is not None else None
    return content
