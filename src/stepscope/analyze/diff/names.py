"""Names of two traces: which mean the same, and what changed between two tables of sums by name.

Equal names mean the same, and so do kernels that another version or device calls otherwise. Tables of sums (`nsys
stats`) have totals by name, without steps, overlap or idle time.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.diff.exposure import Identity, TraceSide, innermost_operator, operators_around
from stepscope.analyze.diff.records import Status, TraceChange
from stepscope.core.errors import UsageError
from stepscope.core.units import format_duration, format_share
from stepscope.formats.classify import CATEGORIES, base_name, classify_names, normal_name, short_name
from stepscope.formats.nesting import nest
from stepscope.formats.readers.nsys_stats import KernelSummary
from stepscope.formats.timeline import MISSING, OPERATOR, Integers, Timeline

LEAST_SHARED = 0.5
"""Fraction of the calls of both names that must stand in the same places for one to be the other under a new name."""


class NameGroup(NamedTuple):
    """Columns of both tables that are compared with each other."""

    status: Status
    identity: Identity
    a: list[int]
    b: list[int]


def match_names(
    a: Sequence[Identity], b: Sequence[Identity], pair: Callable[[list[int], list[int]], list[tuple[int, int]]]
) -> list[NameGroup]:
    """Equal names first; `pair` is asked for the rest: which of A's is which of B's."""
    by_name: dict[Hashable, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, identities in enumerate((a, b)):
        for place, identity in enumerate(identities):
            by_name[identity.share, identity.name][side].append(place)
    groups = []
    only_a: list[int] = []
    only_b: list[int] = []
    for ours, theirs in by_name.values():
        if ours and theirs:
            groups.append(NameGroup("same", _joint(a[ours[0]], b[theirs[0]]), ours, theirs))
        else:
            only_a += ours
            only_b += theirs
    pairs = pair(only_a, only_b) if only_a and only_b else []
    for one, other in pairs:
        groups.append(NameGroup("renamed", _joint(a[one], b[other]), [one], [other]))
    taken_a, taken_b = {one for one, _ in pairs}, {other for _, other in pairs}
    groups += [NameGroup("removed", a[one], [one], []) for one in only_a if one not in taken_a]
    groups += [NameGroup("added", b[one], [], [one]) for one in only_b if one not in taken_b]
    return groups


def _joint(a: Identity, b: Identity) -> Identity:
    """Under B's name; in the category that says more."""
    return b._replace(category=a.category if b.category == "other" or a.category != "other" else b.category)


def pair_renamed(
    a: TraceSide, b: TraceSide, names: tuple[Sequence[Identity], Sequence[Identity]], which: tuple[Integers, Integers]
) -> Callable[[list[int], list[int]], list[tuple[int, int]]]:
    """Pairs of kernels that stand at the same places: same operators around, same shapes, same turn in the operator.

    Where shapes differ (another batch size), the place alone; where the trace has no operators, kernels that differ in
    their template arguments only.
    """

    a_names, b_names = names

    def pair(only_a: list[int], only_b: list[int]) -> list[tuple[int, int]]:
        left_a, left_b = set(only_a), set(only_b)
        found: list[tuple[int, int]] = []
        for key_a, key_b in zip(find_sites(a), find_sites(b), strict=True):
            scores = _shared_calls((key_a, which[0]), (key_b, which[1]), left_a, left_b)
            found += _take_best(scores, names, left_a, left_b)
        variants = pair_variants(a_names, b_names, sorted(left_a), sorted(left_b))
        return found + [(one, other) for one, other in variants if a_names[one].share == b_names[other].share]

    return pair


def pair_variants(
    a: Sequence[Identity], b: Sequence[Identity], only_a: Sequence[int], only_b: Sequence[int]
) -> list[tuple[int, int]]:
    """Kernels that differ in their template arguments only. Several variants on one side cannot be told apart."""
    by_base: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, (identities, places) in enumerate(((a, only_a), (b, only_b))):
        for place in places:
            by_base[base_name(identities[place].name)][side].append(place)
    return [(ours[0], theirs[0]) for ours, theirs in by_base.values() if len(ours) == len(theirs) == 1]


def _take_best(
    scores: dict[tuple[int, int], float],
    names: tuple[Sequence[Identity], Sequence[Identity]],
    left_a: set[int],
    left_b: set[int],
) -> list[tuple[int, int]]:
    """The best pairs first; what is paired is taken out of what is left."""
    found = []
    for (one, other), score in sorted(scores.items(), key=lambda item: (-item[1], item[0])):
        same_share = names[0][one].share == names[1][other].share
        if score >= LEAST_SHARED and same_share and one in left_a and other in left_b:
            found.append((one, other))
            left_a.discard(one)
            left_b.discard(other)
    return found


