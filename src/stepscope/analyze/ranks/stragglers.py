"""Who keeps the others waiting, and whether that is more than chance; how evenly the work is shared out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.ranks.clocks import Clocks
from stepscope.analyze.ranks.digest import RankDigest
from stepscope.analyze.ranks.matching import Matching
from stepscope.analyze.ranks.waiting import Waiting
from stepscope.analyze.step.numbers import MAD_TO_SD, Floats, Whole, distinct, run_medians, run_sums, unique
from stepscope.core.units import count_of
from stepscope.stats import median, median_interval

CHANCE = 0.05
"""Chance of calling any rank a straggler where none is; divided among the ranks."""

LATE_THROUGHOUT = "significantly late throughout"
LATE_IN_ONE_HALF = "late in one half of the trace only"
HANDED_ON = "late only because others had kept it waiting before"


class RankLateness(msgspec.Struct, frozen=True, kw_only=True):
    """How late one rank arrives at synchronising collectives, against the median member."""

    rank: int
    median_s: float | None
    """Over units (steps: summed over the collectives of each)."""
    low_s: float | None
    high_s: float | None
    """Interval of that median from order statistics."""
    own_median_s: float | None
    """The same for its own doing: late because others had kept it waiting before does not count."""
    units: int
    floor_s: float | None
    """Below this it is noise: ordinary jitter, the clock's unit, and what is not known of the clock."""
    last_calls: int
    """Collectives at which it arrived last, alone or together with others."""
    last_share: float | None
    """Its share of all such waiting."""
    caused_s: float
    """How long the other members waited for it, summed over them; split where several came last together."""
    skew_s: float
    """Latest minus median arrival, summed over the collectives at which it came last; split likewise."""
    straggler: bool
    verdict: str

    @property
    def stands_out(self) -> bool:
        """Whether it may be named: significantly late by its own doing, throughout or in one half of the trace."""
        if self.straggler or self.verdict != LATE_IN_ONE_HALF:
            return self.straggler
        return (self.own_median_s or 0.0) > (self.floor_s or 0.0) and self.caused_s > 0


class Stragglers(msgspec.Struct, frozen=True, kw_only=True):
    units: str | None
    """What lateness is counted over: steps, or collectives where there are too few steps. None: there is nothing."""
    level: float | None
    """Coverage of each rank's interval."""
    jitter_s: float | None
    """How much a rank's own lateness varies from unit to unit (robust standard deviation over all ranks)."""
    skew_s: float | None
    """Latest minus median arrival, summed over the synchronising collectives; None: there is none."""
    ranks: list[RankLateness]
    stragglers: list[int]
    note: str | None = None


class LoadBalance(msgspec.Struct, frozen=True, kw_only=True):
    """How evenly computing and copying are shared out; waiting does not count as work."""

    imbalance: float | None
    """max/mean over ranks of the time the device computed or copied: median over steps. 1: even."""
    busiest_rank: int | None
    """In most steps."""
    busy_s: dict[int, float]
    """By rank: median over steps."""
    end_spread_s: float | None
    """Last minus first end of a step over the ranks: median over steps. Needs clocks that agree."""
    steps: int
    """That all ranks have."""
    reason: str | None = None
    """Why there is no imbalance."""


def find_stragglers(
    matching: Matching, waiting: Waiting, clocks: Clocks, *, aligned: bool, by_starts: bool
) -> Stragglers:
    """A rank is a straggler if one of two things holds.

    Lateness lies above noise: the lower end of the interval of its median is above its floor, and so are the medians of
    both halves of the trace. The interval's level is shared out among the ranks, so that large jobs have few false
    ones. Or it is the latest of all in every step, by more than its floor, and there are so many ranks and steps that
    this is no chance: ranks ** (1 − steps) is at most CHANCE. And in both cases it must be late by its own doing:
    lateness is handed on from group to group, and only where it arises there is something to fix.
    """
    ranks = len(matching.ranks)
    level = 1 - 2 * CHANCE / max(ranks, 1)
    owner = matching.owner()
    by_call, by_step = _sum_up(matching, waiting, owner), _sum_up(matching, waiting, matching.step[owner])
    if ranks < 2 or not len(by_call.late_s):
        note = f"not applicable: {'one rank alone' if ranks < 2 else 'no synchronising collective was matched'}"
        return Stragglers(units=None, level=None, jitter_s=None, skew_s=None, ranks=[], stragglers=[], note=note)
    unapplied = by_starts and not aligned
    most_steps = by_step.most_units()
    enough_steps = most_steps > 0 and median_interval(range(most_steps), level)[2] >= level
    judged = _judge(by_step if enough_steps else by_call, clocks, level, unapplied=unapplied)
    always, steps = _latest_in_every_step(by_step, clocks, unapplied=unapplied), len(unique(by_step.unit))
    is_no_chance = float(ranks) ** (1 - steps) <= CHANCE
    always_late = f"the latest in each of {steps} steps" + (
        "" if is_no_chance else ": too few ranks and steps to decide"
    )
    blame = _blame(matching, waiting, clocks.resolution_s)
    total = float(blame.caused_s.sum())
    entries = [
        RankLateness(
            rank=int(matching.ranks[place]),
            **fields,  # type: ignore[arg-type]
            last_calls=int(blame.calls[place]),
            last_share=float(blame.caused_s[place]) / total if total > 0 else None,
            caused_s=float(blame.caused_s[place]),
            skew_s=float(blame.skew_s[place]),
            straggler=verdict is None or (is_no_chance and always == place),
            verdict=LATE_THROUGHOUT if verdict is None else always_late if always == place else verdict,
        )
        for place, (fields, verdict) in enumerate(judged.ranks)
    ]
    caution, seen = None, len(distinct(matching.step))
    if not enough_steps and seen < 3:
        caution = f"seen in {count_of(seen, 'step')} only: what is late there need not be late in others"
    return Stragglers(
        units="steps" if enough_steps else "collectives",
        level=level,
        jitter_s=judged.jitter_s,
        skew_s=float(np.nansum(waiting.skew_s)),
        ranks=entries,
        stragglers=[entry.rank for entry in entries if entry.straggler],
        note=caution,
    )


