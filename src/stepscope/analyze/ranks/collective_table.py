"""Collectives in tables: one row per call, one per kind, group and size, and what each process group costs in all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from stepscope.analyze.ranks.collectives import NAMED_BY, PLACES, SIZE_REASONS, RankCalls, collective_calls
from stepscope.analyze.ranks.groups import TracedGroup
from stepscope.analyze.ranks.matching import Matching
from stepscope.analyze.ranks.waiting import Waiting
from stepscope.analyze.step.numbers import Floats, Mask, Whole, run_medians, run_sums, unique
from stepscope.core import collectives as coll
from stepscope.formats.timeline import Timeline

_LEFT_OPEN = "named by its kernel alone: an all_to_all looks the same, and older NCCL ran others under this name too"


class CollectiveCall(msgspec.Struct, frozen=True, kw_only=True):
    """One collective call of one rank."""

    row: int
    """Row of the timeline: its (first) kernel, or the host event."""
    collective: str
    named_by: str
    note: str | None = None
    """What the name leaves open."""
    place: str
    step: int | None
    call: int
    """The n-th in its group, from 1; sends and receives are counted for each peer apart."""
    sequence: int | None
    """The number the recorder gave it, where it did."""
    group: TracedGroup
    peer: int | None
    dtype: str | None
    size_bytes: int | None
    size_unknown: str | None
    """Why there is no size."""
    stream: int | None
    pieces: int
    """Kernels it consists of."""
    start_ns: int
    end_ns: int
    duration_s: float
    algbw_bytes_per_s: float | None
    """Over the whole duration, waiting for others included: a lower bound of what the links gave."""
    busbw_bytes_per_s: float | None


def list_collectives(timeline: Timeline, step: int | None = None) -> list[CollectiveCall]:
    """One record per collective call, in order of start; of one step, or of all."""
    found = collective_calls(timeline)
    calls = found.calls if step is None else found.calls[found.calls["step"] == step]
    names = calls.dtype.names
    return [_record(dict(zip(names, row, strict=True)), found) for row in calls.tolist()]


def _record(cells: dict[str, int], found: RankCalls) -> CollectiveCall:
    collective, duration_s = cells["collective"], (cells["end_ns"] - cells["start_ns"]) / 1e9
    guess = collective == coll.SEND_RECV
    known: dict[str, Any] = {name: _known(cells[name]) for name in ("step", "sequence", "peer", "size_bytes", "stream")}
    return CollectiveCall(
        **known,
        **{name: cells[name] for name in ("row", "call", "pieces", "start_ns", "end_ns")},
        collective=coll.COLLECTIVES[collective],
        named_by=NAMED_BY[cells["named_by"]],
        note=_LEFT_OPEN if guess else None,
        place=PLACES[cells["place"]],
        group=found.groups[cells["group"]],
        dtype=found.dtypes[cells["dtype"]] if cells["dtype"] >= 0 else None,
        size_unknown=SIZE_REASONS[cells["size_reason"]] or None,
        duration_s=duration_s,
        algbw_bytes_per_s=rate(known["size_bytes"], duration_s),
        busbw_bytes_per_s=rate(_known(cells["bus_bytes"]), duration_s),
    )


def _known(value: int) -> int | None:
    return None if value < 0 else value


def rate(moved_bytes: float | None, seconds: float | None) -> float | None:
    """Bytes per second; None where either is unknown or no time passed."""
    return moved_bytes / seconds if moved_bytes is not None and seconds is not None and seconds > 0 else None


MOST_SIZES = 16
"""Sizes of one collective in one group with rows of their own: more are put together by powers of two."""

_NOT_RECORDED = "not recorded: all ranks with the call are taken for its members"


class CollectiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives alike. Times are of one collective; a matched one counts once, however many ranks took part."""

    collective: str
    dtype: str | None
    group: str
    """What the group is for, or what stands in for it."""
    group_size: int | None
    group_assumed: bool
    """No group is recorded: all ranks are taken for its members."""
    size_bytes: int | None
    """The median where sizes were put together."""
    size_range_bytes: list[int] | None
    size_unknown: str | None
    matched: bool
    """Whether the ranks' calls were put side by side; if not, every call counts for itself."""
    count: int
    total_s: float
    """Sum of the durations (of matched ones: of the median over the ranks), waiting included."""
    median_s: float
    wait_share: float | None
    """Fraction of all members' time in them."""
    transfer_s: float | None
    """Median, from the last arrival to the end."""
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None
    includes_waiting: bool
    """The rates are over the whole duration and so lower bounds: waiting could not be taken out."""
    fastest_s: float
    slowest_s: float
    """Shortest and longest of the times that the rates are over."""
    slowest_call: int
    slowest_step: int | None


