"""What was measured of a trace's operators, beside what the trace itself says of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from stepscope.core.units import format_duration, format_ratio, format_share, format_significant
from stepscope.records import TracedCallRecord, TracedCallsRecord
from stepscope.store import MeasuredCase

SHOWN = 20
WIDEST_INPUTS = 60


class ComparedCall(msgspec.Struct, frozen=True, kw_only=True):
    operator: str
    inputs: str
    calls_per_step: float
    trace_s: float | None
    """Mean time of one call, profiled."""
    measured_s: float | None
    """Median time of one call. None: the case failed or was skipped."""
    ratio: float | None
    """Measured over the trace's own."""
    measured_step_s: float | None
    """All its calls in a step, as measured."""
    skip: str | None = None
    assumed: list[str] = []
    key: str | None = None


class TraceComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Sums are of one step."""

    sources: list[str]
    steps: int
    on_device: bool | None
    calls: list[ComparedCall]
    measured_step_s: float
    """Σ calls × measured time."""
    traced_step_s: float | None
    """The same calls in the trace; None where it has no times."""
    busy_step_s: float | None
    """All work in the trace."""
    covered_share: float | None
    """Fraction of the trace's work that was measured."""
    left_s: dict[str, float]
    """A step's time that belongs to no operator's call, by reason."""
    profiled_step_s: float | None
    unprofiled_step_s: float | None


def compare_with_trace(trace: TracedCallsRecord, cases: Iterable[MeasuredCase]) -> TraceComparison:
    """Medians of the cases against the means of the trace."""
    by_key = {measured.result.case.key: measured for measured in cases}
    calls = [_compare(call, trace.steps, by_key) for call in trace.calls]
    measured = [call for call in calls if call.measured_step_s is not None]
    traced = [call.trace_s * call.calls_per_step for call in measured if call.trace_s is not None]
    traced_step_s = sum(traced) if trace.on_device is not None else None
    busy_step_s = trace.busy_s / trace.steps if trace.busy_s is not None else None
    return TraceComparison(
        sources=trace.sources,
        steps=trace.steps,
        on_device=trace.on_device,
        calls=calls,
        measured_step_s=sum(call.measured_step_s or 0.0 for call in measured),
        traced_step_s=traced_step_s,
        busy_step_s=busy_step_s,
        covered_share=traced_step_s / busy_step_s if traced_step_s is not None and busy_step_s else None,
        left_s={reason: seconds / trace.steps for reason, seconds in trace.left_s.items()},
        profiled_step_s=trace.profiled_step_s,
        unprofiled_step_s=trace.unprofiled_step_s,
    )


def _compare(call: TracedCallRecord, steps: int, by_key: Mapping[str, MeasuredCase]) -> ComparedCall:
    found = by_key.get(call.key) if call.key is not None else None
    summary = found.summary() if found is not None else None
    measured_s = summary.median_s if summary is not None else None
    trace_s = call.trace_s / call.count if call.trace_s is not None else None
    return ComparedCall(
        operator=call.operator,
        inputs=call.inputs,
        calls_per_step=call.count / steps,
        trace_s=trace_s,
        measured_s=measured_s,
        ratio=measured_s / trace_s if measured_s is not None and trace_s else None,
        measured_step_s=measured_s * call.count / steps if measured_s is not None else None,
        skip=call.skip or _why_not(call, found),
        assumed=call.assumed,
        key=call.key,
    )


def _why_not(call: TracedCallRecord, found: MeasuredCase | None) -> str | None:
    if call.key is None:
        return "not among those asked for"
    if found is None:
        return "not measured yet"
    failure = found.result.failure
    return failure.message if failure is not None else None


def format_comparison(comparison: TraceComparison) -> str:
    """A table of what takes most, then what it adds up to."""
    where = {True: "on the device", False: "on the host", None: ""}[comparison.on_device]
    steps = "1 step" if comparison.steps == 1 else f"{comparison.steps} steps"
    lines = [f"# from {', '.join(comparison.sources)}: {steps}, profiled times {where}".rstrip()]
    measured = [call for call in comparison.calls if call.measured_s is not None]
    lines += [_format_call(call) for call in measured[:SHOWN]]
    if len(measured) > SHOWN:
        lines.append(f"… and {len(measured) - SHOWN} more (--json lists them all)")
    lines += _format_skipped([call for call in comparison.calls if call.measured_s is None])
    return "\n".join([*lines, *_format_sums(comparison)])


def _format_call(call: ComparedCall) -> str:
    trace = f"trace {format_duration(call.trace_s)}" if call.trace_s is not None else "no time in the trace"
    ratio = f" ({format_ratio(call.ratio)})" if call.ratio is not None else ""
    assumed = f" [{', '.join(call.assumed)} assumed]" if call.assumed else ""
    return (
        f"{_format_count(call.calls_per_step)} × {call.operator} {_short(call.inputs)}: {trace}, "
        f"measured {format_duration(call.measured_s or 0.0)}{ratio}{assumed}"
    )


def _format_skipped(calls: Sequence[ComparedCall]) -> list[str]:
    """By reason: a trace may have hundreds of them."""
    reasons: dict[str, list[ComparedCall]] = {}
    for call in calls:
        reasons.setdefault(call.skip or "not measured", []).append(call)
    lines = []
    for reason, those in reasons.items():
        names = ", ".join(dict.fromkeys(call.operator for call in those))
        spent = sum((call.trace_s or 0.0) * call.calls_per_step for call in those)
        time = f", {format_duration(spent)} per step" if spent else ""
        lines.append(f"skipped: {_short(names)}{time}: {reason}")
    return lines


def _format_sums(comparison: TraceComparison) -> list[str]:
    lines = [f"a step's operators as measured: {format_duration(comparison.measured_step_s)}"]
    if comparison.traced_step_s:
        ratio = comparison.measured_step_s / comparison.traced_step_s
        lines[0] += f"; the same in the trace: {format_duration(comparison.traced_step_s)} ({format_ratio(ratio)})"
    if comparison.covered_share is not None and comparison.busy_step_s is not None:
        lines.append(
            f"they are {format_share(comparison.covered_share)} of the work in a step of the trace, "
            f"{format_duration(comparison.busy_step_s)}"
        )
    lines += [
        f"left out: {format_duration(seconds)} per step: {reason}" for reason, seconds in comparison.left_s.items()
    ]
    steps = [
        (comparison.unprofiled_step_s, "the step without profiler"),
        (comparison.profiled_step_s, "the profiled step"),
    ]
    lines += [f"{what}: {format_duration(seconds)}" for seconds, what in steps if seconds is not None]
    return lines


def format_calls(trace: TracedCallsRecord) -> str:
    """What would be measured, without measuring it."""
    wanted = [call for call in trace.calls if call.key is not None]
    lines = []
    for call in wanted[:SHOWN]:
        time = f": {format_duration(call.trace_s / call.count)} in the trace" if call.trace_s is not None else ""
        lines.append(f"{_format_count(call.count / trace.steps)} × {call.operator} {_short(call.inputs)}{time}")
    if len(wanted) > SHOWN:
        lines.append(f"… and {len(wanted) - SHOWN} more (--json lists them all)")
    skipped = [_compare(call, trace.steps, {}) for call in trace.calls if call.key is None]
    return "\n".join([*lines, *_format_skipped(skipped)])


def _short(text: str) -> str:
    return text if len(text) <= WIDEST_INPUTS else f"{text[: WIDEST_INPUTS - 1]}…"


def _format_count(calls: float) -> str:
    """Calls per step, which need not be whole: not every step makes the same calls."""
    return str(round(calls)) if calls == round(calls) else format_significant(calls)
