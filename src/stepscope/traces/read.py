"""One call for any trace: the format is found from the content."""

from __future__ import annotations

from pathlib import Path

from stepscope.traces.timeline import Timeline


def read_timeline(path: Path, *, step_marker: str | None = None) -> Timeline:
    """The trace of one rank, finished."""
    from stepscope.traces.finish import finish
    from stepscope.traces.kineto import read_kineto

    return finish(read_kineto(path), step_marker=step_marker)


def read_core(path: Path) -> Timeline:
    from stepscope.traces.kineto_fast import CORE_COLUMNS, read_kineto_fast

    return read_kineto_fast(path, columns=CORE_COLUMNS)
