"""Gradients put together into buckets, as DistributedDataParallel does."""

from __future__ import annotations

from collections.abc import Sequence


def fill_buckets(sizes: Sequence[int], *, element_bytes: int, first_bytes: float, rest_bytes: float) -> list[list[int]]:
    """Sizes in the order in which gradients become ready. A bucket is full when it has reached its limit, so that
    a large tensor may go over it."""
    buckets: list[list[int]] = []
    current: list[int] = []
    for size in sizes:
        current.append(size)
        if sum(current) * element_bytes >= (rest_bytes if buckets else first_bytes):
            buckets.append(current)
            current = []
    return [*buckets, current] if current else buckets


def shrink(elements: int, scale: float) -> int:
    return max(1, round(elements * scale))
