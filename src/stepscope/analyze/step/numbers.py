"""Small questions to columns of numbers, answered in the quickest way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Mask = NDArray[np.bool_]


def seconds(nanoseconds: float) -> float:
    """Divided, not multiplied: the nearest float to the decimal number that people expect to read."""
    return nanoseconds / 1e9


def is_any(numbers: Any, wanted: Sequence[int]) -> Mask:
    """For each number whether it is wanted. For few wanted ones comparing is faster than looking up."""
    import numpy as np

    mask: Mask = numbers == wanted[0]
    for one in wanted[1:]:
        np.logical_or(mask, numbers == one, out=mask)
    return mask


def top_by(values: Any, count: int) -> list[int]:
    """Places of the largest values, largest first, the first of equals first."""
    import numpy as np

    some = np.arange(len(values))
    if len(values) > 16 * count:
        # The largest of each of many stretches: the n-th largest of these is at most the n-th largest of all.
        stretches = np.maximum.reduceat(values, np.arange(8 * count) * len(values) // (8 * count))
        some = np.flatnonzero(values >= np.sort(stretches)[-count])
    places: list[int] = some[np.argsort(-values[some], kind="stable")][:count].tolist()
    return places


def distinct(numbers: Any) -> list[int]:
    """The different ones, ascending: quick where all are the same, or small."""
    import numpy as np

    if not len(numbers):
        return []
    low, high = int(numbers.min()), int(numbers.max())
    if low == high:
        return [low]
    if high - low > 1 << 16:
        return np.unique(numbers).tolist()  # type: ignore[no-any-return]
    seen = np.zeros(high - low + 1, bool)
    seen[numbers.astype(np.int64) - low] = True
    return (np.flatnonzero(seen) + low).tolist()


def number_codes(codes: Any, size: int) -> tuple[list[int], Any]:
    """The different codes (all in [0, size)), and for each entry which of them it is; needs no sorting."""
    import numpy as np

    seen = np.zeros(size, bool)
    seen[codes] = True
    different = np.flatnonzero(seen)
    place = np.empty(size, np.int64)
    place[different] = np.arange(len(different))
    return different.tolist(), place[codes]


def share_of(part: float, whole: float) -> float:
    """0 where there is nothing to share."""
    return part / whole if whole else 0.0
