"""Which operators there are: those of this package and those that others add by entry point."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from stepscope.bench.ops.operator import Operator
from stepscope.core.errors import UsageError, unknown_name

ENTRY_POINT_GROUP = "stepscope.ops"
FAMILIES = (
    "gemm",
    "training",
    "convolution",
    "attention",
    "recurrent",
    "normalisation",
    "pointwise",
    "elementwise",
    "reduction",
    "embedding",
    "interaction",
    "indexing",
    "movement",
    "optimizers",
    "call",
)
"""Modules of this room, each with its `OPERATORS`, in the order in which they are listed."""


@cache
def operators() -> dict[str, Operator]:
    """Name → operator. An entry point's value is a subclass of Operator; its name must be new."""
    found = {
        kind.name: kind() for family in FAMILIES for kind in import_module(f"stepscope.bench.ops.{family}").OPERATORS
    }
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        kind = entry.load()
        if kind.name in found:
            raise UsageError(
                f"the operator {kind.name!r} of {entry.value} is already taken",
                hint="rename it in the package that declares it",
                where=f"entry point {entry.name}",
            )
        found[kind.name] = kind()
    return found


def find_operator(name: str) -> Operator:
    known = operators()
    if name not in known:
        raise unknown_name("operator", name, known, where="--op")
    return known[name]
