"""What a run measured as its machine's ceilings, and how near each case comes to them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from stepscope.records import Scalar
from stepscope.store.view import MeasuredCase

CEILING_CONFIG = "ceiling"
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


def is_ceiling(measured: MeasuredCase) -> bool:
    return measured.result.case.benchmark.config == CEILING_CONFIG


def find_ceilings(cases: Iterable[MeasuredCase]) -> dict[str, Ceilings]:
    """By device, from the cases of one run that were measured as ceilings; empty where none were."""
    found: dict[str, Ceilings] = {}
    for measured in cases:
        case, rule = measured.result.case, measured.result.score
        known = measured.result.status == "ok" and {"device", "dtype"} <= case.parameters.keys()
        summary = measured.summary() if known and is_ceiling(measured) else None
        if summary is None or rule is None or summary.median_s <= 0:
            continue
        ceilings = found.setdefault(str(case.parameters["device"]), Ceilings({}, {}))
        rate = rule.work / summary.median_s
        if case.benchmark.model in _BANDWIDTHS:
            ceilings.bytes_per_s[_BANDWIDTHS[case.benchmark.model]] = rate
        else:
            ceilings.matrix_flops_per_s[str(case.parameters["dtype"])] = rate
    return found


def rate_case(measured: MeasuredCase, median_s: float, ceilings: Ceilings | None) -> Rates:
    """`median_s` is that of the case's own times."""
    observed, rule = measured.result.observed, measured.result.score
    flops_per_s, bytes_per_s = (_rate(observed.get(name), median_s) for name in ("flops", "moved_bytes"))
    unique_per_s = _rate(observed.get("unique_bytes", observed.get("moved_bytes")), median_s)
    if ceilings is None:
        return Rates(flops_per_s, bytes_per_s, None, None)
    top = ceilings.matrix_flops_per_s.get(str(measured.result.case.parameters.get("dtype")))
    computes = rule is not None and rule.unit == "TFLOP/s"
    copy = ceilings.bytes_per_s.get("copy")
    return Rates(
        flops_per_s,
        bytes_per_s,
        flops_per_s / top if computes and flops_per_s and top else None,
        unique_per_s / copy if unique_per_s and copy else None,
    )


def _rate(work: Scalar | None, median_s: float) -> float | None:
    """None for no work, and for what is no number."""
    if not isinstance(work, int | float) or isinstance(work, bool) or work <= 0 or median_s <= 0:
        return None
    rate = work / median_s
    return rate if math.isfinite(rate) else None
