"""What each operation is: how large its parts are, and where each element of a result comes from. No torch.

Inputs, expected results and checks all follow from `Traffic`, and so does what a fake process group delivers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple, TypeVar

from stepscope.bench.comms.layouts import DEFAULT_SKEW, deal, deal_matrix, skewed_weights
from stepscope.core.collectives import bus_factor
from stepscope.core.errors import unknown_name
from stepscope.core.plugins import add_plugins

ENTRY_POINT_GROUP = "stepscope.collectives"
T = TypeVar("T")


class Segment(NamedTuple):
    """A run of elements of a result."""

    member: int | None
    """Whose input it is; None: the reduction over all members."""
    start: int
    """In that input."""
    elements: int


class Traffic(NamedTuple):
    """Elements, by member of the group."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    """0: this member gets nothing that could be checked."""
    sources: tuple[tuple[Segment, ...], ...]
    """What each member's output is made of, in order."""
    size: int
    """What the table's size counts."""
    contribution: int
    """What a member contributes, as nccl-tests counts; of uneven operations the largest."""
    bus: float
    """What the busiest link has to carry: bus factor = bus / size."""
    pieces: tuple[tuple[int, ...], ...] = ()
    """From each member to each, where the operation cuts inputs up."""
    partners: tuple[tuple[int | None, int | None], ...] = ()
    """(to, from) of each member, where members speak to single others."""
    openers: tuple[int, ...] = ()
    """The members of a ping-pong that send first."""


class CollectiveShape(NamedTuple):
    """What is asked for."""

    members: int
    elements: int
    """Elements of the table's size, as asked; operations with equal pieces round it."""
    root: int = 0
    skew: float | None = None
    matrix: Sequence[Sequence[float]] | None = None
    pattern: str | None = None
    window: int = 1
    pairs: tuple[tuple[int, int], ...] = ()
    """Sender and receiver of each message, in place of the pattern's own."""


class Operation(NamedTuple):
    name: str
    summary: str
    plan: Callable[[CollectiveShape], Traffic]
    reduces: bool = False
    rooted: bool = False
    cut: bool = False
    """Into one piece a member: a list form exists beside the tensor form."""
    uneven: bool = False
    synchronises: bool = False
    """Nobody is done before everybody has begun: one iteration leaves the ranks in step for the next."""
    in_place: bool = False
    """Usually: the result replaces the input."""
    both_placements: bool = False
    pairs: bool = False
    """Members send to single others; needs at least two."""
    objects: bool = False
    """Members exchange Python objects; elements are bytes of them, pickled."""
    made_of: tuple[str, ...] = ()
    """Operations on the same buffers, one after the other, that give the result where the backend has no such call."""
    judge: Callable[[CollectiveShape], int] = lambda shape: 0
    """The member whose times decide when there are enough samples: one that is done last."""


def _all_alike(shape: CollectiveShape, *, bus: float) -> Traffic:
    elements, every = shape.elements, range(shape.members)
    whole = (Segment(None, 0, elements),)
    sizes = (elements,) * shape.members
    return Traffic(sizes, sizes, tuple(whole for _ in every), elements, elements, bus)


def plan_all_reduce(shape: CollectiveShape) -> Traffic:
    return _all_alike(shape, bus=(bus_factor("all_reduce", shape.members) or 0.0) * shape.elements)


def _at_root(traffic: Traffic, root: int) -> Traffic:
    """Only the root gets what all would get."""
    outputs = tuple(count if member == root else 0 for member, count in enumerate(traffic.outputs))
    sources = tuple(segments if member == root else () for member, segments in enumerate(traffic.sources))
    return traffic._replace(outputs=outputs, sources=sources)


def plan_reduce(shape: CollectiveShape) -> Traffic:
    return _at_root(_all_alike(shape, bus=shape.elements), shape.root)


def _by_root(shape: CollectiveShape, at_root: T, elsewhere: T) -> tuple[T, ...]:
    return tuple(at_root if member == shape.root else elsewhere for member in range(shape.members))


def plan_broadcast(shape: CollectiveShape) -> Traffic:
    elements = shape.elements
    inputs = _by_root(shape, elements, 0)
    sources = ((Segment(shape.root, 0, elements),),) * shape.members
    return Traffic(inputs, (elements,) * shape.members, sources, elements, elements, elements)


