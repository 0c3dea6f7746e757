"""Runs workload cases in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stepscope.measure import BarProgress, LineProgress, MeasureSettings, Prepared, open_device
from stepscope.measure.session import measure_run
from stepscope.records import Case, Run
from stepscope.workloads.registry import find_workload


def run_workloads(folder: Path, *, request: dict[str, Any], progress: LineProgress | BarProgress) -> Run:
    return measure_run(
        folder,
        prepare=prepare_case,
        settings=msgspec.convert(request["settings"], MeasureSettings),
        device=open_device(request["device"]),
        progress=progress,
    )


def prepare_case(case: Case) -> Prepared:
    return find_workload(case.benchmark.id).prepare(case)
