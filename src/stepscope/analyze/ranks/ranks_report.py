"""What the ranks of one run say together: who waited for whom, how fast data moved, who is late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from stepscope.analyze.ranks.clocks import Clocks, MatchedRanks, choose_clocks, match_ranks, usable_offsets_ns
from stepscope.analyze.ranks.collective_table import CollectiveRow, GroupTotals, make_entries, tabulate, total_groups
from stepscope.analyze.ranks.digest import PAIRED_BY_ORDER, RankDigest, list_numbers, step_times_ns
from stepscope.analyze.ranks.matching import Matching, MatchingSummary, summarize_matching
from stepscope.analyze.ranks.stragglers import (
    LoadBalance,
    Stragglers,
    find_balance,
    find_stragglers,
    step_tables,
)
from stepscope.analyze.ranks.waiting import Waiting, WaitingMap, find_waiting, map_waiting
from stepscope.analyze.step.numbers import Floats, Whole, known_only, make_rows, run_sums
from stepscope.core import collectives as coll
from stepscope.core.errors import UsageError
from stepscope.core.units import format_duration, format_share
from stepscope.formats.timeline import Timeline

ClockChoice = Literal["auto", "as recorded", "aligned", "durations"]
"""as recorded: the ranks' times are compared as they stand. aligned: usable offsets are taken off first. durations: no
clock is compared; the rank that was longer in a collective waited longer. auto: whichever of these the clocks allow."""

LARGEST_DISAGREEMENT = 0.05
"""Fraction of the time in collectives by which the two ways to find waiting differ at most where both are right."""


class RankWaiting(msgspec.Struct, frozen=True, kw_only=True):
    """One rank in its matched collectives."""

    rank: int
    source: str
    calls: int
    matched_calls: int
    collective_s: float
    """Sum of the durations of its calls, unmatched ones included."""
    wait_s: float | None
    """In matched synchronising collectives; None: there are none."""
    wait_share: float | None
    """Fraction of its time in those."""
    wait_by_durations_s: float | None
    """The same without comparing clocks."""


class StepRanks(msgspec.Struct, frozen=True, kw_only=True):
    """One step over the ranks. Times are profiled ones."""

    step: int | None
    """None: outside of all steps."""
    collectives: int
    """Matched ones."""
    calls: int
    """Over all ranks, unmatched ones included."""
    profiled_step_s: float | None
    """Median over the ranks."""
    communication_s: float | None
    """Time in which a rank had a collective running: median over the ranks."""
    wait_s: float | None
    """Sum over the step's collectives: median over the ranks."""
    largest_wait_s: float | None
    skew_s: float | None
    """Latest minus median arrival, summed over the step's synchronising collectives; None: there is none."""
    skew_share: float | None
    """Fraction of the step."""
    latest_rank: int | None
    """To whom most of the skew is due."""
    imbalance: float | None
    busiest_rank: int | None
    end_spread_s: float | None


class OverSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over steps."""

    steps: list[int]
    """Those that count: without the first and the last where more than two remain."""
    profiled_step_s: float | None
    communication_s: float | None
    wait_s: float | None
    skew_s: float | None
    skew_share: float | None
    imbalance: float | None
    end_spread_s: float | None


class RanksReport(msgspec.Struct, frozen=True, kw_only=True):
    ranks: list[int]
    world_size: int | None
    step: int | None
    """The one asked for; None: all."""
    clocks: str
    """How times of different ranks were compared: as recorded, aligned or durations."""
    clocks_because: str
    """Why so."""
    clock_offsets: Clocks
    matching: MatchingSummary
    waiting: list[RankWaiting]
    stragglers: Stragglers
    balance: LoadBalance
    table: list[CollectiveRow]
    groups: list[GroupTotals]
    steps: list[StepRanks]
    over_steps: OverSteps
    waiting_map: WaitingMap | None = None
    """By rank and collective; None where no synchronising collective was matched."""
    left_out: dict[str, int]
    """Records that are no collectives of their own, over all ranks."""
    notes: list[str]


def explain_ranks(
    ranks: Iterable[Timeline] | Iterable[RankDigest] | MatchedRanks,
    step: int | None = None,
    clocks: ClockChoice = "auto",
    *,
    map_step: int | None = None,
) -> RanksReport:
    """From timelines, from digests made elsewhere, or from what `match_ranks` made of either.

    One rank is enough for the table; whatever needs two says so. `step` narrows everything to one step but clocks and
    stragglers, which need all there are. `map_step` is the step of the waiting map; None: all steps.
    """
    if clocks not in get_args(ClockChoice):
        raise UsageError(f"{clocks!r} is no way to compare clocks", hint=f"one of: {', '.join(get_args(ClockChoice))}")
    matched = ranks if isinstance(ranks, MatchedRanks) else match_ranks(ranks)
    digests, is_renumbered, whole, found = matched
    if step is not None and step not in (known := sorted({entry.number for item in digests for entry in item.steps})):
        hint = f"steps: {list_numbers(known)}" if known else "the traces have no steps"
        raise UsageError(f"no rank has a step {step}", hint=hint)
    used, because = choose_clocks(whole, found) if clocks == "auto" else (clocks, "as asked for")
    offsets = usable_offsets_ns(found) if used == "aligned" else [0] * len(digests)
    matching = whole if step is None else whole.only(whole.step == step, whole.rows["step"][whole.unmatched] == step)
    by_starts = find_waiting(matching, "starts", offsets)
    by_durations = find_waiting(matching, "durations")
    waiting = by_durations if used == "durations" else by_starts
    over_all = (
        waiting if step is None else find_waiting(whole, "durations" if used == "durations" else "starts", offsets)
    )
    entries = make_entries(matching, waiting)
    steps = _explain_steps(matching, waiting, digests, offsets, step)
    summary, is_unmarked = summarize_matching(matching), all(item.step_marker == "none" for item in digests)
    return RanksReport(
        ranks=matching.ranks.tolist(),
        world_size=matching.world_size,
        step=step,
        clocks=used,
        clocks_because=because,
        clock_offsets=found,
        matching=summary,
        waiting=_rank_waiting(matching, waiting, by_durations, digests),
        stragglers=find_stragglers(whole, over_all, found, aligned=used == "aligned", by_starts=used != "durations"),
        balance=find_balance(digests, offsets, step),
        table=tabulate(matching, entries),
        groups=total_groups(matching, entries),
        steps=steps,
        over_steps=_over_steps(steps),
        waiting_map=map_waiting(whole, over_all, step if map_step is None else map_step),
        left_out=dict(sorted(sum((Counter(item.left_out) for item in digests), Counter()).items())),
        notes=[
            *_notes_on_matching(matching, summary),
            *_notes_on_silent_ranks(summary),
            *_notes_on_clocks(found, used, because, asked=clocks != "auto"),
            *_notes_on_agreement(by_starts, by_durations, used),
            *(["no steps are marked: each trace counts as one step"] if is_unmarked else []),
            *([PAIRED_BY_ORDER] if is_renumbered else []),
        ],
    )


def _rank_waiting(
    matching: Matching, waiting: Waiting, by_durations: Waiting, digests: Sequence[RankDigest]
) -> list[RankWaiting]:
    ranks = len(digests)
    rank, alone = matching.rank[matching.member], matching.unmatched
    told = ~np.isnan(waiting.wait_s) & ~np.isnan(by_durations.wait_s)

    def total(values: Floats) -> Floats:
        return run_sums(rank[told], values[told], ranks)

    wait, compared, inside = total(waiting.wait_s), total(by_durations.wait_s), total(waiting.duration_s)
    single = (matching.rows["end_ns"][alone] - matching.rows["start_ns"][alone]) / 1e9
    spent = run_sums(rank, waiting.duration_s, ranks) + run_sums(matching.rank[alone], single, ranks)
    matched = np.bincount(rank, minlength=ranks)
    calls = matched + np.bincount(matching.rank[alone], minlength=ranks)
    some = np.bincount(rank[told], minlength=ranks) > 0
    columns = {"rank": [item.rank or 0 for item in digests], "source": [item.source for item in digests]}
    columns |= {"calls": calls, "matched_calls": matched, "collective_s": spent}
    columns |= {"wait_s": known_only(wait, some), "wait_by_durations_s": known_only(compared, some)}
    share = known_only(wait / np.where(inside > 0, inside, 1.0), inside > 0)
    return make_rows(RankWaiting, columns | {"wait_share": share})


def _explain_steps(
    matching: Matching,
    waiting: Waiting,
    digests: Sequence[RankDigest],
    offsets_ns: Sequence[int],
    step: int | None,
) -> list[StepRanks]:
    """Steps that any rank has, and what lies outside of all of them where there is something."""
    listed = {entry.number for item in digests for entry in item.steps if step is None or entry.number == step}
    unmatched = matching.rows["step"][matching.unmatched].tolist()
    numbers = sorted(listed | set(matching.step.tolist()) | set(unmatched))
    place = np.searchsorted(numbers, matching.step)
    skew = run_sums(place, np.nan_to_num(waiting.skew_s), len(numbers))
    told = np.bincount(place[~np.isnan(waiting.skew_s)], minlength=len(numbers))
    counts = np.bincount(place, minlength=len(numbers))
    alone = np.searchsorted(numbers, matching.rows["step"][matching.unmatched])
    calls = run_sums(place, matching.count, len(numbers)) + np.bincount(alone, minlength=len(numbers))
    ranks, told_wait, is_told = len(digests), ~np.isnan(waiting.wait_s), waiting.last >= 0

    def by_rank(step: Whole, rank: Whole, values: Any) -> Floats:
        return run_sums(step * ranks + rank, values, len(numbers) * ranks).reshape(-1, ranks)

    member = place[matching.owner()][told_wait], matching.rank[matching.member][told_wait]
    waits, takes_part = by_rank(*member, waiting.wait_s[told_wait]), by_rank(*member, None) > 0
    caused = by_rank(place[is_told], waiting.last[is_told], waiting.skew_s[is_told])
    common, busy, end = step_tables(digests, offsets_ns, step)
    column = {number: index for index, number in enumerate(common)}
    spans = _spans_by_step(digests)
    found = []
    for index, number in enumerate(numbers):
        step_s, communication_s = spans.get(number, (None, None))
        at = column.get(number) if len(digests) > 1 else None
        share = busy[:, at] if at is not None else None
        waited = waits[index][takes_part[index]]
        works = share is not None and not np.isnan(share).any() and share.sum() > 0
        found.append(
            StepRanks(
                step=number if number >= 0 else None,
                collectives=int(counts[index]),
                calls=int(calls[index]),
                profiled_step_s=step_s,
                communication_s=communication_s,
                wait_s=float(np.median(waited)) if len(waited) else None,
                largest_wait_s=float(waited.max()) if len(waited) else None,
                skew_s=float(skew[index]) if told[index] else None,
                skew_share=float(skew[index]) / step_s if step_s and told[index] else None,
                latest_rank=int(matching.ranks[caused[index].argmax()]) if caused[index].max() > 0 else None,
                imbalance=float(share.max() / share.mean()) if share is not None and works else None,
                busiest_rank=digests[int(share.argmax())].rank if share is not None and works else None,
                end_spread_s=float(end[:, at].max() - end[:, at].min()) if at is not None else None,
            )
        )
    return found


def _spans_by_step(digests: Sequence[RankDigest]) -> dict[int, tuple[float, float]]:
    """By step: medians over the ranks of its length and of its communication, in seconds."""
    times: dict[int, list[tuple[int, int]]] = {}
    for item in digests:
        step_times = step_times_ns(item)
        for entry in item.steps:
            times.setdefault(entry.number, []).append((step_times[entry.number], entry.communication_ns))
    medians = {number: np.median(listed, axis=0) / 1e9 for number, listed in times.items()}
    return {number: (float(length), float(communicated)) for number, (length, communicated) in medians.items()}


def _over_steps(steps: Sequence[StepRanks]) -> OverSteps:
    counted = [entry for entry in steps if entry.step is not None]
    if len(counted) > 4:
        counted = counted[1:-1]

    def middle(name: str) -> float | None:
        values = [value for value in (getattr(entry, name) for entry in counted) if value is not None]
        return float(np.median(values)) if values else None

    medians = {name: middle(name) for name in OverSteps.__struct_fields__ if name != "steps"}
    return OverSteps(steps=[entry.step for entry in counted if entry.step is not None], **medians)


def _notes_on_matching(matching: Matching, summary: MatchingSummary) -> Iterator[str]:
    """What a reader must know before believing a number."""
    given, world, of = len(matching.ranks), matching.world_size, f" of {matching.world_size}"
    if not summary.calls:
        yield "no collective was found"
    elif given == 1:
        yield f"one rank{of if world else ''}: waiting cannot be told from moving data, and rates are lower bounds"
    elif world is not None and given < world:
        yield f"{given}{of} ranks: a rank that is not here may have come later, so waiting is a lower bound"
    if summary.without_group:
        yield (
            f"{summary.without_group:,} collectives were matched by order alone: the traces name no process groups, "
            "and all ranks with the call were taken for its members"
        )
    unmatched = len(matching.unmatched)
    if unmatched and given > 1:
        share = format_share(unmatched / summary.calls)
        yield f"{unmatched:,} of {summary.calls:,} calls were not matched ({share}); see the reasons"
    used = np.concatenate([matching.member, matching.unmatched])
    if vague := int((matching.rows["collective"][used] == coll.SEND_RECV).sum()):
        yield f"{vague:,} calls are known by their SendRecv kernel alone: they may be all-to-alls"


def _notes_on_silent_ranks(summary: MatchingSummary) -> Iterator[str]:
    """A listed member without any call may have taken part all the same: its trace does not show it."""
    silent: dict[str, list[int]] = {}
    for entry in summary.short_ranks:
        if entry.calls == 0:
            silent.setdefault(entry.group, []).append(entry.rank)
    for group, ranks in silent.items():
        named = f"rank {ranks[0]} is a member" if len(ranks) == 1 else f"ranks {list_numbers(ranks)} are members"
        yield (
            f"{named} of group {group} without any collective in the trace: sizes and waiting there are lower bounds"
        )


def _notes_on_clocks(clocks: Clocks, used: str, because: str, *, asked: bool) -> Iterator[str]:
    refused = sum(not entry.usable for entry in clocks.offsets[1:])
    if used == "as recorded" and clocks.largest_offset_s is not None:
        yield (
            f"clocks are up to {format_duration(clocks.largest_offset_s)} apart and were left as recorded; "
            "`--clocks aligned` takes that off"
        )
    elif asked and used == "aligned" and refused:
        yield f"{refused:,} of {len(clocks.offsets) - 1:,} clock offsets are not usable; those ranks were not shifted"
    elif not asked and used == "durations":
        yield f"no clocks were compared: {because}"


def _notes_on_agreement(by_starts: Waiting, by_durations: Waiting, used: str) -> Iterator[str]:
    """Starts and durations say the same where clocks agree and ends coincide."""
    told = ~np.isnan(by_starts.wait_s) & ~np.isnan(by_durations.wait_s)
    first, second = float(by_starts.wait_s[told].sum()), float(by_durations.wait_s[told].sum())
    inside = float(by_starts.duration_s[told].sum())
    if used != "durations" and abs(first - second) > LARGEST_DISAGREEMENT * inside:
        yield (
            f"starts say {format_duration(first)} of waiting, durations say {format_duration(second)}: the clocks "
            "disagree, or the ranks do not leave their collectives together"
        )