def _even_chunks(shape: CollectiveShape) -> tuple[int, ...]:
    return (max(1, shape.elements // shape.members),) * shape.members


def _uneven_chunks(shape: CollectiveShape) -> tuple[int, ...]:
    if shape.matrix is not None:
        return deal(shape.elements, shape.matrix[0])
    skew = DEFAULT_SKEW if shape.skew is None else shape.skew
    return deal(shape.elements, skewed_weights(shape.members, skew))


def _gathered(chunks: tuple[int, ...]) -> Traffic:
    total = sum(chunks)
    segments = tuple(Segment(member, 0, count) for member, count in enumerate(chunks))
    sources = (segments,) * len(chunks)
    return Traffic(chunks, (total,) * len(chunks), sources, total, max(chunks), total - min(chunks))


def _scattered(chunks: tuple[int, ...]) -> Traffic:
    total, starts = sum(chunks), [0, *accumulate(chunks)]
    sources = tuple((Segment(None, starts[member], count),) for member, count in enumerate(chunks))
    return Traffic((total,) * len(chunks), chunks, sources, total, max(chunks), total - min(chunks))


def _even(plan: Callable[[tuple[int, ...]], Traffic]) -> Callable[[CollectiveShape], Traffic]:
    return lambda shape: plan(_even_chunks(shape))


def _uneven(plan: Callable[[tuple[int, ...]], Traffic]) -> Callable[[CollectiveShape], Traffic]:
    return lambda shape: plan(_uneven_chunks(shape))


def _exchanged(chunks: tuple[int, ...]) -> Traffic:
    return exchange_pieces((chunks,) * len(chunks))


def plan_all_to_allv(shape: CollectiveShape) -> Traffic:
    if shape.matrix is not None and len(shape.matrix) == shape.members:
        return exchange_pieces(deal_matrix(shape.elements, shape.matrix))
    return _exchanged(_uneven_chunks(shape))


def exchange_pieces(pieces: tuple[tuple[int, ...], ...]) -> Traffic:
    """Everybody sends everybody a piece: size is the most that one member sends or gets in all."""
    members = range(len(pieces))
    starts = [[0, *accumulate(row)] for row in pieces]
    inputs = tuple(sum(row) for row in pieces)
    outputs = tuple(sum(row[member] for row in pieces) for member in members)
    sources = tuple(
        tuple(Segment(sender, starts[sender][member], pieces[sender][member]) for sender in members)
        for member in members
    )
    bus = max(max(inputs[m], outputs[m]) - pieces[m][m] if len(pieces) > 1 else 0 for m in members)
    largest = max(max(row) for row in pieces)
    return Traffic(inputs, outputs, sources, max(*inputs, *outputs), largest, bus, pieces)


def plan_gather(shape: CollectiveShape) -> Traffic:
    return _at_root(_gathered(_even_chunks(shape)), shape.root)


def plan_scatter(shape: CollectiveShape) -> Traffic:
    chunks = _even_chunks(shape)
    starts = [0, *accumulate(chunks)]
    inputs = _by_root(shape, sum(chunks), 0)
    sources = tuple((Segment(shape.root, starts[member], count),) for member, count in enumerate(chunks))
    return Traffic(inputs, chunks, sources, sum(chunks), chunks[0], sum(chunks) - chunks[0])


def plan_barrier(shape: CollectiveShape) -> Traffic:
    nothing = (0,) * shape.members
    return Traffic(nothing, nothing, ((),) * shape.members, 0, 0, 0.0)


def plan_incast(shape: CollectiveShape) -> Traffic:
    chunk = max(1, shape.elements // max(1, shape.members - 1))
    into_root = tuple(Segment(sender, 0, chunk) for sender in range(shape.members) if sender != shape.root)
    total = chunk * len(into_root)
    outputs, sources = _by_root(shape, total, 0), _by_root(shape, into_root, ())
    return Traffic(_by_root(shape, 0, chunk), outputs, sources, total, chunk, total)


def plan_multicast(shape: CollectiveShape) -> Traffic:
    whole = plan_broadcast(shape)
    outputs, sources = _by_root(shape, 0, shape.elements), _by_root(shape, (), whole.sources[0])
    # The root's link carries one copy for each of the others.
    return whole._replace(outputs=outputs, sources=sources, bus=shape.elements * (shape.members - 1))


PATTERNS = {
    "ring": "member i sends to i+1 and gets from i−1, all at once",
    "one_to_one": "member 0 sends to member 1; the others wait",
    "pairwise": "even members send to the next odd one",
    "bidirectional": "pairs of neighbours send to each other at the same time",
    "ping_pong": "member 0 sends to member 1, which answers; two messages one after the other",
}


USUAL_PATTERN = "ring"
BOTH_WAYS = frozenset({"bidirectional", "ping_pong"})


def _partners(shape: CollectiveShape) -> tuple[tuple[int | None, int | None], ...]:
    members, pattern = range(shape.members), shape.pattern or USUAL_PATTERN
    pairs: Sequence[tuple[int, int]] = shape.pairs
    if not pairs and pattern == "ring":
        pairs = [(member, (member + 1) % len(members)) for member in members]
    elif not pairs:
        pairs = [(source, source + 1) for source in members[:-1:2]]
        pairs = pairs if pattern in {"pairwise", "bidirectional"} else pairs[:1]
    to = dict(pairs)
    if pattern in BOTH_WAYS:
        to |= {target: source for source, target in pairs}
    sender = {target: source for source, target in to.items()}
    return tuple((to.get(member), sender.get(member)) for member in members)


def plan_send_recv(shape: CollectiveShape) -> Traffic:
    """Each member sends to one and gets from one, or none. With a window, that many messages of the size follow each
    other, each with data of its own."""
    elements, partners = shape.elements, _partners(shape)
    inputs = tuple(0 if to is None else elements * shape.window for to, _ in partners)
    sources = tuple(
        () if sender is None else tuple(Segment(sender, i * elements, elements) for i in range(shape.window))
        for _, sender in partners
    )
    outputs = tuple(elements * len(segments) for segments in sources)
    openers = tuple(source for source, _ in shape.pairs) or (shape.root,)
    return Traffic(inputs, outputs, sources, elements, elements, elements, partners=partners, openers=openers)


def _root(shape: CollectiveShape) -> int:
    return shape.root


def _far_end(shape: CollectiveShape) -> int:
    """A member that is not the root, and the last to be reached in a chain."""
    return (shape.root - 1) % shape.members


def _receiver(shape: CollectiveShape) -> int:
    if shape.pairs:
        source, target = shape.pairs[0]
        return source if shape.pattern in BOTH_WAYS else target
    return 0 if shape.pattern in {None, "ring", "bidirectional", "ping_pong"} else 1


_BUILT_IN = (
    Operation("all_reduce", "every rank ends with the sum of all ranks' tensors", plan_all_reduce, reduces=True,
              synchronises=True, in_place=True, both_placements=True),
    Operation("reduce", "the root ends with the sum of all ranks' tensors", plan_reduce, reduces=True, rooted=True,
              in_place=True, both_placements=True, judge=_root),
    Operation("broadcast", "every rank ends with the root's tensor", plan_broadcast, rooted=True, in_place=True,
              both_placements=True, judge=_far_end),
    Operation("all_gather", "every rank ends with all ranks' tensors, one behind the other", _even(_gathered), cut=True,
              synchronises=True, both_placements=True),
    Operation("all_gatherv", "the same with tensors of different lengths", _uneven(_gathered), cut=True, uneven=True),
    Operation("reduce_scatter", "every rank ends with its piece of the sum", _even(_scattered), reduces=True,
              synchronises=True, cut=True, both_placements=True),
    Operation("reduce_scatterv", "the same with pieces of different lengths", _uneven(_scattered), reduces=True,
              cut=True, uneven=True),
    Operation("all_to_all", "every rank sends every rank a piece of its tensor", _even(_exchanged), cut=True,
              synchronises=True),
    Operation("all_to_allv", "the same with pieces of different lengths", plan_all_to_allv, cut=True, uneven=True),
    Operation("gather", "the root ends with all ranks' tensors", plan_gather, rooted=True, judge=_root),
    Operation("scatter", "every rank ends with its piece of the root's tensor", plan_scatter, rooted=True,
              judge=_far_end),
    Operation("barrier", "no rank leaves before the last has come", plan_barrier, synchronises=True),
    Operation("send_recv", "messages between single ranks, in a pattern",
              plan_send_recv, pairs=True, judge=_receiver),
    Operation("incast", "all others send to the root at once", plan_incast, rooted=True, pairs=True, judge=_root),
    Operation("multicast", "the root sends to all others at once", plan_multicast, rooted=True, pairs=True,
              judge=_far_end),
    Operation("all_gather_object", "every rank ends with all ranks' Python objects", _even(_gathered), objects=True),
    Operation("gather_object", "the root ends with all ranks' Python objects", plan_gather, rooted=True, objects=True,
              judge=_root),
    Operation("broadcast_object_list", "every rank ends with the root's Python object", plan_broadcast, rooted=True,
              objects=True, judge=_far_end),
    Operation("scatter_object_list", "every rank ends with one of the root's Python objects", plan_scatter, rooted=True,
              objects=True, judge=_far_end),
)  # fmt: skip


@cache
def operations() -> dict[str, Operation]:
    """Name → operation: those of this package and those that others add by entry point."""
    found = {operation.name: operation for operation in _BUILT_IN}
    add_plugins(found, ENTRY_POINT_GROUP, "collective")
    return found


def find_operation(name: str) -> Operation:
    known = operations()
    if name not in known:
        raise unknown_name("collective", name, known, where="--collective")
    return known[name]
