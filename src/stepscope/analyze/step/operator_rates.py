"""Rates of matrix products, convolutions and attention: work from their shapes over the time of their kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.section import Chart, Section, field, make_table
from stepscope.analyze.step.numbers import seconds, share_of, sum_by
from stepscope.analyze.step.view import TraceView, view
from stepscope.core.dtypes import dtype_bytes, dtype_name
from stepscope.core.units import format_share
from stepscope.formats.timeline import DEVICE_KINDS, MISSING, OPERATOR, Integers, Timeline
from stepscope.system.catalogue import DevicePeak, find_device_peak
from stepscope.traces.operators import count_operations

if TYPE_CHECKING:
    from stepscope.analyze.job import JobReport

NO_SHAPES = "shapes were not recorded (profile with record_shapes=True): work of operators is not known"
NO_WORK = "no matrix product, convolution or attention of known work ran on a device in this step"

MOST_RATES = 60
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_addmm_activation": 1, "aten::bmm": 0, "aten::baddbmm": 1}
"""Operator → where the first factor stands among its inputs."""
_ATTENTION = re.compile(
    r"aten::_(?:scaled_dot_product_(?:flash|efficient|cudnn)_attention|(?:flash|efficient)_attention_forward)"
)
_CONVOLUTIONS = ("aten::cudnn_convolution", "aten::miopen_convolution")
_CONVOLUTION_BACKWARD = "aten::convolution_backward"
_KNOWN = {*_PRODUCTS, *_CONVOLUTIONS, _CONVOLUTION_BACKWARD}
_TF32 = re.compile(r"tf32|s1688(?:gemm|fprop|dgrad|wgrad)_(?!bf16|f16|fp16)", re.IGNORECASE)
"""Kernels that round 32-bit inputs to TF32 say so in their names."""
_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "int8"}

Shape = Sequence[int]


class OperatorRate(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one operator with the same inputs."""

    name: str
    shapes: str
    dtype: str
    """As the catalogue of devices names it; tf32 where the kernels' names say so."""
    calls: int
    flops: int
    """Multiplications and additions of one call; masks of attention are not taken off."""
    bytes: int
    """Each input read once and each output written once."""
    median_s: float
    """Device time of one call: the sum of its kernels."""
    total_s: float
    flops_per_s: float
    bytes_per_s: float
    intensity: float
    """Flop per byte."""


class RateReport(msgspec.Struct, frozen=True, kw_only=True):
    step: int | None
    rates: list[OperatorRate]
    """Most device time first."""
    share: float
    """Fraction of the sum of device work that these calls hold."""
    note: str | None = None


class _Work(NamedTuple):
    flops: int
    bytes: int
    dtype: str


def rate_operators(timeline: Timeline, step: int | None, *, top: int = 60) -> RateReport:
    """The operators of one step whose shapes give their work; None: of the whole trace."""
    trace = view(timeline)
    rows = trace.rows_of(step, OPERATOR)
    shaped = rows[trace.column("shapes")[rows] != MISSING] if len(rows) else rows
    if not len(shaped):
        return RateReport(step=step, rates=[], share=0.0, note=NO_SHAPES)
    known = trace.named(shaped, lambda name: name in _KNOWN or _ATTENTION.match(name))
    device = trace.rows_of(step, *DEVICE_KINDS)
    owner = trace.enclosing(trace.parent[device], trace.mask(known))
    whole = int((trace.end[device] - trace.start[device]).sum())
    device, owner = device[owner >= 0], owner[owner >= 0]
    spent = sum_by(owner, trace.end[device] - trace.start[device], len(trace.start))
    # For every row whether one of the kernels that it launched says TF32.
    tf32 = trace.mask(owner[trace.has_name(device, _TF32.search)])
    found = _rate_groups(trace, known[spent[known] > 0], spent, tf32)
    total = sum(rate.total_s for rate in found)
    return RateReport(
        step=step,
        rates=sorted(found, key=lambda rate: -rate.total_s)[:top],
        share=share_of(round(total * 1e9), whole),
        note=None if found else NO_WORK,
    )


def _rate_groups(trace: TraceView, rows: Integers, spent: Any, tf32: Any) -> list[OperatorRate]:
    columns = [trace.column(name)[rows] for name in ("name", "shapes", "types", "values")]
    keys = np.stack([*columns, tf32[rows]], axis=1) if len(rows) else np.zeros((0, 5), np.int64)
    groups, place = np.unique(keys, axis=0, return_inverse=True)
    found = []
    for number, (name, shapes, types, values, rounded) in enumerate(groups.tolist()):
        texts = [trace.text(code) if code != MISSING else None for code in (shapes, types, values)]
        work = find_work(trace.text(name), *texts)
        if work is None:
            continue
        times = spent[rows[place.reshape(-1) == number]]
        median = seconds(float(np.median(times)))
        found.append(
            OperatorRate(
                name=trace.text(name),
                shapes=texts[0] or "",
                dtype="tf32" if rounded and work.dtype == "fp32" else work.dtype,
                calls=len(times),
                flops=work.flops,
                bytes=work.bytes,
                median_s=median,
                total_s=seconds(int(times.sum())),
                flops_per_s=work.flops / median,
                bytes_per_s=work.bytes / median,
                intensity=work.flops / work.bytes,
            )
        )
    return found


