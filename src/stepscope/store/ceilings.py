"""What a run measured as the peaks of its machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stepscope.records.kinds import OperatorSpec
from stepscope.store.view import MeasuredCase

_BANDWIDTHS = {"read": "read", "memset": "write", "memcpy": "copy"}
"""Operator → the bandwidth it shows."""


class Ceilings(NamedTuple):
    """Measured on one device in one run. Work per second in base units; a missing one was not measured."""

    matrix_flops_per_s: dict[str, float]
    """By dtype: a large square matrix product."""
    bytes_per_s: dict[str, float]
    """`read`, `write`, `copy` (both directions counted), each of a stream many times any cache."""


def find_ceilings(cases: Iterable[MeasuredCase]) -> dict[str, Ceilings]:
    """By device, from the cases of one run that were measured as ceilings; empty where none were."""
    found: dict[str, Ceilings] = {}
    for measured in cases:
        spec, rule = measured.result.case.spec, measured.result.score
        if measured.result.status != "ok" or rule is None or not isinstance(spec, OperatorSpec):
            continue
        if not spec.is_measured_peak or spec.device is None or spec.dtype is None:
            continue
        summary = measured.summary()
        if summary is None or summary.median_s <= 0:
            continue
        ceilings = found.setdefault(spec.device, Ceilings({}, {}))
        rate = rule.work / summary.median_s
        if spec.op in _BANDWIDTHS:
            ceilings.bytes_per_s[_BANDWIDTHS[spec.op]] = rate
        else:
            ceilings.matrix_flops_per_s[spec.dtype] = rate
    return found
