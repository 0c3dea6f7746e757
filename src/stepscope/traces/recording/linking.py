"""Joins the two traces of a rank and says how far that went."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stepscope.core.errors import StepscopeError
from stepscope.traces.recording.evidence import RankRecording


def with_link(folder: Path, record: RankRecording) -> RankRecording:
    """The record with what was joined; with a notice where that could not be tried. Needs numpy."""
    if record.kineto is None or record.et is None:
        return record
    try:
        from stepscope.formats.execution_trace import read_execution_trace
        from stepscope.traces.link import link
        from stepscope.traces.read import read_timeline

        graph = read_execution_trace(folder / record.et.path)
        timeline = read_timeline(folder / record.kineto.path)
        summary = link(graph, timeline, minimum_share=0.0).summary
    except (StepscopeError, ImportError) as error:
        notices = [*record.notices, f"the two traces were not linked: {error}"]
        return msgspec.structs.replace(record, notices=notices)
    return msgspec.structs.replace(record, linked=summary)
