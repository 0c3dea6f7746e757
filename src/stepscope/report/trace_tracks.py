"""Small lanes beside the rectangles of a timeline: the device queue and bandwidths over time, as few points."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from stepscope.analyze.step.device_work import Window
from stepscope.analyze.step.intervals import StepFunction
from stepscope.analyze.step.over_time import collective_bandwidth, copy_bandwidth, queue_length
from stepscope.formats.timeline import Timeline

MOST_POINTS = 500
"""Of one lane; a curve with more changes is drawn as means over so many equal parts of the step."""
FULL_SCALE = 1000
"""Values are whole numbers from 0 to this, which stands for the peak."""


class Track(NamedTuple):
    label: str
    unit: str
    """What a value counts: `activities` or `B/s`."""
    peak: float
    """The highest value in the window, before anything was averaged."""
    cell_ns: int
    """Values are means over this time; 0: exact."""
    points: list[int]
    """Time since the point before and value, one after the other; a value holds until the next point."""

    def to_data(self) -> dict[str, Any]:
        return self._asdict()


def draw_tracks(timeline: Timeline, window: Window) -> list[Track]:
    """Those that have anything to show."""
    return [track for track in _make_tracks(timeline, window) if track.peak > 0]


def _make_tracks(timeline: Timeline, window: Window) -> Iterator[Track]:
    yield sample("queue length", "activities", queue_length(timeline), window)
    yield sample("host copies", "B/s", copy_bandwidth(timeline, with_host=True), window)
    yield sample("device copies", "B/s", copy_bandwidth(timeline, with_host=False), window)
    yield sample("collectives, algbw", "B/s", collective_bandwidth(timeline), window)


def sample(label: str, unit: str, function: StepFunction, window: Window) -> Track:
    import numpy as np

    inside = (function.time > window.start_ns) & (function.time < window.end_ns)
    before = int(np.searchsorted(function.time, window.start_ns, side="right")) - 1
    time = np.concatenate(([window.start_ns], function.time[inside]))
    value = np.concatenate(([function.value[before] if before >= 0 else 0], function.value[inside])).astype(np.float64)
    peak, cell = float(value.max()), 0
    if len(time) > MOST_POINTS:
        cell = -(-window.length_ns // MOST_POINTS)
        time, value = _average(time, value, np.arange(window.start_ns, window.end_ns, cell), window.end_ns)
    scaled = np.rint(value * FULL_SCALE / peak).astype(np.int64) if peak > 0 else np.zeros(len(value), np.int64)
    changes = np.flatnonzero(np.r_[True, scaled[1:] != scaled[:-1]])
    since = np.diff(time[changes], prepend=window.start_ns)
    return Track(label, unit, peak, cell, np.stack((since, scaled[changes]), axis=1).reshape(-1).tolist())


def _average(time: Any, value: Any, cells: Any, end_ns: int) -> tuple[Any, Any]:
    """Means between the starts of cells, weighted by time."""
    import numpy as np

    edges = np.append(cells, end_ns)
    area = np.concatenate(([0.0], np.cumsum(value[:-1] * np.diff(time))))
    place = np.searchsorted(time, edges, side="right") - 1
    until = area[place] + value[place] * (edges - time[place])
    return cells, np.diff(until) / np.diff(edges)
