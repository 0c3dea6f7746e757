"""Which kernels, operators, modules and phases the device time of a step went to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.analyze.section import Brief, Field, Section, Table, field, make_table
from stepscope.analyze.step.intervals import length
from stepscope.analyze.step.kernel_groups import (
    PHASES,
    TimesTable,
    find_annotations,
    find_modules,
    find_phases,
    tabulate,
)
from stepscope.analyze.step.numbers import make_rows, number_codes, seconds, sum_by
from stepscope.analyze.step.view import TraceView, view
from stepscope.core.units import count_of, format_duration
from stepscope.formats.classify import CATEGORIES, short_name
from stepscope.formats.timeline import (
    ANNOTATION,
    COPY,
    DEVICE_ANNOTATION,
    DEVICE_KINDS,
    KERNEL,
    MISSING,
    OPERATOR,
    SET,
    Integers,
    Timeline,
)

if TYPE_CHECKING:
    from stepscope.analyze.job import JobReport

NO_OPERATOR = "no operator recorded"
NO_MODULE = "outside modules"
NO_ANNOTATION = "outside annotations"
NO_MODULES_NOTE = "modules do not apply: the trace has no nn.Module rows (record it with stacks to get them)"
NO_DEVICE_NOTE = "no device rows in this trace: kernels do not apply; see host operators"


class KernelName(msgspec.Struct, frozen=True, kw_only=True):
    """What the names of the table stand for."""

    short: str
    category: str


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """Copies or fills of one direction and kind of memory."""

    name: str
    count: int
    bytes: int
    sum_s: float
    busy_s: float
    """Time in which any of them ran."""
    bytes_per_s: float | None
    """bytes over busy_s; None where the trace has no sizes or no time passed."""


class HostOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator on the host."""

    name: str
    count: int
    total_s: float
    """Time inside, what it calls included; inside itself counted once."""
    self_s: float
    """Without the operators it calls."""
    share: float
    """Fraction of the self time of all operators."""


class KernelTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Device work that a step launched, on all devices of the rank, by name and by class."""

    step: int | None
    kernels: int
    copies: int
    sum_s: float
    """Sum of all durations: what shares are of."""
    by_name: TimesTable
    names: dict[str, KernelName]
    """Name as in the trace → how to show it."""
    by_category: TimesTable


class AnnotationTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Annotations by name. Those inside others count for themselves, so the sum may be more than the time passed."""

    step: int | None
    host: TimesTable
    device: TimesTable


class KernelReport(KernelTimes, frozen=True, kw_only=True):
    """The same work, grouped in more ways."""

    by_operator: TimesTable
    """Innermost operator that launched the work."""
    by_top_operator: TimesTable
    """Outermost one."""
    by_phase: TimesTable
    by_module: TimesTable | None
    by_annotation: TimesTable
    transfers: list[Transfer]
    host_operators: list[HostOperator]
    """Most self time first."""
    notes: list[str]


def list_kernels(timeline: Timeline, step: int | None) -> KernelReport:
    """The device work of one step; None: of the whole trace."""
    trace = view(timeline)
    rows = trace.rows_of(step, *DEVICE_KINDS)
    durations = trace.end[rows] - trace.start[rows]
    is_operator = trace.is_kind(OPERATOR)
    inner = trace.enclosing(trace.parent[rows], is_operator)
    outer = trace.outermost(inner, is_operator)
    modules = find_modules(trace, rows)
    notes = [] if len(rows) else [NO_DEVICE_NOTE]
    if modules is None and len(rows):
        notes.append(NO_MODULES_NOTE)
    return KernelReport(
        **msgspec.structs.asdict(kernel_times(timeline, step)),
        by_operator=_by_row(trace, inner, durations, NO_OPERATOR),
        by_top_operator=_by_row(trace, outer, durations, NO_OPERATOR),
        by_phase=tabulate(PHASES, find_phases(trace, rows), durations),
        by_module=None if modules is None else _by_row(trace, modules, durations, NO_MODULE),
        by_annotation=_by_row(trace, find_annotations(trace, rows), durations, NO_ANNOTATION),
        transfers=list_transfers(timeline, step),
        host_operators=list_host_operators(trace, step),
        notes=notes,
    )


