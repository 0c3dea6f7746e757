"""What a run measured as its machine's ceilings, and how near each case comes to them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from stepscope.records.kinds import OperatorObserved, OperatorSpec
from stepscope.store.view import MeasuredCase

_BANDWIDTHS = {"read": "read", "memset": "write", "memcpy": "copy"}
"""Operator → the bandwidth it shows."""


class Ceilings(NamedTuple):
    """Measured on one device in one run. Work per second in base units; a missing one was not measured."""

    matrix_flops_per_s: dict[str, float]
    """By dtype: a large square matrix product."""
    bytes_per_s: dict[str, float]
    """`read`, `write`, `copy` (both directions counted), each of a stream many times any cache."""


class Rates(NamedTuple):
    """A case's declared work over its median time, and the shares of the ceilings; None: nothing to say."""

    flops_per_s: float | None
    bytes_per_s: float | None
    compute_share: float | None
    """Of the matrix rate in the same dtype; only for operators that are scored in TFLOP/s."""
    memory_share: float | None
    """Of the copy bandwidth, by unique bytes: what a call touches twice counts once. With warm caches it may exceed 1:
    the data does not come from memory."""


NO_RATES = Rates(None, None, None, None)


def is_ceiling(measured: MeasuredCase) -> bool:
    return measured.result.case.spec.is_measured_peak


def find_ceilings(cases: Iterable[MeasuredCase]) -> dict[str, Ceilings]:
    """By device, from the cases of one run that were measured as ceilings; empty where none were."""
    found: dict[str, Ceilings] = {}
    for measured in cases:
        spec, rule = measured.result.case.spec, measured.result.score
        known = measured.result.status == "ok" and isinstance(spec, OperatorSpec) and spec.is_measured_peak
        summary = measured.summary() if known else None
        if summary is None or rule is None or summary.median_s <= 0:
            continue
        assert isinstance(spec, OperatorSpec)
        if spec.device is None or spec.dtype is None:
            continue
        ceilings = found.setdefault(spec.device, Ceilings({}, {}))
        rate = rule.work / summary.median_s
        if spec.op in _BANDWIDTHS:
            ceilings.bytes_per_s[_BANDWIDTHS[spec.op]] = rate
        else:
            ceilings.matrix_flops_per_s[spec.dtype] = rate
    return found


def rate_case(measured: MeasuredCase, median_s: float, ceilings: Ceilings | None) -> Rates:
    """`median_s` is that of the case's own times."""
    observed, rule = measured.result.observed, measured.result.score
    if not isinstance(observed, OperatorObserved):
        return NO_RATES
    flops_per_s, bytes_per_s = _rate(observed.flops, median_s), _rate(observed.moved_bytes, median_s)
    unique = observed.moved_bytes if observed.unique_bytes is None else observed.unique_bytes
    unique_per_s = _rate(unique, median_s)
    if ceilings is None:
        return Rates(flops_per_s, bytes_per_s, None, None)
    top = ceilings.matrix_flops_per_s.get(str(measured.result.case.spec.dtype))
    computes = rule is not None and rule.unit == "TFLOP/s"
    copy = ceilings.bytes_per_s.get("copy")
    return Rates(
        flops_per_s,
        bytes_per_s,
        flops_per_s / top if computes and flops_per_s and top else None,
        unique_per_s / copy if unique_per_s and copy else None,
    )


def _rate(work: float | None, median_s: float) -> float | None:
    """None for no work."""
    if work is None or work <= 0 or median_s <= 0:
        return None
    rate = work / median_s
    return rate if math.isfinite(rate) else None
