"""Rates of cases against the ceilings of their own run, and rooflines: the ceilings of one device with its cases."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from stepscope.records import Observed
from stepscope.records.kinds import OperatorObserved
from stepscope.store import Ceilings, MeasuredCase, Rates, find_ceilings, rate_case

LEAST, MOST = 1e-30, 1e30
"""What lies beyond is no measurement and would push all others to the edge of a logarithmic axis."""


class RooflinePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One measured case with floating-point work."""

    anchor: str
    """Of the case."""
    label: str
    operator: str
    dtype: str
    cache: str
    """`warm` or `cold`."""
    intensity: float
    """Flop per byte of compulsory traffic."""
    median_s: float
    flops_per_s: float
    bytes_per_s: float
    compute_share: float | None
    memory_share: float | None


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """What one run measured on one device. Ceilings of another run are never used."""

    run_id: str
    device: str
    matrix_flops_per_s: dict[str, float]
    """By dtype."""
    bytes_per_s: dict[str, float]
    """`read`, `write`, `copy`."""
    points: list[RooflinePoint]
    """Ceilings are not among them: they are the roofs."""


class RooflineInput(NamedTuple):
    run: int
    """Its place among the runs: two runs may bear one name."""
    device: str
    point: RooflinePoint


def read_ceilings(cases: Iterable[MeasuredCase]) -> dict[str, Ceilings]:
    """By device, of the cases of one run. A ceiling that failed half-way may have samples, yet is none."""
    return find_ceilings(measured for measured in cases if measured.result.status == "ok")


def rate(measured: MeasuredCase, median_s: float, ceilings: Ceilings | None) -> Rates:
    """None for every rate that the record does not give as a positive number."""
    return Rates(*map(_positive, rate_case(measured, median_s, ceilings)))


def intensity_of(observed: Observed | None) -> float | None:
    """Flop per byte."""
    if not isinstance(observed, OperatorObserved):
        return None
    flops, moved = _positive(observed.flops), _positive(observed.moved_bytes)
    return _positive(flops / moved) if flops is not None and moved is not None else None


def _positive(value: float | None) -> float | None:
    return value if value is not None and value > 0 and math.isfinite(value) else None


def find_rooflines(
    run_ids: Sequence[str], ceilings: Sequence[Mapping[str, Ceilings]], inputs: Iterable[RooflineInput]
) -> list[Roofline]:
    """One a run and device with ceilings; `ceilings` in the order of the runs."""
    points: dict[tuple[int, str], list[RooflinePoint]] = {}
    for run, device, point in inputs:
        if drawable(point.intensity) and drawable(point.flops_per_s):
            points.setdefault((run, device), []).append(point)
    return [
        Roofline(
            run_id=run_ids[run],
            device=device,
            matrix_flops_per_s=measured.matrix_flops_per_s,
            bytes_per_s=measured.bytes_per_s,
            points=points.get((run, device), []),
        )
        for run, devices in enumerate(ceilings)
        for device, measured in devices.items()
    ]


def drawable(value: float) -> bool:
    return LEAST < value < MOST