def kernel_times(timeline: Timeline, step: int | None) -> KernelTimes:
    """Only what the device itself tells: part of `list_kernels`, sooner."""
    trace = view(timeline)
    rows = trace.rows_of(step, *DEVICE_KINDS)
    durations = trace.end[rows] - trace.start[rows]
    kernels = int((trace.kind[rows] == KERNEL).sum())
    category = trace.column("category")[rows]
    by_name = _by_text(trace, trace.name[rows], durations, "")
    # A kernel that is communication by its record and something else by its name shows the first row's category.
    first = np.full(len(trace.timeline.texts), len(CATEGORIES))
    first[trace.name[rows][::-1]] = category[::-1]  # the last one written stays: backwards, the first
    categories = {trace.text(code): CATEGORIES[first[code]] for code in trace.codes_in(rows)}
    return KernelTimes(
        step=step,
        kernels=kernels,
        copies=len(rows) - kernels,
        sum_s=seconds(int(durations.sum())),
        by_name=by_name,
        names={row.name: KernelName(short=short_name(row.name), category=categories[row.name]) for row in by_name.rows},
        by_category=tabulate(CATEGORIES, category.astype(int), durations),
    )


def _by_row(trace: TraceView, rows: Integers, durations: Integers, otherwise: str) -> TimesTable:
    """By the names of these rows; −1 goes to `otherwise`."""
    return _by_text(trace, np.where(rows >= 0, trace.name[rows], MISSING), durations, otherwise)


def _by_text(trace: TraceView, codes: Integers, durations: Integers, otherwise: str) -> TimesTable:
    count = len(trace.timeline.texts)
    different, group = number_codes(np.where(codes >= 0, codes, count), count + 1)
    return tabulate([trace.text(code) if code < count else otherwise for code in different], group, durations)


def time_annotations(timeline: Timeline, step: int | None) -> AnnotationTimes:
    """How long annotations took, on the host and as the profiler repeats them on the device; part of a step or (None)
    of the whole trace. What ran inside them: `by_annotation` of `list_kernels`."""
    trace = view(timeline)
    rows = trace.rows_of(step, ANNOTATION, DEVICE_ANNOTATION)
    name, durations, is_host = trace.name[rows], trace.end[rows] - trace.start[rows], trace.kind[rows] == ANNOTATION
    host, device = (_by_text(trace, name[mine], durations[mine], "") for mine in (is_host, ~is_host))
    return AnnotationTimes(step=step, host=host, device=device)


def list_transfers(timeline: Timeline, step: int | None) -> list[Transfer]:
    """Copies and fills of one step (None: of the whole trace) with their bandwidth: part of `list_kernels`, sooner."""
    trace = view(timeline)
    transfers = trace.rows_of(step, COPY, SET)
    if not len(transfers):
        return []
    sizes = trace.column("bytes")[transfers]
    found = []
    for code in trace.codes_in(transfers):
        mine = trace.name[transfers] == code
        size = int(sizes[mine][sizes[mine] > 0].sum())
        busy = length(trace.spans(transfers[mine]))
        found.append(
            Transfer(
                name=trace.text(code),
                count=int(mine.sum()),
                bytes=size,
                sum_s=seconds(int((trace.end[transfers[mine]] - trace.start[transfers[mine]]).sum())),
                busy_s=seconds(busy),
                bytes_per_s=size / seconds(busy) if size and busy else None,
            )
        )
    return sorted(found, key=lambda one: -one.busy_s)


def list_host_operators(trace: TraceView, step: int | None) -> list[HostOperator]:
    rows = trace.rows_of(step, OPERATOR)
    if not len(rows):
        return []
    is_operator = trace.is_kind(OPERATOR)
    durations = trace.end[rows] - trace.start[rows]
    caller = trace.enclosing(trace.parent[rows], is_operator)
    inside = np.flatnonzero(caller >= 0)
    calling, called = caller[inside], rows[inside]
    # A child that ends after its caller takes no more from it than it shares with it.
    shared = np.minimum(trace.end[called], trace.end[calling]) - trace.start[called]
    # Sums of nanoseconds: as numbers with fractions exact for a hundred days.
    inner = np.bincount(calling, weights=shared, minlength=len(trace.start))[rows]
    name = trace.name[rows]
    different, group = number_codes(name, len(trace.timeline.texts))
    nested = inside[trace.name[calling] == name[inside]]
    selfs = sum_by(group, np.maximum(durations - inner, 0), len(different))
    totals = sum_by(group, durations, len(different)) - sum_by(group[nested], durations[nested], len(different))
    order = np.argsort(-selfs, kind="stable")
    columns = {"name": [trace.text(different[place]) for place in order.tolist()], "count": np.bincount(group)[order]}
    columns |= {"total_s": totals[order] / 1e9, "self_s": selfs[order] / 1e9}
    return make_rows(HostOperator, columns | {"share": selfs[order] / max(int(selfs.sum()), 1)})


