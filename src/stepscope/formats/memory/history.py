"""What the memory of one device held over time, whichever file it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from stepscope.formats.timeline import Integers, Span

BEFORE = "allocated before the recording"
MOST_IN_SUM = 1 << 62
"""Bytes of all changes together; more does not fit a column, and no device moves as much."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Whose memory it is: a category of tensors, or the line that allocated it."""

    name: str
    stack: tuple[str, ...] = ()
    """The whole stack where it was first seen, innermost call first."""


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """An allocation that failed."""

    time_s: float | None
    """From the first event."""
    requested_bytes: int
    device_free_bytes: int | None
    """What the driver said was free."""
    allocated_bytes: int
    reserved_bytes: int
    owner: str


class Fragmentation(msgspec.Struct, frozen=True, kw_only=True):
    """How the allocator's segments were used when the snapshot was taken."""

    segments: int
    reserved_bytes: int
    allocated_bytes: int
    """In use by tensors, rounded up to the allocator's block sizes."""
    requested_bytes: int
    """What the program asked for of these."""
    awaiting_free_bytes: int
    """Freed by the program, still in use by another stream."""
    free_in_used_segments_bytes: int
    """Free, but beside blocks in use: empty_cache() cannot return it."""
    free_segments_bytes: int
    """Segments without a block in use: empty_cache() returns them."""
    largest_free_block_bytes: int


@dataclass(frozen=True)
class MemoryHistory:
    """Changes in the order in which they happened."""

    source: str
    format: str
    device: str
    owner_kind: str
    """category or allocation stack."""
    owners: Sequence[Owner]
    time_ns: Integers | None
    """None where the file has no times."""
    change_bytes: Integers
    owner: Integers
    """By change: index into owners."""
    start_bytes: Mapping[int, int]
    """By owner: held before the first change."""
    counts_blocks: bool
    """Whether each change is one block taken or given back; else several may be added up in one."""
    reserved_bytes: Integers | None = None
    """After each change; None where it is not recorded."""
    steps: Sequence[Span] = ()
    """As annotated."""
    failures: Sequence[OutOfMemory] = ()
    fragmentation: Fragmentation | None = None
    repairs: Mapping[str, int] = field(default_factory=dict)
