"""Readers and writers of traces and graphs, the columnar timeline, recording."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepscope.formats.timeline import Timeline, TimelineBuilder

if TYPE_CHECKING:
    from stepscope.traces.read import TraceSet, load_timeline, read_timeline, read_timelines, read_traces
    from stepscope.traces.table import make_table

RECORDING_FILE, KINETO_FOLDER = "recording.json", "kineto"
"""What makes a folder a recording, and where a recording keeps its timelines."""

_HOMES = {
    "Timeline": "formats.timeline",
    "TimelineBuilder": "formats.timeline",
    "TraceSet": "traces.read",
    "load_timeline": "traces.read",
    "make_table": "traces.table",
    "read_timeline": "traces.read",
    "read_timelines": "traces.read",
    "read_traces": "traces.read",
}

__all__ = [
    "Timeline",
    "TimelineBuilder",
    "TraceSet",
    "load_timeline",
    "make_table",
    "read_timeline",
    "read_timelines",
    "read_traces",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stepscope.traces' has no attribute {name!r}")
    return getattr(import_module(f"stepscope.{_HOMES[name]}"), name)
