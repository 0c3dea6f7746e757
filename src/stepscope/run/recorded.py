"""A few steps of a case under the profiler, apart from the timed ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stepscope.records import Case
from stepscope.store import TRACES_FOLDER
from stepscope.traces.recording import ignoring_marks, record

TRACED_STEPS = 3


def record_steps(step: Callable[[], object], run: Path, case: Case, *, link: bool = True) -> str:
    """The folder of the recording, relative to that of the run. Ranks that share a step all call this.

    What an interrupted run has left there is replaced.
    """
    place = f"{TRACES_FOLDER}/{case.key}"
    with record(out=run / place, steps=TRACED_STEPS, warmup=1, unprofiled=2, link=link, overwrite=True) as recording:
        while not recording.is_done:
            with ignoring_marks():
                step()
            recording.step()
    return place
