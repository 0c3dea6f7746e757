"""Sums and medians of many runs of values at once."""

from __future__ import annotations
from stepscope.analyze.step.numbers import Floats
import numpy as np

from typing import Any


def run_sums(key: Any, values: Any, keys: int) -> Floats:
    """By key (0 … keys − 1) the sum of its values."""
    # bincount forgets about weights where there are no rows.
    return np.bincount(key, weights=values, minlength=keys).astype(np.float64)


def run_medians(values: Any, key: Any, keys: int) -> Floats:
    """By key (0 … keys − 1) the median of its values; NaN for a key that has none."""
    count = np.bincount(key, minlength=keys)
    if keys and len(key) == keys * count[0] > 0 and (count == count[0]).all() and (key[1:] >= key[:-1]).all():
        whole: Floats = np.median(values.reshape(keys, -1), axis=1).astype(np.float64)
        return whole
    ordered = values[np.lexsort((values, key))].astype(np.float64)
    first = np.cumsum(count) - count
    result = np.full(keys, np.nan)
    some = count > 0
    low = first[some] + (count[some] - 1) // 2
    high = first[some] + count[some] // 2
    result[some] = (ordered[low] + ordered[high]) / 2
    return result
