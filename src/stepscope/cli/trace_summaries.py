"""What `stepscope trace` says of files without a timeline: sums of `nsys stats`, memory timelines and snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.cli.output import emit, terminal_width
from stepscope.cli.trace_options import format_signed, require_numpy
from stepscope.core.errors import UsageError
from stepscope.core.units import format_duration, format_share

if TYPE_CHECKING:
    from stepscope.analyze.diff.names import SumChange, SumsDiff
    from stepscope.formats.readers.nsys_stats import KernelSummary

SHOWN = 10


def show_sums(source: str) -> bool:
    """False for anything that is no such table."""
    found = _read(source)
    if found is None:
        return False
    by_category = found.seconds_by_category()
    data = {**msgspec.to_builtins(found), "total_s": found.total_s, "by_category_s": by_category}
    emit(data, lambda: _format(found, by_category))
    return True


def show_memory(source: str) -> bool:
    """False for anything that is no memory timeline and no snapshot."""
    from stepscope.formats.memory import looks_like_memory, read_memory
    from stepscope.formats.source import read_head

    path = Path(source)
    if not path.is_file() or not looks_like_memory(head := read_head(path), path):
        return False
    require_numpy()
    from stepscope.analyze.memory_use import memory_section, memory_use
    from stepscope.report.trace_text import WIDTH, format_summary

    found = [memory_use(history) for history in read_memory(path, head)]
    width = terminal_width() or WIDTH
    lines = (line for use in found for line in format_summary(memory_section(use), width=width))
    emit({"memory": msgspec.to_builtins(found)}, lambda: "\n".join(lines))
    return True


def diff_two_sums(a: str, b: str, *, chosen: bool) -> bool:
    """False where neither is such a table. `chosen`: ranks or steps were asked for, which sums do not have."""
    from stepscope.analyze.diff.names import diff_sums

    sides = [_read(source) for source in (a, b)]
    if not any(sides):
        return False
    if sides[0] is None or sides[1] is None:
        with_sums, other = ("A", "B") if sides[0] else ("B", "A")
        raise UsageError(
            f"{with_sums} holds sums without a timeline, {other} does not",
            hint="compare two tables of `nsys stats`, or two traces: `nsys export --type sqlite` keeps the timeline",
            where=with_sums,
        )
    if chosen:
        raise UsageError("sums have no ranks and no steps", hint="leave out --rank, --steps-a and --steps-b")
    found = diff_sums(sides[0], sides[1])
    emit(msgspec.to_builtins(found), lambda: _format_diff(found))
    return True


def _read(source: str) -> KernelSummary | None:
    from stepscope.formats.readers.nsys_stats import read_summary, sniff_summary
    from stepscope.formats.source import read_head

    path = Path(source)
    return read_summary(path) if path.is_file() and sniff_summary(read_head(path), path) else None


def _format(found: KernelSummary, by_category: dict[str, float]) -> str:
    from stepscope.formats.classify import short_name

    largest = sorted(found.rows, key=lambda row: -row.total_s)[:SHOWN]
    return "\n".join(
        [
            f"{len(found.rows)} {found.report}, {format_duration(found.total_s)} in sum",
            "no timeline: nothing is known of steps, overlap or idle time",
            *(
                f"  {category:14} {format_duration(spent):>10}  {format_share(spent / found.total_s):>7}"
                for category, spent in sorted(by_category.items(), key=lambda item: -item[1])
            ),
            "largest:",
            *(
                f"  {format_duration(row.total_s):>10}  {row.count:>8} ×  {short_name(row.name)[:80]}"
                for row in largest
            ),
        ]
    )


def _format_diff(found: SumsDiff) -> str:
    return "\n".join(
        [
            found.sentence,
            f"A takes {format_duration(found.total_a_s)} in {found.calls_a} calls",
            f"B takes {format_duration(found.total_b_s)} in {found.calls_b} calls",
            "by class, A and B (the changes add up):",
            *(
                f"  {format_signed(one.change_s):>11}  {one.category:14} {format_duration(one.a_s):>10} "
                f"{format_duration(one.b_s):>10}"
                for one in found.categories
            ),
            "by name, largest change first; time per call and number of calls, A → B:",
            *(_format_name(one) for one in found.names[:SHOWN]),
            *(f"note: {note}" for note in found.notes),
        ]
    )


def _format_name(one: SumChange) -> str:
    a, b = ("none" if mean is None else format_duration(mean) for mean in (one.mean_a_s, one.mean_b_s))
    word = "" if one.status == "same" else f" ({one.status})"
    return f"  {format_signed(one.change_s):>11}  {a} → {b}, {one.calls_a} → {one.calls_b}  {one.short_name[:60]}{word}"
