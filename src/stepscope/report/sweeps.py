"""Cases of one benchmark that differ in message size, as lines to plot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: float
    median_s: float
    ci_low_s: float
    ci_high_s: float
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None


class SweepSeries(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    """What sets this line apart; empty where the benchmark has only one."""
    points: list[SweepPoint]
    """By growing size."""


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    benchmark: str
    series: list[SweepSeries]


class SweepInput(NamedTuple):
    benchmark: str
    label: str
    point: SweepPoint


def find_sweeps(inputs: Iterable[SweepInput]) -> list[Sweep]:
    """Lines of at least two sizes; a single point is already in the table. Sizes and times of zero have no place
    on logarithmic axes and are left out."""
    grouped: dict[str, dict[str, list[SweepPoint]]] = {}
    for benchmark, label, point in inputs:
        if point.size_bytes > 0 and point.ci_low_s > 0:
            grouped.setdefault(benchmark, {}).setdefault(label, []).append(point)
    sweeps = []
    for benchmark, lines in grouped.items():
        series = [
            SweepSeries(label=label, points=sorted(points, key=lambda point: point.size_bytes))
            for label, points in lines.items()
            if len({point.size_bytes for point in points}) > 1
        ]
        if series:
            sweeps.append(Sweep(benchmark=benchmark, series=series))
    return sweeps