class GroupTotals(msgspec.Struct, frozen=True, kw_only=True):
    """One process group over all its collectives and messages."""

    group: str
    name: str | None
    members: str | None
    size: int | None
    note: str | None
    ranks: int
    """Given ones that use it."""
    collectives: int
    """Matched ones; where none is, the calls of the ranks given."""
    calls: int
    per_rank_s: float
    """Time in its collectives, mean over the ranks given."""
    wait_share: float | None
    bytes: int
    """Sum of the sizes that are known."""
    without_size: int
    busbw_bytes_per_s: float | None
    """Bus bytes over time of transfer, for collectives of which both are known."""


@dataclass(frozen=True)
class Entries:
    """What the table counts: matched collectives, then calls that were not matched."""

    collective: Whole
    dtype: Whole
    group: Whole
    members: Whole
    assumed: Mask
    size_bytes: Whole
    bus_bytes: Whole
    reason: Whole
    matched: Mask
    duration_s: Floats
    transfer_s: Floats
    all_wait_s: Floats
    """Over the members of a matched one; NaN: not known."""
    all_duration_s: Floats
    timed_s: Floats
    """What rates are over: the transfer where it is known, else the duration."""
    call: Whole
    step: Whole


def make_entries(matching: Matching, waiting: Waiting) -> Entries:
    owner, runs = matching.owner(), len(matching)
    single = matching.rows[matching.unmatched]
    single_s, nothing = (single["end_ns"] - single["start_ns"]) / 1e9, np.full(len(single), np.nan)
    group_size = np.array([*(group.size or 0 for group in matching.groups), 0], np.int64)
    reason = np.minimum.reduceat(matching.of_members("size_reason"), matching.first) if runs else owner

    def both(first: Any, second: Any) -> Any:
        return np.concatenate([first, second])

    columns = ("collective", "dtype", "group", "size_bytes", "bus_bytes", "step")
    duration_s = both(run_medians(waiting.duration_s, owner, runs), single_s)
    transfer_s = both(waiting.transfer_s, nothing)
    return Entries(
        **{name: both(getattr(matching, name), single[name]).astype(np.int64) for name in columns},
        members=both(matching.members, group_size[single["group"]]),
        assumed=both(matching.assumed, np.zeros(len(single), bool)),
        reason=both(np.where(matching.size_bytes >= 0, 0, reason), single["size_reason"]).astype(np.int64),
        matched=np.repeat((True, False), (runs, len(single))),
        duration_s=duration_s,
        transfer_s=transfer_s,
        timed_s=np.where(np.isnan(transfer_s), duration_s, transfer_s),
        all_wait_s=both(run_sums(owner, waiting.wait_s, runs), nothing),
        all_duration_s=both(run_sums(owner, waiting.duration_s, runs), single_s),
        call=both(matching.of_members("call")[matching.first], single["call"]).astype(np.int64),
    )


def tabulate(matching: Matching, entries: Entries) -> list[CollectiveRow]:
    """Rows with the largest total first."""
    if not len(entries.collective):
        return []
    labels: dict[str, int] = {}
    named = [(group.stand_in and group.label()) or group.description or "" for group in matching.groups]
    label = np.array([labels.setdefault(text, len(labels)) for text in named], np.int64)[entries.group]
    kind = _codes(entries.collective, entries.dtype, label, entries.members, entries.matched, entries.assumed)
    key = _codes(kind, _size_class(kind, entries.size_bytes))
    order = np.argsort(key, kind="stable")
    cuts = np.flatnonzero(np.r_[True, key[order][1:] != key[order][:-1]])
    rows = [_make_row(part, entries, named, matching) for part in np.split(order, cuts[1:])]
    return sorted(
        rows, key=lambda row: (-row.total_s, row.collective, row.dtype or "", row.group, row.size_bytes or -1)
    )


