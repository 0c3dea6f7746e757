"""Who waited in which collective of a step, and who came last to it: few rows and columns, however large the job."""

from __future__ import annotations
from stepscope.analyze.step.numbers import Whole
import numpy as np

from typing import Any

import msgspec

from stepscope.analyze.ranks import conventions as conv
from stepscope.analyze.ranks.matching import Matching
from stepscope.analyze.ranks.waiting import Waiting


MOST_COLUMNS = 48
"""Collectives with a column of their own; more of them are put together with their neighbours in time."""
MOST_ROWS, SINGLE_ROWS, GROUP_ROWS = 32, 8, 24
"""Ranks with a row of their own. Of more ranks, those that kept others waiting longest have one, and groups of
neighbouring ranks have the others."""


class MapColumn(msgspec.Struct, frozen=True, kw_only=True):
    """One collective, or several that follow each other."""

    collectives: dict[str, int]
    """How many of each kind: one, except where neighbours were put together."""
    size_bytes: int | None
    """Of the single collective; None: not known, or several."""
    group_size: int | None
    last_rank: int | None
    """The rank to whom most of the arrival skew is due; None: all came at the same time."""
    skew_s: float
    """Latest minus median arrival, summed over the collectives."""


class MapRow(msgspec.Struct, frozen=True, kw_only=True):
    ranks: list[int]
    """One rank, or the first and the last of a group of neighbours."""
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
    """Of the matched synchronising collectives of one step, or of all; None where there are none."""
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
    names = [conv.COLLECTIVES[int(code)] for code in matching.collective[collectives]]
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
