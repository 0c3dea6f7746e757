"""The roofline of a traced step: operators whose shapes give their work, under the peaks that the maker states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stepscope.analyze.job import JobReport
from stepscope.analyze.step.operator_rates import OperatorRate, RateReport, rate_operators
from stepscope.core.units import format_share
from stepscope.formats.timeline import Timeline
from stepscope.report.plots import draw_roofline
from stepscope.report.series import Roofline, RooflinePoint, drawable
from stepscope.system.catalogue import DevicePeak, find_device_peak


class TraceRoofline(NamedTuple):
    plot: str | None
    caption: str
    legend: list[tuple[str, str]]
    rates: Sequence[OperatorRate]
    peaks: dict[str, float]
    """Flop/s by type of the device; empty where it is not in the catalogue."""
    why_not: str | None


def make_roofline(job: JobReport, timeline: Timeline) -> TraceRoofline:
    found = rate_operators(timeline, job.step if job.detail.step_marker != "none" else None)
    if not found.rates:
        return _without(found, {}, f"No roofline: {found.note}.")
    device = next(iter(job.devices), "")
    peak = find_device_peak(device) if device else None
    if peak is None:
        what = f"the peaks of {device!r} are not in the catalogue" if device else "the trace does not name its device"
        return _without(found, {}, f"No roofline: {what}. The rates are in the table.")
    return _draw(found, peak)


def _without(found: RateReport, peaks: dict[str, float], reason: str) -> TraceRoofline:
    return TraceRoofline(None, "", [], found.rates, peaks, reason)


def _draw(found: RateReport, peak: DevicePeak) -> TraceRoofline:
    used = {rate.dtype for rate in found.rates}
    roofline = Roofline(
        run_id="",
        device=peak.name,
        matrix_flops_per_s={dtype: rate for dtype, rate in peak.flops.items() if dtype in used},
        bytes_per_s={"copy": peak.memory_bytes_per_s},
        points=[_point(place, rate, peak) for place, rate in enumerate(found.rates) if drawable(rate.intensity)],
    )
    plot = draw_roofline(roofline, f"Roofline of the step on {peak.name}")
    if plot is None:
        return _without(found, peak.flops, "No roofline: nothing that has a roof ran.")
    caption = (
        f"{len(roofline.points)} operators with {format_share(found.share)} of device work; roofs are what the maker "
        f"states for {peak.name} ({peak.source}), both axes logarithmic"
    )
    legend = [(f"round hollow {colour}", dtype) for dtype, colour in plot.colours.items()]
    return TraceRoofline(plot.markup, caption, legend, found.rates, peak.flops, None)


def _point(place: int, rate: OperatorRate, peak: DevicePeak) -> RooflinePoint:
    """Caches are as the step left them: neither cold nor warm."""
    roof = peak.flops.get(rate.dtype)
    return RooflinePoint(
        anchor=f"rate-{place}",
        label=f"{rate.calls} × {rate.name} {rate.shapes.replace(', []', '')}",
        operator=rate.name,
        dtype=rate.dtype,
        cache="in-step",
        intensity=rate.intensity,
        median_s=rate.median_s,
        flops_per_s=rate.flops_per_s,
        bytes_per_s=rate.bytes_per_s,
        compute_share=rate.flops_per_s / roof if roof else None,
        memory_share=rate.bytes_per_s / peak.memory_bytes_per_s,
    )
