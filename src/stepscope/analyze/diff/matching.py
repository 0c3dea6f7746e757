"""Which names of two traces mean the same: equal ones, and kernels that another version or device calls otherwise."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from stepscope.analyze.diff.exposure import Identity, Side, innermost_operator, operators_around
from stepscope.analyze.diff.records import Status
from stepscope.formats.classify import base_name
from stepscope.formats.timeline import MISSING, OPERATOR, Integers, Timeline

LEAST_SHARED = 0.5
"""Fraction of the calls of both names that must stand in the same places for one to be the other under a new name."""


class Group(NamedTuple):
    """Columns of both tables that are compared with each other."""

    status: Status
    identity: Identity
    a: list[int]
    b: list[int]


def match_names(
    a: Sequence[Identity], b: Sequence[Identity], pair: Callable[[list[int], list[int]], list[tuple[int, int]]]
) -> list[Group]:
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
            groups.append(Group("same", _joint(a[ours[0]], b[theirs[0]]), ours, theirs))
        else:
            only_a += ours
            only_b += theirs
    pairs = pair(only_a, only_b) if only_a and only_b else []
    for one, other in pairs:
        groups.append(Group("renamed", _joint(a[one], b[other]), [one], [other]))
    taken_a, taken_b = {one for one, _ in pairs}, {other for _, other in pairs}
    groups += [Group("removed", a[one], [one], []) for one in only_a if one not in taken_a]
    groups += [Group("added", b[one], [], [one]) for one in only_b if one not in taken_b]
    return groups


def _joint(a: Identity, b: Identity) -> Identity:
    """Under B's name; in the category that says more."""
    return b._replace(category=a.category if b.category == "other" or a.category != "other" else b.category)


def pair_renamed(
    a: Side, b: Side, names: tuple[Sequence[Identity], Sequence[Identity]], which: tuple[Integers, Integers]
) -> Callable[[list[int], list[int]], list[tuple[int, int]]]:
    """Pairs of kernels that stand at the same places: same operators around, same shapes, same turn in the operator.

    Where shapes differ (another batch size), the place alone; where the trace has no operators, kernels that differ in
    their template arguments only.
    """

    def pair(only_a: list[int], only_b: list[int]) -> list[tuple[int, int]]:
        left_a, left_b = set(only_a), set(only_b)
        found: list[tuple[int, int]] = []
        for key_a, key_b in zip(find_sites(a), find_sites(b), strict=True):
            scores = _shared_calls((key_a, which[0]), (key_b, which[1]), left_a, left_b)
            found += _take_best(scores, names, left_a, left_b)
        by_base = {
            (one, other): 1.0
            for one in left_a
            for other in left_b
            if base_name(names[0][one].name) == base_name(names[1][other].name)
        }
        # Several variants on one side cannot be told apart by name alone.
        ours, theirs = [one for one, _ in by_base], [other for _, other in by_base]
        single = {key: score for key, score in by_base.items() if ours.count(key[0]) == theirs.count(key[1]) == 1}
        return found + _take_best(single, names, left_a, left_b)

    return pair


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
    totals_a, totals_b = _totals(counts_a), _totals(counts_b)
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


def _totals(counts: dict[int, dict[int, int]]) -> dict[int, int]:
    totals: dict[int, int] = defaultdict(int)
    for names in counts.values():
        for name, calls in names.items():
            totals[name] += calls
    return totals


def find_sites(side: Side) -> tuple[Integers, Integers, Integers]:
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


def operator_paths(side: Side) -> Integers:
    """For each operator a number for its name and those of all operators around it, outermost to innermost."""
    rows = side.trace.rows(OPERATOR)
    above = operators_around(side, rows)
    numbers = _text_numbers(side.timeline, side.trace.name[rows])
    paths = np.zeros(len(side.timeline) + 1, np.int64)
    ready = above < 0
    paths[rows[ready]] = numbers[ready]
    waiting = np.flatnonzero(~ready)
    while len(waiting):
        known = paths[above[waiting]] != 0
        now = waiting[known]
        if not len(now):
            break
        paths[rows[now]] = _mix(paths[above[now]], numbers[now])
        waiting = waiting[~known]
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
