"""Which call of one rank is the same collective as which call of another.

Calls of one process group are laid side by side: by the recorder's sequence number where there is one, else by their
order in the group. Order says something only where all ranks have the same number of calls: one that is missing shifts
all behind it. Where the numbers differ over the whole trace (a profiler that started later on one rank), calls of one
kind inside one step are counted instead, and steps in which the numbers still differ stay unmatched. What lies side by
side must be the same collective of the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from stepscope.analyze.ranks.collectives import BY_KERNEL, find_changes, ordinals
from stepscope.analyze.ranks.digest import DIGEST_VERSION, RankDigest, calls_of
from stepscope.analyze.ranks.groups import TracedGroup, parse_members
from stepscope.analyze.step.numbers import Mask, Whole, distinct, expand, unique
from stepscope.core import collectives as coll
from stepscope.core.errors import UsageError

METHODS = ("sequence number", "call in the group", "call of its kind in the step")
BY_SEQUENCE, BY_CALL, BY_STEP = range(3)

REASONS = (
    "only one rank of its group is given",
    "absent on another rank of its group",
    "another collective on another rank",
    "another size on another rank",
    "the other end of the message is not recorded",
)
ALONE, ABSENT, OTHER_COLLECTIVE, OTHER_SIZE, NO_PEER = range(5)

_PER_COLLECTIVE = ("collective", "group", "step", "size_bytes", "bus_bytes", "dtype", "members", "assumed", "method")
_MOST_LISTED = 20


class UnmatchedCalls(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    calls: int
    """Summed over ranks."""
    collectives: dict[str, int]


class ShortRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that has fewer calls of a group than others: its trace may begin later or end earlier."""

    rank: int
    group: str
    calls: int
    most: int


class MatchingSummary(msgspec.Struct, frozen=True, kw_only=True):
    collectives: int
    """Matched: each is one call on every rank of its group that was given."""
    calls: int
    """Over all ranks, matched and unmatched."""
    matched_calls: int
    methods: dict[str, int]
    """Collectives by how they were matched."""
    without_group: int
    """Matched by order alone: no group is recorded, and all ranks that have the call are taken for its members."""
    unmatched: list[UnmatchedCalls]
    short_ranks: list[ShortRank]


@dataclass(frozen=True)
class Matching:
    """Matched collectives as columns. `rows` holds all calls of all ranks; a collective is a run of `member`."""

    ranks: Whole
    world_size: int | None
    groups: Sequence[TracedGroup]
    dtypes: Sequence[str]
    rows: Any
    """Structured array (CALL_FIELDS); `group` and `dtype` point into the lists above."""
    rank: Whole
    """By row: place in `ranks`."""
    member: Whole
    """Places in `rows`, run by run, by rank inside a run."""
    first: Whole
    count: Whole
    collective: Whole
    group: Whole
    step: Whole
    size_bytes: Whole
    bus_bytes: Whole
    dtype: Whole
    members: Whole
    """Size of the group; 0: not known."""
    assumed: Mask
    """Whether the group is not recorded and taken to be all ranks."""
    method: Whole
    unmatched: Whole
    """Places in `rows`."""
    reason: Whole

    def __len__(self) -> int:
        return len(self.first)

    def of_members(self, column: str) -> Any:
        """A column of the matched rows, run by run."""
        return self.rows[column][self.member]

    def owner(self) -> Whole:
        """By matched row: its collective."""
        return np.repeat(np.arange(len(self)), self.count)

    def only(self, keep: Mask, keep_unmatched: Mask) -> Matching:
        """Some of the collectives and some of the unmatched rows."""
        count = self.count[keep]
        per_collective = {name: getattr(self, name)[keep] for name in _PER_COLLECTIVE}
        return replace(
            self,
            member=self.member[np.repeat(keep, self.count)],
            count=count,
            first=np.cumsum(count) - count,
            unmatched=self.unmatched[keep_unmatched],
            reason=self.reason[keep_unmatched],
            **per_collective,
        )


