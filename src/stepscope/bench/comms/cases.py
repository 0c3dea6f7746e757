"""From a command's words to cases: which operations, dtypes, reductions and roots are measured, and which cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import msgspec

from stepscope.bench.comms.data import DTYPE_BYTES, REDUCTIONS
from stepscope.bench.comms.encodings import find_encoding
from stepscope.bench.comms.layouts import parse_layout
from stepscope.bench.comms.operations import (
    BOTH_WAYS,
    PATTERNS,
    USUAL_PATTERN,
    CollectiveShape,
    Operation,
    find_operation,
    operations,
)
from stepscope.core.errors import UsageError, unknown_name
from stepscope.records import Benchmark, Case
from stepscope.records.kinds import COMMUNICATION_OWNER, POINT_TO_POINT, WORLD, CollectiveSpec, PointToPointSpec

DEFAULT_DEPTH = 4


def read_options(case: Case) -> tuple[Operation, CollectiveSpec]:
    assert isinstance(case.spec, CollectiveSpec)
    return find_operation(case.spec.operation), case.spec


def make_shape(spec: CollectiveSpec, members: int) -> CollectiveShape:
    matrix = None
    if spec.matrix is not None:
        matrix = [spec.matrix[start : start + members] for start in range(0, len(spec.matrix), members)]
    elements = spec.size_bytes // DTYPE_BYTES[spec.dtype] // spec.coalesce
    return CollectiveShape(members, elements, spec.root, spec.skew, matrix, spec.pattern, spec.window, spec.pairs)


def is_in_place(spec: CollectiveSpec, operation: Operation) -> bool:
    return spec.placement == "in_place" if spec.placement else operation.in_place


QUANTISED = ("all_reduce", "reduce", "all_to_all")
"""Operations with a quantised form."""
LARGEST_SIZE_BYTES = 2**44
OBJECT_DTYPE = "uint8"
"""Pickled objects travel as bytes."""


def make_benchmark(model: str, backend: str, world_size: int, description: str) -> Benchmark:
    return Benchmark(
        model=model, implementation="micro", mode=backend, config=f"{world_size}ranks", owner=COMMUNICATION_OWNER,
        description=description,
    )  # fmt: skip


def make_cases(
    *,
    collective: str,
    sizes: Sequence[int],
    dtype: str,
    backend: str,
    world_size: int,
    device: str,
    one_group_at_a_time: bool = False,
    **options: object,
) -> list[Case]:
    """One case a size (and a group, where they act in turn). `options` are further fields of the spec.

    Sizes that are no whole number of elements are refused: what is measured is what was asked.
    """
    operation = find_operation(collective)
    if dtype not in DTYPE_BYTES:
        raise unknown_name("dtype", dtype, DTYPE_BYTES, where="--dtype")
    if operation.objects:
        if dtype not in {"float32", OBJECT_DTYPE}:
            raise UsageError(f"{operation.name} has no dtype", hint="leave --dtype out", where="--dtype")
        dtype = OBJECT_DTYPE
    points = [0] if operation.name == "barrier" else sizes
    for size in points if operation.name != "barrier" else ():
        require_size(size, dtype)
    kind = PointToPointSpec if operation.name == POINT_TO_POINT else CollectiveSpec
    common: dict[str, Any] = {"operation": operation.name, "dtype": dtype, "device": device, **options}
    asked = [leave_out_usual(operation, kind(size_bytes=size, **common)) for size in points]
    layout = parse_layout(asked[0].groups, world_size)
    require_sense(operation, asked[0], min(len(group) for group in layout))
    benchmark = make_benchmark(operation.name, backend, world_size, operation.summary)
    numbers: Iterable[int | None] = range(len(layout)) if one_group_at_a_time else (None,)
    return [
        Case(benchmark=benchmark, spec=msgspec.structs.replace(one, group=number), world_size=world_size)
        for number in numbers
        for one in asked
    ]


def leave_out_usual(operation: Operation, options: CollectiveSpec) -> CollectiveSpec:
    """Asking for what is usual is the same case as not asking."""
    usual_placement = "in_place" if operation.in_place else "out_of_place"
    return msgspec.structs.replace(
        options,
        placement=None if options.placement == usual_placement else options.placement,
        pattern=None
        if options.pattern == USUAL_PATTERN and operation.name == "send_recv" and not options.sources
        else options.pattern,
    )


def require_size(size: int, dtype: str) -> None:
    if size < DTYPE_BYTES[dtype] or size % DTYPE_BYTES[dtype] or size > LARGEST_SIZE_BYTES:
        raise UsageError(
            f"a message of {size} bytes is no whole number of {dtype} elements ({DTYPE_BYTES[dtype]} bytes each)"
            if size <= LARGEST_SIZE_BYTES
            else f"a message of {size} bytes is beyond any memory",
            hint="write for example 1K:1M:x4",
            where="--sizes",
        )


def require_sense(operation: Operation, options: CollectiveSpec, members: int) -> None:
    """Options that an operation does not have are refused, never ignored."""
    name = operation.name
    rules = [
        (options.reduction != "sum" and not operation.reduces, "--reduction", f"{name} reduces nothing"),
        (options.reduction not in REDUCTIONS, "--reduction", f"reductions are {', '.join(REDUCTIONS)}"),
        (options.root != 0 and not operation.rooted, "--root", f"{name} has no root"),
        (options.root >= members, "--root", f"root {options.root} is not among {members} ranks"),
        (options.form == "list" and not operation.cut, "--form", f"{name} has no list form"),
        (options.pattern is not None and name != "send_recv", "--pattern", f"{name} has no patterns"),
        (options.pattern is not None and options.pattern not in PATTERNS, "--pattern",
         f"patterns are {', '.join(PATTERNS)}"),
        (operation.objects and options.mode == "graph", "--mode", f"{name} cannot be captured"),
        (bool(operation.objects or operation.made_of) and options.mode == "nonblocking", "--mode",
         f"{name} waits for its result"),
        (operation.objects and options.coalesce > 1, "--coalesce", f"{name} pickles whole objects"),
        (options.window > 1 and name != "send_recv", "--window", f"{name} has no window"),
        (options.window > 1 and options.pattern == "ping_pong", "--window", "a ping-pong has one message a turn"),
        (options.skew is not None and not operation.uneven, "--skew", f"{name} has equal pieces"),
        (options.skew is not None and options.skew < 0, "--skew", "a skew is 0 or more"),
        (options.matrix is not None and not operation.uneven, "--splits", f"{name} has equal pieces"),
        (options.matrix is not None and len(options.matrix) > members and name != "all_to_allv", "--splits",
         f"{name} takes one row of splits, a number per rank"),
        (options.matrix is not None and options.skew is not None, "--splits", "--skew makes the splits itself"),
        (options.matrix is not None and options.groups != WORLD, "--splits", "a matrix is of the whole world"),
        (options.reduction == "avg" and options.dtype == "bool", "--reduction", "bool has no average"),
        (options.placement == "in_place" and not (operation.in_place or operation.both_placements), "--placement",
         f"{name} has no in-place form"),
        (options.placement == "in_place" and options.form == "list", "--placement", "list forms are out of place"),
        (options.coalesce > 1 and not options.size_bytes // DTYPE_BYTES[options.dtype] // options.coalesce,
         "--coalesce", "sizes are too small to be cut into so many"),
        (options.mode == "nonblocking" and options.pattern == "ping_pong", "--mode",
         "a ping-pong waits for its answer"),
        (options.depth > 1 and options.mode != "nonblocking", "--depth", "only non-blocking calls are outstanding"),
        (options.mode == "graph" and options.device == "cpu", "--mode",
         "graphs are captured on a GPU only, and the device is cpu"),
    ]  # fmt: skip
    _refuse_broken(rules, hint="stepscope bench comms --list shows what each operation takes")
    if options.sources is not None or options.targets is not None:
        require_pairs(name, options, members)
    if options.wire is not None:
        require_wire_sense(name, options, options.wire)


def _refuse_broken(rules: Iterable[tuple[bool, str, str]], *, hint: str) -> None:
    """Each rule: whether it is broken, the option, and why."""
    for broken, where, message in rules:
        if broken:
            raise UsageError(message, hint=hint, where=where)


def require_wire_sense(operation: str, options: CollectiveSpec, wire: str) -> None:
    """What has no quantised form is refused, never measured as something else."""
    find_encoding(wire)
    rules = [
        (operation not in QUANTISED, "--wire", f"{operation} has no quantised form: {', '.join(QUANTISED)} have"),
        (options.dtype != "float32", "--dtype", "what is quantised is float32"),
        (options.reduction != "sum", "--reduction", "quantised pieces are added, nothing else"),
        (options.mode != "blocking", "--mode", "a quantised collective is several steps, each of which waits"),
        (options.coalesce > 1, "--coalesce", "quantised pieces travel as one call a step"),
        (options.placement == "in_place", "--placement", "the result of a quantised collective has its own place"),
        (options.form != "tensor", "--form", "quantised pieces travel as one tensor"),
    ]
    _refuse_broken(rules, hint="leave --wire or the other option out")


def require_pairs(name: str, options: CollectiveSpec, members: int) -> None:
    """Each rank sends to at most one other and receives from at most one; both ways, it is in one pair only."""
    sources, targets = options.sources or [], options.targets or []
    both_ways = options.pattern in BOTH_WAYS
    rules = [
        (name != "send_recv", "--src-ranks", f"{name} has no single senders"),
        (len(sources) != len(targets), "--dst-ranks",
         f"{len(sources)} sending ranks and {len(targets)} receiving ones are no pairs"),
        (options.groups != WORLD, "--src-ranks", "pairs are of the whole world"),
        (any(rank >= members for rank in [*sources, *targets]), "--src-ranks", f"the ranks are 0 to {members - 1}"),
        (any(source == target for source, target in zip(sources, targets, strict=False)), "--dst-ranks",
         "a rank cannot send to itself"),
        (len(set(sources)) < len(sources), "--src-ranks", "a rank sends to one other; multicast sends to all"),
        (len(set(targets)) < len(targets), "--dst-ranks", "a rank receives from one other; incast receives from all"),
        (both_ways and bool(set(sources) & set(targets)), "--dst-ranks",
         f"with {options.pattern} a rank is in one pair only"),
        (options.pattern == "ring", "--pattern", "a ring has its own senders and receivers"),
        (options.pattern == "one_to_one" and len(sources) > 1, "--pattern", "one_to_one is one pair"),
    ]  # fmt: skip
    _refuse_broken(rules, hint="for example --src-ranks 0,2 --dst-ranks 1,3")


ALL = "all"
USUAL_WINDOW = 16
"""Messages under way of a bandwidth, where none are asked for."""


class Sweep(NamedTuple):
    cases: list[Case]
    left_out: list[str]
    """Why combinations that `all` would include do not exist, each reason once."""


class SweepAxis(NamedTuple):
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
        known = operations().get(name)
        # `all` reductions and roots of an operation that has none are its usual one.
        own_reductions = ["sum"] if reducing.every and known and not known.reduces else reducing.values
        own_roots = [0] if rooted.every and known and not known.rooted else rooted.values
        own_types = types.values[:1] if name == "barrier" else types.values
        if types.every and known and known.objects:
            own_types = [OBJECT_DTYPE]
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


def read_axis(given: Iterable[str], every: Iterable[Any], *, convert: Callable[[str], Any] = str) -> SweepAxis:
    """Values of an option that may be repeated, hold a list divided by commas, or say `all`; each value once."""
    words = [word.strip() for text in given for word in text.split(",") if word.strip()]
    if ALL in words:
        return SweepAxis(list(every), every=True)
    return SweepAxis(list(dict.fromkeys(convert(word) for word in words)), every=False)


def _parse_root(word: str, members: int) -> int:
    if not word.isdecimal() or int(word) >= members:
        raise UsageError(f"root {word} is not among {members} ranks", hint="write 0, 0,1 or all", where="--root")
    return int(word)
