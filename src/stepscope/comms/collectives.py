"""What a collective is: its sizes, its bus traffic, its inputs and its expected result. No torch at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from stepscope.errors import unknown_name

if TYPE_CHECKING:
    import torch

    from stepscope.comms.group import Group

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}

VALUES = 7
"""Inputs are whole numbers below this, different by rank and place: sums over 16 ranks are exact even in bfloat16."""


class Collective(NamedTuple):
    name: str
    summary: str
    bus_factor: Callable[[int], float]
    """Of the group size n: bytes on the busiest link over the bytes in the table's size."""
    call: Callable[[Group, torch.Tensor], None]
    """In place."""
    make_input: Callable[[int, int, torch.dtype, str], torch.Tensor]
    """(rank, elements, dtype, device) → what this rank puts in."""
    make_expected: Callable[[int, int, torch.dtype, str], torch.Tensor]
    """(world size, elements, dtype, device) → what every rank must end up with, computed without communication."""


def ring_factor(n: int) -> float:
    """All-reduce moves each byte to n−1 others and back: 2(n−1)/n of the size crosses each rank's link."""
    return 2 * (n - 1) / n


def fill_by_rank(rank: int, elements: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    import torch

    places = torch.arange(elements, device=device)
    return ((places * 5 + rank * 3 + places // 11) % VALUES).to(dtype)


def sum_of_ranks(world_size: int, elements: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    import torch

    total = torch.zeros(elements, dtype=torch.int64, device=device)
    for rank in range(world_size):
        total += fill_by_rank(rank, elements, torch.int64, device)
    return total.to(dtype)


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(
        name="all_reduce",
        summary="every rank ends with the sum of all ranks' tensors",
        bus_factor=ring_factor,
        call=lambda group, tensor: group.all_reduce(tensor),
        make_input=fill_by_rank,
        make_expected=sum_of_ranks,
    ),
}


def find_collective(name: str) -> Collective:
    if name not in COLLECTIVES:
        raise unknown_name("collective", name, COLLECTIVES, where="--collective")
    return COLLECTIVES[name]
