"""Which embedding tables a model has: declared, or drawn with the statistics of production tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple


class Tables(NamedTuple):
    rows: tuple[int, ...]
    lookups: tuple[int, ...]
    """Of one bag, on average."""

    @property
    def starts(self) -> list[int]:
        """Where each begins when all are laid out as one."""
        return [0, *accumulate(self.rows)][:-1]


def read_tables(sizes: Mapping[str, Any]) -> Tables:
    """`rows` and `lookups` are one number for `tables` tables or a list; with `table_seed` they are drawn."""
    if "table_seed" in sizes:
        return _draw_tables(sizes)
    rows, lookups = sizes["rows"], sizes["lookups"]
    count = len(rows) if isinstance(rows, list) else int(sizes["tables"])
    every_row = rows if isinstance(rows, list) else [rows] * count
    every_lookup = lookups if isinstance(lookups, list) else [lookups] * count
    cap = sizes.get("row_cap", math.inf)
    return Tables(tuple(int(min(one, cap)) for one in every_row), tuple(every_lookup))


def _draw_tables(sizes: Mapping[str, Any]) -> Tables:
    """Log-normal rows and lookups: most tables are short and read once or twice, few are long and read by the hundred.

    With `mean_tables` their number is drawn too, from 0.7 to 1.3 of it, and every other seed gives a task whose tables
    all have at least `busy_lookups`.
    """
    seed = int(sizes["table_seed"])
    chance = Random(seed)
    mean = sizes.get("mean_tables")
    count = round(chance.uniform(0.7, 1.3) * mean) if mean else int(sizes["tables"])
    least = int(sizes.get("busy_lookups", 1)) if seed % 2 else 1
    rows: list[int] = []
    lookups: list[int] = []
    while len(rows) < count:
        reads = _draw_whole(chance, sizes["median_lookups"], sizes["lookup_spread"], sizes["lookup_cap"])
        length = _draw_whole(chance, sizes["median_rows"], sizes["row_spread"], sizes["row_cap"])
        if reads >= least:
            rows.append(length)
            lookups.append(reads)
    return Tables(tuple(rows), tuple(lookups))


def _draw_whole(chance: Random, median: float, spread: float, cap: int) -> int:
    return max(1, min(cap, round(chance.lognormvariate(math.log(median), spread))))
