"""One process measures one run, from the plan on disk to the sealed folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stepscope.measure.device import Device
from stepscope.measure.progress import BarProgress, LineProgress
from stepscope.measure.runner import Prepared, run_cases
from stepscope.measure.settings import MeasureSettings
from stepscope.records import Case, Run
from stepscope.store import RunWriter
from stepscope.system import collect_system, open_telemetry


def measure_run(
    folder: Path,
    *,
    prepare: Callable[[Case], Prepared],
    settings: MeasureSettings,
    device: Device,
    progress: LineProgress | BarProgress,
    measure_more: Callable[[], list[Case]] | None = None,
) -> Run:
    """Measure what the plan in `folder` still lacks, then what `measure_more` asks for, then seal the run."""
    with RunWriter(folder) as writer:
        writer.write_system(collect_system())
        with progress:
            run_cases(
                writer,
                prepare=prepare,
                settings=settings,
                device=device,
                telemetry=open_telemetry(device.name),
                progress=progress,
                measure_more=measure_more,
            )
        return writer.finish()
