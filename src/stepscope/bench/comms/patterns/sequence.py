"""One step of a job as data: what is communicated and computed, by whom, and what has to be done before. No torch.

A sequence is the same list on every rank. A rank carries out the steps it is in, when its program says.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from stepscope.bench.comms.data import DTYPE_BYTES
from stepscope.bench.comms.kernels import LookupKernel
from stepscope.bench.comms.layouts import Layout
from stepscope.bench.comms.operations import CollectiveShape, Operation, Traffic, exchange_pieces, find_operation
from stepscope.core.errors import UsageError, unknown_name
from stepscope.records import Parameter

Flops = Annotated[
    float, Meta(ge=0, description="Floating-point operations of every computing step (matmuls); 0: none.")
]
Scale = Annotated[float, Meta(gt=0, le=1, description="Factor on the model's sizes, for small machines.")]


class PatternOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of one pattern. `Meta.description` is what `--list` says of a field."""

    flops: Flops = 0.0


def require_dtypes(*dtypes: str) -> None:
    for dtype in dtypes:
        if dtype not in DTYPE_BYTES:
            raise unknown_name("dtype", dtype, DTYPE_BYTES, where="--set dtype=…")


def require_ranks(pattern: str, world_size: int, least: int, reason: str) -> None:
    if world_size < least:
        raise UsageError(
            f"{pattern} needs {least} ranks or more, and there {'is 1' if world_size == 1 else f'are {world_size}'}: "
            f"{reason}",
            hint=f"--ranks {least}",
            where="--ranks",
        )


def everybody(world_size: int) -> Layout:
    return (tuple(range(world_size)),)


def lines_of(degree: int | None, world_size: int) -> Layout:
    """Neighbouring ranks, `degree` to a group; None: all ranks in one."""
    if degree is not None and world_size % degree:
        raise UsageError(
            f"{world_size} ranks do not divide into groups of {degree}",
            hint="choose a degree that divides the number of ranks",
            where="--set degree=…",
        )
    width = degree or world_size
    return tuple(tuple(range(first, first + width)) for first in range(0, world_size, width))


Pieces = tuple[tuple[int, ...], ...]
"""Elements from each member to each."""

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.\d+)*")


class Step(NamedTuple):
    name: str
    """`part` or `part.3`: steps of one part are shown together."""
    groups: Layout
    """Who acts together; several groups do the same thing at the same time."""
    after: tuple[str, ...] = ()
    """Names of the steps that must be done before, on the ranks that are in both."""
    operation: str | None = None
    """None: the rank computes."""
    shape: CollectiveShape | None = None
    """The shape in one group."""
    pieces: Pieces | None = None
    """What an all_to_allv sends, in place of a shape."""
    dtype: str = "float32"
    flops: float = 0.0
    """Operations of a computing step; 0: only a point that others wait for."""
    lookups: LookupKernel | None = None
    """Embedding tables in which a computing step looks rows up."""

    @property
    def part(self) -> str:
        return self.name.partition(".")[0]

    @property
    def communicates(self) -> bool:
        return self.operation is not None

    @property
    def ranks(self) -> list[int]:
        return [rank for group in self.groups for rank in group]

    def group_of(self, rank: int) -> tuple[int, ...] | None:
        return next((group for group in self.groups if rank in group), None)

    def make_operation(self) -> Operation:
        """As the groups bind it; pieces that were given take the place of what the operation would plan."""
        assert self.operation is not None
        operation, pieces = find_operation(self.operation), self.pieces
        return operation if pieces is None else operation._replace(plan=lambda shape: exchange_pieces(pieces))

    def make_shape(self) -> CollectiveShape:
        return self.shape or CollectiveShape(len(self.groups[0]), max(sum(row) for row in self.pieces or ((0,),)))

    def plan(self) -> Traffic:
        return self.make_operation().plan(self.make_shape())

    @property
    def size_bytes(self) -> int:
        """As `bench comms` counts the size of this operation."""
        return self.plan().size * DTYPE_BYTES[self.dtype] if self.communicates else 0

    @property
    def bus_bytes(self) -> float:
        return self.plan().bus * DTYPE_BYTES[self.dtype] if self.communicates else 0.0


