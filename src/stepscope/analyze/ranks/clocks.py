"""How far the ranks' clocks are apart, seen in collectives that all members leave together; how they are compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.ranks.digest import RankDigest, digest, pair_steps
from stepscope.analyze.ranks.matching import Matching, match, order_digests
from stepscope.analyze.step.numbers import MAD_TO_SD, Floats, Mask, Whole, run_medians, run_sums
from stepscope.core import collectives as coll
from stepscope.core.errors import UsageError
from stepscope.core.units import format_duration
from stepscope.formats.timeline import Timeline

LEAST_CALLS = 3
"""With fewer, nothing can be said about how well they agree."""

_ITERATIONS = 2000


class RankClockOffset(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's clock against that of the reference rank."""

    rank: int
    offset_s: float | None
    """What this clock shows minus what the reference's shows; None: no chain of shared collectives leads to it."""
    spread_s: float | None
    """How far single collectives lie from that (robust standard deviation, at least two units of the clock)."""
    calls: int
    usable: bool
    reason: str | None = None
    """Why not."""


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    reference: int | None
    """The lowest rank given."""
    method: str
    resolution_s: float
    """Unit of the coarsest clock among the ranks."""
    collectives: int
    """Matched synchronising ones that were looked at."""
    offsets: list[RankClockOffset]
    largest_offset_s: float | None
    """Among the usable ones, in size; None: no rank has a usable one."""
    largest_spread_s: float | None


def find_clocks(matching: Matching, resolution_ns: int = 1) -> Clocks:
    """Offsets from the ends of matched synchronising collectives.

    Each member's end is compared with that of one member of its group (the reference rank where it is one, else the
    lowest); the median difference of each such pair is taken. Where every rank shares a group with the reference these
    medians are the offsets; otherwise the offsets that fit all pairs best in the least squares' sense.
    """
    pairs = _compare_ends(matching)
    ranks = len(matching.ranks)
    direct = np.isin(np.arange(1, ranks), pairs.rank[pairs.hub == 0]).all() if ranks > 1 else True
    if direct:
        offset = np.full(ranks, np.nan)
        offset[:1] = 0.0
        here = pairs.pair_hub == 0
        offset[pairs.pair_rank[here]] = pairs.median[here]
    else:
        offset = _solve(pairs, ranks)
    spread = _spread(pairs, offset, ranks)
    columns = (matching.ranks, offset, spread, pairs.taken_part)
    entries = [_entry(resolution_ns, *cells) for cells in zip(*(column.tolist() for column in columns), strict=True)]
    if entries:
        entries[0] = msgspec.structs.replace(entries[0], usable=False, reason="it is the reference")
    usable = [entry for entry in entries if entry.usable]
    return Clocks(
        reference=int(matching.ranks[0]) if ranks else None,
        method="difference to the reference" if direct else "least squares over pairs of ranks that share a group",
        resolution_s=resolution_ns / 1e9,
        collectives=pairs.collectives,
        offsets=entries,
        largest_offset_s=max((abs(entry.offset_s or 0.0) for entry in usable), default=None),
        largest_spread_s=max((entry.spread_s for entry in entries if entry.spread_s is not None), default=None),
    )


class _Pairs:
    """Differences of ends between members and the hub of their collective, one row per member that is not the hub."""

    def __init__(self, rank: Whole, hub: Whole, difference: Floats, taken_part: Whole, collectives: int) -> None:
        ranks = len(taken_part)
        self.rank, self.hub, self.difference, self.collectives = rank, hub, difference, collectives
        self.taken_part = taken_part
        """By rank: in how many collectives."""
        keys, self.pair = np.unique(hub * ranks + rank, return_inverse=True)
        self.pair_hub, self.pair_rank = keys // max(ranks, 1), keys % max(ranks, 1)
        self.calls = np.bincount(self.pair, minlength=len(keys))
        self.median = run_medians(difference, self.pair, len(keys))


