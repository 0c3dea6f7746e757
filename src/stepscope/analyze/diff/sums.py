"""What changed between two tables of sums (`nsys stats`): totals by name, without steps, overlap or idle time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from stepscope.analyze.diff.exposure import Identity
from stepscope.analyze.diff.matching import match_names
from stepscope.analyze.diff.records import Status
from stepscope.core.errors import UsageError
from stepscope.core.units import format_duration, format_share
from stepscope.formats.classify import CATEGORIES, base_name, classify_names, normal_name, short_name
from stepscope.formats.readers.nsys_stats import KernelSummary

MOST_NAMED = 3
LEAST_NAMED = 0.1
"""Share of the change below which a class is not named in the sentence."""
CALLS_APART = 0.02
"""Difference in the number of calls beyond which two recordings are said to hold different amounts of work."""


class SumChange(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel or call in both tables, or in one of them."""

    name: str
    short_name: str
    status: Status
    category: str
    calls_a: int
    calls_b: int
    a_s: float
    b_s: float
    change_s: float
    mean_a_s: float | None
    mean_b_s: float | None
    """Mean duration of one call; None where there is none."""
    from_calls_s: float
    """Part of the change because there are more or fewer calls, at A's duration (B's where it is new)."""
    from_duration_s: float
    """Part of the change because a call takes longer or shorter."""


class CategoryChange(msgspec.Struct, frozen=True, kw_only=True):
    """All kernels of one class."""

    category: str
    a_s: float
    b_s: float
    change_s: float


class SumsDiff(msgspec.Struct, frozen=True, kw_only=True):
    """B compared with A. Times are sums over the whole recording; work that overlapped counts twice."""

    sentence: str
    report: str
    """kernels or calls."""
    total_a_s: float
    total_b_s: float
    change_s: float
    calls_a: int
    calls_b: int
    categories: list[CategoryChange]
    """Largest change first; they add up to the change."""
    names: list[SumChange]
    """Largest change first; they add up to the change."""
    notes: list[str]


class _Total(NamedTuple):
    identity: Identity
    calls: int
    total_s: float


def diff_sums(a: KernelSummary, b: KernelSummary) -> SumsDiff:
    """UsageError where one holds sums of kernels and the other of calls."""
    if a.report != b.report:
        raise UsageError(
            f"A holds sums of {a.report}, B of {b.report}",
            hint="print both with the same --report of nsys stats",
            where="A and B",
        )
    ours, theirs = _totals(a), _totals(b)
    names = sorted(_changes(ours, theirs), key=lambda one: (-abs(one.change_s), one.name))
    categories = _by_category(names)
    calls_a, calls_b = (sum(one.calls for one in side) for side in (ours, theirs))
    notes = ["sums of two recordings: nothing is known of steps, overlap, idle time or noise"]
    if abs(calls_b - calls_a) > CALLS_APART * max(calls_a, calls_b):
        notes.append(
            f"A has {calls_a} calls, B {calls_b}: the recordings hold different amounts of work; compare times per call"
        )
    return SumsDiff(
        sentence=_sentence(a, b, categories),
        report=a.report,
        total_a_s=a.total_s,
        total_b_s=b.total_s,
        change_s=b.total_s - a.total_s,
        calls_a=calls_a,
        calls_b=calls_b,
        categories=categories,
        names=names,
        notes=notes,
    )


def _totals(side: KernelSummary) -> list[_Total]:
    """Rows whose names differ in spelling alone, together."""
    found: dict[str, _Total] = {}
    names = [normal_name(row.name) for row in side.rows]
    for row, name, category in zip(side.rows, names, classify_names([row.name for row in side.rows]), strict=True):
        before = found.get(name) or _Total(Identity("", CATEGORIES[category], name), 0, 0.0)
        found[name] = before._replace(calls=before.calls + row.count, total_s=before.total_s + row.total_s)
    return list(found.values())


def _changes(a: Sequence[_Total], b: Sequence[_Total]) -> list[SumChange]:
    def pair(only_a: list[int], only_b: list[int]) -> list[tuple[int, int]]:
        """Kernels that differ in their template arguments only, where one variant stands on each side."""
        by_base: dict[str, tuple[list[int], list[int]]] = {}
        for side, places in enumerate((only_a, only_b)):
            for place in places:
                by_base.setdefault(base_name((a, b)[side][place].identity.name), ([], []))[side].append(place)
        return [(ours[0], theirs[0]) for ours, theirs in by_base.values() if len(ours) == len(theirs) == 1]

    groups = match_names([one.identity for one in a], [one.identity for one in b], pair)
    return [
        _change(group.identity, group.status, [a[place] for place in group.a], [b[place] for place in group.b])
        for group in groups
    ]


def _change(identity: Identity, status: Status, a: Sequence[_Total], b: Sequence[_Total]) -> SumChange:
    (calls_a, a_s), (calls_b, b_s) = ((sum(t.calls for t in side), sum(t.total_s for t in side)) for side in (a, b))
    mean_a, mean_b = (total_s / calls if calls else None for calls, total_s in ((calls_a, a_s), (calls_b, b_s)))
    level = mean_a if mean_a is not None else mean_b or 0.0
    from_calls = (calls_b - calls_a) * level
    return SumChange(
        name=identity.name,
        short_name=short_name(identity.name),
        status=status,
        category=identity.category,
        calls_a=calls_a,
        calls_b=calls_b,
        a_s=a_s,
        b_s=b_s,
        change_s=b_s - a_s,
        mean_a_s=mean_a,
        mean_b_s=mean_b,
        from_calls_s=from_calls,
        from_duration_s=b_s - a_s - from_calls,
    )


def _by_category(names: Sequence[SumChange]) -> list[CategoryChange]:
    sums: dict[str, tuple[float, float]] = {}
    for one in names:
        a_s, b_s = sums.get(one.category, (0.0, 0.0))
        sums[one.category] = (a_s + one.a_s, b_s + one.b_s)
    changes = [CategoryChange(category=name, a_s=a, b_s=b, change_s=b - a) for name, (a, b) in sums.items()]
    return sorted(changes, key=lambda one: (-abs(one.change_s), one.category))


def _sentence(a: KernelSummary, b: KernelSummary, categories: Sequence[CategoryChange]) -> str:
    change_s = b.total_s - a.total_s
    what = "kernels" if a.report == "kernels" else "calls"
    if not change_s:
        return f"B's {what} take as long as A's in sum, {format_duration(a.total_s)}."
    share = f" ({format_share(abs(change_s) / a.total_s)})" if a.total_s else ""
    way = "longer" if change_s > 0 else "shorter"
    parts = [
        f"{'+' if one.change_s > 0 else '−'}{format_duration(abs(one.change_s))} {one.category}"
        for one in categories[:MOST_NAMED]
        if abs(one.change_s) >= LEAST_NAMED * abs(change_s)
    ]
    of = f": {', '.join(parts)}" if parts and what == "kernels" else ""
    return f"B's {what} take {format_duration(abs(change_s))}{share} {way} in sum than A's{of}."
