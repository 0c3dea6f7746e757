"""What the parameters of all patterns have in common."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from stepscope.bench.comms.data import DTYPE_BYTES
from stepscope.bench.comms.layouts import Layout
from stepscope.core.errors import UsageError, unknown_name

Flops = Annotated[
    float, Meta(ge=0, description="Floating-point operations of every computing step (matrix products); 0: none.")
]
Scale = Annotated[float, Meta(gt=0, le=1, description="Share of the model's sizes, for small machines.")]


class PatternOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of one pattern. `Meta.description` is what `--list` says of a field."""

    flops: Flops = 0.0


def require_dtypes(*dtypes: str) -> None:
    for dtype in dtypes:
        if dtype not in DTYPE_BYTES:
            raise unknown_name("dtype", dtype, DTYPE_BYTES, where="--set dtype=…")


def require_ranks(pattern: str, world_size: int, least: int, reason: str) -> None:
    if world_size < least:
        raise UsageError(
            f"{pattern} needs {least} ranks or more, and there {'is 1' if world_size == 1 else f'are {world_size}'}: "
            f"{reason}",
            hint=f"--ranks {least}",
            where="--ranks",
        )


def everybody(world_size: int) -> Layout:
    return (tuple(range(world_size)),)


def lines_of(degree: int | None, world_size: int, *, where: str) -> Layout:
    """Neighbouring ranks, `degree` to a group; None: all ranks in one."""
    if degree is not None and world_size % degree:
        raise UsageError(
            f"{world_size} ranks do not divide into groups of {degree}",
            hint="choose a degree that divides the number of ranks",
            where=where,
        )
    width = degree or world_size
    return tuple(tuple(range(first, first + width)) for first in range(0, world_size, width))