def _compare_ends(matching: Matching) -> _Pairs:
    chosen = np.isin(matching.collective, coll.SYNCHRONISING)
    kept = matching.only(chosen, np.zeros(len(matching.unmatched), bool))
    rank, end = kept.rank[kept.member], kept.of_members("end_ns").astype(np.int64)
    # Runs are ordered by rank: the first member is the reference, or the lowest rank.
    lead = np.repeat(kept.first, kept.count)
    other = np.ones(len(rank), bool)
    other[kept.first] = False
    difference = (end - end[lead])[other].astype(np.float64)
    taken_part = np.bincount(rank, minlength=len(matching.ranks))
    return _Pairs(rank[other], rank[lead][other], difference, taken_part, len(kept))


def _solve(pairs: _Pairs, ranks: int) -> Floats:
    """Offsets with offset[rank] − offset[hub] = median for all pairs as nearly as can be, weighted by calls.

    NaN for ranks that no chain reaches. Conjugate gradients on the graph of pairs: thousands of ranks need no matrix.
    """
    offset, reached = _follow_chains(pairs, ranks)
    weight = pairs.calls.astype(np.float64)
    free = reached.copy()
    free[0] = False  # the reference stays at zero

    def gather(edge: Floats) -> Floats:
        return np.where(free, run_sums(pairs.pair_rank, edge, ranks) - run_sums(pairs.pair_hub, edge, ranks), 0.0)

    def differences(values: Floats) -> Floats:
        apart: Floats = values[pairs.pair_rank] - values[pairs.pair_hub]
        return apart

    # What the chains leave is small, so even clocks that are years apart lose no digits here.
    rest = gather(weight * (pairs.median - differences(offset)))
    step, left = rest.copy(), float(rest @ rest)
    enough = 1e-20 * left
    for _ in range(min(_ITERATIONS, 10 * ranks)):
        moved = gather(weight * differences(step))
        curvature = float(step @ moved)
        if left <= enough or curvature <= 0:
            break
        offset += left / curvature * step
        rest -= left / curvature * moved
        previous, left = left, float(rest @ rest)
        step = rest + left / previous * step
    return np.where(reached, offset, np.nan)


def _follow_chains(pairs: _Pairs, ranks: int) -> tuple[Floats, Mask]:
    """Offsets by adding up pairs from the reference outwards, and which ranks that reaches."""
    offset, reached = np.zeros(ranks), np.zeros(ranks, bool)
    reached[0] = True
    for _ in range(ranks):
        forward = reached[pairs.pair_hub] & ~reached[pairs.pair_rank]
        backward = reached[pairs.pair_rank] & ~reached[pairs.pair_hub]
        if not forward.any() and not backward.any():
            break
        offset[pairs.pair_rank[forward]] = offset[pairs.pair_hub[forward]] + pairs.median[forward]
        offset[pairs.pair_hub[backward]] = offset[pairs.pair_rank[backward]] - pairs.median[backward]
        reached[pairs.pair_rank[forward]] = reached[pairs.pair_hub[backward]] = True
    return offset, reached


def _spread(pairs: _Pairs, offset: Floats, ranks: int) -> Floats:
    """Robust standard deviation of what the offsets leave; NaN where a rank is in no pair."""
    rest = np.abs(pairs.difference - (offset[pairs.rank] - offset[pairs.hub]))
    known = ~np.isnan(rest)
    spread = run_medians(rest[known], pairs.rank[known], ranks)
    as_hub = run_medians(rest[known], pairs.hub[known], ranks)
    return MAD_TO_SD * np.where(np.isnan(spread), as_hub, spread)