def compute(
    name: str,
    ranks: Iterable[int],
    *,
    after: Iterable[str] = (),
    flops: float = 0.0,
    lookups: LookupKernel | None = None,
) -> Step:
    """Every rank for itself."""
    return Step(name, tuple((rank,) for rank in ranks), tuple(after), flops=flops, lookups=lookups)


def collective(
    name: str,
    operation: str,
    groups: Layout,
    elements: int,
    *,
    after: Iterable[str] = (),
    dtype: str = "float32",
    root: int = 0,
) -> Step:
    """`elements` of the table's size. Groups must be equally large. `root` is a member of the group, by its place."""
    return Step(name, groups, tuple(after), operation, CollectiveShape(len(groups[0]), elements, root), None, dtype)


def exchange(
    name: str, groups: Layout, pieces: Sequence[Sequence[int]], *, after: Iterable[str] = (), dtype: str = "float32"
) -> Step:
    rows = tuple(tuple(row) for row in pieces)
    return Step(name, groups, tuple(after), "all_to_allv", None, rows, dtype)


def message(
    name: str, sender: int, receiver: int, elements: int, *, after: Iterable[str] = (), dtype: str = "float32"
) -> Step:
    """The pair (sender, receiver) is another group than (receiver, sender), so that ways do not wait for each other."""
    shape = CollectiveShape(2, elements, pattern="one_to_one")
    return Step(name, ((sender, receiver),), tuple(after), "send_recv", shape, None, dtype)


def reduce_buckets(
    part: str,
    buckets: Iterable[int],
    world_size: int,
    *,
    before: Iterable[str] = (),
    flops: float = 0.0,
    dtype: str = "float32",
) -> list[Step]:
    """A backward pass whose gradients are added up bucket by bucket, each as soon as it is ready."""
    steps: list[Step] = []
    for number, elements in enumerate(buckets):
        backward = f"{part}backward.{number}"
        reduce = f"{part}reduce.{number}"
        steps += [
            compute(backward, range(world_size), after=before, flops=flops),
            collective(reduce, "all_reduce", everybody(world_size), elements, after=[backward], dtype=dtype),
        ]
        before = [backward]
    return steps


def transpose(pieces: Sequence[Sequence[int]]) -> Pieces:
    """What goes back: j returns to i what i sent to j."""
    return tuple(zip(*pieces, strict=True))


def require_sound(steps: Sequence[Step], world_size: int) -> None:
    """Raises UsageError: a sequence that breaks a rule would hang or measure something else."""
    known: dict[str, Step] = {}
    for step in steps:
        _require(_NAME.fullmatch(step.name) is not None, step, "names are words, or words and numbers: gather.3")
        _require(step.name not in known, step, "the name stands there twice")
        known[step.name] = step
        ranks = step.ranks
        _require(bool(ranks) and all(step.groups), step, "nobody is in one of its groups")
        _require(len(set(ranks)) == len(ranks), step, "a rank is in two of its groups")
        _require(all(0 <= rank < world_size for rank in ranks), step, f"a rank is not among the {world_size}")
        if step.communicates:
            members = len(step.pieces) if step.pieces is not None else step.make_shape().members
            _require(all(len(group) == members for group in step.groups), step, f"its shape is for groups of {members}")
            _require(step.pieces is not None or step.shape is not None, step, "it has neither a shape nor pieces")
    for step in steps:
        for name in step.after:
            _require(name in known, step, f"it comes after {name!r}, which is not there")
            shared = set(step.ranks) & set(known[name].ranks)
            _require(bool(shared), step, f"it comes after {name!r}, but no rank is in both")
    order_steps(steps)


def _require(holds: bool, step: Step, rule: str) -> None:
    if not holds:
        raise UsageError(f"step {step.name!r} cannot be: {rule}", hint="correct the pattern's builder", where=step.name)