class _Blame(NamedTuple):
    """By rank, over the collectives at which it came last."""

    calls: Whole
    caused_s: Floats
    skew_s: Floats


def _blame(matching: Matching, waiting: Waiting, resolution_s: float) -> _Blame:
    """Members that came within a unit of the clock of the latest share what the others waited."""
    owner, ranks, runs = matching.owner(), len(matching.ranks), len(matching)
    waited = run_sums(owner, np.nan_to_num(waiting.wait_s), runs)
    told = (waiting.last >= 0) & (waited > 0)
    is_last = told[owner] & (waiting.late_s >= waiting.skew_s[owner] - resolution_s)
    place, of = matching.rank[matching.member][is_last], owner[is_last]
    ties = np.bincount(of, minlength=runs)
    caused = run_sums(place, waited[of] / ties[of], ranks)
    skew = run_sums(place, waiting.skew_s[of] / ties[of], ranks)
    return _Blame(np.bincount(place, minlength=ranks), caused, skew)


@dataclass(frozen=True)
class _Samples:
    """Lateness of each rank in each unit, by rank and then in order of time."""

    rank: Whole
    unit: Whole
    late_s: Floats
    own_s: Floats
    calls: Whole
    """Collectives that each value is the sum of."""

    def most_units(self) -> int:
        return int(np.bincount(self.rank).max()) if len(self.rank) else 0

    def jitter_s(self, values: Floats) -> float:
        """How far a rank strays from its own median."""
        middle = run_medians(values, self.rank, int(self.rank.max()) + 1)
        return MAD_TO_SD * float(np.median(np.abs(values - middle[self.rank])))

    def floors_s(self, clocks: Clocks, *, unapplied: bool) -> list[float]:
        """By rank: below this, lateness is noise. `unapplied`: clock offsets were found and are still in the times."""
        jitter, calls = self.jitter_s(self.late_s), float(self.calls.max())
        off = [(entry.offset_s or 0.0) if unapplied and entry.usable else 0.0 for entry in clocks.offsets]
        usual = median(off) or 0.0  # a clock is wrong against those of the others
        floors = []
        for entry, own in zip(clocks.offsets, off, strict=True):
            noise = max(2 * clocks.resolution_s, entry.spread_s or 0.0) * calls**0.5
            floors.append(max(jitter, noise) + abs(own - usual) * calls)
        return floors

    def is_caused_by_rank(self, clocks: Clocks) -> list[bool]:
        """By rank: whether its own share of the lateness is above noise."""
        ranks = len(clocks.offsets)
        floor = max(self.jitter_s(self.own_s), 2 * clocks.resolution_s * float(self.calls.max()) ** 0.5)
        above: list[bool] = (run_medians(self.own_s, self.rank, ranks) > floor).tolist()
        return above


