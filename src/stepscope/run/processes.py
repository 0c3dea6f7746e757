"""Fresh processes: the same cases measured again from nothing, so that what differs between processes shows.

Memory layout, thread placement and the state of the machine are drawn anew for each process; samples inside one
process share them. A run that is measured in several processes keeps every sample with the number of its process.
Two runs measured at once (the sides of an A/B comparison) take turns, so that a machine whose speed drifts favours
neither.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.core.errors import StepscopeError
from stepscope.core.processes import last_line
from stepscope.launch.watchdog import start_child
from stepscope.records import CaseResult, Notice, RankSamples, System
from stepscope.run.rank import AnyProgress
from stepscope.store import (
    TRACES_FOLDER,
    JournalTail,
    MeasuredCase,
    RunWriter,
    StoredRun,
    create_run,
    run_folders,
)
from stepscope.store.folder import hold_run, release_run

PROCESSES_FOLDER = "processes"
"""Inside the run while it is measured: one run per process, so that an interruption keeps those that are done."""
LOG_FILE = "process.log"
TIMEOUT_S = 3600.0
POLL_S = 0.1


class ProcessError(StepscopeError):
    """A fresh process failed; its own message is passed on."""

    kind = "child_failed"


class RunSide(NamedTuple):
    """A run that is measured in fresh processes, with variables set for them alone."""

    stored: StoredRun
    environment: Mapping[str, str] = {}

    def children(self) -> list[StoredRun]:
        return [StoredRun(folder) for folder in run_folders(self.stored.folder / PROCESSES_FOLDER)]

    def open_child(self, number: int) -> StoredRun:
        """The run of one process: made now, or left by an attempt that was interrupted."""
        children = self.children()
        if number < len(children):
            return children[number]
        plan = self.stored.plan
        return StoredRun(
            create_run(
                self.stored.folder / PROCESSES_FOLDER,
                verb=plan.verb,
                name=f"process-{number}",
                command=plan.command,
                request=msgspec.structs.replace(plan.request, processes=1),
                cases=plan.cases,
                launcher=plan.launcher,
                world_size=plan.world_size,
            )
        )


def measure_in_processes(
    sides: Sequence[RunSide],
    processes: int,
    *,
    progress: AnyProgress,
    count_wanted: Callable[[list[MeasuredCase], System | None], int] = lambda cases, system: 0,
) -> None:
    """Measure the plan of each side in fresh processes, in turn, and finish its run. Finished processes are kept.

    `count_wanted` sees the cases that all processes of the first side measured so far, and says how many processes it
    wants altogether.
    """
    number, measured = 0, [side for side in sides if side.stored.run is None]
    try:
        for side in measured:
            hold_run(side.stored.folder)
        with progress:
            while number < processes:
                for turn, side in enumerate(measured if number % 2 == 0 else reversed(measured)):
                    child, name = side.open_child(number), f"process {number + 1} of {processes}"
                    if child.run is None:
                        place = (number * len(measured) + turn, processes * len(measured))
                        run_process(child, side, progress=progress, name=name, place=place)
                number += 1
                if number == processes:
                    children = measured[0].children()[:number]
                    processes = max(processes, count_wanted(_merge_cases(children), children[0].system))
        for side in measured:
            merge_processes(side.children()[:processes], side.stored.folder)
    finally:
        for side in measured:
            release_run(side.stored.folder)


def run_process(
    child: StoredRun, side: RunSide, *, progress: AnyProgress, name: str, place: tuple[int, int] = (0, 1)
) -> None:
    """Measure one child run in a process of its own, and show its cases as they finish.

    `place`: how many processes are done, and how many there will be.
    """
    command = [sys.executable, "-m", "stepscope.run", str(child.folder), child.plan_seal]
    cases = child.plan.cases
    tail, measured = JournalTail(child), len(child.results)
    deadline_s = time.monotonic() + TIMEOUT_S

    def show_next() -> None:
        count = place[0] * len(cases) + measured + 1
        total = max(count, place[1] * len(cases))
        progress.case_started(cases[min(measured, len(cases) - 1)], count, total, note=name)

    def show_finished() -> None:
        nonlocal measured
        for case in tail.read_new():
            progress.case_done(case.result, case.samples)
            measured += 1
            if measured < len(cases):
                show_next()

    show_next()
    with (child.folder / LOG_FILE).open("ab") as log:
        process = start_child(
            command, env={**os.environ, **side.environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            while process.poll() is None:
                show_finished()
                if time.monotonic() > deadline_s:
                    raise ProcessError(
                        f"{name} did not end within {TIMEOUT_S:.0f} s", hint="measure fewer cases at once"
                    )
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    show_finished()
    if process.returncode:
        raise _explain_failure(child, process.returncode, name, side.stored)


def _explain_failure(child: StoredRun, code: int, name: str, parent: StoredRun) -> ProcessError:
    """From what the process left in its run, else from the end of its output."""
    again = f"finished processes are kept: continue with --resume {parent.id}"
    failures = [one for one in StoredRun(child.folder).failures if one.kind != "interrupted"]
    if failures:
        last = failures[-1]
        hint = f"{last.hint}; {again}" if last.hint else again
        return ProcessError(f"{name}: {last.message}", hint=hint, where=last.where or str(child.folder))
    said = last_line((child.folder / LOG_FILE).read_text(errors="replace"), "it printed nothing")
    return ProcessError(f"{name} ended with {code}: {said}", hint=again, where=str(child.folder))


def _merge_cases(children: Sequence[StoredRun]) -> list[MeasuredCase]:
    by_process = [{case.key: case for case in child.cases()} for child in children]
    return [MeasuredCase(*merge_case([process[key] for process in by_process])) for key in by_process[0]]


def merge_processes(children: Sequence[StoredRun], folder: Path) -> StoredRun:
    """Fill the run in `folder`: per case one result, its samples marked with their process; then seal it."""
    with RunWriter(folder) as writer:
        system = children[0].system
        if system is None:
            raise ProcessError(f"process 0 left no system record in {children[0].folder}")
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
    """The result of the first process that failed stands for all; else the first one's, with everybody's samples."""
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
    """Ten processes on a noisy machine find the same ten times."""
    by_kind: dict[str, Notice] = {}
    for notice in notices:
        by_kind.setdefault(notice.kind, notice)
    return list(by_kind.values())
