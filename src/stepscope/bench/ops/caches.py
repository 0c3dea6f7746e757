"""Cold caches: enough sets of inputs that a call never finds the last one's data, or a flush where that would be many.

A lap is one call on each set. Where all sets together exceed four times the last-level cache, each call evicts what a
later one needs: rotation alone keeps the cache cold. Small inputs would need thousands of sets; they get a few, and the
cache is overwritten before each lap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

CACHES = ("warm", "cold")
EVICTION_FACTOR = 4
"""Caches hash addresses and do not evict strictly by age: on an H200, of a stream of twice the cache's size that comes
round again an eighth is still found; of four times nothing that could be measured."""
MAX_SETS = 4
MAX_SETS_BYTES = 1 << 30
"""Beyond this, a flush is cheaper than more sets."""


class Rotation(NamedTuple):
    sets: int
    flush: bool


WARM = Rotation(sets=1, flush=False)


def plan_rotation(touched_bytes: int, footprint_bytes: int, cache_bytes: int) -> Rotation:
    """`touched_bytes` are those one call reads and writes, `footprint_bytes` those a set occupies."""
    wanted = -(-EVICTION_FACTOR * cache_bytes // max(touched_bytes, 1))
    affordable = max(1, MAX_SETS_BYTES // max(footprint_bytes, 1))
    sets = max(1, min(wanted, affordable, MAX_SETS))
    return Rotation(sets=sets, flush=sets < wanted)


class CacheFlush:
    """Overwrites the last-level cache of a device; on a GPU the work is queued like any other."""

    def __init__(self, device: str, cache_bytes: int) -> None:
        import torch

        self._buffer: torch.Tensor = torch.empty(EVICTION_FACTOR * cache_bytes, dtype=torch.int8, device=device)

    def __call__(self) -> None:
        self._buffer.zero_()
