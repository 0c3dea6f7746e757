"""The path as events of a Chrome trace: tracks of their own, with arrows where it changes between host and device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stepscope.analyze.critical.kinds import COSTS, HOST_COSTS, WORK_COSTS
from stepscope.analyze.critical.path import CriticalPath, PathSegment

PROCESS = "Critical path"
_LANES = ("host", "delays", "device")
_LANE_OF = {kind: 0 if cost in HOST_COSTS else 2 if cost in WORK_COSTS else 1 for cost, kind in enumerate(COSTS)}
_FLOW = "critical_path"


def path_records(path: CriticalPath) -> list[PathSegment]:
    """The stretches of the path in order of time, without those of negative length (clocks that differ by a little)."""
    return [segment for segment in path.segments if segment.end_ns > segment.start_ns]


def path_events(path: CriticalPath, *, base_ns: int = 0) -> list[dict[str, Any]]:
    """Events for the `traceEvents` of a Chrome trace: one process, for each rank a track for host, delays and device.

    Times are µs after `base_ns`, which must be the one that the trace's own events count from.
    """
    segments = path_records(path)
    several = len(path.ranks) > 1
    events = _named_tracks(path, segments, several=several)
    before: PathSegment | None = None
    for number, segment in enumerate(segments):
        events.append(_slice(segment, base_ns))
        if before is not None and _track(before) != _track(segment):
            events.extend(_arrow(before, segment, number, base_ns))
        before = segment
    return events


def _track(segment: PathSegment) -> int:
    return segment.rank * len(_LANES) + _LANE_OF[segment.kind]


def _named_tracks(path: CriticalPath, segments: Iterable[PathSegment], *, several: bool) -> list[dict[str, Any]]:
    named = [{"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "args": {"name": PROCESS}}]
    for track in sorted({_track(segment) for segment in segments}):
        index, lane = divmod(track, len(_LANES))
        rank = path.ranks[index]
        prefix = f"rank {index if rank is None else rank}: " if several else ""
        named.append(
            {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": track, "args": {"name": prefix + _LANES[lane]}}
        )
        named.append(
            {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": track, "args": {"sort_index": track}}
        )
    return named


def _slice(segment: PathSegment, base_ns: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": _FLOW,
        "name": segment.name,
        "pid": PROCESS,
        "tid": _track(segment),
        "ts": (segment.start_ns - base_ns) / 1000,
        "dur": (segment.end_ns - segment.start_ns) / 1000,
        "args": {"kind": segment.kind, "row": segment.row},
    }


def _arrow(before: PathSegment, after: PathSegment, number: int, base_ns: int) -> list[dict[str, Any]]:
    """From the last moment of one slice to the first of the next: viewers want both ends inside a slice."""
    common = {"cat": _FLOW, "name": _FLOW, "id": number, "pid": PROCESS}
    leaves = (before.end_ns - 1 - base_ns) / 1000
    arrives = (after.start_ns - base_ns) / 1000
    return [
        {**common, "ph": "s", "tid": _track(before), "ts": leaves},
        {**common, "ph": "f", "bp": "e", "tid": _track(after), "ts": arrives},
    ]