def _shared_calls(
    a: tuple[Integers, Integers], b: tuple[Integers, Integers], left_a: set[int], left_b: set[int]
) -> dict[tuple[int, int], float]:
    """For names that meet at some place: which share of the calls of both does."""
    counts_a, counts_b = _count_at_sites(*a, left_a), _count_at_sites(*b, left_b)
    totals_a, totals_b = (sum(map(Counter, counts.values()), Counter()) for counts in (counts_a, counts_b))
    shared: dict[tuple[int, int], float] = defaultdict(float)
    for site in counts_a.keys() & counts_b.keys():
        for one, calls in counts_a[site].items():
            for other, others in counts_b[site].items():
                # Traces may hold different numbers of steps: shares of all calls, not calls.
                shared[one, other] += min(calls / totals_a[one], others / totals_b[other])
    return dict(shared)


def _count_at_sites(keys: Integers, which: Integers, wanted: set[int]) -> dict[int, dict[int, int]]:
    mine = np.flatnonzero(np.isin(which, list(wanted)) & (keys != 0))
    if not len(mine):
        return {}
    pairs, calls = np.unique(np.stack([keys[mine], which[mine].astype(np.int64)], axis=1), axis=0, return_counts=True)
    counts: dict[int, dict[int, int]] = defaultdict(dict)
    for (site, name), count in zip(pairs.tolist(), calls.tolist(), strict=True):
        counts[site][name] = count
    return counts


def find_sites(side: TraceSide) -> tuple[Integers, Integers, Integers]:
    """For each row of work where it stands in the program, in three ways from strict to loose.

    As numbers that are equal in both traces: operators around it, turn and shapes; without shapes; operators alone.
    0 for work that no operator launched.
    """
    operator = innermost_operator(side, side.work.rows)
    there = operator >= 0
    path = operator_paths(side)[operator]
    place = _mix(path, _turn_in_operator(operator))
    shapes = np.where(there, side.trace.column("shapes")[operator], MISSING)
    with_shapes = _mix(place, _text_numbers(side.timeline, shapes))
    return np.where(there, with_shapes, 0), np.where(there, place, 0), np.where(there, path, 0)


def operator_paths(side: TraceSide) -> Integers:
    """For each operator a number for its name and those of all operators around it, outermost to innermost."""
    rows = side.trace.rows(OPERATOR)
    above = operators_around(side, rows)
    numbers = _text_numbers(side.timeline, side.trace.name[rows])
    paths = np.zeros(len(side.timeline) + 1, np.int64)
    place = np.full(len(side.timeline) + 1, MISSING, np.int64)
    place[rows] = np.arange(len(rows))
    outermost, *deeper = nest(place[above]).levels
    paths[rows[outermost]] = numbers[outermost]
    for level in deeper:
        paths[rows[level]] = _mix(paths[above[level]], numbers[level])
    found: Integers = paths
    return found


def _turn_in_operator(operator: Integers) -> Integers:
    """How many works of the same operator come before each."""
    order = np.argsort(operator, kind="stable")
    grouped = operator[order]
    first = np.searchsorted(grouped, grouped, side="left")
    turn = np.empty(len(operator), np.int64)
    turn[order] = np.arange(len(operator)) - first
    return turn


def _text_numbers(timeline: Timeline, codes: Any) -> Integers:
    """A number for each text that is the same in every trace."""
    different, place = np.unique(codes, return_inverse=True)
    numbers = []
    for code in different.tolist():
        text = "" if code == MISSING else timeline.texts[code]
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        numbers.append(int.from_bytes(digest, "little", signed=True) | 1)
    found: Integers = np.array(numbers, np.int64)[place.reshape(-1)]
    return found


def _mix(one: Any, other: Any) -> Any:
    """Two numbers made one; never 0."""
    mixed = one.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed = (mixed + other.astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return (mixed | np.uint64(1)).astype(np.int64)


MOST_NAMED = 3
LEAST_NAMED = 0.1
"""Share of the change below which a class is not named in the sentence."""
CALLS_APART = 0.02
"""Difference in the number of calls beyond which two recordings are said to hold different amounts of work."""


class SumChange(TraceChange, frozen=True, kw_only=True):
    """A kernel or call in both tables, or in one of them."""

    category: str
    calls_a: int
    calls_b: int


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
    ours, theirs = _sum_by_name(a), _sum_by_name(b)
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


def _sum_by_name(side: KernelSummary) -> list[_Total]:
    """Rows whose names differ in spelling alone, together."""
    found: dict[str, _Total] = {}
    names = [normal_name(row.name) for row in side.rows]
    for row, name, category in zip(side.rows, names, classify_names([row.name for row in side.rows]), strict=True):
        before = found.get(name) or _Total(Identity("", CATEGORIES[category], name), 0, 0.0)
        found[name] = before._replace(calls=before.calls + row.count, total_s=before.total_s + row.total_s)
    return list(found.values())


def _changes(a: Sequence[_Total], b: Sequence[_Total]) -> list[SumChange]:
    names_a, names_b = [one.identity for one in a], [one.identity for one in b]
    return [
        _change(group.identity, group.status, [a[place] for place in group.a], [b[place] for place in group.b])
        for group in match_names(names_a, names_b, partial(pair_variants, names_a, names_b))
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