def kernels_section(job: JobReport) -> Section | None:
    kernels = job.detail.kernels
    names = _times_table("Kernels", "Device work by name", kernels.by_name, [
        field("Class", lambda row: kernels.names[row.name].category, brief=1),
        field("Kernel", "name", "name", "In short; the whole name when the pointer rests on it", brief=1),
    ])  # fmt: skip
    operator = field("Operator", "name", brief=1)
    operators = _times_table(
        "By operator", "By the innermost operator around the launch", kernels.by_operator, [operator]
    )
    others = [
        _times_table(title, caption, times, [field(what, "name")])
        for title, caption, times, what in (
            ("By class", "Device work by class of kernel", kernels.by_category, "Class"),
            ("By outermost operator", "By the outermost operator around the launch", kernels.by_top_operator,
             "Operator"),
            ("By phase", "Device work by phase of training", kernels.by_phase, "Phase"),
            ("By annotation", "Device work by the innermost annotation around its launch", kernels.by_annotation,
             "Annotation"),
            ("By module", "Device work by the innermost nn.Module", kernels.by_module, "Module"),
        )
        if times is not None
    ]  # fmt: skip
    transfers = make_table("Copies and fills", "By direction and kind of memory", kernels.transfers, [
        field("Time", "busy_s", "s"),
        field("Count", "count", "count"),
        field("Bytes", "bytes", "B"),
        field("Rate", "bytes_per_s", "B/s"),
        field("Copy", "name"),
    ])  # fmt: skip
    if not any(table.rows for table in (names, operators, *others)):
        return None
    counts = f"{count_of(kernels.kernels, 'kernel')}, {count_of(kernels.copies, 'copy or fill', 'copies and fills')}"
    return Section(
        id="device",
        title="Device work",
        summary=[
            Brief(f"Device work: {counts}, {format_duration(kernels.sum_s)} in sum", names, 5, "names"),
            Brief("Device time by operator", operators, 3, "operators"),
        ],
        facts=[
            ("Kernels", str(kernels.kernels)),
            ("Copies and fills", str(kernels.copies)),
            ("Sum of durations", format_duration(kernels.sum_s)),
            ("Busy", format_duration(job.detail.breakdown.device_busy_s)),
        ],
        tables=[names._replace(is_folded=False), others[0], operators, *others[1:], transfers],
    )


def _times_table(title: str, caption: str, times: TimesTable, named: Sequence[Field]) -> Table:
    more = f"; the first {times.covering} cover 80 % of the time" if times.rows else ""
    return make_table(title, caption + more, times.rows, [
        field("Time", "total_s", "s", brief=1),
        field("% of work", "share", "share", "Of the sum of device work", brief=1),
        field("Count", "count", "count", brief=1),
        field("Median", "median_s", "s", brief=1),
        field("p95", "p95_s", "s"),
        field("Longest", "max_s", "s"),
        *named,
    ])  # fmt: skip


def operators_section(job: JobReport) -> Section | None:
    kernels = job.detail.kernels
    on_cpu = not kernels.by_name.rows
    table = make_table("Operators on the host", "Profiled host time by operator", kernels.host_operators, [
        field("Self time", "self_s", "s", "Without the operators it calls", brief=1),
        field("% of self", "share", "share", "Of the self times of all operators", brief=1),
        field("Count", "count", "count", brief=1),
        field("Total time", "total_s", "s", brief=1),
        field("Operator", "name", brief=1),
    ], is_folded=not on_cpu)  # fmt: skip
    summary = [Brief("Operators on the host", table, 5, "operators")] if on_cpu and table.rows else []
    return Section(id="operators", title="Operators on the host", summary=summary, tables=[table])
