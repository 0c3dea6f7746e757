"""The collective calls of one rank: which collective, how large, among whom, when.

A call is device work of the category communication, with the fields that the profiler wrote on it or on the host record
that launched it (`record_param_comms`). Kernels of one record are one call. Where nothing was recorded, the annotation
around the launch (`nccl:all_to_all`) and then the kernel's name say what it is. Collectives that the host carries out
itself (gloo) are the host's own events.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import msgspec
import numpy as np

from stepscope.analyze.ranks.groups import TracedGroup, find_members, listed_groups, parse_members
from stepscope.analyze.step.numbers import Mask, Whole
from stepscope.core import collectives as coll
from stepscope.core.dtypes import dtype_bytes, dtype_name
from stepscope.formats.classify import COMMUNICATION, base_name
from stepscope.formats.timeline import ANNOTATION, DEVICE_KINDS, HOST_KINDS, MISSING, OPERATOR, Timeline

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

_CUSTOM_ALL_REDUCE = re.compile(r"cross_?device_?reduce|(?:one|two)_?shot|multimem_?all_?reduce", re.IGNORECASE)
_LIBRARY_KERNEL = re.compile(r"^(?:nccl|rccl|mscclpp|hccl|oneccl)|::nccl", re.IGNORECASE)

NAMED_BY = ("arguments", "annotation", "kernel name")
"""What said which collective it is, in order of trust."""
ARGUMENTS, BY_ANNOTATION, BY_KERNEL = range(3)

PLACES = ("device", "host", "host call")
"""Where the interval was seen. `host call`: of the call alone; the transfer itself is not in the trace."""
ON_DEVICE, ON_HOST, HOST_CALL = range(3)

CALL_FIELDS = (
    ("start_ns", "<i8"), ("end_ns", "<i8"), ("size_bytes", "<i8"), ("piece_bytes", "<i8"), ("bus_bytes", "<i8"),
    ("sequence", "<i8"), ("row", "<i4"), ("step", "<i4"), ("group", "<i4"), ("call", "<i4"), ("stream", "<i4"),
    ("peer", "<i4"), ("pieces", "<u2"), ("dtype", "<i2"), ("collective", "u1"), ("named_by", "u1"),
    ("size_reason", "u1"), ("place", "u1"),
)  # fmt: skip
"""Columns of a rank's calls; −1 stands for a missing value. `group` and `dtype` are places in the lists beside them."""

_DEEPEST = 1000
"""Enclosing events looked at: stacks of Python frames are deep, and a damaged file may have a circle."""


@dataclass(frozen=True)
class RankCalls:
    """The same as columns."""

    calls: Any
    """Structured array with CALL_FIELDS, in order of start."""
    groups: Sequence[TracedGroup]
    dtypes: Sequence[str]
    left_out: dict[str, int]
    """Records that are no calls of their own, counted by what they are."""


def collective_calls(timeline: Timeline) -> RankCalls:
    """All calls of the timeline as columns."""
    seen = _Seen(timeline)
    rows, place = seen.find_rows()
    record, annotation = seen.climb(rows)
    calls, groups, dtypes = _describe(seen, rows, place, record, annotation)
    # What makes kernels one call: their record, else their annotation; else each is a call of its own.
    calls = _join_pieces(calls, np.select([record >= 0, annotation >= 0], [record, annotation], -1 - rows))
    # The n-th of its group in order of start; of its peer and direction for single messages.
    single = np.isin(calls["collective"], (coll.SEND, coll.RECV))
    direction, peer = np.where(single, calls["collective"], 255), np.where(single, calls["peer"], -1)
    calls["call"] = 1 + ordinals(calls["group"], direction, peer)
    return RankCalls(calls, groups, dtypes, seen.left_out(place, record))


