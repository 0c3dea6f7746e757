"""Small questions to a timeline: a column, rows of some kinds, names among rows, the window of a step."""

from __future__ import annotations
from stepscope.analyze.step.numbers import Mask, Whole
import numpy as np

from typing import Any

from stepscope.analyze.step.device_work import Window
from stepscope.analyze.step.view import view
from stepscope.formats.timeline import Timeline


def core(timeline: Timeline, name: str) -> Any:
    """A column that every row has. Typed loosely: its element type is the reader's choice."""
    return timeline.core[name]


def is_kind(timeline: Timeline, *kinds: int) -> Mask:
    """For each row whether it is of one of these kinds; kept with the timeline, not to be written to."""
    return view(timeline).is_kind(*kinds)


def rows_of_kind(timeline: Timeline, *kinds: int) -> Whole:
    """The rows of these kinds, in file order; kept with the timeline, not to be written to."""
    return view(timeline).rows(*kinds)


def codes_in(timeline: Timeline, rows: Whole | Mask) -> list[int]:
    """The different names among these rows, as codes."""
    names = core(timeline, "name")[rows]
    return np.flatnonzero(np.bincount(names)).tolist() if len(names) else []


def step_window(timeline: Timeline, step: int | None) -> Window:
    """The exclusive window of the step, as long as its step time. None: all host and device events."""
    return view(timeline).window(step)