def order_digests(digests: Sequence[RankDigest]) -> list[RankDigest]:
    """By rank. A single trace without a rank is rank 0; several must each say theirs."""
    for item in digests:
        if item.version != DIGEST_VERSION:
            raise UsageError(
                f"the digest of rank {item.rank} has version {item.version}, this is version {DIGEST_VERSION}",
                hint="make the digests of all ranks with one version of stepscope",
                where=item.source or None,
            )
    if len(digests) == 1 and digests[0].rank is None:
        return [msgspec.structs.replace(digests[0], rank=0)]
    seen: dict[int, RankDigest] = {}
    for item in digests:
        if item.rank is None:
            raise UsageError(
                "the trace does not say of which rank it is, and there are several",
                hint="put the rank into the file's name (rank3.json) or give one trace alone",
                where=item.source or None,
            )
        if item.rank in seen:
            raise UsageError(
                f"two traces are of rank {item.rank}: {seen[item.rank].source or '?'} and {item.source or '?'}",
                hint="give one trace a rank, all of the same run",
                where=item.source or None,
            )
        seen[item.rank] = item
    return [seen[rank] for rank in sorted(seen)]


def match(digests: Sequence[RankDigest]) -> Matching:
    """Matches the calls of these ranks; the order of the digests does not matter."""
    ordered = order_digests(digests)
    ranks = np.array([item.rank for item in ordered], np.int64)
    rows, rank, groups, dtypes = _lay_together(ordered)
    channel, usable = _channels(rows, ranks[rank], len(groups))
    member, first, method, unmatched, reason = _Best(rows, rank, channel, len(ordered), usable).result()
    by_row = np.argsort(unmatched, kind="stable")
    worlds = [item.world_size for item in ordered if item.world_size is not None]
    return _describe(
        rows,
        member,
        first,
        groups,
        world_size=max(worlds, default=None),
        ranks=ranks,
        dtypes=dtypes,
        rank=rank,
        method=method,
        unmatched=unmatched[by_row],
        reason=reason[by_row],
    )


def _lay_together(ordered: Sequence[RankDigest]) -> tuple[Any, Whole, list[TracedGroup], list[str]]:
    tables = [calls_of(item) for item in ordered]
    rows = np.concatenate(tables)
    rank = np.repeat(np.arange(len(ordered)), [len(table) for table in tables])
    groups, group_map = _join_groups(ordered)
    dtypes: dict[str, int] = {}
    dtype_map = [dtypes.setdefault(name, len(dtypes)) for item in ordered for name in item.dtypes]
    rows["group"] = _translate(rows["group"], rank, [len(item.groups) for item in ordered], group_map)
    rows["dtype"] = _translate(rows["dtype"], rank, [len(item.dtypes) for item in ordered], dtype_map)
    return rows, rank, groups, list(dtypes)


def _translate(local: Any, rank: Whole, lengths: Sequence[int], table: Sequence[int]) -> Whole:
    """Places in each rank's own list as places in the common one."""
    offset = np.cumsum([0, *lengths])[:-1][rank]
    common = np.array([*table, -1], np.int64)
    return common[np.where(local >= 0, offset + local, len(table))]


def _join_groups(ordered: Sequence[RankDigest]) -> tuple[list[TracedGroup], list[int]]:
    """Groups of all ranks, and for each rank's groups in turn the place of its group among them."""
    by_order = _named_differently(ordered)
    known: dict[tuple[object, ...], int] = {}
    groups: list[TracedGroup] = []
    places: list[int] = []
    for item in ordered:
        nth: dict[str, int] = {}
        for group in item.groups:
            key: tuple[object, ...] = (group.members, group.name, group.stand_in)
            if group.members is None:
                key = (*key, group.description, group.size)
            elif group.members in by_order:
                nth[group.members] = nth.get(group.members, 0) + 1
                key = (group.members, nth[group.members])
            if key not in known:
                known[key] = len(groups)
                groups.append(group)
            places.append(known[key])
    return groups, places


