"""Small questions to a timeline: a column, rows of some kinds, names among rows, the window of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.errors import UsageError
from stepscope.traces.timeline import DEVICE_KINDS, HOST_KINDS, Span, Timeline

if TYPE_CHECKING:
    from stepscope.analyze.critical.kinds import Mask, Whole


class Window(NamedTuple):
    """An interval on the clock of the trace."""

    start_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


def core(timeline: Timeline, name: str) -> Any:
    """A column that every row has. Typed loosely: its element type is the reader's choice."""
    return timeline.core[name]


def is_kind(timeline: Timeline, *kinds: int) -> Mask:
    """For each row whether it is of one of these kinds."""
    import numpy as np

    wanted = np.zeros(256, bool)
    wanted[list(kinds)] = True
    mask: Mask = wanted[core(timeline, "kind")]
    return mask


def codes_in(timeline: Timeline, rows: Whole | Mask) -> list[int]:
    """The different names among these rows, as codes."""
    import numpy as np

    names = core(timeline, "name")[rows]
    return np.flatnonzero(np.bincount(names)).tolist() if len(names) else []


def find_span(timeline: Timeline, step: int) -> Span:
    for span in timeline.steps:
        if span.number == step:
            return span
    known = ", ".join(str(span.number) for span in timeline.steps[:20]) or "none"
    source = timeline.metadata.get("source")
    raise UsageError(
        f"the trace has no step {step}", hint=f"steps it has: {known}", where=None if source is None else str(source)
    )


def step_window(timeline: Timeline, step: int | None) -> Window:
    """The step on the host, extended to the end of the device work it launched. None: all host and device events."""
    start, end = core(timeline, "start_ns"), core(timeline, "end_ns")
    if step is None:
        rows = is_kind(timeline, *HOST_KINDS, *DEVICE_KINDS)
        if not rows.any():
            return Window(0, 0)
        return Window(int(start[rows].min()), int(end[rows].max()))
    span = find_span(timeline, step)
    launched = is_kind(timeline, *DEVICE_KINDS) & (core(timeline, "step") == step)
    last = int(end[launched].max()) if launched.any() else span.end_ns
    return Window(span.start_ns, max(span.end_ns, last))
