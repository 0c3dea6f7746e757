"""Small questions to columns of numbers, answered in the quickest way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Whole: TypeAlias = "NDArray[np.int64]"
Floats: TypeAlias = "NDArray[np.float64]"
Mask: TypeAlias = "NDArray[np.bool_]"
Row = TypeVar("Row")


MAD_TO_SD = 1.4826
"""From a median absolute deviation to a standard deviation, for normal values."""


def seconds(nanoseconds: float) -> float:
    """Divided, not multiplied: the nearest float to the decimal number that people expect to read."""
    return nanoseconds / 1e9


def is_any(numbers: Any, wanted: Sequence[int]) -> Mask:
    """For each number whether it is wanted. For few wanted ones comparing is faster than looking up."""
    mask: Mask = numbers == wanted[0]
    for one in wanted[1:]:
        np.logical_or(mask, numbers == one, out=mask)
    return mask


def top_by(values: Any, count: int) -> list[int]:
    """Places of the largest values, largest first, the first of equals first."""
    some = np.arange(len(values))
    if len(values) > 16 * count:
        # The largest of each of many segments: the n-th largest of these is at most the n-th largest of all.
        segments = np.maximum.reduceat(values, np.arange(8 * count) * len(values) // (8 * count))
        some = np.flatnonzero(values >= np.sort(segments)[-count])
    places: list[int] = some[np.argsort(-values[some], kind="stable")][:count].tolist()
    return places


def highest_places(values: Any, most: int) -> Whole:
    """Places of all values, or of the highest in each of so many equal parts where there are more; ascending."""
    places = np.arange(len(values))
    if len(values) <= most:
        return places
    part = places * most // len(values)
    order = np.lexsort((values, part))
    return np.sort(order[np.flatnonzero(np.diff(part[order], append=most))])


def distinct(numbers: Any) -> list[int]:
    """The different ones, ascending: quick where all are the same, or small."""
    if not len(numbers):
        return []
    low, high = int(numbers.min()), int(numbers.max())
    if low == high:
        return [low]
    if high - low > 1 << 16:
        return unique(numbers).tolist()  # type: ignore[no-any-return]
    seen = np.zeros(high - low + 1, bool)
    seen[numbers.astype(np.int64) - low] = True
    return (np.flatnonzero(seen) + low).tolist()


def unique(numbers: Any) -> Any:
    """The different ones, ascending, as an array. np.unique without an index loads numpy.ma, which takes 5 ms."""
    return np.unique(numbers, return_index=True)[0]


def expand(first: Any, count: Any) -> tuple[Whole, Whole]:
    """The numbers of all ranges (so many from each first one): of which range each is, and the numbers."""
    owner = np.repeat(np.arange(len(count)), count)
    return owner, np.arange(len(owner)) + np.repeat(first - (np.cumsum(count) - count), count)


def number_codes(codes: Any, size: int) -> tuple[list[int], Any]:
    """The different codes (all in [0, size)), and for each entry which of them it is; needs no sorting."""
    seen = np.zeros(size, bool)
    seen[codes] = True
    different = np.flatnonzero(seen)
    place = np.empty(size, np.int64)
    place[different] = np.arange(len(different))
    return different.tolist(), place[codes]


def known_only(values: Any, is_known: Mask) -> Any:
    """The values; None where they are not known."""
    return np.where(is_known, values, np.array(None))


def make_rows(kind: Callable[..., Row], columns: Mapping[str, Any]) -> list[Row]:
    """A struct for each row of these columns, which are lists or arrays."""
    lists = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns.values()]
    return [kind(**dict(zip(columns, cells, strict=False))) for cells in zip(*lists, strict=True)]


def share_of(part: float, whole: float) -> float:
    """0 where there is nothing to share."""
    return part / whole if whole else 0.0


def sum_by(key: Any, values: Any, keys: int) -> Whole:
    """By key (0 … keys − 1) the sum of its nanoseconds or bytes: exact up to 2⁵³, a hundred days."""
    return np.bincount(key, weights=values, minlength=keys).astype(np.int64)


def run_sums(key: Any, values: Any, keys: int) -> Floats:
    """By key (0 … keys − 1) the sum of its values."""
    # bincount forgets about weights where there are no rows.
    return np.bincount(key, weights=values, minlength=keys).astype(np.float64)


def run_medians(values: Any, key: Any, keys: int) -> Floats:
    """By key (0 … keys − 1) the median of its values; NaN for a key that has none."""
    count = np.bincount(key, minlength=keys)
    if keys and len(key) == keys * count[0] > 0 and (count == count[0]).all() and (key[1:] >= key[:-1]).all():
        even: Floats = np.median(values.reshape(keys, -1), axis=1).astype(np.float64)
        return even
    ordered = values[np.lexsort((values, key))].astype(np.float64)
    first = np.cumsum(count) - count
    result = np.full(keys, np.nan)
    some = count > 0
    low = first[some] + (count[some] - 1) // 2
    high = first[some] + count[some] // 2
    result[some] = (ordered[low] + ordered[high]) / 2
    return result
