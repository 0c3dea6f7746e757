"""Waiting for others and moving data, told apart inside matched collectives."""

from __future__ import annotations
from stepscope.analyze.step.numbers import Floats, Mask, Whole
import numpy as np

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stepscope.analyze.ranks import conventions as conv
from stepscope.analyze.ranks.collectives import ON_DEVICE
from stepscope.analyze.ranks.matching import Matching
from stepscope.analyze.ranks.segments import run_medians


Basis = Literal["starts", "durations"]
"""starts: who began when, on clocks that agree. durations: all end together, so whoever was in it longer waited longer;
no clock is compared."""


@dataclass(frozen=True)
class Waiting:
    """Seconds. Rows are those of `matching.member`; NaN where waiting cannot be told."""

    duration_s: Floats
    wait_s: Floats
    late_s: Floats
    """How much later than the median member it arrived (negative: earlier); synchronising collectives only."""
    own_late_s: Floats
    """The same by its own doing: how much more time than the median member it took since it left its collective before.
    Late because others had kept it waiting does not count. Compares no clocks."""
    transfer_s: Floats
    """By collective: from the last arrival to the end."""
    skew_s: Floats
    """By collective: the latest arrival minus the median one."""
    last: Whole
    """By collective: place in `ranks` of the latest; −1 where it cannot be told."""


def find_waiting(matching: Matching, basis: Basis = "starts", offsets_ns: Sequence[int] | None = None) -> Waiting:
    """`offsets_ns` by place of the rank is taken off its times first."""
    rank = matching.rank[matching.member]
    start = matching.of_members("start_ns").astype(np.int64)
    duration = (matching.of_members("end_ns") - start).astype(np.float64)
    if offsets_ns is not None:
        start = start - np.asarray(offsets_ns, np.int64)[rank]
    owner, runs = matching.owner(), len(matching)
    together = np.isin(matching.collective, conv.SYNCHRONISING)
    # Starts are counted from the run's first one: nanoseconds since 1970 do not fit a float.
    since_first = (start - _lowest(start, matching)[owner]).astype(np.float64)
    arrival = since_first if basis == "starts" else -duration
    latest = np.maximum.reduceat(arrival, matching.first) if runs else np.empty(0)
    middle = run_medians(arrival, owner, runs)
    wait = np.clip(latest[owner] - arrival, 0.0, duration)
    transfer = run_medians(duration - wait, owner, runs)
    wait[~together[owner]] = np.nan
    transfer[~together] = np.nan
    if basis == "starts":
        _add_messages(matching, arrival, duration, wait, transfer)
    late = np.where(together[owner], arrival - middle[owner], np.nan)
    own_late = _own_lateness(matching, together[owner])
    return Waiting(
        duration_s=duration / 1e9,
        wait_s=wait / 1e9,
        late_s=late / 1e9,
        own_late_s=np.where(np.isnan(own_late), late, own_late) / 1e9,
        transfer_s=transfer / 1e9,
        skew_s=np.where(together, latest - middle, np.nan) / 1e9,
        last=np.where(together, rank[_place_of_latest(arrival, latest, matching)], -1) if runs else owner,
    )


def _lowest(values: Whole, matching: Matching) -> Whole:
    lowest: Whole = np.minimum.reduceat(values, matching.first) if len(matching) else values
    return lowest


def _place_of_latest(arrival: Floats, latest: Floats, matching: Matching) -> Whole:
    """The first member (lowest rank) of each run that arrived latest."""
    owner = matching.owner()
    candidates = np.flatnonzero(arrival == latest[owner])
    return candidates[np.searchsorted(owner[candidates], np.arange(len(matching)))]


def _own_lateness(matching: Matching, kept: Mask) -> Floats:
    """NaN where a member's time before the collective is not known: at its first one, and outside of `kept`."""
    rank = matching.rank[matching.member]
    start, end = (matching.of_members(name).astype(np.int64) for name in ("start_ns", "end_ns"))
    before = np.full(len(rank), np.nan)
    before[kept] = _time_since_last_end(rank[kept], start[kept], end[kept])
    owner, runs = matching.owner(), len(matching)
    own = before - run_medians(before, owner, runs)[owner]
    unknown = np.bincount(owner[np.isnan(before)], minlength=runs) > 0
    return np.where(unknown[owner], np.nan, own)


def _time_since_last_end(rank: Whole, start: Whole, end: Whole) -> Floats:
    """From the last end on the same rank that is not after the start; NaN where there is none."""
    if not len(rank):
        return np.empty(0)
    earliest = np.full(int(rank.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(earliest, rank, start)
    start, end = start - earliest[rank], end - earliest[rank]
    # Ranks are laid one behind the other: one search serves all.
    span = int(end.max()) + 1
    ends = np.sort(rank * span + end)
    place = np.searchsorted(ends, rank * span + start, side="right") - 1
    found = ends[np.maximum(place, 0)]
    known = (place >= 0) & (found // span == rank)
    return np.where(known, rank * span + start - found, np.nan)


def _add_messages(matching: Matching, arrival: Floats, duration: Floats, wait: Floats, transfer: Floats) -> None:
    """A receive waits for its send to begin. How long a send waits cannot be told: small ones are buffered."""
    pairs = np.flatnonzero((matching.count == 2) & np.isin(matching.collective, (conv.SEND, conv.RECV)))
    first, second = matching.first[pairs], matching.first[pairs] + 1
    collective, place = matching.of_members("collective"), matching.of_members("place")
    receives_first = collective[first] == conv.RECV
    receive, send = np.where(receives_first, first, second), np.where(receives_first, second, first)
    kept = (place[receive] == ON_DEVICE) & (place[send] == ON_DEVICE)
    receive, send, pairs = receive[kept], send[kept], pairs[kept]
    wait[receive] = np.clip(arrival[send] - arrival[receive], 0.0, duration[receive])
    transfer[pairs] = duration[receive] - wait[receive]
