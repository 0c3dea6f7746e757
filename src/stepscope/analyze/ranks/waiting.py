"""Waiting for others and moving data, told apart inside matched collectives; and a map of ranks and collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from stepscope.analyze.ranks.collectives import ON_DEVICE
from stepscope.analyze.ranks.matching import Matching
from stepscope.analyze.step.numbers import Floats, Mask, Whole, run_medians
from stepscope.core import collectives as coll

Basis = Literal["starts", "durations"]
"""starts: who began when, on clocks that agree. durations: all end together, so a rank that was in a collective longer
waited longer; no clock is compared."""


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
    together = np.isin(matching.collective, coll.SYNCHRONISING)
    # Starts are counted from the run's first one: nanoseconds since 1970 do not fit a float.
    begun = np.minimum.reduceat(start, matching.first) if runs else start
    since_first = (start - begun[owner]).astype(np.float64)
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
    # The first member (lowest rank) of each run that arrived latest.
    candidates = np.flatnonzero(arrival == latest[owner])
    last = rank[candidates[np.searchsorted(owner[candidates], np.arange(runs))]]
    return Waiting(
        duration_s=duration / 1e9,
        wait_s=wait / 1e9,
        late_s=late / 1e9,
        own_late_s=np.where(np.isnan(own_late), late, own_late) / 1e9,
        transfer_s=transfer / 1e9,
        skew_s=np.where(together, latest - middle, np.nan) / 1e9,
        last=np.where(together, last, -1),
    )


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
    pairs = np.flatnonzero((matching.count == 2) & np.isin(matching.collective, (coll.SEND, coll.RECV)))
    first, second = matching.first[pairs], matching.first[pairs] + 1
    collective, place = matching.of_members("collective"), matching.of_members("place")
    receives_first = collective[first] == coll.RECV
    receive, send = np.where(receives_first, first, second), np.where(receives_first, second, first)
    kept = (place[receive] == ON_DEVICE) & (place[send] == ON_DEVICE)
    receive, send, pairs = receive[kept], send[kept], pairs[kept]
    wait[receive] = np.clip(arrival[send] - arrival[receive], 0.0, duration[receive])
    transfer[pairs] = duration[receive] - wait[receive]


MOST_COLUMNS = 48
"""Collectives with a column of their own; more of them are put together with those next to them in time."""
MOST_ROWS, SINGLE_ROWS, GROUP_ROWS = 32, 8, 24
"""Ranks with a row of their own. Of more ranks, those that kept others waiting longest have one, and groups of
neighbouring ranks have the others."""


class MapColumn(msgspec.Struct, frozen=True, kw_only=True):
    """One collective, or several that follow each other."""

    collectives: dict[str, int]
    """How many of each kind: one, except where several were put together."""
    size_bytes: int | None
    """Size of the single collective; None: not known, or several."""
    group_size: int | None
    last_rank: int | None
    """The rank to whom most of the arrival skew is due; None: all came at the same time."""
    skew_s: float
    """Latest minus median arrival, summed over the collectives."""


class MapRow(msgspec.Struct, frozen=True, kw_only=True):
    ranks: list[int]
    """One rank, or the first and the last of a group of consecutive ranks."""
    wait_s: list[float | None]
    """By column: how long the rank waited for later ones (mean over a group); None: it took no part."""
    late_s: list[float | None]
    """By column: how much later than the median rank it arrived (mean over a group); negative: earlier."""


class WaitingMap(msgspec.Struct, frozen=True, kw_only=True):
    step: int | None
    """None: all steps."""
    collectives: int
    columns: list[MapColumn]
    """In order of time."""
    rows: list[MapRow]


def map_waiting(matching: Matching, waiting: Waiting, step: int | None) -> WaitingMap | None:
    """The map of the matched synchronising collectives of one step, or of all; None where there are none."""
    told = waiting.last >= 0
    if step is not None:
        told &= matching.step == step
    chosen = np.flatnonzero(told)
    if not len(chosen) or len(matching.ranks) < 2:
        return None
    begun = matching.rows["start_ns"][matching.member[matching.first[chosen]]]
    chosen = chosen[np.argsort(begun, kind="stable")]
    count = min(len(chosen), MOST_COLUMNS)
    column = np.full(len(matching), -1, np.int64)
    column[chosen] = np.arange(len(chosen)) * count // len(chosen)
    columns = [_describe_column(matching, waiting, chosen[column[chosen] == place]) for place in range(count)]
    return WaitingMap(step=step, collectives=len(chosen), columns=columns, rows=_rows(matching, waiting, column, count))


def _describe_column(matching: Matching, waiting: Waiting, collectives: Whole) -> MapColumn:
    names = [coll.COLLECTIVES[int(code)] for code in matching.collective[collectives]]
    skew = waiting.skew_s[collectives]
    caused = np.bincount(waiting.last[collectives], weights=skew, minlength=len(matching.ranks))
    single = int(collectives[0]) if len(collectives) == 1 else None
    size = -1 if single is None else int(matching.size_bytes[single])
    return MapColumn(
        collectives={name: names.count(name) for name in dict.fromkeys(names)},
        size_bytes=size if size >= 0 else None,
        group_size=(int(matching.members[single]) or None) if single is not None else None,
        last_rank=int(matching.ranks[int(caused.argmax())]) if caused.max() > 0 else None,
        skew_s=float(skew.sum()),
    )


def _rows(matching: Matching, waiting: Waiting, column: Whole, columns: int) -> list[MapRow]:
    ranks, of_member = len(matching.ranks), column[matching.owner()]
    kept = of_member >= 0
    cell = matching.rank[matching.member][kept] * columns + of_member[kept]

    def table(values: Any) -> Any:
        """By rank and column; NaN where the rank takes no part."""
        sums = np.bincount(cell, weights=values[kept], minlength=ranks * columns)
        present = np.bincount(cell, minlength=ranks * columns) > 0
        return np.where(present, sums, np.nan).reshape(ranks, columns)

    wait, late = table(waiting.wait_s), table(waiting.late_s)
    return [
        MapRow(
            ranks=[int(matching.ranks[part[0]])] + ([int(matching.ranks[part[-1]])] if len(part) > 1 else []),
            wait_s=_means(wait[part]),
            late_s=_means(late[part]),
        )
        for part in _group_ranks(np.nansum(np.maximum(late, 0.0), axis=1))
    ]


def _group_ranks(lateness_s: Any) -> list[Any]:
    """Places of ranks, row by row."""
    ranks = len(lateness_s)
    if ranks <= MOST_ROWS:
        return [np.array([place]) for place in range(ranks)]
    latest = np.sort(np.argsort(-lateness_s, kind="stable")[:SINGLE_ROWS])
    size = -(-ranks // GROUP_ROWS)
    return [*latest.reshape(-1, 1), *(np.arange(first, min(first + size, ranks)) for first in range(0, ranks, size))]


def _means(values: Any) -> list[float | None]:
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    sums = np.where(known, values, 0.0).sum(axis=0)
    return [float(total / some) if some else None for total, some in zip(sums, count, strict=True)]
