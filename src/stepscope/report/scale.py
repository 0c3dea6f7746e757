"""One time unit for numbers that are read together: a column, an axis, the two ends of an interval."""

from __future__ import annotations

from typing import NamedTuple

from stepscope.core.units import format_significant


class TimeScale(NamedTuple):
    unit: str
    seconds: float

    def format(self, value_s: float, digits: int = 4) -> str:
        """Without the unit."""
        return format_significant(value_s / self.seconds, digits)


TIME_SCALES = (TimeScale("s", 1.0), TimeScale("ms", 1e-3), TimeScale("µs", 1e-6), TimeScale("ns", 1e-9))


def choose_time_scale(typical_s: float) -> TimeScale:
    """The largest unit that the typical value fills."""
    return next((scale for scale in TIME_SCALES if typical_s >= scale.seconds), TIME_SCALES[-1])


def format_interval(low_s: float, high_s: float, scale: TimeScale) -> str:
    return f"{scale.format(low_s)}–{scale.format(high_s)}"
