"""Runs workload cases in one process."""

from __future__ import annotations

from pathlib import Path

from stepscope.measure import BarProgress, LineProgress, MeasureSettings, Prepared
from stepscope.measure.session import measure_run
from stepscope.records import Case, Run
from stepscope.workloads.registry import find_workload


def run_workloads(
    folder: Path, *, settings: MeasureSettings, device_name: str, progress: LineProgress | BarProgress
) -> Run:
    return measure_run(folder, prepare=prepare_case, settings=settings, device_name=device_name, progress=progress)


def prepare_case(case: Case) -> Prepared:
    return find_workload(case.benchmark.id).prepare(case)
