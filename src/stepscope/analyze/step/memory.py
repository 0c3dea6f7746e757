"""What memory was taken and given back, what held it at the peak, and what a step did not give back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.section import Chart, Section, field, make_table
from stepscope.analyze.step.kernels import NO_OPERATOR
from stepscope.analyze.step.numbers import distinct, highest_places, known_only, make_rows, seconds
from stepscope.analyze.step.view import TraceView, view
from stepscope.core.units import format_bytes
from stepscope.formats.timeline import MEMORY, MISSING, OPERATOR, Integers, Timeline

if TYPE_CHECKING:
    from stepscope.analyze.job import JobReport

NOT_RECORDED = "memory was not recorded (profile with profile_memory=True)"
BEFORE = "allocated before the trace"
MOST_POINTS = 2000
"""Points of a timeline handed out; the peak of every stretch between two of them is kept."""


class MemoryPoint(msgspec.Struct, frozen=True, kw_only=True):
    time_s: float
    """From the start of the window."""
    allocated_bytes: int
    reserved_bytes: int | None


class MemoryOf(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that one operator allocated."""

    operator: str
    allocations: int
    bytes: int


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device in a window."""

    device: str
    """Number of the device, or cpu."""
    events: int
    peak_bytes: int
    peak_reserved_bytes: int | None
    peak_time_s: float
    """From the start of the window."""
    start_bytes: int
    end_bytes: int
    at_peak: list[MemoryOf]
    """What was held at the peak, by the operator that allocated it; adds up to peak_bytes."""
    allocated_bytes: int
    """Sum of all allocations in the window."""
    freed_bytes: int
    kept: list[MemoryOf]
    """Allocated in the window and still held at its end: a leak where it comes again in every step."""
    timeline: list[MemoryPoint]


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    step: int | None
    devices: list[DeviceMemory]
    note: str | None = None


class _Events(NamedTuple):
    """Memory events of one device in order of time."""

    rows: Any
    time: Any
    size: Any
    total: Any
    """Bytes allocated after each."""
    reserved: Any
    freed_by: Any
    """Place of the event that gives back what this one took; the number of events where none does. For releases 0."""


def trace_memory(timeline: Timeline, step: int | None) -> MemoryReport:
    """Memory of one step; None: of the whole trace."""
    trace = view(timeline)
    trace.check(step)
    # Memory is taken and given back by the host: what the step itself allocates lies before its device work.
    window = trace.window(None) if step is None else trace.completion_windows[step]
    rows = trace.rows(MEMORY)
    if not len(rows):
        return MemoryReport(step=step, devices=[], note=NOT_RECORDED)
    rows = rows[np.argsort(trace.start[rows], kind="stable")]
    device = trace.column("device")[rows]
    found = []
    for number in distinct(device):
        events = _pair(trace, rows[device == number])
        low = int(np.searchsorted(events.time, window.start_ns, side="left"))
        high = int(np.searchsorted(events.time, window.end_ns, side="right"))
        if high > low:
            label = "cpu" if number == MISSING else str(number)
            found.append(_describe(trace, events, slice(low, high), label, begin=window.start_ns))
    return MemoryReport(step=step, devices=found, note=None if found else "no memory events in this step")


def _pair(trace: TraceView, rows: Integers) -> _Events:
    size, address = trace.column("bytes")[rows], trace.column("address")[rows]
    count = len(rows)
    # By address, then time: a release that follows an allocation of its address belongs to it.
    order = np.lexsort((np.arange(count), address))
    follows = (address[order][1:] == address[order][:-1]) & (size[order][:-1] > 0) & (size[order][1:] < 0)
    freed_by = np.full(count, count, np.int64)
    freed_by[order[:-1][follows]] = order[1:][follows]
    freed_by[size < 0] = 0
    total = trace.column("total_allocated")[rows]
    if (total < 0).any():
        total = np.cumsum(size) - min(0, int(np.cumsum(size).min()))
    return _Events(rows, trace.start[rows], size, total, trace.column("total_reserved")[rows], freed_by)


def _describe(trace: TraceView, events: _Events, part: slice, device: str, *, begin: int) -> DeviceMemory:
    total, size = events.total[part], events.size[part]
    start = int(total[0] - size[0])
    peak = part.start + int(np.argmax(total))
    places = np.arange(len(events.rows))
    taken = events.size > 0
    held = np.flatnonzero(taken & (places <= peak) & (events.freed_by > peak))
    inside = (places >= part.start) & (places < part.stop)
    kept = np.flatnonzero(taken & inside & (events.freed_by >= part.stop))
    at_peak = _by_operator(trace, events, held)
    unknown = int(events.total[peak]) - sum(one.bytes for one in at_peak)
    if unknown:
        at_peak.append(MemoryOf(operator=BEFORE, allocations=0, bytes=unknown))
    reserved = events.reserved[part]
    return DeviceMemory(
        device=device,
        events=len(total),
        peak_bytes=int(events.total[peak]),
        peak_reserved_bytes=int(reserved.max()) if (reserved >= 0).any() else None,
        peak_time_s=seconds(int(events.time[peak]) - begin),
        start_bytes=start,
        end_bytes=int(total[-1]),
        at_peak=sorted(at_peak, key=lambda one: -one.bytes),
        allocated_bytes=int(size[size > 0].sum()),
        freed_bytes=-int(size[size < 0].sum()),
        kept=_by_operator(trace, events, kept),
        timeline=_points(events, part, begin),
    )


def _by_operator(trace: TraceView, events: _Events, places: Integers) -> list[MemoryOf]:
    """By the innermost operator that was open on the allocating thread."""
    rows = events.rows[places]
    operator = trace.enclosing(trace.innermost_of(trace.thread[rows], trace.start[rows]), trace.is_kind(OPERATOR))
    codes = np.where(operator >= 0, trace.name[operator], MISSING)
    found = []
    for code in distinct(codes):
        mine = codes == code
        name = NO_OPERATOR if code == MISSING else trace.text(code)
        size = int(events.size[places[mine]].sum())
        found.append(MemoryOf(operator=name, allocations=int(mine.sum()), bytes=size))
    return sorted(found, key=lambda one: -one.bytes)


def _points(events: _Events, part: slice, begin: int) -> list[MemoryPoint]:
    """All events, or the highest of each of equally long segments where there are too many."""
    total = events.total[part]
    chosen = highest_places(total, MOST_POINTS)
    reserved = events.reserved[part][chosen]
    columns = {"time_s": (events.time[part][chosen] - begin) / 1e9, "allocated_bytes": total[chosen]}
    return make_rows(MemoryPoint, columns | {"reserved_bytes": known_only(reserved, reserved >= 0)})


def memory_section(job: JobReport) -> Section | None:
    if job.detail.memory is None:
        return None
    summary, charts, tables = [], [], []
    for device in job.detail.memory.devices:
        where = name_memory(device)
        holder = f", most of it from {device.at_peak[0].operator}" if device.at_peak else ""
        peak, start, end = map(format_bytes, (device.peak_bytes, device.start_bytes, device.end_bytes))
        summary.append(f"Memory of {where}: peak {peak}{holder}")
        caption = f"Memory of {where} in the step: peak {peak}, from {start} to {end}"
        charts.append(Chart("memory", f"Memory of {where}", caption, device))
        for title, text, rows in (
            (f"Held at the peak of {where}", "By the operator that allocated it", device.at_peak),
            (f"Kept by {where}", "Allocated in the step and still held at its end", device.kept),
        ):
            columns = [
                field("Bytes", "bytes", "B"),
                field("Allocations", "allocations", "count"),
                field("Allocated by", "operator"),
            ]
            tables.append(make_table(title, text, rows, columns))
    return Section(id="memory", title="Memory", summary=summary, charts=charts, tables=tables)


def name_memory(device: DeviceMemory) -> str:
    return device.device if device.device == "cpu" else f"device {device.device}"
