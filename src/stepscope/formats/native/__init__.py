"""Loops that are compiled. These modules import numpy at their top and are imported only inside functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def part(function: Callable[P, R]) -> Callable[P, R]:
    """Compiled into a function whose machine code is kept as a whole (module machine_code). numba keeps nothing of it:
    its own cache does not notice when a part in another file changes."""
    import numba

    return cast(Callable[P, R], numba.njit(nogil=True)(function))


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """By numba, kept on disk so that only the first use on a machine pays; plain Python where numba is missing."""
    try:
        import numba
    except ImportError:
        return function
    try:
        return cast(Callable[P, R], numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no folder to keep it in
        return cast(Callable[P, R], numba.njit(nogil=True)(function))
