"""What ranks put in and must get out: numbers that every rank can compute for every other, at any place.

Values look random and depend on member, place and case. They are small enough that every reduction over the group is
exact in its dtype, whatever the order of its steps: a result is right or wrong, with nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, reduce
from typing import NamedTuple

from stepscope.core.lazy_torch import torch

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
LARGEST_EXACT = {
    "float64": 1 << 30, "float32": 1 << 24, "bfloat16": 256, "float16": 2048, "float8_e4m3fn": 16, "float8_e5m2": 8,
    "int64": 1 << 30, "int32": 1 << 30, "int16": 32_766, "int8": 126, "uint8": 254, "bool": 1,
}  # fmt: skip
"""Whole numbers from 0 to here are exact in the dtype, and the next one is free to mark what was never written."""
REDUCTIONS = ("sum", "avg", "min", "max", "prod")
LARGEST_VALUE = 250
MOST_DOUBLINGS = 6
"""Factors 2 in a product: 2 to this power is exact in every dtype that multiplies (126 in int8 holds 64)."""
PERIOD = 65_521
"""Values repeat after so many places. It is prime: no message size of common use is a multiple of it."""
PIECE = 1 << 22
"""Elements compared at once, so that a check needs little memory of its own."""


class Recipe(NamedTuple):
    """How the values of one case are made."""

    dtype: str
    members: int
    reduction: str | None = None
    """None: data is moved, not reduced."""
    seed: int = 0


def torch_dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def make_values(recipe: Recipe, member: int | None, start: int, count: int, device: str = "cpu") -> torch.Tensor:
    """What `member` puts in at the places from `start` on; with None, the reduction over all members there."""
    table = _input_table(recipe, member) if member is not None else _reduced_table(recipe)
    return tile(table, start, count).to(device).to(torch_dtype(recipe.dtype))


def tile(table: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """`table` repeated for ever, from `start` on."""
    first = start % len(table)
    repeats = -(-(first + count) // len(table))
    return table.repeat(repeats)[first : first + count]


@lru_cache(maxsize=64)
def _input_table(recipe: Recipe, member: int) -> torch.Tensor:
    return _make_table(recipe, member).double()


@lru_cache(maxsize=4)
def _reduced_table(recipe: Recipe) -> torch.Tensor:
    """Float64: exact."""
    combine: dict[str | None, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "sum": torch.add, "avg": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum,
    }  # fmt: skip
    tables = (_make_table(recipe, member) for member in range(recipe.members))
    total = reduce(combine[recipe.reduction], tables)
    if recipe.dtype == "bool":
        total = total.clamp(max=1)
    return total.double() / recipe.members if recipe.reduction == "avg" else total.double()


def _make_table(recipe: Recipe, member: int) -> torch.Tensor:
    places = torch.arange(PERIOD)
    exact = LARGEST_EXACT[recipe.dtype]
    if recipe.reduction == "prod" and recipe.dtype != "bool":
        return 1 + _is_chosen(places, member, recipe, MOST_DOUBLINGS)
    largest, unit = min(exact, LARGEST_VALUE), 1
    if recipe.reduction in {"sum", "avg"} and recipe.dtype != "bool":
        unit = average_unit(recipe) if recipe.reduction == "avg" else 1
        largest = min(largest, exact // (recipe.members * unit))
        if not largest:  # not everybody can add something at every place
            return unit * _is_chosen(places, member, recipe, max(1, exact // unit))
    return unit * (_hash(places, member, recipe.seed) % (largest + 1))


def average_unit(recipe: Recipe) -> int:
    """What averaged values are multiples of: the number of members, so that dividing first or last is exact too.

    Where that is beyond the dtype, the next power of two, which is exact, and whose share is rounded once.
    """
    if recipe.members <= LARGEST_EXACT[recipe.dtype]:
        return recipe.members
    return 1 << (recipe.members - 1).bit_length()


def _hash(places: torch.Tensor, member: int, seed: int) -> torch.Tensor:
    """31 bits that look random, the same on every machine."""
    mixed = places * 0x9E3779B1 + (member + 1) * 0x85EBCA77 + seed * 0xC2B2AE3D
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
    mixed = (mixed ^ (mixed >> 12)) * 0x297A2D39
    return (mixed ^ (mixed >> 15)) & 0x7FFFFFFF


def _is_chosen(places: torch.Tensor, member: int, recipe: Recipe, most: int) -> torch.Tensor:
    """1 where this member is among those chosen: at each place at most so many members in a row, beginning anywhere."""
    common = _hash(places, -1, recipe.seed)
    many = common % (min(recipe.members, most) + 1)
    return (((common >> 8) + member) % recipe.members < many).long()


def is_average_exact(recipe: Recipe) -> bool:
    return average_unit(recipe) == recipe.members


def spoil(tensor: torch.Tensor, dtype: str) -> None:
    """Overwrite with what no result contains, so that an element nobody wrote is found.

    bool has no third value: there an element that nobody wrote is found only where the result is false.
    """
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif dtype == "bool":
        tensor.fill_(True)
    else:
        tensor.fill_(LARGEST_EXACT[dtype] + 1)


def count_wrong(result: torch.Tensor, expected: torch.Tensor, recipe: Recipe) -> int:
    """Elements that are not what they must be: equality.

    Only averages over more members than the dtype has whole numbers, and no power of two of them, may be off: by two
    roundings of the dtype.
    """
    wrong = 0
    for start in range(0, len(result), PIECE):
        got, wanted = result[start : start + PIECE], expected[start : start + PIECE]
        if recipe.reduction == "avg" and not is_average_exact(recipe):
            epsilon = torch.finfo(got.dtype).eps
            near = (got.double() - wanted.double()).abs() <= 2 * epsilon * wanted.double().abs()
            wrong += int((~near).sum())
        elif got.dtype.itemsize == 1 and got.is_floating_point():
            # No comparison is built for float8; NaN, which equals nothing, must stay wrong.
            wrong += int((got.float() != wanted.float()).sum())
        else:
            wrong += int((got != wanted).sum())
    return wrong
