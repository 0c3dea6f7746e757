"""Durations summed up by group: one pass for all groups, whatever they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.analyze.step.numbers import seconds, share_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

_LARGEST_BITS = 62
COVERED = 0.8
"""Share of the time that the smallest set of groups has to cover."""


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one group."""

    name: str
    count: int
    total_s: float
    """Sum of durations: more than the time passed, where several run at once."""
    share: float
    """Of the sum of all groups."""
    mean_s: float
    median_s: float
    p95_s: float
    min_s: float
    max_s: float
    std_s: float | None
    """Of the sample; None for a single one."""


class TimesTable(msgspec.Struct, frozen=True, kw_only=True):
    """Groups, longest total first."""

    rows: list[Times]
    covering: int
    """So many of the first rows cover 80 % of the time, and no smaller set does."""


class GroupStatistics(NamedTuple):
    """One entry a group, in nanoseconds."""

    count: Any
    total: Any
    mean: Numbers
    median: Numbers
    p95: Numbers
    least: Any
    most: Any
    deviation: Numbers


def _by_group_and_length(group: Any, durations: Any, count: int) -> Any:
    """The durations, group by group, in each the shortest first."""
    import numpy as np

    bits = int(durations.max()).bit_length()
    if int(durations.min()) < 0 or bits + count.bit_length() > _LARGEST_BITS:
        return durations[np.lexsort((durations, group))]
    # Both in one number: numbers sort several times faster than places of numbers.
    together = group.astype(np.int64)
    together <<= bits
    together |= durations
    together.sort()
    together &= (1 << bits) - 1
    return together


def summarise_groups(group: Any, durations: Any, count: int) -> GroupStatistics:
    """`group` holds numbers below `count`, and every one of them occurs."""
    import numpy as np

    ordered = _by_group_and_length(group, durations, count)
    counts = np.bincount(group, minlength=count)
    last = np.cumsum(counts)
    first = last - counts
    totals = np.add.reduceat(ordered, first)
    means = totals / np.maximum(counts, 1)
    squares = np.bincount(group, weights=(durations - means[group]) ** 2, minlength=count)
    return GroupStatistics(
        count=counts,
        total=totals,
        mean=means,
        median=_quantile(ordered, first, counts, 0.5),
        p95=_quantile(ordered, first, counts, 0.95),
        least=ordered[first],
        most=ordered[last - 1],
        deviation=np.sqrt(squares / np.maximum(counts - 1, 1)),
    )


def _quantile(ordered: Any, first: Any, counts: Any, q: float) -> Numbers:
    """Linear between order statistics, as in `stepscope.stats`."""
    import numpy as np

    position = q * (counts - 1)
    below = np.floor(position).astype(np.int64)
    low, high = ordered[first + below], ordered[first + np.minimum(below + 1, counts - 1)]
    values: Numbers = low + (high - low) * (position - below)
    return values


def tabulate(names: Sequence[str], group: Any, durations: Any) -> TimesTable:
    """A row a name; `group` says for each duration which of the names it has. Names without any are left out."""
    import numpy as np

    if not len(durations):
        return TimesTable(rows=[], covering=0)
    used = np.bincount(group, minlength=len(names)) > 0
    if not used.all():
        place = np.cumsum(used) - 1
        group, names = place[group], [name for name, is_used in zip(names, used.tolist(), strict=True) if is_used]
    found = summarise_groups(group, durations, len(names))
    whole = int(found.total.sum())
    order = np.argsort(-found.total, kind="stable")
    columns = [values[order].tolist() for values in found]
    rows = [
        Times(
            name=names[place],
            count=count,
            total_s=seconds(total),
            share=share_of(total, whole),
            mean_s=seconds(mean),
            median_s=seconds(median),
            p95_s=seconds(p95),
            min_s=seconds(least),
            max_s=seconds(most),
            std_s=seconds(deviation) if count > 1 else None,
        )
        for place, count, total, mean, median, p95, least, most, deviation in zip(order.tolist(), *columns, strict=True)
    ]
    reached = np.cumsum(found.total[order])
    return TimesTable(rows=rows, covering=min(int(np.searchsorted(reached, COVERED * whole)) + 1, len(rows)))