def _named_differently(ordered: Sequence[RankDigest]) -> set[str]:
    """Member lists whose groups have other names on every rank: there the order of the groups must do."""
    names: dict[str, list[list[str | None]]] = {}
    for item in ordered:
        own: dict[str, list[str | None]] = {}
        for group in item.groups:
            if group.members is not None:
                own.setdefault(group.members, []).append(group.name)
        for members, listed in own.items():
            names.setdefault(members, []).append(listed)
    return {
        members
        for members, by_rank in names.items()
        if len(by_rank) > 1 and not set.intersection(*map(set, by_rank)) and len({len(own) for own in by_rank}) == 1
    }


def _channels(rows: Any, rank: Whole, groups: int) -> tuple[Whole, Mask]:
    """What is laid side by side: a group's collectives, or the messages from one rank to another; and what can be."""
    single = np.isin(rows["collective"], (coll.SEND, coll.RECV))
    channel = rows["group"].astype(np.int64)
    usable = ~(single & (rows["peer"] < 0))
    if single.any():
        peer = rows["peer"].astype(np.int64)
        sends = rows["collective"] == coll.SEND
        width = int(max(rank.max(), peer.max())) + 1
        sender, receiver = np.where(sends, rank, peer), np.where(sends, peer, rank)
        pairs = (channel * width + sender) * width + receiver
        channel[single] = groups + np.unique(pairs[single], return_inverse=True)[1]
    return channel, usable


