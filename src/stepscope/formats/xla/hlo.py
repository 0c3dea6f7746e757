"""What the text of an HLO operation says: which collective, over which group, how much, and what class of work."""

from __future__ import annotations

import re
from typing import NamedTuple

from stepscope.core.dtypes import dtype_bytes, dtype_name
from stepscope.formats import classify as classes

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
    "recv",
)
_OPERATION = re.compile(
    r"%?(all-reduce-scatter|ragged-all-to-all|all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    r"|collective-broadcast|send|recv|copy)(?:-(start|done))?(?=[.\s]|$)"
)
_CONTAINERS = re.compile(r"%?(while|conditional|call)(?:\.\d+)*$")
_SHAPE = re.compile(r"\b(pred|[suf]\d+\w*|bf16|c64|c128|f8\w+)\[([\d,<= ]{0,200})\]")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d, ]*)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[(\d{1,9}),(\d{1,9})\]<=\[([\d,]{1,60})\](T\()?")
_STARTED = re.compile(r"%([\w-]{1,100}-start[\w.-]{0,100}|(?:send|recv)[.\d]{0,20})(?![\w-])")
_RESULT = re.compile(r"%?[\w.-]+ = (.*?) [\w-]+\(")
_LONGEST = 1 << 14
_MOST_ELEMENTS = 1 << 50
_LARGEST_GROUP = 1 << 12
"""Numbers beyond these are damage; their product stays within 64 bits."""


class Operation(NamedTuple):
    """An operation that moves data."""

    name: str
    """One of COLLECTIVES, or copy."""
    phase: str
    """start or done of an asynchronous operation; empty for one that is whole."""


def parse_operation(name: str, category: str = "") -> Operation | None:
    """What an operation moves, by its name or its HLO category; None for computation."""
    for text in (name, category.removesuffix(" fusion")):
        found = _OPERATION.match(text)
        if found and not (found[1] == "copy" and not found[2]):
            # XLA's own name for an all-reduce of which each keeps a part.
            operation = "reduce-scatter" if found[1] == "all-reduce-scatter" else found[1]
            # A send and a receive are always in two parts, the first without a word for it.
            return Operation(operation, found[2] or ("start" if operation in ("send", "recv") else ""))
    return None


def is_container(name: str, category: str = "") -> bool:
    """Loops and calls enclose the operations they run: their rows are no work of their own."""
    return category in ("while", "conditional", "call") or bool(_CONTAINERS.match(name))


def started_by(long_name: str) -> str | None:
    """Name of the start that a `-done` waits for."""
    found = _STARTED.search(long_name[:_LONGEST])
    return found[1] if found else None


def parse_shapes(text: str) -> list[tuple[str, int]]:
    """Element type and number of elements of every array in a shape or a tuple of shapes."""
    shapes = []
    for dtype, sizes in _SHAPE.findall(text[:_LONGEST]):
        elements = 1
        for size in re.findall(r"\d+", sizes):
            elements *= int(size)
        shapes.append((dtype, min(elements, _MOST_ELEMENTS)))
    return shapes


def result_shapes(long_name: str) -> list[tuple[str, int]]:
    """Arrays that an operation gives."""
    found = _RESULT.match(long_name[:_LONGEST])
    return parse_shapes(found[1]) if found else []


def array_bytes(dtype: str, elements: int) -> int | None:
    """Bytes of an array; None for types smaller than a byte or not known."""
    width = dtype_bytes(dtype)
    return None if width is None or elements >= _MOST_ELEMENTS else width * elements


def parse_groups(long_name: str) -> tuple[int | None, list[int] | None]:
    """Size of the groups, and the members of the first one where they are written out."""
    text = long_name[:_LONGEST]
    if found := _LISTED_GROUPS.search(text):
        ranks = [int(rank) for rank in re.findall(r"\d{1,9}", found[1])]
        return (len(ranks), ranks) if ranks else (None, None)
    if found := _COUNTED_GROUPS.search(text):
        size = int(found[2])
        if size > _LARGEST_GROUP:
            return None, None
        # Without a permutation the groups are runs of neighbours.
        return size, list(range(size)) if found[4] is None else None
    return None, None


def collective_columns(operation: Operation, long_name: str) -> dict[str, object]:
    """Columns of the collective block, as far as the text tells."""
    size, ranks = parse_groups(long_name)
    columns: dict[str, object] = {"collective": operation.name, "group_size": size}
    if ranks is not None:
        columns["group_ranks"] = str(ranks)
    shapes = result_shapes(long_name)
    if operation.phase == "start" and len(shapes) > 1 and operation.name != "all-reduce":
        # A start gives its input and its output (and contexts without elements that matter).
        shapes = [shapes[1]]
    if not shapes or len({dtype for dtype, _ in shapes}) > 1:
        return columns
    out = sum(elements for _, elements in shapes)
    if out >= _MOST_ELEMENTS:
        return columns
    columns |= {"dtype": dtype_name(shapes[0][0]), "out_elements": out, "in_elements": out}
    if operation.name == "all-gather":
        columns["in_elements"] = out // size if size else None
    elif operation.name == "reduce-scatter":
        columns["in_elements"] = out * size if size else None
    return columns


_CLASS_OF_CATEGORY = {
    "loop fusion": classes.ELEMENTWISE,
    "non-fusion elementwise": classes.ELEMENTWISE,
    "data formatting": classes.ELEMENTWISE,
    "copy": classes.ELEMENTWISE,
    "copy fusion": classes.ELEMENTWISE,
    "broadcast": classes.ELEMENTWISE,
    "reshape": classes.ELEMENTWISE,
    "transpose": classes.ELEMENTWISE,
    "slice": classes.ELEMENTWISE,
    "dynamic-slice": classes.ELEMENTWISE,
    "dynamic-update-slice": classes.ELEMENTWISE,
    "concatenate": classes.ELEMENTWISE,
    "pad": classes.ELEMENTWISE,
    "iota": classes.ELEMENTWISE,
    "gather": classes.ELEMENTWISE,
    "scatter": classes.ELEMENTWISE,
    "rng-bit-generator": classes.ELEMENTWISE,
    "reduce": classes.REDUCTION,
    "reduce-window": classes.REDUCTION,
    "reduction": classes.REDUCTION,
    "select-and-scatter": classes.REDUCTION,
    "sort": classes.SORT,
}


def category_of(category: str, origin: str) -> int | None:
    """Class of an operation by its HLO category and the framework's name for it; None where neither tells.

    Compilers for TPU write matrix products as convolutions, so that the origin decides between the two.
    """
    if category in _CLASS_OF_CATEGORY:
        return _CLASS_OF_CATEGORY[category]
    if category.startswith(("convolution", "dot", "gemm")):
        return classes.CONVOLUTION if re.search(r"conv_general|conv2d|/conv\b", origin) else classes.GEMM
    return None
