"""Which ranks act together: the whole world, a split by colour, or the lines of a mesh along one of its axes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from stepscope.core.errors import UsageError
from stepscope.records.kinds import WORLD

NO_COLOUR = "-"
_AXIS = re.compile(r"([A-Za-z_]\w*)=(\d+)")

Layout = tuple[tuple[int, ...], ...]
"""Groups of ranks; no rank is in two of them."""


def parse_layout(text: str, world_size: int) -> Layout:
    """`world`, `split:2` (rank modulo 2), `colours:0,0,1,1`, `mesh:dp=2,tp=2/tp` (along tp)."""
    kind, _, rest = text.partition(":")
    if text == WORLD:
        return (tuple(range(world_size)),)
    if kind == "split" and rest.isdigit() and 1 <= int(rest) <= world_size:
        return split_by_colour([rank % int(rest) for rank in range(world_size)])
    if kind == "colours":
        colours = rest.split(",")
        if len(colours) != world_size:
            raise UsageError(
                f"{len(colours)} colours for {world_size} ranks", hint="give one colour a rank", where="--groups"
            )
        if set(colours) == {NO_COLOUR}:
            raise UsageError("no rank has a colour", where="--groups")
        return split_by_colour(colours)
    if kind == "mesh":
        axes, _, axis = rest.rpartition("/")
        return split_mesh(parse_mesh(axes), axis, world_size)
    raise UsageError(
        f"cannot read the groups {text!r} for {world_size} ranks",
        hint="world, split:2, colours:0,0,1,1, or --mesh dp=2,tp=4 --axis tp",
        where="--groups",
    )


def split_by_colour(colours: Sequence[object]) -> Layout:
    """Ranks with the colour `-` are in no group."""
    found: dict[object, list[int]] = {}
    for rank, colour in enumerate(colours):
        if colour != NO_COLOUR:
            found.setdefault(colour, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def parse_mesh(text: str) -> dict[str, int]:
    """`dp=2,tp=4`: the first axis changes slowest with the rank."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        match = _AXIS.fullmatch(part.strip())
        if match is None or int(match[2]) < 1 or match[1] in axes:
            raise UsageError(
                f"{part.strip()!r} is no axis of a mesh, or stands there twice",
                hint="write name=size, for example --mesh dp=2,tp=4",
                where="--mesh",
            )
        axes[match[1]] = int(match[2])
    return axes


def split_mesh(axes: dict[str, int], axis: str, world_size: int) -> Layout:
    """The lines of the mesh along one axis: every rank is in one."""
    shape = "×".join(f"{name}={size}" for name, size in axes.items())
    if math.prod(axes.values()) != world_size:
        raise UsageError(
            f"the mesh {shape} has {math.prod(axes.values())} places for {world_size} ranks",
            hint="sizes must multiply to the number of ranks",
            where="--mesh",
        )
    if axis not in axes:
        raise UsageError(f"the mesh {shape} has no axis {axis!r}", hint=f"--axis {'|'.join(axes)}", where="--axis")
    names = list(axes)
    stride = math.prod(axes[name] for name in names[names.index(axis) + 1 :])
    # A line's ranks differ only in this axis: they have everything but its digit in common.
    return split_by_colour([(rank // (stride * axes[axis]), rank % stride) for rank in range(world_size)])