class _Best:
    """Tries the methods and keeps for each channel the one that matches most calls; earlier ones win ties."""

    def __init__(self, rows: Any, rank: Whole, channel: Whole, ranks: int, usable: Mask) -> None:
        self.rows, self.rank, self.channel = rows, rank, channel
        self.channels = int(channel.max()) + 1 if len(channel) else 0
        users = unique(channel * ranks + rank) // ranks
        self.expected = np.bincount(users, minlength=self.channels)
        """By channel: ranks that use it."""
        self.calls = np.bincount(channel, minlength=self.channels)
        self.matched = np.full(self.channels, -1)
        self.method = np.full(self.channels, -1)
        self.tried: list[tuple[int, Whole, Whole, Whole]] = []
        self.usable, self.lost = np.flatnonzero(usable), np.flatnonzero(~usable)
        collective = rows["collective"].astype(np.int64)
        vague = (rows["named_by"] == BY_KERNEL) & np.isin(collective, (coll.SEND_RECV, coll.OTHER))
        self.low, self.high = np.where(vague, 255, collective), np.where(vague, -1, collective)
        sized = np.isin(collective, coll.EVEN) & (rows["size_bytes"] >= 0)
        self.least = np.where(sized, rows["size_bytes"], np.iinfo(np.int64).max)
        self.most = np.where(sized, rows["size_bytes"], -1)
        for method in range(len(METHODS)):
            open_channels = (self.matched < self.calls) & (self.expected > 1)
            places = self.usable[open_channels[self.channel[self.usable]]]
            if method == BY_SEQUENCE:
                places = self._numbered(places)
            if len(places):
                self._try(method, places)

    def _numbered(self, rows: Whole) -> Whole:
        """Rows of channels in which every call has a sequence number."""
        lacking = np.zeros(self.channels, bool)
        lacking[self.channel[rows[self.rows["sequence"][rows] < 0]]] = True
        return rows[~lacking[self.channel[rows]]]

    def _key(self, method: int, rows: Whole) -> tuple[Whole, Whole]:
        """What must be equal for two calls of one channel to lie side by side."""
        coarse = np.zeros(len(rows), np.int64)
        if method == BY_SEQUENCE:
            coarse += self.rows["sequence"][rows]
        elif method == BY_STEP:
            kind = self.rows["collective"][rows].astype(np.int64)
            # The two ends of a message lie side by side, though they are not the same call.
            kind[np.isin(kind, (coll.SEND, coll.RECV))] = coll.SEND_RECV
            coarse += self.rows["step"][rows].astype(np.int64) * len(coll.COLLECTIVES) + kind
        return coarse, ordinals(self.channel[rows], self.rank[rows], coarse)

    def _try(self, method: int, rows: Whole) -> None:
        coarse, fine = self._key(method, rows)
        channel = self.channel[rows]
        order = np.lexsort((self.rank[rows], fine, coarse, channel))
        member, first = rows[order], np.flatnonzero(find_changes(order, channel, coarse, fine))
        block = np.cumsum(np.r_[0, (np.diff(channel[order][first]) != 0) | (np.diff(coarse[order][first]) != 0)])
        reason = self._judge(member, first, block)
        count = _run_lengths(first, member)
        fitting = np.bincount(self.channel[member[first]], weights=count * (reason < 0), minlength=self.channels)
        touched = np.bincount(channel, minlength=self.channels) > 0
        better = touched & (fitting > self.matched)
        self.matched[better], self.method[better] = fitting[better], method
        self.tried.append((method, member, first, reason))

    def _judge(self, member: Whole, first: Whole, block: Whole) -> Whole:
        """−1 where a run is one collective, else the reason why not.

        Runs of one block were told apart by their order: one that lacks a rank makes the others doubtful too.
        """
        count = _run_lengths(first, member)
        expected = self.expected[self.channel[member[first]]]
        low, high = np.minimum.reduceat(self.low[member], first), np.maximum.reduceat(self.high[member], first)
        message = (low == coll.SEND) & (high == coll.RECV)
        same = (high < 0) | (low == high) | message
        least, most = np.minimum.reduceat(self.least[member], first), np.maximum.reduceat(self.most[member], first)
        lacking = np.bincount(block, weights=count < expected) > 0
        checks = [lacking[block], ~same, (most >= 0) & (least != most)]
        return np.select(checks, [ABSENT, OTHER_COLLECTIVE, OTHER_SIZE], -1)

    def result(self) -> tuple[Whole, Whole, Whole, Whole, Whole]:
        """Members and first member of each collective, its method; unmatched rows and their reasons."""
        empty = np.empty(0, np.int64)
        alone = self.usable[self.expected[self.channel[self.usable]] < 2]
        runs = [(empty, empty, empty)]
        left = [(rows, np.full(len(rows), why)) for rows, why in ((alone, ALONE), (self.lost, NO_PEER))]
        for method, member, first, reason in self.tried:
            chosen = self.method[self.channel[member[first]]] == method
            count = _run_lengths(first, member)
            good = chosen & (reason < 0)
            runs.append((member[np.repeat(good, count)], count[good], np.full(int(good.sum()), method)))
            bad = np.repeat(chosen & (reason >= 0), count)
            left.append((member[bad], np.repeat(reason, count)[bad]))
        members, counts, methods = (np.concatenate(column) for column in zip(*runs, strict=True))
        unmatched, reasons = (np.concatenate(column) for column in zip(*left, strict=True))
        member, first, order = self._in_order(members, counts)
        return member, first, methods[order], unmatched, reasons

    def _in_order(self, members: Whole, counts: Whole) -> tuple[Whole, Whole, Whole]:
        """Collectives by their start on the lowest rank that has them."""
        first = np.cumsum(counts) - counts
        lead = members[first] if len(counts) else members
        order = np.lexsort((lead, self.rows["start_ns"][lead]))
        first, counts = first[order], counts[order]
        return members[expand(first, counts)[1]], np.cumsum(counts) - counts, order


def _describe(
    rows: Any, member: Whole, first: Whole, groups: list[TracedGroup], *, world_size: int | None, **known: Any
) -> Matching:
    """Adds what all members of a collective have in common."""
    count = _run_lengths(first, member)
    group = rows["group"][member[first]].astype(np.int64)
    # The most that any member says: `send_recv` by a kernel's name gives way to a recorded name.
    named = rows["named_by"][member].astype(np.int64) * 256 + rows["collective"][member]
    collective = _reduce(np.minimum, named, first) % 256
    known_size = np.array([entry.size or 0 for entry in groups], np.int64)
    members = known_size[group] if len(groups) else group
    single = np.isin(collective, (coll.SEND, coll.RECV, coll.SEND_RECV)) & (members == 0)
    assumed = (members == 0) & (count == (world_size or -1)) & ~single
    members = np.where(assumed, count, members)
    size, bus = _common_sizes(rows, member, first, collective, members)
    return Matching(
        **known,
        world_size=world_size,
        groups=groups,
        rows=rows,
        member=member,
        first=first,
        count=count,
        collective=collective,
        group=group,
        step=_reduce(np.maximum, rows["step"][member], first),
        size_bytes=size,
        bus_bytes=bus,
        dtype=_reduce(np.maximum, rows["dtype"][member], first),
        members=members,
        assumed=assumed,
    )