class _Seen:
    """What the timeline's rows say of collectives, looked up for few rows at a time."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.block = timeline.blocks.get("collective")
        self.name_of_text = np.full(len(timeline.texts), -2, np.int16)
        """By text code: index into COLLECTIVES as an annotation would name it; −2: not looked at, −1: none."""
        core, marks = timeline.core, []
        named = np.isin(core["kind"], (ANNOTATION, OPERATOR))
        for code in np.flatnonzero(np.bincount(core["name"][named], minlength=len(timeline.texts))).tolist():
            text = timeline.texts[code]
            if text.startswith((*coll.HOST_BACKENDS, *coll.DEVICE_BACKENDS)):
                collective = coll.canonical_collective(text)
                self.name_of_text[code] = -1 if collective is None else collective
                if collective is not None and text.startswith(coll.HOST_BACKENDS):
                    marks.append(code)
        self.host_marks = np.flatnonzero(named & np.isin(core["name"], marks))
        """Rows that a backend of the host carries out itself."""

    def cells(self, column: str, rows: Whole) -> Whole:
        """A column of the collective block in these rows; MISSING where there is none, and for row −1."""
        values = np.full(len(rows), MISSING, np.int64)
        if self.block is not None and column in self.block.columns and len(self.block.rows):
            place = np.minimum(np.searchsorted(self.block.rows, rows), len(self.block.rows) - 1)
            hit = self.block.rows[place] == rows
            values[hit] = self.block.columns[column][place[hit]]
        return values

    def by_text(self, codes: Whole, name: Callable[[str], int | None] = coll.canonical_collective) -> Whole:
        """−1 where the text is missing or names nothing."""
        distinct, back = np.unique(codes, return_inverse=True)
        texts = self.timeline.texts
        found = [None if code < 0 else name(texts[code]) for code in distinct.tolist()]
        return np.array([-1 if value is None else value for value in found], np.int64)[back]

    def _host_rows(self) -> Whole:
        """Rows of the host with fields of a collective, bookkeeping included."""
        rows = np.asarray(self.block.rows if self.block is not None else (), np.int64)
        return rows[np.isin(self.timeline.core["kind"][rows], HOST_KINDS)]

    def records(self) -> Whole:
        """Host rows that record a collective call, bookkeeping left out."""
        rows = self._host_rows()
        return rows[self.by_text(self.cells("collective", rows)) >= 0]

    def find_rows(self) -> tuple[Whole, Whole]:
        """Rows whose intervals are collectives, and where they ran."""
        core = self.timeline.core
        on_device = np.flatnonzero((core["category"] == COMMUNICATION) & np.isin(core["kind"], DEVICE_KINDS))
        on_host = self.host_marks
        calls = self.records() if not len(on_device) and not len(on_host) else np.empty(0, np.int64)
        rows = np.concatenate([on_device, on_host, calls])
        return rows, np.repeat([ON_DEVICE, ON_HOST, HOST_CALL], [len(on_device), len(on_host), len(calls)])

    def climb(self, rows: Whole) -> tuple[Whole, Whole]:
        """The innermost enclosing record and backend annotation of each row (of a device row: of its launch)."""
        parents, names = self.timeline.core["parent"], self.timeline.core["name"]
        record, annotation = np.full(len(rows), -1, np.int64), np.full(len(rows), -1, np.int64)
        current, live = rows.astype(np.int64), np.arange(len(rows))
        for _ in range(_DEEPEST):
            at = current[live]
            marked = (annotation[live] < 0) & (self.name_of_text[names[at]] >= 0)
            annotation[live[marked]] = at[marked]
            named = self.by_text(self.cells("collective", at)) >= 0
            recorded = named & np.isin(self.timeline.core["kind"][at], HOST_KINDS)
            record[live[recorded]] = at[recorded]
            current[live] = np.where(recorded, -1, parents[at])
            live = live[current[live] >= 0]
            if not len(live):
                break
        return record, annotation

    def left_out(self, place: Whole, record: Whole) -> dict[str, int]:
        counts: dict[str, int] = {}
        host = self._host_rows()
        for code, count in zip(*np.unique(self.cells("collective", host), return_counts=True), strict=True):
            if code >= 0 and coll.canonical_collective(self.timeline.texts[code]) is None:
                counts[f"record of {self.timeline.texts[code]}"] = int(count)
        if not (place == HOST_CALL).any():
            alone = len(np.setdiff1d(self.records(), record))
            if alone:
                counts["record without device work of its own"] = alone
        return counts


def _describe(
    seen: _Seen, rows: Whole, place: Whole, record: Whole, annotation: Whole
) -> tuple[Any, list[TracedGroup], list[str]]:
    """Structured array in the order of `rows`, with the groups and element types it points to."""

    def field(column: str) -> Whole:
        own = seen.cells(column, rows)
        return np.where(own != MISSING, own, seen.cells(column, record))

    timeline = seen.timeline
    core = timeline.core
    calls = np.full(len(rows), -1, np.dtype(list(CALL_FIELDS)))
    for column in ("start_ns", "end_ns", "step"):
        calls[column] = core[column][rows]
    calls["row"], calls["place"], calls["pieces"] = rows, place, 1
    calls["stream"] = np.where(place == ON_DEVICE, core["stream"][rows], -1)
    calls["sequence"], calls["peer"] = field("collective_sequence"), field("peer")
    _name(calls, seen, rows, annotation, field("collective"))
    elements = _Elements.look_up(timeline, field, annotation)
    groups = _group(calls, timeline, field)
    splits = field("in_splits"), field("out_splits")
    _measure(calls, timeline, elements, groups, splits)
    calls["dtype"] = elements.dtype
    return calls, groups, elements.dtypes


def _name(calls: Any, seen: _Seen, rows: Whole, annotation: Whole, recorded: Whole) -> None:
    by_arguments = seen.by_text(recorded)
    names = seen.timeline.core["name"]
    by_annotation = np.where(annotation >= 0, seen.name_of_text[names[annotation]], -1)
    by_kernel = np.where(calls["place"] == ON_DEVICE, seen.by_text(names[rows], kernel_collective), coll.OTHER)
    choices = [by_arguments >= 0, by_annotation >= 0]
    calls["collective"] = np.select(choices, [by_arguments, by_annotation], by_kernel)
    calls["named_by"] = np.select(choices, [ARGUMENTS, BY_ANNOTATION], BY_KERNEL)


@dataclass(frozen=True)
class _Elements:
    """Elements put in and got by each call (−1: not known) and their type."""

    put_in: Whole
    got: Whole
    dtype: Whole
    dtypes: list[str]
    recorded: Mask

    @classmethod
    def look_up(cls, timeline: Timeline, field: Callable[[str], Whole], annotation: Whole) -> _Elements:
        put_in, got, code = field("in_elements"), field("out_elements"), field("dtype")
        texts = timeline.texts
        dtypes: dict[str, int] = {}
        distinct, back = np.unique(code, return_inverse=True)
        local = [_place(dtypes, texts[c]) if c >= 0 else -1 for c in distinct.tolist()]
        dtype = np.array(local, np.int64)[back]
        # Older profilers recorded no counts, but the annotation around the launch has the input's shape.
        shapes = np.where(annotation >= 0, timeline.core["shapes"][annotation], -1)
        types = np.where(annotation >= 0, timeline.core["types"][annotation], -1)
        wanted = np.flatnonzero((put_in < 0) & (got < 0) & (shapes >= 0) & (types >= 0))
        for place in wanted.tolist():
            counted = count_elements(texts[shapes[place]], texts[types[place]])
            if counted is not None:
                put_in[place], dtype[place] = counted[0], _place(dtypes, counted[1])
        recorded = (put_in >= 0) | (got >= 0) | (dtype >= 0) | (annotation >= 0)
        return cls(put_in, got, dtype, list(dtypes), recorded)


def _place(known: dict[str, int], dtype: str) -> int:
    return known.setdefault(dtype_name(dtype), len(known))


def _group(calls: Any, timeline: Timeline, field: Callable[[str], Whole]) -> list[TracedGroup]:
    """Fills the column `group`."""
    columns = ("group", "group_description", "group_ranks", "rank_start", "rank_stride", "group_size")
    # For calls without a group: the place of their stream among the rank's streams; −2 for calls of the host.
    device, stand_in = calls["place"] == ON_DEVICE, np.full(len(calls), -2, np.int64)
    stand_in[device] = np.unique(calls["stream"][device], return_inverse=True)[1]
    described = np.stack([*map(field, columns), stand_in], axis=1)
    known = (described[:, 0] >= 0) | (described[:, 2] >= 0)
    described[known, -1] = -1
    described[~known, :-1] = -1
    groups: dict[TracedGroup, int] = {}
    listed = listed_groups(timeline.metadata)
    distinct, back = np.unique(described, axis=0, return_inverse=True)
    places = [groups.setdefault(_make_group(cells, timeline, listed), len(groups)) for cells in distinct.tolist()]
    calls["group"] = np.array(places, np.int64)[back.reshape(-1)] if places else -1
    return list(groups)


def _make_group(cells: list[int], timeline: Timeline, listed: dict[str, list[int]]) -> TracedGroup:
    name, description, ranks, start, stride, size, stand_in = cells
    if name < 0 and ranks < 0:
        return TracedGroup(stand_in="host" if stand_in == -2 else f"communication stream {stand_in + 1}")
    texts = timeline.texts
    named = texts[name] if name >= 0 else None
    members, note = find_members(
        texts[ranks] if ranks >= 0 else None,
        size=size if size > 0 else None,
        start=start if start >= 0 else None,
        stride=stride if stride >= 0 else None,
        listed=listed.get(named) if named is not None else None,
        world_size=timeline.world_size,
    )
    count = len(parse_members(members)) if members is not None else None
    return TracedGroup(
        name=named,
        description=texts[description] if description >= 0 else None,
        members=members,
        size=size if size > 0 else count,
        note=note,
    )


def _measure(
    calls: Any,
    timeline: Timeline,
    elements: _Elements,
    groups: list[TracedGroup],
    splits: tuple[Whole, Whole],
) -> None:
    """Fills sizes and bus bytes; calls without one get a reason instead."""
    own_place = [_own_place(group, timeline.rank) for group in groups]
    columns = (calls["collective"], elements.put_in, elements.got, elements.dtype, *splits, calls["group"])
    facts = np.stack([*columns, elements.recorded], axis=1).astype(np.int64)
    distinct, back = np.unique(facts, axis=0, return_inverse=True)
    sizes = [_size(cells, elements.dtypes, groups, own_place, timeline.texts) for cells in distinct.tolist()]
    if sizes:
        found = np.array(sizes, np.int64)[back.reshape(-1)]
        calls["size_bytes"], calls["piece_bytes"], calls["bus_bytes"], calls["size_reason"] = found.T


def _own_place(group: TracedGroup, rank: int | None) -> int:
    members = parse_members(group.members) if group.members is not None else ()
    return members.index(rank) if rank in members else -1


def _size(
    cells: list[int], dtypes: list[str], groups: list[TracedGroup], own_place: list[int], texts: Sequence[str]
) -> tuple[int, int, int, int]:
    """Size, one member's piece (where the size waits for the group's), bus bytes, reason."""
    collective, put_in, got, dtype, in_splits, out_splits, group, recorded = cells
    members = groups[group].size or 0
    if collective == coll.BARRIER:
        return -1, -1, -1, NO_DATA
    if not recorded:
        return -1, -1, -1, NO_RECORD
    if put_in < 0 and got < 0:
        return -1, -1, -1, NO_ELEMENTS
    width = dtype_bytes(dtypes[dtype]) if dtype >= 0 else None
    if width is None:
        return -1, -1, -1, NO_DTYPE
    whole = coll.whole_elements(collective, put_in, got, members)
    if whole is None:
        return -1, max(put_in, got) * width, -1, NO_GROUP_SIZE
    uneven = None
    if collective == coll.ALL_TO_ALL and in_splits >= 0 and out_splits >= 0:
        uneven = uneven_bus_elements(put_in, got, texts[in_splits], texts[out_splits], own_place[group])
    factor = coll.bus_factor(coll.COLLECTIVES[collective], members)
    even = -1 if factor is None else round(whole * width * factor)
    return whole * width, -1, even if uneven is None else uneven * width, KNOWN


def _join_pieces(calls: Any, owner: Whole) -> Any:
    """One row per call, in order of start."""
    if not len(calls):
        return calls
    order = np.lexsort((calls["row"], calls["start_ns"], owner))
    calls, owner = calls[order], owner[order]
    first = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
    joined = calls[first].copy()
    joined["end_ns"] = np.maximum.reduceat(calls["end_ns"], first)
    joined["pieces"] = np.minimum(np.diff(np.r_[first, len(calls)]), 65535)
    return joined[np.lexsort((joined["row"], joined["end_ns"], joined["start_ns"]))]


def ordinals(*keys: Any) -> Whole:
    """For each row: how many rows with the same keys stand before it."""
    count = len(keys[0])
    order = np.lexsort((np.arange(count), *keys[::-1]))
    new = find_changes(order, *keys)
    first = np.maximum.accumulate(np.where(new, np.arange(count), 0))
    result = np.empty(count, np.int64)
    result[order] = np.arange(count) - first
    return result


def find_changes(order: Whole, *keys: Any) -> Mask:
    """For each row in this order whether it is the first, or one of its keys is not that of the row before."""
    new = np.zeros(len(order), bool)
    new[:1] = True
    for key in keys:
        moved = key[order]
        new[1:] |= moved[1:] != moved[:-1]
    return new


@lru_cache(4096)
def kernel_collective(kernel: str) -> int:
    """Code of the collective by the name of a device kernel: what it carries, as far as a name can tell."""
    name = base_name(kernel)
    if _CUSTOM_ALL_REDUCE.search(name):
        return coll.ALL_REDUCE
    return coll.find_collective(name, clear=not _LIBRARY_KERNEL.search(name))


def uneven_bus_elements(put_in: int, got: int, in_splits: str, out_splits: str, place: int) -> int | None:
    """What an uneven all-to-all's busier direction carries on one member: all but the piece it keeps.

    Splits are counted in rows, elements are not: shares of the rows are shares of the elements. None: the pieces are
    all alike, or not written out in full.
    """
    sent, received = _parse_splits(in_splits), _parse_splits(out_splits)
    kept_in, kept_out = _kept(put_in, sent, place), _kept(got, received, place)
    # The piece a member keeps is the same on both sides, so one known side gives the other.
    kept = kept_in if kept_in is not None else kept_out
    if kept is None:
        return None
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
        tensors = [(size, name) for size, name in zip(sizes, names, strict=False) if dtype_bytes(name)]
        counts = [prod(msgspec.convert(size, list[int])) for size, _ in tensors]
    except msgspec.DecodeError:
        return None
    kinds = {name for _, name in tensors}
    return (sum(counts), kinds.pop()) if len(kinds) == 1 else None
