"""Fresh processes: the same cases measured again from nothing, so that what differs between processes shows.

Memory layout, thread placement and the machine's mood are drawn anew for each process; samples inside one process share
them. A run measured in several processes keeps every sample with the number of its process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from stepscope.core.errors import StepscopeError
from stepscope.records import CaseResult, Notice, RankSamples, System
from stepscope.store import TRACES_FOLDER, MeasuredCase, RunWriter, StoredRun, create_run, run_folders

PROCESSES_FOLDER = "processes"
"""Inside the run while it is measured: one run a process, so that an interruption keeps those that are done."""
TIMEOUT_S = 3600.0
OWN_PLAN_VARIABLE = "STEPSCOPE_OWN_PLAN"
"""Seal of the plan that the starting process wrote itself, and that the started one may therefore follow."""


class ChildError(StepscopeError):
    """A fresh process failed; its own message is passed on."""

    kind = "child_failed"


def call_stepscope(
    arguments: Sequence[str], *, environment: Mapping[str, str] | None = None, name: str, timeout_s: float = TIMEOUT_S
) -> StoredRun:
    """Run this Stepscope with `--json` in a process of its own; returns the run it made."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "stepscope", *arguments, "--json"],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ChildError(f"{name} did not end within {timeout_s:.0f} s", hint="measure fewer cases at once") from None
    try:
        answer = msgspec.json.decode(done.stdout)
    except msgspec.DecodeError:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise ChildError(f"{name} ended with {done.returncode} and said: {last[0]}") from None
    if not answer["ok"]:
        error = answer["error"]
        raise ChildError(f"{name}: {error['message']}", hint=error["hint"], where=error["where"])
    return StoredRun(Path(answer["data"]["run"]))


def measure_in_processes(
    stored: StoredRun,
    processes: int,
    *,
    count_wanted: Callable[[list[MeasuredCase], System | None], int] = lambda cases, system: 0,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Measure the plan of `stored` in several fresh processes and seal it; finished processes are not repeated.

    `count_wanted` sees the cases that all processes so far measured and says how many it wants altogether.
    """
    plan, place = stored.plan, stored.folder / PROCESSES_FOLDER
    children = [StoredRun(folder) for folder in run_folders(place)]
    number = 0
    while number < processes:
        if number >= len(children):
            folder = create_run(
                place,
                verb=plan.verb,
                name=f"process-{number}",
                command=plan.command,
                request={**plan.request, "processes": 1},
                cases=plan.cases,
                launcher=plan.launcher,
                world_size=plan.world_size,
            )
            children.append(StoredRun(folder))
        if children[number].run is None:
            folder = children[number].folder
            mine, name = {OWN_PLAN_VARIABLE: children[number].plan_seal}, f"process {number}"
            children[number] = call_stepscope(["runs", "resume", str(folder)], environment=mine, name=name)
        number += 1
        on_done(number, processes)
        if number == processes:
            processes = max(processes, count_wanted(_merge_cases(children), children[0].system))
    merge_processes(children, stored.folder)


def _merge_cases(children: Sequence[StoredRun]) -> list[MeasuredCase]:
    by_process = [{case.key: case for case in child.cases()} for child in children]
    return [MeasuredCase(*merge_case([process[key] for process in by_process])) for key in by_process[0]]


def merge_processes(children: Sequence[StoredRun], folder: Path) -> StoredRun:
    """Fill the run in `folder`: per case one result, its samples marked with their process; then seal it."""
    with RunWriter(folder) as writer:
        system = children[0].system
        if system is None:
            raise ChildError(f"process 0 left no system record in {children[0].folder}")
        writer.write_system(system)
        communication = children[0].communication
        if communication is not None:
            writer.write_communication(communication)
        measured = {case.key: case for case in _merge_cases(children)}
        for case in writer.remaining():
            writer.append(*measured[case.key])
        _keep_traces(children[0].folder, folder)
        shutil.rmtree(folder / PROCESSES_FOLDER, ignore_errors=True)
        writer.finish()
    return StoredRun(folder)


def _keep_traces(child: Path, folder: Path) -> None:
    """Results name recordings relative to their run, and those of the first process stand for all."""
    recorded = child / TRACES_FOLDER
    if recorded.is_dir():
        shutil.rmtree(folder / TRACES_FOLDER, ignore_errors=True)
        recorded.rename(folder / TRACES_FOLDER)


def merge_case(processes: Sequence[MeasuredCase]) -> tuple[CaseResult, list[RankSamples]]:
    """The first process that failed speaks for all; otherwise the first one's result with everybody's samples."""
    results = [process.result for process in processes]
    failed = next((result for result in results if result.status != "ok"), None)
    if failed is not None:
        return failed, []
    samples = [
        msgspec.structs.replace(rank, process=number)
        for number, process in enumerate(processes)
        for rank in process.samples
    ]
    return msgspec.structs.replace(
        results[0],
        elapsed_s=sum(result.elapsed_s for result in results),
        readings=[reading for result in results for reading in result.readings],
        notices=_one_of_each(notice for result in results for notice in result.notices),
    ), samples


def _one_of_each(notices: Iterable[Notice]) -> list[Notice]:
    """Ten processes on a noisy machine say the same ten times."""
    by_kind: dict[str, Notice] = {}
    for notice in notices:
        by_kind.setdefault(notice.kind, notice)
    return list(by_kind.values())