def _sum_up(matching: Matching, waiting: Waiting, unit: Whole) -> _Samples:
    """By rank and unit, which each matched row has: summed over its collectives. Rows with −1 do not count."""
    kept = ~np.isnan(waiting.late_s) & (unit >= 0)
    rank, unit = matching.rank[matching.member][kept], unit[kept]
    width = int(unit.max()) + 1 if len(unit) else 1
    keys, back = np.unique(rank * width + unit, return_inverse=True)
    late, own = (run_sums(back, values[kept], len(keys)) for values in (waiting.late_s, waiting.own_late_s))
    return _Samples(keys // width, keys % width, late, own, np.bincount(back, minlength=len(keys)))


class _Judged(NamedTuple):
    jitter_s: float
    ranks: list[tuple[dict[str, float | int | None], str | None]]
    """Fields of RankLateness, and why it is no straggler (None: it is one)."""


def _judge(samples: _Samples, clocks: Clocks, level: float, *, unapplied: bool) -> _Judged:
    ranks = len(clocks.offsets)
    floors, halves = samples.floors_s(clocks, unapplied=unapplied), _halves(samples, ranks)
    own, caused_by_rank = run_medians(samples.own_s, samples.rank, ranks), samples.is_caused_by_rank(clocks)
    values = samples.late_s[np.lexsort((samples.late_s, samples.rank))]
    middle = run_medians(samples.late_s, samples.rank, ranks)
    count = np.bincount(samples.rank, minlength=ranks)
    first = np.cumsum(count) - count
    judged: list[tuple[dict[str, float | int | None], str | None]] = []
    for place, (start, n) in enumerate(zip(first.tolist(), count.tolist(), strict=True)):
        fields: dict[str, float | int | None] = dict.fromkeys(("median_s", "low_s", "high_s", "own_median_s"))
        verdict: str | None = "it is in no matched synchronising collective"
        if n:
            low, high, covered = median_interval(range(n), level)
            ends = float(values[start + int(low)]), float(values[start + int(high)])
            fields |= {"median_s": float(middle[place]), "low_s": ends[0], "high_s": ends[1]}
            fields["own_median_s"] = float(own[place])
            reasons = (
                (covered < level, "too few units to decide"),
                (ends[0] <= floors[place], "not significantly late"),
                (halves[place] <= floors[place], LATE_IN_ONE_HALF),
                (not caused_by_rank[place], HANDED_ON),
            )
            verdict = next((reason for holds, reason in reasons if holds), None)
        judged.append((fields | {"units": n, "floor_s": floors[place]}, verdict))
    return _Judged(samples.jitter_s(samples.late_s), judged)


def _halves(samples: _Samples, ranks: int) -> list[float]:
    """By rank: the smaller of the medians of its earlier and its later units."""
    count = np.bincount(samples.rank, minlength=ranks)
    place = np.arange(len(samples.rank)) - (np.cumsum(count) - count)[samples.rank]
    later = place >= (count[samples.rank] + 1) // 2
    medians = run_medians(samples.late_s, samples.rank * 2 + later, ranks * 2).reshape(ranks, 2)
    smaller: list[float] = np.nan_to_num(medians, nan=-np.inf).min(axis=1).tolist()
    return smaller


def steps_to_decide(ranks: int) -> int:
    """How many steps it takes until a rank that is the latest in each of them is no chance."""
    return 1 + math.ceil(math.log(1 / CHANCE) / math.log(ranks))


def _latest_in_every_step(samples: _Samples, clocks: Clocks, *, unapplied: bool) -> int | None:
    """The place of the rank that is the latest in every step, by more than noise and by its own doing."""
    if len(unique(samples.unit)) < 2:
        return None
    order = np.lexsort((samples.rank, samples.late_s, samples.unit))
    latest = order[np.flatnonzero(np.r_[samples.unit[order][1:] != samples.unit[order][:-1], True])]
    place = int(samples.rank[latest[0]])
    if (samples.rank[latest] != place).any():
        return None
    floor = samples.floors_s(clocks, unapplied=unapplied)[place]
    if samples.late_s[latest].min() <= floor or not samples.is_caused_by_rank(clocks)[place]:
        return None
    return place


def find_balance(digests: Sequence[RankDigest], offsets_ns: Sequence[int], step: int | None = None) -> LoadBalance:
    """`digests` by rank, `offsets_ns` as in `find_waiting`."""
    numbers, busy, end = step_tables(digests, offsets_ns, step)
    several = len(digests) > 1 and len(numbers) > 0
    works = bool(len(numbers)) and not np.isnan(busy).any() and bool((busy.sum(axis=0) > 0).all())
    busiest = np.bincount(busy.argmax(axis=0), minlength=len(digests)) if several and works else None
    reason = "one rank alone" if len(digests) < 2 else None if len(numbers) else "the ranks have no step in common"
    if reason is None and not works:
        reason = "a rank has no device work"
    return LoadBalance(
        imbalance=float(np.median(busy.max(axis=0) / busy.mean(axis=0))) if several and works else None,
        busiest_rank=digests[int(busiest.argmax())].rank if busiest is not None else None,
        busy_s={int(item.rank or 0): float(np.median(row)) for item, row in zip(digests, busy, strict=True)}
        if works
        else {},
        end_spread_s=float(np.median(end.max(axis=0) - end.min(axis=0))) if several else None,
        steps=len(numbers),
        reason=None if reason is None else f"not applicable: {reason}",
    )


def step_tables(
    digests: Sequence[RankDigest], offsets_ns: Sequence[int], step: int | None = None
) -> tuple[list[int], Floats, Floats]:
    """Numbers of the steps that all ranks have; busy seconds and ends (since the first of all), by rank and step."""
    by_rank = [{entry.number: entry for entry in item.steps} for item in digests]
    common = set.intersection(*(set(entries) for entries in by_rank)) if by_rank else set()
    numbers = sorted(number for number in common if step is None or number == step)
    shape = (len(digests), len(numbers))
    busy, end = np.full(shape, np.nan), np.zeros(shape, np.int64)
    for place, entries in enumerate(by_rank):
        for column, number in enumerate(numbers):
            entry = entries[number]
            end[place, column] = entry.end_ns - offsets_ns[place]
            if entry.busy_ns is not None:
                busy[place, column] = entry.busy_ns / 1e9
    return numbers, busy, (end - end.min()) / 1e9 if end.size else end.astype(np.float64)