def find_work(name: str, shapes: str | None, types: str | None, values: str | None) -> _Work | None:
    """Work of one call from its recorded inputs; None where they do not decide it."""
    try:
        sizes: list[Any] = msgspec.json.decode(shapes or "[]")
        kinds: list[Any] = msgspec.json.decode(types or "[]")
        scalars: list[Any] = msgspec.json.decode(values or "[]")
        if name == _CONVOLUTION_BACKWARD:
            flops, outputs = _convolution_backward(sizes, scalars)
        elif name in _CONVOLUTIONS:
            out = _convolved(sizes[0], sizes[1], *(msgspec.json.decode(text) for text in scalars[2:5]))
            flops, outputs = count_operations(name, sizes, out), [out]
        else:
            flops, outputs = count_operations(name, sizes), _outputs(name, sizes)
        dtype = next(dtype_name(kind) for kind, size in zip(kinds, sizes, strict=True) if size)
        moved = [(size, dtype_name(kind)) for kind, size in zip(kinds, sizes, strict=True) if size]
        moved += [(size, dtype) for size in outputs]
        total = sum(prod(size) * (dtype_bytes(kind) or 0) for size, kind in moved)
    except (msgspec.DecodeError, IndexError, TypeError, ValueError, StopIteration):
        return None
    if not flops or not total or dtype not in _SHORT:
        return None
    return _Work(flops, total, _SHORT[dtype])


def _outputs(name: str, sizes: Sequence[Shape]) -> list[Shape]:
    if name in _PRODUCTS:
        first, second = sizes[_PRODUCTS[name] :][:2]
        return [[*first[:-1], second[-1]]]
    return sizes[1:4] if name.endswith("backward") else [sizes[0]]  # type: ignore[return-value]


def _convolved(
    image: Shape, weight: Shape, padding: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Shape:
    kept = [
        (size + 2 * pad - step * (width - 1) - 1) // hop + 1
        for size, width, pad, hop, step in zip(image[2:], weight[2:], padding, stride, dilation, strict=True)
    ]
    return [image[0], weight[0], *kept]


def _convolution_backward(sizes: Sequence[Shape], scalars: Sequence[str]) -> tuple[int | None, list[Shape]]:
    """Each of the two gradients asked for costs as much as the forward pass; transposed ones are left out."""
    if scalars[7] != "False":
        return None, []
    wanted = [word.strip() == "True" for word in scalars[-1].strip("[]").split(",")][:2]
    outputs = [size for size, is_wanted in zip(sizes[1:3], wanted, strict=True) if is_wanted]
    return 2 * len(outputs) * prod(sizes[0]) * prod(sizes[2][1:]), outputs


class DrawnRates(NamedTuple):
    """What a roofline is drawn from."""

    rates: Sequence[OperatorRate]
    peak: DevicePeak


def roofline_section(job: JobReport) -> Section | None:
    found: RateReport | None = job.more.get("operator_rates")
    if found is None:
        return None
    device = next(iter(job.devices), "")
    peak = find_device_peak(device) if device else None
    peaks = peak.flops if peak is not None else {}
    table = make_table("Operators in the roofline", "Work from shapes, time from kernels", found.rates, [
        field("Device time", "total_s", "s"),
        field("Calls", "calls", "count"),
        field("Median call", "median_s", "s"),
        field("Work", "flops", "flop"),
        field("Rate", "flops_per_s", "flop/s"),
        field("% of peak", lambda one: one.flops_per_s / peaks[one.dtype] if peaks.get(one.dtype) else None, "share",
              "Of the maker's dense rate for this type"),
        field("Bytes rate", "bytes_per_s", "B/s"),
        field("Flop per byte", "intensity", "number"),
        field("Type", "dtype"),
        field("Operator", "name"),
        field("Shapes", lambda one: one.shapes.replace(", []", "")),
    ], most=MOST_RATES, id="rate")  # fmt: skip
    if not found.rates or peak is None:
        reason = f"{found.note}."
        if found.rates:
            unknown = f"the peaks of {device!r} are not in the catalogue" if device else "the trace names no device"
            reason = f"{unknown}. The rates are in the table."
        return Section(id="roofline", title="Roofline", lead=f"No roofline: {reason}", tables=[table])
    caption = (
        f"operators with {format_share(found.share)} of device work; roofs are what the maker states for {peak.name} "
        f"({peak.source}), both axes logarithmic"
    )
    chart = Chart("roofline", f"Roofline of the step on {peak.name}", caption, DrawnRates(found.rates, peak))
    return Section(id="roofline", title="Roofline", charts=[chart], tables=[table])
