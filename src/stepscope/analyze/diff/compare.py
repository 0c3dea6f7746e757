"""Two traces side by side, step against step; of two jobs, the ranks to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.diff.exposure import (
    DEVICE_VARIATION,
    HOST_VARIATION,
    MIN_EFFECT,
    NO_OPERATOR,
    NameTotals,
    Table,
    TraceSide,
    are_clear,
    complete_steps,
    count_idle,
    count_operators,
    count_work,
    known_steps,
    middle_steps,
    noise_of_step,
    p_values,
)
from stepscope.analyze.diff.names import NameGroup, match_names, pair_renamed
from stepscope.analyze.diff.records import (
    Contribution,
    NameChange,
    NameVerdict,
    Part,
    RankSteps,
    StepsUsed,
    TraceDiff,
    Verdict,
    describe_change,
    list_notes,
)
from stepscope.analyze.step.numbers import MAD_TO_SD, Mask, seconds
from stepscope.analyze.step.view import view
from stepscope.core.errors import UsageError
from stepscope.formats.classify import short_name
from stepscope.formats.timeline import Timeline

EXPLAINED = 0.5, 1.5
"""Shares of the change of a step between which clear contributions must lie to make the change one."""


def diff_traces(
    a: Timeline, b: Timeline, steps_a: Sequence[int] | None = None, steps_b: Sequence[int] | None = None
) -> TraceDiff:
    """What made B's profiled step longer or shorter than A's.

    Without `steps_a` and `steps_b` all complete steps are looked at. Values are means over the steps of middle length,
    so traces with different numbers of steps can be compared; a difference counts only where it is larger than what
    steps of one trace differ by. The contributions add up to the change of the step to the nanosecond.
    """
    sides = _Pair(_side(a, steps_a, "A"), _side(b, steps_b, "B"))
    (names_a, which_a), (names_b, which_b) = count_work(sides.a), count_work(sides.b)
    pair = pair_renamed(sides.a, sides.b, (names_a.identities, names_b.identities), (which_a, which_b))
    groups = match_names(names_a.identities, names_b.identities, pair)
    contributions = _contributions(sides, groups, (names_a, names_b))
    kernels = _changes(sides, groups, (names_a, names_b), DEVICE_VARIATION) if sides.have_devices else []
    each = count_operators(sides.a), count_operators(sides.b)
    groups = match_names(each[0].identities, each[1].identities, lambda only_a, only_b: [])
    operators = _changes(sides, groups, each, HOST_VARIATION)
    change_ns = sum(contribution.change_ns for contribution in contributions)
    step_a, step_b = sides.step_s
    noise = noise_of_step(*sides.durations, (step_a + step_b) / 2)
    diff = TraceDiff(
        sentence="",
        verdict=_step_verdict(sides, step_b - step_a, noise.noise_s, contributions),
        rank_a=a.rank,
        rank_b=b.rank,
        step_a_s=step_a,
        step_b_s=step_b,
        change_s=seconds(change_ns),
        change_ns=change_ns,
        change_share=(step_b - step_a) / step_a if step_a else None,
        noise_s=noise.noise_s,
        noise_assumed=noise.assumed,
        a=sides.describe(0),
        b=sides.describe(1),
        contributions=contributions,
        kernels=kernels,
        operators=operators,
        counts=_count(kernels, operators),
        notes=list_notes(sides.a, sides.b),
    )
    return msgspec.structs.replace(diff, sentence=describe_change(diff))


class _Pair:
    """Both sides, with the steps that represent each."""

    def __init__(self, a: TraceSide, b: TraceSide) -> None:
        self.a = a
        self.b = b
        lengths = [np.array([window.length_ns for window in side.windows], np.int64) for side in (a, b)]
        self.middle = [middle_steps(length) for length in lengths]
        self.durations: tuple[Any, Any] = (lengths[0] / 1e9, lengths[1] / 1e9)
        means = [seconds(float(length[middle].mean())) for length, middle in zip(lengths, self.middle, strict=True)]
        self.step_s = (means[0], means[1])

    @property
    def have_devices(self) -> bool:
        return self.a.has_device and self.b.has_device

    def means(self, a: Table, b: Table) -> tuple[Table, Table]:
        """Seconds a step, over the steps that count."""
        return a[self.middle[0]].mean(axis=0), b[self.middle[1]].mean(axis=0)

    def changes_ns(self, a: Table, b: Table) -> list[int]:
        """Whole nanoseconds that add up: numerators are exact, and what rounding leaves goes to the largest rests."""
        sums_a, count_a = a[self.middle[0]].sum(axis=0), int(self.middle[0].sum())
        sums_b, count_b = b[self.middle[1]].sum(axis=0), int(self.middle[1].sum())
        numerators = [
            int(after) * count_a - int(before) * count_b
            for before, after in zip(sums_a.tolist(), sums_b.tolist(), strict=True)
        ]
        return apportion(numerators, count_a * count_b)

    def describe(self, number: int) -> StepsUsed:
        side = (self.a, self.b)[number]
        durations = np.asarray(self.durations[number])
        median = float(np.median(durations))
        return StepsUsed(
            source=side.trace.source,
            marker=side.timeline.step_marker,
            numbers=side.numbers,
            middle=[step for step, is_middle in zip(side.numbers, self.middle[number], strict=True) if is_middle],
            durations_s=durations.tolist(),
            step_s=self.step_s[number],
            median_s=median,
            spread_s=MAD_TO_SD * float(np.median(np.abs(durations - median))) if len(durations) > 1 else None,
            device=side.device,
        )


def apportion(numerators: Sequence[int], denominator: int) -> list[int]:
    """Each quotient rounded down or up, so that all add up to the rounded sum."""
    wholes = [numerator // denominator for numerator in numerators]
    rests = [numerator % denominator for numerator in numerators]
    total = (2 * sum(numerators) + denominator) // (2 * denominator)
    missing = total - sum(wholes)
    for place in sorted(range(len(rests)), key=lambda place: -rests[place])[:missing]:
        wholes[place] += 1
    return wholes


def _side(timeline: Timeline, steps: Sequence[int] | None, which: str) -> TraceSide:
    if not timeline.steps:
        raise UsageError(f"trace {which} has no events to compare", where=view(timeline).source)
    return TraceSide(timeline, steps)


def _gather(table: Table, columns: Sequence[list[int]]) -> Table:
    """One column per group: the sum of its columns."""
    gathered = np.zeros((len(table), len(columns)))
    for place, mine in enumerate(columns):
        if mine:
            gathered[:, place] = table[:, mine].sum(axis=1)
    return gathered


def _contributions(
    sides: _Pair, groups: Sequence[NameGroup], names: tuple[NameTotals, NameTotals]
) -> list[Contribution]:
    """All that makes up a step, by share and category."""
    (idle_a, spent_a), (idle_b, spent_b) = count_idle(sides.a), count_idle(sides.b)
    idle_groups = match_names(idle_a, idle_b, lambda only_a, only_b: [])
    identities = [group.identity for group in [*groups, *idle_groups]]
    a = np.hstack([_gather(names[0].exposed_ns, [g.a for g in groups]), _gather(spent_a, [g.a for g in idle_groups])])
    b = np.hstack([_gather(names[1].exposed_ns, [g.b for g in groups]), _gather(spent_b, [g.b for g in idle_groups])])
    changes, part_a, part_b = sides.changes_ns(a, b), *(means.tolist() for means in sides.means(a, b))
    members: dict[tuple[str, str], list[int]] = {}
    for place, identity in enumerate(identities):
        members.setdefault((identity.share, identity.category), []).append(place)
    a, b = _gather(a, list(members.values())), _gather(b, list(members.values()))
    clear = _clear_contributions(sides, a, b, [share.endswith("_idle") for share, _ in members])
    found = []
    for number, ((share, category), places) in enumerate(members.items()):
        change_ns = sum(changes[place] for place in places)
        parts = [
            Part(name=identities[place].name, **_before_and_after(part_a[place], part_b[place], changes[place]))
            for place in places
            if part_a[place] or part_b[place] or changes[place]
        ]
        before, after = (sum(means[place] for place in places) for means in (part_a, part_b))
        found.append(
            Contribution(
                share=share,
                name=category,
                **_before_and_after(before, after, change_ns),
                share_of_change=change_ns / sum(changes) if sum(changes) else None,
                clear=clear[number],
                a_steps_s=(a[:, number] / 1e9).tolist(),
                b_steps_s=(b[:, number] / 1e9).tolist(),
                parts=sorted(parts, key=lambda part: (-abs(part.change_ns), part.name)),
            )
        )
    return sorted(found, key=lambda one: (-abs(one.change_ns), one.share, one.name))


def _before_and_after(a_ns: float, b_ns: float, change_ns: int) -> dict[str, Any]:
    return {"a_s": seconds(a_ns), "b_s": seconds(b_ns), "change_s": seconds(change_ns), "change_ns": change_ns}


def _clear_contributions(sides: _Pair, a: Table, b: Table, idle: list[bool]) -> list[bool]:
    mean_a, mean_b = sides.means(a, b)
    change, level = mean_b - mean_a, np.maximum(mean_a, mean_b)
    by_host, by_device = (
        p_values(a, b, level=level, variation=variation) for variation in (HOST_VARIATION, DEVICE_VARIATION)
    )
    return are_clear(np.where(idle, by_host, by_device).tolist(), change, level)


def _changes(
    sides: _Pair, groups: Sequence[NameGroup], names: tuple[NameTotals, NameTotals], variation: float
) -> list[NameChange]:
    """Changes of kernels, or of operators, the largest first."""
    columns = [group.a for group in groups], [group.b for group in groups]
    tables = [
        (_gather(getattr(names[0], table), columns[0]), _gather(getattr(names[1], table), columns[1]))
        for table in ("calls", "total_ns", "exposed_ns")
    ]
    in_device = [
        [0.0] * len(groups) if table is None else _gather(table, mine)[middle].mean(axis=0).tolist()
        for table, mine, middle in zip((one.device_ns for one in names), columns, sides.middle, strict=True)
    ]
    found = []
    for place, values in enumerate(_judge(sides, groups, *tables, variation=variation)):
        (_, category, name), ours, theirs = groups[place].identity, groups[place].a, groups[place].b
        device = [times[place] for times in in_device]
        if name == NO_OPERATOR and not any(device):
            continue
        launched_by = [names[1].operators[one] for one in theirs[:1]] + [names[0].operators[one] for one in ours[:1]]
        has_times = sides.have_devices and not category
        found.append(
            NameChange(
                name=name,
                short_name=short_name(name) if category else name,
                status=groups[place].status,
                category=category or None,
                operator=next(filter(None, launched_by), None),
                names_a=[names[0].identities[one].name for one in ours],
                names_b=[names[1].identities[one].name for one in theirs],
                device_a_s=seconds(device[0]) if has_times else None,
                device_b_s=seconds(device[1]) if has_times else None,
                **values,
            )
        )
    return sorted(found, key=lambda one: (-abs(one.change_s), -abs(one.exposed_change_ns), one.name))


def _judge(
    sides: _Pair,
    groups: Sequence[NameGroup],
    calls: tuple[Table, Table],
    total: tuple[Table, Table],
    exposed: tuple[Table, Table],
    *,
    variation: float,
) -> list[dict[str, Any]]:
    """How calls and durations of each group changed: fields of NameChange."""
    calls_a, calls_b = sides.means(*calls)
    total_a, total_b = sides.means(*total)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_call = [spent / np.where(count > 0, count, np.nan) for spent, count in zip(total, calls, strict=True)]
        mean_a, mean_b = total_a / calls_a, total_b / calls_b
    has_both = (calls_a > 0) & (calls_b > 0)
    slower = np.where(has_both, mean_b - mean_a, 0.0)
    level = np.where(has_both, np.fmax(mean_a, mean_b), 0.0)
    clear_duration = are_clear(p_values(*per_call, level=level, variation=variation), slower, level)
    clear_calls = _clear_calls(*calls, calls_a, calls_b)
    from_calls = (calls_b - calls_a) * np.where(calls_a > 0, mean_a, np.where(calls_b > 0, mean_b, 0.0))
    from_duration = np.where(has_both, calls_b * slower, 0.0)
    exposed_ns = sides.changes_ns(*exposed)
    return [
        {
            "verdict": _name_verdict(
                group,
                calls=float(calls_b[place] - calls_a[place]) if clear_calls[place] else 0.0,
                duration=float(slower[place]) if clear_duration[place] else 0.0,
                by_calls=abs(float(from_calls[place])) >= abs(float(from_duration[place])),
            ),
            "calls_a": float(calls_a[place]),
            "calls_b": float(calls_b[place]),
            "a_s": seconds(float(total_a[place])),
            "b_s": seconds(float(total_b[place])),
            "mean_a_s": seconds(float(mean_a[place])) if calls_a[place] > 0 else None,
            "mean_b_s": seconds(float(mean_b[place])) if calls_b[place] > 0 else None,
            "change_s": seconds(float(total_b[place] - total_a[place])),
            "from_calls_s": seconds(float(from_calls[place])),
            "from_duration_s": seconds(float(from_duration[place])),
            "exposed_change_ns": exposed_ns[place],
        }
        for place, group in enumerate(groups)
    ]


def _clear_calls(calls_a: Table, calls_b: Table, mean_a: Table, mean_b: Table) -> list[bool]:
    """A number of calls that is the same in every step needs no statistics; one that varies must leave its range."""
    apart: Mask = (calls_a.min(axis=0) > calls_b.max(axis=0)) | (calls_b.min(axis=0) > calls_a.max(axis=0))
    clear: list[bool] = (apart & (mean_a != mean_b)).tolist()
    return clear


def _name_verdict(group: NameGroup, *, calls: float, duration: float, by_calls: bool) -> NameVerdict:
    if group.status in ("added", "removed"):
        return group.status
    if calls and (by_calls or not duration):
        return "more calls" if calls > 0 else "fewer calls"
    if duration:
        return "slower" if duration > 0 else "faster"
    return "no difference found"


def _step_verdict(sides: _Pair, change_s: float, noise_s: float, contributions: Sequence[Contribution]) -> Verdict:
    large = abs(change_s) >= MIN_EFFECT * max(sides.step_s)
    # Whether clear contributions make up most of the change, though the step as a whole varies by as much.
    least, most = EXPLAINED
    explained = least < sum(one.share_of_change or 0.0 for one in contributions if one.clear) < most
    if abs(change_s) >= noise_s or (large and explained):
        return "longer" if change_s > 0 else "shorter"
    few = min(len(sides.a.windows), len(sides.b.windows)) == 1
    return "not enough data" if few and large else "no difference found"


def _count(kernels: Sequence[NameChange], operators: Sequence[NameChange]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for what, changes in (("kernels", kernels), ("operators", operators)):
        for word in ("added", "removed", "slower", "faster", "more calls", "fewer calls"):
            counts[f"{what} {word}"] = sum(change.verdict == word for change in changes)
    counts["kernels renamed"] = sum(change.status == "renamed" for change in kernels)
    return counts


class ChosenRanks(NamedTuple):
    rank_a: int
    rank_b: int
    ranks: list[RankSteps]
    """All ranks, in order."""
    why: str
    """In words."""


def step_time_s(timeline: Timeline, steps: Sequence[int] | None = None) -> float:
    """What a comparison takes as the profiled step of a trace, without looking at what is in it."""
    trace = view(timeline)
    if not timeline.steps:
        raise UsageError("the trace has no events to compare", where=trace.source)
    numbers = complete_steps(trace) if steps is None else known_steps(trace, steps)
    lengths = np.array([trace.windows[number].length_ns for number in numbers], np.int64)
    return seconds(float(lengths[middle_steps(lengths)].mean()))


def choose_ranks(a: Mapping[int, float], b: Mapping[int, float]) -> ChosenRanks:
    """From each rank's step in A and in B.

    Jobs of the same ranks: the rank whose step changed most. Else the slowest rank of each side, of those that both
    have if there are any.
    """
    common = sorted({*a} & {*b})
    ranks = [
        RankSteps(rank=rank, a_s=a.get(rank), b_s=b.get(rank), change_s=b[rank] - a[rank] if rank in common else None)
        for rank in sorted({*a, *b})
    ]
    if len(common) == len(ranks):
        most = max(common, key=lambda rank: (abs(b[rank] - a[rank]), -rank))
        return ChosenRanks(most, most, ranks, f"of {len(ranks)} ranks the one whose step changed most")
    slowest = [max(common or side, key=lambda rank: (side[rank], -rank)) for side in (a, b)]
    why = f"the slowest of the {len(common)} ranks that both have" if common else "the slowest, as no rank is in both"
    return ChosenRanks(slowest[0], slowest[1], ranks, "the only rank that both have" if len(common) == 1 else why)
