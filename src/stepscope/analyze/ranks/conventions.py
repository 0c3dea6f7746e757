"""How collectives are named, how large they are and what their links carry: one place for all of it.

Sizes and rates follow nccl-tests: the size S is the whole array (all-reduce in = out, all-gather the output,
reduce-scatter the input, all-to-all the input), the algorithm bandwidth is S over time, the bus bandwidth is that times
a factor that depends on the collective and on the number of members.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from stepscope.formats.classify import base_name
from stepscope.formats.nccl_tests.output import OPERATIONS

COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter",
    "send", "recv", "barrier", "send_recv", "other",
)  # fmt: skip
"""`send_recv`: all that a kernel's name says where nothing else was recorded. An all-to-all looks the same, and so did
other collectives in older versions of NCCL."""

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, REDUCE, GATHER, SCATTER = range(8)
SEND, RECV, BARRIER, SEND_RECV, OTHER = range(8, 13)

SYNCHRONISING = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BARRIER)
"""Nobody is done before everybody has begun, and all are done at nearly the same time."""

EVEN = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, GATHER, SCATTER, SEND, RECV)
"""Collectives whose size is the same on every member; the pieces of an all-to-all may differ."""

SIZE_REASONS = (
    "",
    "no collective record: only the kernel's name is known",
    "the number of elements is not recorded",
    "the element type is not recorded or not known",
    "the group's size is not recorded, and this size is a multiple of it",
    "a barrier moves no data",
)
"""Why a size is not known; the first stands for a known one."""

KNOWN, NO_RECORD, NO_ELEMENTS, NO_DTYPE, NO_GROUP_SIZE, NO_DATA = range(6)

BOOKKEEPING = frozenset({"wait", "init", "coalesced", "start_coalescing", "end_coalescing"})
"""Records about collectives that are none themselves."""

HOST_BACKENDS = ("gloo:", "mpi:", "ucc:")
"""How annotations of collectives begin that the host itself carries out."""

DEVICE_BACKENDS = ("nccl:", "rccl:", "xccl:", "hccl:")

_BY_TEXT = (
    ("allreduce", ALL_REDUCE), ("reducescatter", REDUCE_SCATTER), ("allgather", ALL_GATHER), ("alltoall", ALL_TO_ALL),
    ("broadcast", BROADCAST), ("bcast", BROADCAST), ("sendrecv", SEND_RECV), ("barrier", BARRIER), ("reduce", REDUCE),
    ("gather", GATHER), ("scatter", SCATTER), ("send", SEND), ("recv", RECV),
)  # fmt: skip
"""Longer words first: `reduce` is part of `allreduce`."""

_CUSTOM_ALL_REDUCE = re.compile(r"cross_?device_?reduce|(?:one|two)_?shot|multimem_?all_?reduce", re.IGNORECASE)
_LIBRARY_KERNEL = re.compile(r"^(?:nccl|rccl|mscclpp|hccl|oneccl)|::nccl", re.IGNORECASE)

_SPELLINGS = {
    "float64": (8, ("double",)),
    "float32": (4, ("float",)),
    "float16": (2, ("half", "__half")),
    "bfloat16": (2, ("__nv_bfloat16",)),
    "int64": (8, ("long", "longint", "int64_t", "longlong")),
    "int32": (4, ("int", "int32_t")),
    "int16": (2, ("short", "shortint", "int16_t")),
    "int8": (1, ("char", "signedchar", "int8_t", "qint8")),
    "uint8": (1, ("byte", "unsignedchar", "uint8_t", "quint8")),
    "uint16": (2, ("unsignedshort", "uint16_t")),
    "uint32": (4, ("unsignedint", "uint32_t")),
    "uint64": (8, ("unsignedlong", "uint64_t")),
    "bool": (1, ()),
    "complex64": (8, ("complexfloat", "cfloat", "complex<float>")),
    "complex128": (16, ("complexdouble", "cdouble", "complex<double>")),
}
"""Element types with their bytes and the other ways profilers write them."""
_CANONICAL = {text: name for name, (_, others) in _SPELLINGS.items() for text in (name, *others)}


@lru_cache(4096)
def canonical_collective(recorded: str) -> int | None:
    """Index into COLLECTIVES of a recorded name: `_allgather_base`, `nccl:all_to_all`, `c10d::allreduce_`.

    None: a record about collectives that is none itself, such as `wait`.
    """
    name = recorded.rsplit(":", 1)[-1].lower()
    if name.strip("_") in BOOKKEEPING:
        return None
    squeezed = name.replace("_", "")
    return next((code for word, code in _BY_TEXT if word in squeezed), OTHER)


@lru_cache(4096)
def kernel_collective(kernel: str) -> int:
    """Index into COLLECTIVES by the name of a device kernel: what it carries, as far as a name can tell."""
    name = base_name(kernel)
    if _CUSTOM_ALL_REDUCE.search(name):
        return ALL_REDUCE
    squeezed = name.lower().replace("_", "")
    known = _BY_TEXT if _LIBRARY_KERNEL.search(name) else _BY_TEXT[:4]
    return next((code for word, code in known if word in squeezed), OTHER)


@lru_cache(1024)
def canonical_dtype(recorded: str) -> str:
    """`Float`, `c10::Half`, `long int` as float32, float16, int64; others as written, in small letters."""
    name = recorded.lower().replace("c10::", "").replace("torch.", "").replace(" ", "")
    return _CANONICAL.get(name, name)


@lru_cache(1024)
def element_bytes(dtype: str) -> int | None:
    """Of an element type in any spelling. None: not known."""
    name = canonical_dtype(dtype)
    if name.startswith(("float8", "f8", "__nv_fp8")):
        return 1
    return _SPELLINGS[name][0] if name in _SPELLINGS else None


_FACTORS = {operation.name: operation.bus_factor for operation in OPERATIONS.values()}
_FACTORS |= {"send": _FACTORS["send_recv"], "recv": _FACTORS["send_recv"]}


_WHATEVER_THE_SIZE = (BROADCAST, REDUCE, SEND, RECV)
"""Their factor is 1 in every group."""


def bus_factor(collective: int, members: int) -> float | None:
    """Bus bytes over the size; `members` 0 stands for an unknown number.

    None where there is no such thing (barriers, collectives of an unknown kind), or where the number would be needed.
    """
    factor = _FACTORS.get(COLLECTIVES[collective])
    if collective in _WHATEVER_THE_SIZE:
        members = max(members, 1)
    return factor(members) if factor is not None and members > 0 else None


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


def uneven_bus_elements(put_in: int, got: int, in_splits: str, out_splits: str, place: int) -> int | None:
    """What an uneven all-to-all's busier direction carries on one member: all but the piece it keeps.

    Splits are counted in rows, elements are not: shares of the rows are shares of the elements. None: the pieces are
    all alike, or not written out in full.
    """
    sent, received = _parse_splits(in_splits), _parse_splits(out_splits)
    if sent is None and received is None:
        return None
    kept_in, kept_out = _kept(put_in, sent, place), _kept(got, received, place)
    if kept_in is None and kept_out is None:
        return None
    # The piece a member keeps is the same on both sides, so one known side gives the other.
    kept = kept_in if kept_in is not None else kept_out
    assert kept is not None
    return max(put_in - kept, got - (kept_out if kept_out is not None else kept), 0)


def _kept(elements: int, splits: tuple[int, ...] | None, place: int) -> int | None:
    if splits is None or not 0 <= place < len(splits) or sum(splits) <= 0:
        return None
    return elements * splits[place] // sum(splits)


@lru_cache(4096)
def _parse_splits(text: str) -> tuple[int, ...] | None:
    try:
        return tuple(msgspec.json.decode(text, type=list[int])) or None
    except msgspec.DecodeError:  # shortened with "...": the pieces are not all known
        return None


@lru_cache(4096)
def count_elements(shapes: str, types: str) -> tuple[int, str] | None:
    """Elements and element type of the tensors among an event's inputs; None where there is none, or several types."""
    try:
        sizes = msgspec.json.decode(shapes, type=list[object])
        names = msgspec.json.decode(types, type=list[str])
    except msgspec.DecodeError:
        return None
    tensors = [(size, name) for size, name in zip(sizes, names, strict=False) if element_bytes(name)]
    kinds = {name for _, name in tensors}
    counts = [_product(size) for size, _ in tensors]
    if len(kinds) != 1 or any(count is None for count in counts):
        return None
    return sum(count for count in counts if count is not None), kinds.pop()


def _product(size: object) -> int | None:
    if not isinstance(size, list):
        return None
    elements = 1
    for length in size:
        if not isinstance(length, int):
            return None
        elements *= length
    return elements
