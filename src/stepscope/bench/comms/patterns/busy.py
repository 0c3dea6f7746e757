"""Work for the ranks that compute: matrix products of a stated size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

FP32_BYTES = 4
LARGEST_EDGE = {"cpu": 256, "cuda": 2048}
"""Small enough that several of them make up a step evenly, large enough that a device is busy."""


class Products(NamedTuple):
    """`repeats` products of two square matrices."""

    edge: int
    repeats: int

    @property
    def flops(self) -> int:
        return 2 * self.edge**3 * self.repeats


def plan_products(flops: float, device: str) -> Products:
    """As many operations as asked for, to within the last product."""
    largest = LARGEST_EDGE["cuda" if device.startswith("cuda") else "cpu"]
    edge = max(1, min(largest, round((flops / 2) ** (1 / 3))))
    return Products(edge, max(1, round(flops / (2 * edge**3))))


def needed_bytes(sizes: Iterable[float], device: str) -> int:
    edges = {plan_products(flops, device).edge for flops in sizes}
    return sum(3 * edge * edge * FP32_BYTES for edge in edges)


def make_work(flops: float, device: str) -> Callable[[], None]:
    """Every call does the same, into the same memory."""
    import torch

    edge, repeats = plan_products(flops, device)
    left, right = (torch.ones(edge, edge, device=device) for _ in range(2))
    into = torch.empty(edge, edge, device=device)

    def work() -> None:
        for _ in range(repeats):
            torch.mm(left, right, out=into)

    return work
