"""Rooflines: the measured peaks of one device with its cases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from stepscope.store import Ceilings

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
