"""What collectives are: their names, how large they are and what their links carry. One table for all rooms.

Sizes and rates follow nccl-tests: the size S is the whole array (all-reduce in = out, all-gather the output,
reduce-scatter the input, all-to-all the input), the algorithm bandwidth is S over time, the bus bandwidth is that times
a factor that depends on the collective and on the number of members.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple


class Collective(NamedTuple):
    bus_factor: Callable[[int], float] | None = None
    """Bus bytes over the size, by the number of members; None where there is no such thing."""
    reduces: bool = False
    rooted: bool = False
    synchronises: bool = False
    """No member is done before every member has begun, and all are done at nearly the same time."""


def _whole(_: int) -> float:
    return 1.0


def _others(members: int) -> float:
    return (members - 1) / members


def _both_ways(members: int) -> float:
    return 2 * (members - 1) / members


FACTS = {
    "all_reduce": Collective(_both_ways, reduces=True, synchronises=True),
    "all_gather": Collective(_others, synchronises=True),
    "reduce_scatter": Collective(_others, reduces=True, synchronises=True),
    "all_to_all": Collective(_others, synchronises=True),
    "broadcast": Collective(_whole, rooted=True),
    "reduce": Collective(_whole, reduces=True, rooted=True),
    "gather": Collective(_others, rooted=True),
    "scatter": Collective(_others, rooted=True),
    "send": Collective(_whole),
    "recv": Collective(_whole),
    "barrier": Collective(synchronises=True),
    # All that a kernel's name says where nothing else was recorded. An all-to-all looks the same, and so did other
    # collectives in older versions of NCCL: it has no factor where the number of members is unknown.
    "send_recv": Collective(lambda _: 1.0),
    "other": Collective(),
    "all_gatherv": Collective(_others),
    "reduce_scatterv": Collective(_others, reduces=True),
    "all_to_allv": Collective(_others),
    "hypercube": Collective(_others),
    "incast": Collective(rooted=True),
    "multicast": Collective(rooted=True),
    "all_gather_object": Collective(_others),
    "gather_object": Collective(_others, rooted=True),
    "broadcast_object_list": Collective(_whole, rooted=True),
    "scatter_object_list": Collective(_others, rooted=True),
}
COLLECTIVES = tuple(FACTS)[:13]
"""What a trace can name; the place in it is the code of a collective."""

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, REDUCE, GATHER, SCATTER = range(8)
SEND, RECV, BARRIER, SEND_RECV, OTHER = range(8, 13)

SYNCHRONISING = tuple(code for code, name in enumerate(COLLECTIVES) if FACTS[name].synchronises)
EVEN = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, GATHER, SCATTER, SEND, RECV)
"""Collectives whose size is the same on every member; the pieces of an all-to-all may differ."""

HOST_BACKENDS = ("gloo:", "mpi:", "ucc:")
"""Prefixes of the annotations of collectives that the host itself carries out."""
DEVICE_BACKENDS = ("nccl:", "rccl:", "xccl:", "hccl:")

_BOOKKEEPING = frozenset({"wait", "init", "coalesced", "start_coalescing", "end_coalescing"})
"""Records about collectives that are none themselves."""
_WORDS = (
    ("allreduce", ALL_REDUCE), ("reducescatter", REDUCE_SCATTER), ("allgather", ALL_GATHER), ("alltoall", ALL_TO_ALL),
    ("broadcast", BROADCAST), ("bcast", BROADCAST), ("sendrecv", SEND_RECV), ("barrier", BARRIER), ("reduce", REDUCE),
    ("gather", GATHER), ("scatter", SCATTER), ("send", SEND), ("recv", RECV),
)  # fmt: skip
"""Longer words first: `reduce` is part of `allreduce`."""


def find_collective(text: str, *, clear: bool = False) -> int:
    """Code of the collective that a text names anywhere; `clear` leaves out words that other things are called by."""
    squeezed = text.lower().replace("_", "")
    return next((code for word, code in (_WORDS[:4] if clear else _WORDS) if word in squeezed), OTHER)


@lru_cache(4096)
def canonical_collective(recorded: str) -> int | None:
    """Code of a recorded name: `_allgather_base`, `nccl:all_to_all`, `c10d::allreduce_`.

    None: a record about collectives that is none itself, such as `wait`.
    """
    name = recorded.rsplit(":", 1)[-1].lower()
    return None if name.strip("_") in _BOOKKEEPING else find_collective(name)


def bus_factor(name: str, members: int) -> float | None:
    """Bus bytes over the size; `members` 0 stands for an unknown number.

    None where there is no such thing (barriers, collectives of an unknown kind), or where the number would be needed.
    """
    factor = FACTS[name].bus_factor
    return factor(members) if factor is not None and (members > 0 or factor is _whole) else None


def whole_elements(collective: int, put_in: int, got: int, members: int) -> int | None:
    """Elements of the whole array; −1 stands for an unknown number.

    None where the group's size (0: not known) would be needed. Some recorders give the same number for both sides of an
    all-gather or a reduce-scatter: then it is one member's piece.
    """
    if collective in (ALL_GATHER, REDUCE_SCATTER):
        whole, piece = (got, put_in) if collective == ALL_GATHER else (put_in, got)
        if whole >= 0 and (whole != piece or members == 1):
            return whole
        known = piece if piece >= 0 else whole
        return known * members if members > 0 and known >= 0 else None
    if collective in (GATHER, SCATTER):
        piece = put_in if collective == GATHER else got
        return piece * members if members > 0 and piece >= 0 else None
    return put_in if put_in >= 0 else got
