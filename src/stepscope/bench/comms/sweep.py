"""Which operations, dtypes, reductions and roots one command measures: lists of each, or `all`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

from stepscope.bench.comms.cases import OBJECT_DTYPE, make_cases
from stepscope.bench.comms.data import DTYPE_BYTES, REDUCTIONS
from stepscope.bench.comms.layouts import parse_layout
from stepscope.bench.comms.operations import operations
from stepscope.core.errors import UsageError
from stepscope.records import Case

ALL = "all"
USUAL_WINDOW = 16
"""Messages under way of a bandwidth, where none are asked for."""


class Sweep(NamedTuple):
    cases: list[Case]
    left_out: list[str]
    """Why combinations that `all` would include do not exist, each reason once."""


class Axis(NamedTuple):
    values: list[Any]
    every: bool
    """They stand for `all`: combinations that do not exist are left out instead of refused."""


def make_sweep(
    *,
    collectives: Iterable[str],
    sizes: Sequence[int],
    dtypes: Iterable[str],
    reductions: Iterable[str] = ("sum",),
    roots: Iterable[str] = ("0",),
    world_size: int,
    groups: str = "world",
    pattern: str | None = None,
    window: int = 1,
    **common: Any,
) -> Sweep:
    """Cases of every combination, by operation, dtype, reduction and root. `common` goes to `make_cases`.

    A value that was named is refused where an operation does not take it. `all` means every value that exists for the
    operation: reductions and roots of those that have them, and operations that take every other option given.
    """
    members = min(len(group) for group in parse_layout(groups, world_size))
    names = read_axis(collectives, operations())
    types = read_axis(dtypes, DTYPE_BYTES)
    reducing = read_axis(reductions, REDUCTIONS)
    rooted = read_axis(roots, range(members), convert=lambda word: _parse_root(word, members))
    cases: list[Case] = []
    refusals: dict[str, UsageError] = {}
    for name in names.values:
        own_reductions, own_roots = _own_values(name, reducing, rooted)
        has_no_dtype = name == "barrier" or (types.every and is_of_objects(name))
        own_types = [OBJECT_DTYPE if is_of_objects(name) else types.values[0]] if has_no_dtype else types.values
        for dtype, reduction, root in product(own_types, own_reductions, own_roots):
            try:
                if pattern == ALL and name != "send_recv":
                    raise UsageError(f"{name} has no patterns", hint="--collective send_recv", where="--pattern")
                for further in _list_messages(pattern, window, world_size, common):
                    cases += make_cases(
                        collective=name, sizes=sizes, dtype=dtype, world_size=world_size, groups=groups,
                        reduction=reduction, root=root, **common | further,
                    )  # fmt: skip
            except UsageError as error:
                if error.where == "--sizes" or not (names.every or types.every or reducing.every):
                    raise
                refusals.setdefault(error.message, error)
    if not cases and refusals:
        raise next(iter(refusals.values()))
    return Sweep(cases, list(refusals))


def is_of_objects(name: str) -> bool:
    found = operations().get(name)
    return found is not None and found.objects


def _list_messages(pattern: str | None, window: int, world_size: int, common: dict[str, Any]) -> list[dict[str, Any]]:
    """`all`: one message at a time, ping-pong, and a window of messages one way and both ways, of the same pairs; where
    none are named, of each even rank and the next."""
    if pattern != ALL:
        return [{"pattern": pattern, "window": window}]
    sources, targets = common.get("sources"), common.get("targets")
    if sources is None and targets is None:
        paired = world_size - world_size % 2
        sources, targets = list(range(0, paired, 2)), list(range(1, paired, 2))
    many = window if window > 1 else USUAL_WINDOW
    kinds = ((None, 1), ("ping_pong", 1), (None, many), ("bidirectional", many))
    return [{"pattern": kind, "window": count, "sources": sources, "targets": targets} for kind, count in kinds]


def _own_values(name: str, reducing: Axis, rooted: Axis) -> tuple[list[str], list[int]]:
    """`all` reductions and roots of an operation that has none are its usual one."""
    operation = operations().get(name)
    reduces, has_root = (operation.reduces, operation.rooted) if operation else (True, True)
    return (
        ["sum"] if reducing.every and not reduces else reducing.values,
        [0] if rooted.every and not has_root else rooted.values,
    )


def read_axis(given: Iterable[str], every: Iterable[Any], *, convert: Callable[[str], Any] = str) -> Axis:
    """Values of an option that may be repeated, hold a list divided by commas, or say `all`; each value once."""
    words = [word.strip() for text in given for word in text.split(",") if word.strip()]
    if ALL in words:
        return Axis(list(every), every=True)
    return Axis(list(dict.fromkeys(convert(word) for word in words)), every=False)


def _parse_root(word: str, members: int) -> int:
    if not word.isdecimal() or int(word) >= members:
        raise UsageError(f"root {word} is not among {members} ranks", hint="write 0, 0,1 or all", where="--root")
    return int(word)