def _entry(resolution_ns: int, rank: int, offset_ns: float, spread_ns: float, calls: int) -> RankClockOffset:
    if math.isnan(offset_ns):
        unlinked = "no matched synchronising collective links it to the reference"
        return RankClockOffset(rank=rank, offset_s=None, spread_s=None, calls=calls, usable=False, reason=unlinked)
    # Both times of a difference are cut to whole units of their clock.
    spread = None if math.isnan(spread_ns) else max(spread_ns, 2.0 * resolution_ns) / 1e9
    offset, reason = offset_ns / 1e9, None
    if calls < LEAST_CALLS or spread is None:
        reason = f"fewer than {LEAST_CALLS} matched synchronising collectives"
    elif abs(offset) <= spread:
        reason = "not larger than its spread: no offset can be told from none"
    return RankClockOffset(
        rank=rank, offset_s=offset, spread_s=spread, calls=calls, usable=reason is None, reason=reason
    )


class MatchedRanks(NamedTuple):
    """The ranks of a job with their collectives side by side, and how their clocks differ."""

    digests: list[RankDigest]
    """By rank; all count steps alike."""
    is_renumbered: bool
    """Whether steps had to be paired by order for that."""
    matching: Matching
    clocks: Clocks


def match_ranks(ranks: Iterable[Timeline] | Iterable[RankDigest]) -> MatchedRanks:
    """From timelines or from digests made elsewhere; neither their order nor where they were made matters."""
    digests = order_digests([item if isinstance(item, RankDigest) else digest(item) for item in ranks])
    if not digests:
        raise UsageError("there is no trace to explain", hint="give one trace a rank")
    digests, is_renumbered = pair_steps(digests)
    matching = match(digests)
    clocks = find_clocks(matching, max(item.resolution_ns for item in digests))
    return MatchedRanks(digests, is_renumbered, matching, clocks)


def usable_offsets_ns(clocks: Clocks) -> list[int]:
    """By place of the rank: what to take off its times; 0 where no offset is usable."""
    return [round((entry.offset_s or 0.0) * 1e9) if entry.usable else 0 for entry in clocks.offsets]


CONTRADICTED = 0.05
"""With more than this fraction of the collectives impossible, the ranks' times cannot be compared."""


def choose_clocks(matching: Matching, clocks: Clocks) -> tuple[Literal["as recorded", "aligned", "durations"], str]:
    """The choice and why: aligned where every rank that needs an offset has a usable one; durations where starts are
    impossible; else as recorded."""
    # An offset within its spread is none; one that is not known may be any.
    needed = [
        entry
        for entry in clocks.offsets[1:]
        if not entry.usable
        and (entry.offset_s is None or entry.spread_s is None or abs(entry.offset_s) > entry.spread_s)
    ]
    usable = sum(entry.usable for entry in clocks.offsets)
    is_aligned = usable > 0 and not needed
    offsets = usable_offsets_ns(clocks) if is_aligned else [0] * len(clocks.offsets)
    impossible, of = count_impossible(matching, offsets, clocks.resolution_s)
    if impossible > CONTRADICTED * of:
        return "durations", (
            f"in {impossible:,} of {of:,} collectives a rank left before another had begun, which clocks that agree "
            "cannot show"
        )
    if is_aligned:
        apart = format_duration(clocks.largest_offset_s or 0.0)
        return "aligned", f"offsets of up to {apart} were found from collectives and taken off"
    if usable:
        return "as recorded", f"the clock of {len(needed):,} of {len(clocks.offsets):,} ranks has no usable offset"
    return "as recorded", "no clock offset can be told from none"


def count_impossible(matching: Matching, offsets_ns: Sequence[int], resolution_s: float) -> tuple[int, int]:
    """Synchronising collectives that one member left before another had begun, and how many there are in all."""
    together = np.isin(matching.collective, coll.SYNCHRONISING)
    if not together.any():
        return 0, 0
    shift = np.asarray(offsets_ns, np.int64)[matching.rank[matching.member]]
    start, end = (matching.of_members(name).astype(np.int64) - shift for name in ("start_ns", "end_ns"))
    first_end = np.minimum.reduceat(end, matching.first)
    last_start = np.maximum.reduceat(start, matching.first)
    # Both times are cut to whole units of their clocks.
    impossible = together & (last_start - first_end > 2e9 * resolution_s)
    return int(impossible.sum()), int(together.sum())