def _run_lengths(first: Whole, member: Whole) -> Whole:
    """How many members stand from each first one to the next."""
    return np.diff(first, append=len(member))


def _reduce(how: Any, values: Any, first: Whole) -> Whole:
    return how.reduceat(values.astype(np.int64), first) if len(first) else np.empty(0, np.int64)


def _common_sizes(rows: Any, member: Whole, first: Whole, collective: Whole, members: Whole) -> tuple[Whole, Whole]:
    """Size and bus bytes of each collective; −1 where they are not known. Of uneven pieces the largest count."""
    size = _reduce(np.maximum, rows["size_bytes"][member], first)
    piece = _reduce(np.maximum, rows["piece_bytes"][member], first)
    size = np.where((size < 0) & (piece >= 0) & (members > 0), piece * members, size)
    bus = _reduce(np.maximum, rows["bus_bytes"][member], first)
    lacking = (bus < 0) & (size >= 0) & (members > 0)
    for kind, n in np.unique(np.stack([collective, members], axis=1)[lacking], axis=0).tolist():
        if (factor := coll.bus_factor(coll.COLLECTIVES[kind], n)) is not None:
            here = lacking & (collective == kind) & (members == n)
            bus[here] = np.rint(size[here] * factor)
    return size, bus


def summarize_matching(matching: Matching) -> MatchingSummary:
    methods = np.bincount(matching.method, minlength=len(METHODS))
    stand_in = np.array([group.stand_in is not None for group in matching.groups], bool)
    return MatchingSummary(
        collectives=len(matching),
        calls=len(matching.member) + len(matching.unmatched),
        matched_calls=len(matching.member),
        methods={name: int(count) for name, count in zip(METHODS, methods, strict=True) if count},
        without_group=int(stand_in[matching.group].sum()) if len(matching) else 0,
        unmatched=_count_unmatched(matching),
        short_ranks=_find_short_ranks(matching),
    )


def _count_unmatched(matching: Matching) -> list[UnmatchedCalls]:
    found = []
    for code, reason in enumerate(REASONS):
        rows = matching.unmatched[matching.reason == code]
        if len(rows):
            counts = np.bincount(matching.rows["collective"][rows], minlength=len(coll.COLLECTIVES))
            names = {name: int(count) for name, count in zip(coll.COLLECTIVES, counts, strict=True) if count}
            found.append(UnmatchedCalls(reason=reason, calls=len(rows), collectives=names))
    return found


def _find_short_ranks(matching: Matching) -> list[ShortRank]:
    """Ranks with fewer calls of a group than another member, the shortest first; single messages do not count."""
    rows, ranks = matching.rows, matching.ranks
    several = ~np.isin(rows["collective"], (coll.SEND, coll.RECV))
    keys, counts = np.unique(
        rows["group"][several].astype(np.int64) * len(ranks) + matching.rank[several], return_counts=True
    )
    group, rank = keys // len(ranks), keys % len(ranks)
    short: list[ShortRank] = []
    for code in distinct(group):
        here = group == code
        most = int(counts[here].max())
        calls = dict(zip(ranks[rank[here]].tolist(), counts[here].tolist(), strict=True))
        members = matching.groups[code].members
        given = np.intersect1d(parse_members(members), ranks).tolist() if members is not None else list(calls)
        label = matching.groups[code].label()
        short += [
            ShortRank(rank=member, group=label, calls=calls.get(member, 0), most=most)
            for member in given
            if calls.get(member, 0) < most
        ]
    short.sort(key=lambda item: (item.calls - item.most, item.rank, item.group))
    return short[:_MOST_LISTED]
