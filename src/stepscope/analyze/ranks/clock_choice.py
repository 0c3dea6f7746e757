"""How the times of different ranks can be compared: what the clocks themselves allow."""

from __future__ import annotations
from collections.abc import Sequence
import numpy as np

from typing import Literal

from stepscope.analyze.ranks import conventions as conv
from stepscope.analyze.ranks.clocks import Clocks, usable_offsets_ns
from stepscope.analyze.ranks.matching import Matching
from stepscope.core.units import format_duration


CONTRADICTED = 0.05
"""Of the collectives: with more of them impossible, the ranks' times cannot be compared."""


def choose_clocks(matching: Matching, clocks: Clocks) -> tuple[Literal["as recorded", "aligned", "durations"], str]:
    """The choice and why: aligned where every rank that needs an offset has a usable one; durations where starts are
    impossible; else as recorded."""
    needed = [
        entry for entry in clocks.offsets[1:] if not entry.usable and not _needs_none(entry.offset_s, entry.spread_s)
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


def _needs_none(offset_s: float | None, spread_s: float | None) -> bool:
    """An offset within its spread is none; one that is not known may be any."""
    return offset_s is not None and spread_s is not None and abs(offset_s) <= spread_s


def count_impossible(matching: Matching, offsets_ns: Sequence[int], resolution_s: float) -> tuple[int, int]:
    """Synchronising collectives that one member left before another had begun, and how many there are in all."""
    together = np.isin(matching.collective, conv.SYNCHRONISING)
    if not together.any():
        return 0, 0
    shift = np.asarray(offsets_ns, np.int64)[matching.rank[matching.member]]
    start, end = (matching.of_members(name).astype(np.int64) - shift for name in ("start_ns", "end_ns"))
    first_end = np.minimum.reduceat(end, matching.first)
    last_start = np.maximum.reduceat(start, matching.first)
    # Both times are cut to whole units of their clocks.
    impossible = together & (last_start - first_end > 2e9 * resolution_s)
    return int(impossible.sum()), int(together.sum())
