"""Average times of each rank, beside the table whose times are those of the slowest one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stepscope.core.units import format_bytes, format_duration, format_significant
from stepscope.report.text import align, plain
from stepscope.store import MeasuredCase


def format_rank_averages(cases: Sequence[MeasuredCase]) -> str:
    """`#` lines: one row per case with times, one column per rank, then the average over the ranks and the total."""
    means = [(case, found) for case in cases if (found := case.rank_means_s())]
    if not means:
        return ""
    ranks = sorted({rank for _, found in means for rank in found})
    rows = [["operation", "size", "dtype", *(f"rank {rank}" for rank in ranks), "all ranks", "total"]]
    for case, found in means:
        spec = case.result.case.spec
        rows.append(
            [
                plain(case.result.case.benchmark.model),
                format_bytes(spec.size_bytes) if spec.size_bytes is not None else "-",
                plain(spec.dtype or "-"),
                *(format_significant(found[rank] * 1e6) if rank in found else "-" for rank in ranks),
                format_significant(math.fsum(found.values()) / len(found) * 1e6),
                format_duration(math.fsum(case.seconds())),
            ]
        )
    head = "# average time of one call per rank (us); total: all timed calls, by the slowest rank of each"
    numeric = [False, True, False, *[True] * (len(ranks) + 2)]
    return "\n".join([head, *(f"# {line}" for line in align(rows, numeric))])
