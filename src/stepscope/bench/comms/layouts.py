"""Which ranks act together, and how the elements of a message are dealt out among them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from stepscope.core.errors import UsageError
from stepscope.core.units import parse_size
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


DEFAULT_SKEW = 0.5
"""Skew of the uneven operations, where nothing else is asked for."""

MAX_PROPORTION = 1e100
"""Sums and quotients of proportions stay numbers."""


def deal(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of the weights that add up to `total`; the largest remainders are rounded up."""
    scale = total / math.fsum(weights)
    exact = [weight * scale for weight in weights]
    shares = [int(value) for value in exact]
    order = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def skewed_weights(members: int, skew: float) -> list[float]:
    """Zipf: member i has (i+1)^−skew; 0 is even."""
    return [(member + 1) ** -skew for member in range(members)]


_NUMBERS = re.compile(r"[\s\d.,;kmgtibKMGTIB]+")
"""What is no file name: rows written on the command line, divided by semicolons."""


def parse_matrix(text: str, members: int, *, where: str, convert: Callable[[str], float] = float) -> list[list[float]]:
    """One line a sender, one number a receiver, divided by blanks or commas; `#` starts a comment. A single line is
    the same for every sender."""
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        try:
            row = [convert(word) for word in words]
        except ValueError:
            raise UsageError(f"line {number} is no row of numbers: {line.strip()!r}", where=where) from None
        if any(value != 0 and not 1 / MAX_PROPORTION < value < MAX_PROPORTION for value in row):
            raise UsageError(f"line {number} has a share that is negative, out of range or no number", where=where)
        rows.append(row)
    if len(rows) not in {1, members} or any(len(row) != members for row in rows):
        shape = "×".join(str(n) for n in (len(rows), max((len(row) for row in rows), default=0)))
        raise UsageError(
            f"the matrix of splits is {shape}; {members} ranks need 1×{members} or {members}×{members}",
            hint="one line per sending rank (or one for all), one number per receiving rank",
            where=where,
        )
    if not any(any(row) for row in rows):
        raise UsageError("the matrix of splits moves nothing", where=where)
    return rows


def read_matrix(given: str, members: int, *, where: str, in_bytes: bool = False) -> list[list[float]]:
    """From a file, or as written on the command line: `3,1` or `3,1; 0,4`. Proportions, or sizes as `64K`."""
    convert = (lambda word: float(parse_size(word, where=where))) if in_bytes else float
    if _NUMBERS.fullmatch(given) and not Path(given).exists():
        return parse_matrix(given.replace(";", "\n"), members, where=where, convert=convert)
    try:
        text = Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the matrix of splits: {error.strerror}", where=given) from error
    except UnicodeDecodeError:
        raise UsageError("the matrix of splits is no text file", where=given) from None
    return parse_matrix(text, members, where=given, convert=convert)


def require_whole_elements(matrix: Sequence[Sequence[float]], dtype: str, width: int) -> None:
    """Sizes that somebody gives are what is moved, to the byte."""
    broken = next((value for row in matrix for value in row if value % width), None)
    if broken is not None:
        raise UsageError(
            f"a piece of {broken:.0f} bytes is no whole number of {dtype} elements ({width} bytes each)",
            hint=f"use multiples of {width}",
            where="--split-bytes",
        )


def deal_matrix(total: int, matrix: Sequence[Sequence[float]]) -> tuple[tuple[int, ...], ...]:
    """Elements from each member to each: the busiest sender sends `total`, the others in proportion."""
    busiest = max(math.fsum(row) for row in matrix)
    return tuple(
        deal(round(total * math.fsum(row) / busiest), row) if math.fsum(row) else (0,) * len(row) for row in matrix
    )
