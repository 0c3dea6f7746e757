"""From a sweep to cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from stepscope.bench.comms.data import DTYPE_BYTES, REDUCTIONS
from stepscope.bench.comms.layouts import parse_layout
from stepscope.bench.comms.operations import BOTH_WAYS, PATTERNS, USUAL_PATTERN, Operation, find_operation
from stepscope.bench.comms.wire import require_wire_sense
from stepscope.core.errors import UsageError, unknown_name
from stepscope.records import Benchmark, Case
from stepscope.records.kinds import COMMUNICATION_OWNER, POINT_TO_POINT, WORLD, CollectiveSpec, PointToPointSpec

LARGEST_SIZE_BYTES = 2**44
OBJECT_DTYPE = "uint8"
"""Pickled objects travel as bytes."""


def make_benchmark(model: str, backend: str, world_size: int, description: str) -> Benchmark:
    return Benchmark(
        model=model,
        implementation="micro",
        mode=backend,
        config=f"{world_size}ranks",
        owner=COMMUNICATION_OWNER,
        description=description,
    )


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
    for size in () if operation.name == "barrier" else points:
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
        (operation.objects and options.mode != "blocking", "--mode", f"{name} waits for its result"),
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
        (options.reduction == "avg" and options.dtype == "bool", "--reduction", "truths have no average"),
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
    for broken, where, message in rules:
        if broken:
            raise UsageError(message, hint="stepscope bench comms --list shows what each operation takes", where=where)
    if options.sources is not None or options.targets is not None:
        require_pairs(name, options, members)
    if options.wire is not None:
        require_wire_sense(name, options, options.wire)


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
    for broken, where, message in rules:
        if broken:
            raise UsageError(message, hint="for example --src-ranks 0,2 --dst-ranks 1,3", where=where)
