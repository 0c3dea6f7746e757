"""How elements are dealt out: evenly, by a skew, or by a matrix that somebody gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from stepscope.errors import UsageError

DEFAULT_SKEW = 0.5
"""Of the uneven operations, where nothing else is asked for."""

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


def parse_matrix(text: str, members: int, *, where: str) -> list[list[float]]:
    """One line a sender, one number a receiver, divided by blanks or commas; `#` starts a comment. Proportions."""
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        try:
            row = [float(word) for word in words]
        except ValueError:
            raise UsageError(f"line {number} is no row of numbers: {line.strip()!r}", where=where) from None
        if any(value != 0 and not 1 / MAX_PROPORTION < value < MAX_PROPORTION for value in row):
            raise UsageError(f"line {number} has a share that is negative, out of range or no number", where=where)
        rows.append(row)
    if len(rows) != members or any(len(row) != members for row in rows):
        shape = "×".join(str(n) for n in (len(rows), max((len(row) for row in rows), default=0)))
        raise UsageError(
            f"the matrix of splits is {shape}; {members} ranks need {members}×{members}",
            hint="one line a sending rank, one number a receiving rank",
            where=where,
        )
    if not any(any(row) for row in rows):
        raise UsageError("the matrix of splits moves nothing", where=where)
    return rows


def read_matrix(path: Path, members: int) -> list[list[float]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the matrix of splits: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError:
        raise UsageError("the matrix of splits is no text file", where=str(path)) from None
    return parse_matrix(text, members, where=str(path))


def deal_matrix(total: int, matrix: Sequence[Sequence[float]]) -> tuple[tuple[int, ...], ...]:
    """Elements from each member to each: the busiest sender sends `total`, the others in proportion."""
    busiest = max(math.fsum(row) for row in matrix)
    return tuple(
        deal(round(total * math.fsum(row) / busiest), row) if math.fsum(row) else (0,) * len(row) for row in matrix
    )