def order_steps(steps: Sequence[Step]) -> list[Step]:
    """As listed, but never before what a step comes after. Raises UsageError where steps wait for each other."""
    place = {step.name: number for number, step in enumerate(steps)}
    sorter = TopologicalSorter({number: [place[name] for name in step.after] for number, step in enumerate(steps)})
    try:
        sorter.prepare()
    except CycleError as error:
        stuck = [steps[number].name for number in sorted(set(error.args[1]))]
        raise UsageError(
            f"steps wait for each other: {', '.join(stuck[:5])}", hint="correct the pattern's builder", where=stuck[0]
        ) from None
    ready: list[int] = []
    ordered: list[Step] = []
    while sorter.is_active():
        for number in sorter.get_ready():
            heapq.heappush(ready, number)
        first = heapq.heappop(ready)
        ordered.append(steps[first])
        sorter.done(first)
    return ordered


def busiest_rank_bytes(steps: Sequence[Step], world_size: int) -> float:
    """What the rank moves that moves most in all steps: its own messages, and bus bytes of collectives."""
    totals = [0.0] * world_size
    for step in (step for step in steps if step.communicates):
        traffic, width = step.plan(), DTYPE_BYTES[step.dtype]
        own: list[float] = [max(moved) for moved in zip(traffic.inputs, traffic.outputs, strict=True)]
        by_member = own if step.make_operation().pairs else [traffic.bus] * len(own)
        for group in step.groups:
            for rank, moved in zip(group, by_member, strict=True):
                totals[rank] += moved * width
    return max(totals)


class Action(NamedTuple):
    kind: Literal["start", "wait", "compute"]
    step: Step


def make_program(steps: Sequence[Step], rank: int, *, overlap: bool = True) -> list[Action]:
    """Everything this rank does in one step of the job, in order.

    With overlap a communication is started as soon as what it comes after is done, and waited for when the next step
    needs it, or at the end. Without, each is waited for at once; as all ranks then follow one order, no two can wait
    for each other.
    """
    mine = [step for step in order_steps(steps) if step.group_of(rank) is not None]
    if overlap:
        return _overlap(mine)
    return [Action(kind, step) for step in mine for kind in (("start", "wait") if step.communicates else ("compute",))]


def _overlap(steps: Sequence[Step]) -> list[Action]:
    """Steps that other ranks alone are in hold nobody up here: what comes from them arrives by messages."""
    names = {step.name for step in steps}
    needs = {step.name: [name for name in step.after if name in names] for step in steps}
    actions: list[Action] = []
    done: set[str] = set()
    going: dict[str, Step] = {}
    pending = list(steps)
    while pending:
        ready = [step for step in pending if done.issuperset(needs[step.name])]
        # Communication first: it goes on by itself while this rank computes.
        startable = [step for step in ready if step.communicates]
        if startable:
            actions += [Action("start", step) for step in startable]
            going.update((step.name, step) for step in startable)
            pending = [step for step in pending if step.name not in going]
        elif ready:
            actions.append(Action("compute", ready[0]))
            done.add(ready[0].name)
            pending.remove(ready[0])
        else:
            following = next(
                step for step in pending if all(name in done or name in going for name in needs[step.name])
            )
            for name in needs[following.name]:
                if name in going:
                    actions.append(Action("wait", going.pop(name)))
                    done.add(name)
    return actions + [Action("wait", step) for step in going.values()]


class Pattern(NamedTuple):
    name: str
    summary: str
    options: type[PatternOptions]
    build: Callable[[Any, int], list[Step]]

    def make_steps(self, options: PatternOptions, world_size: int) -> list[Step]:
        steps = self.build(options, world_size)
        require_sound(steps, world_size)
        return order_steps(steps)

    def list_values(self, options: PatternOptions | None = None) -> dict[str, Parameter]:
        """As plain values; without options, the usual ones."""
        values: dict[str, Any] = msgspec.to_builtins(options or self.options())
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
