"""Curves of time against message size: three forms, each monotone and never negative. Seconds and bytes.

Using a curve is plain Python; only fitting one needs numpy.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from typing import Literal

import msgspec

ModelName = Literal["alpha_beta", "sqrt", "piecewise"]
MODEL_NAMES: tuple[ModelName, ...] = ("alpha_beta", "sqrt", "piecewise")
"""From the plainest to the most flexible."""

END_SPAN = 4.0
"""An end slope is taken over sizes that differ by this factor: between close neighbours it would be mostly noise."""


class AlphaBeta(msgspec.Struct, frozen=True, kw_only=True, tag_field="model", tag="alpha_beta"):
    """t = latency_s + S · s_per_byte."""

    latency_s: float
    s_per_byte: float

    def __post_init__(self) -> None:
        _require_coefficients(self.latency_s, self.s_per_byte)

    def predict(self, size_bytes: float) -> float:
        return self.latency_s + self.s_per_byte * size_bytes


class SquareRoot(msgspec.Struct, frozen=True, kw_only=True, tag_field="model", tag="sqrt"):
    """t = latency_s + s_per_sqrt_byte · √S + S · s_per_byte: what a pipeline with a well-chosen chunk size leaves."""

    latency_s: float
    s_per_sqrt_byte: float
    s_per_byte: float

    def __post_init__(self) -> None:
        _require_coefficients(self.latency_s, self.s_per_sqrt_byte, self.s_per_byte)

    def predict(self, size_bytes: float) -> float:
        return self.latency_s + self.s_per_sqrt_byte * math.sqrt(size_bytes) + self.s_per_byte * size_bytes


class Piecewise(msgspec.Struct, frozen=True, kw_only=True, tag_field="model", tag="piecewise"):
    """Straight lines between knots where both axes are logarithmic; straight lines in S beyond the ends."""

    sizes_bytes: list[int]
    times_s: list[float]

    def __post_init__(self) -> None:
        if len(self.sizes_bytes) != len(self.times_s) or len(self.sizes_bytes) < 2:
            raise ValueError("a piecewise curve has as many times as sizes, and at least two")
        if self.sizes_bytes[0] < 1 or any(b <= a for a, b in pairwise(self.sizes_bytes)):
            raise ValueError("the sizes of a piecewise curve are above 0 and grow")
        if not 0 < self.times_s[0] < math.inf or any(not a <= b < math.inf for a, b in pairwise(self.times_s)):
            raise ValueError("the times of a piecewise curve are above 0 and never fall")

    @property
    def latency_s(self) -> float:
        """What is left at no bytes when the first piece is followed down."""
        return max(0.0, self.times_s[0] - self.sizes_bytes[0] * self._first_s_per_byte())

    @property
    def s_per_byte(self) -> float:
        """Of the last piece: how the curve goes on beyond its largest size."""
        largest = self.sizes_bytes[-1]
        far = max((i for i, size in enumerate(self.sizes_bytes) if size * END_SPAN <= largest), default=0)
        slope = self._slope(far, len(self.sizes_bytes) - 1)
        # A message twice as large never costs more than two messages.
        return min(slope, self.times_s[-1] / largest)

    def predict(self, size_bytes: float) -> float:
        sizes, times = self.sizes_bytes, self.times_s
        if size_bytes < sizes[0]:
            return max(0.0, times[0] - (sizes[0] - size_bytes) * self._first_s_per_byte())
        if size_bytes >= sizes[-1]:
            return times[-1] + (size_bytes - sizes[-1]) * self.s_per_byte
        above = bisect_right(sizes, size_bytes)
        way = math.log(size_bytes / sizes[above - 1]) / math.log(sizes[above] / sizes[above - 1])
        value = times[above - 1] * math.exp(way * math.log(times[above] / times[above - 1]))
        # Rounding must not leave the piece: neighbouring pieces would cross.
        return min(max(value, times[above - 1]), times[above])

    def _first_s_per_byte(self) -> float:
        last = len(self.sizes_bytes) - 1
        far = next((i for i, size in enumerate(self.sizes_bytes) if size >= END_SPAN * self.sizes_bytes[0]), last)
        return min(self._slope(0, far), self.times_s[0] / self.sizes_bytes[0])

    def _slope(self, a: int, b: int) -> float:
        return (self.times_s[b] - self.times_s[a]) / (self.sizes_bytes[b] - self.sizes_bytes[a])


Curve = AlphaBeta | SquareRoot | Piecewise


def model_of(curve: Curve) -> ModelName:
    if isinstance(curve, AlphaBeta):
        return "alpha_beta"
    return "sqrt" if isinstance(curve, SquareRoot) else "piecewise"


def bandwidth_of(curve: Curve) -> float | None:
    """Bytes a second that a large message comes near to; None where the curve does not grow with its size."""
    return 1 / curve.s_per_byte if curve.s_per_byte > 0 else None


def steepness(curve: Curve, size_bytes: float) -> float:
    """d ln t / d ln S just above a size: 0 where only latency counts, 1 where time is proportional to size."""
    step = 1e-6
    rise = math.log(curve.predict(size_bytes * (1 + step)) / curve.predict(size_bytes))
    return min(1.0, max(0.0, rise / math.log1p(step)))


def _require_coefficients(*values: float) -> None:
    if not all(0 <= value < math.inf for value in values):
        raise ValueError("coefficients are numbers of 0 or more")
    if not any(values):
        raise ValueError("a curve of nothing but zeros says that communication is free")