def _codes(*columns: Whole | Mask) -> Whole:
    """One whole number for each combination of values."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, back = np.unique(column, return_inverse=True)
        code = np.unique(code * len(values) + back, return_inverse=True)[1]
    return code


def _size_class(kind: Whole, size: Whole) -> Whole:
    """The size itself; −2 − its power of two where a kind has too many sizes."""
    one_of_each = np.unique(_codes(kind, size), return_index=True)[1]
    many = (np.bincount(kind[one_of_each]) > MOST_SIZES)[kind]
    power = np.ceil(np.log2(np.maximum(size, 1))).astype(np.int64)
    return np.where(many & (size >= 0), -2 - power, size)


def _make_row(part: Whole, entries: Entries, named: list[str], matching: Matching) -> CollectiveRow:
    first = part[0]
    size, bus, timed = entries.size_bytes[part], entries.bus_bytes[part], entries.timed_s[part]
    waiting_in = np.isnan(entries.transfer_s[part])
    slowest = part[int(timed.argmax())]
    known = ~np.isnan(entries.all_wait_s[part])
    spent = float(entries.all_duration_s[part][known].sum())
    dtype, members = int(entries.dtype[first]), int(entries.members[first])
    sizes = size[size >= 0]
    return CollectiveRow(
        collective=coll.COLLECTIVES[int(entries.collective[first])],
        dtype=matching.dtypes[dtype] if dtype >= 0 else None,
        group=named[int(entries.group[first])],
        group_size=members or None,
        group_assumed=bool(entries.assumed[first]),
        size_bytes=int(np.median(sizes)) if len(sizes) else None,
        size_range_bytes=[int(sizes.min()), int(sizes.max())] if len(sizes) and sizes.min() != sizes.max() else None,
        size_unknown=SIZE_REASONS[int(entries.reason[first])] or None if not len(sizes) else None,
        matched=bool(entries.matched[first]),
        count=len(part),
        total_s=float(entries.duration_s[part].sum()),
        median_s=float(np.median(entries.duration_s[part])),
        wait_share=float(entries.all_wait_s[part][known].sum()) / spent if spent > 0 else None,
        transfer_s=float(np.median(entries.transfer_s[part][~waiting_in])) if not waiting_in.all() else None,
        algbw_bytes_per_s=_median_rate(size, timed),
        busbw_bytes_per_s=_median_rate(bus, timed),
        includes_waiting=bool(waiting_in.any()),
        fastest_s=float(timed.min()),
        slowest_s=float(timed.max()),
        slowest_call=int(entries.call[slowest]),
        slowest_step=int(entries.step[slowest]) if entries.step[slowest] >= 0 else None,
    )


def _median_rate(moved: Whole, timed_s: Floats) -> float | None:
    """Median of the single collectives' rates; those without a size or a time are left out."""
    known = (moved >= 0) & (timed_s > 0)
    return float(np.median(moved[known] / timed_s[known])) if known.any() else None


def total_groups(matching: Matching, entries: Entries) -> list[GroupTotals]:
    """By process group, the most expensive first."""
    groups = len(matching.groups)
    used = np.concatenate([matching.member, matching.unmatched])
    calls = np.bincount(matching.rows["group"][used], minlength=groups)
    users = unique(matching.rows["group"][used].astype(np.int64) * len(matching.ranks) + matching.rank[used])
    ranks = np.bincount(users // max(len(matching.ranks), 1), minlength=groups)

    def total(values: Floats | Whole, keep: Mask) -> Floats:
        return run_sums(entries.group[keep], values[keep], groups)

    told = ~np.isnan(entries.all_wait_s)
    both = ~np.isnan(entries.transfer_s) & (entries.bus_bytes >= 0) & (entries.transfer_s > 0)
    spent = run_sums(entries.group, entries.all_duration_s, groups)
    waited, told_s = total(entries.all_wait_s, told), total(entries.all_duration_s, told)
    moved, moving_s = total(entries.bus_bytes, both), total(entries.transfer_s, both)
    matched = np.bincount(entries.group[entries.matched], minlength=groups)
    size = total(entries.size_bytes, entries.size_bytes >= 0)
    lacking = np.bincount(entries.group[entries.size_bytes < 0], minlength=groups)
    totals = [
        GroupTotals(
            group=group.label(),
            name=group.name,
            members=group.members,
            size=group.size,
            note=_NOT_RECORDED if group.stand_in is not None else group.note,
            ranks=int(ranks[place]),
            collectives=int(matched[place]) or int(calls[place]),
            calls=int(calls[place]),
            per_rank_s=float(spent[place]) / int(ranks[place]),
            wait_share=float(waited[place] / told_s[place]) if told_s[place] > 0 else None,
            bytes=int(size[place]),
            without_size=int(lacking[place]),
            busbw_bytes_per_s=float(moved[place] / moving_s[place]) if moving_s[place] > 0 else None,
        )
        for place, group in enumerate(matching.groups)
        if ranks[place]
    ]
    return sorted(totals, key=lambda entry: (-entry.per_rank_s, entry.group, entry.members or ""))
