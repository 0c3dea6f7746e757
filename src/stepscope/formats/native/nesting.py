"""The walk over nested calls, compiled, on arrays by address."""

from __future__ import annotations

from typing import Any

from numba import carray  # type: ignore[attr-defined]

from stepscope.formats.native import part
from stepscope.formats.nesting import walk_stack

_walk = part(walk_stack)


def walk_stack_at(order: Any, thread: Any, start: Any, end: Any, parent: Any, stack: Any, sizes: Any) -> int:
    """As `walk_stack`; `sizes` holds the numbers of rows in `order` and in the other columns."""
    ordered, rows = sizes[0], sizes[1]
    return _walk(
        carray(order, ordered),
        carray(thread, rows),
        carray(start, rows),
        carray(end, rows),
        carray(parent, rows),
        carray(stack, ordered + 1),
    )
