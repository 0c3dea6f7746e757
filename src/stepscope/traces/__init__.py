"""Readers and writers of traces and graphs, the columnar timeline, recording."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.traces.read import TraceSet, load_timeline, read_timeline, read_timelines, read_traces
    from stepscope.traces.table import make_table
    from stepscope.traces.timeline import Timeline, TimelineBuilder

_HOMES = {
    "Timeline": "timeline",
    "TimelineBuilder": "timeline",
    "TraceSet": "read",
    "load_timeline": "read",
    "make_table": "table",
    "read_timeline": "read",
    "read_timelines": "read",
    "read_traces": "read",
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
    return getattr(import_module(f"stepscope.traces.{_HOMES[name]}"), name)
