"""Segments of host time and device events put in order: what each waits for, and how long it was late beyond that.

Every dependency found points from an end to a beginning that is not earlier. Those that the times contradict are left
out and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from stepscope.formats.nesting import climb, nest
from stepscope.formats.timeline import COPY, EDGE_KINDS, RUNTIME, Integers, RowEdges, Timeline
from stepscope.traces.link import GraphLink, count_reason
from stepscope.traces.operators import data_edges


class HostSegments(NamedTuple):
    """Segments ordered by thread, then time."""

    thread: Integers
    start_ns: Integers
    end_ns: Integers
    owner: Integers
    """Row whose own time it is; −1: a gap outside every call."""
    is_head: Integers
    head_of: Integers
    """By row of the timeline: its head's place among the segments; −1 for rows that are not part."""
    last_of: Integers
    """By row: the last segment that lies inside it."""
    parent: Integers
    """By row: the enclosing row among those that are part."""
    clipped: int
    """Rows that ended after the call they began in, and were cut there."""


def cut_host_time(timeline: Timeline, rows: Integers) -> HostSegments:
    """Segments of the given host rows. Heads are always there, other segments only where they take time."""
    core = timeline.core
    is_part = np.full(len(timeline), -1, np.int64)
    is_part[rows] = rows
    rows = rows[
        np.lexsort((core["event_index"][rows], -core["end_ns"][rows], core["start_ns"][rows], core["thread"][rows]))
    ]
    above = core["parent"].astype(np.int64)
    parent_row = np.full(len(timeline), -1, np.int64)
    parent_row[rows] = climb(is_part, above, above[rows])
    place_of = np.full(len(timeline), -1, np.int64)
    place_of[rows] = np.arange(len(rows))
    parent = np.where(parent_row[rows] >= 0, place_of[parent_row[rows]], -1)
    depth, size, levels = nest(parent)
    start, end, clipped = _clip(core["start_ns"][rows], core["end_ns"][rows], parent, levels)

    count = len(rows)
    begins = 2 * np.arange(count) - depth
    ends = 2 * (np.arange(count) + size) - depth - 1
    time = np.zeros(2 * count, np.int64)
    time[begins], time[ends] = start, end
    owner = np.full(2 * count, -1, np.int64)
    owner[begins], owner[ends] = rows, parent_row[rows]
    is_head = np.zeros(2 * count, bool)
    is_head[begins] = True
    thread = np.zeros(2 * count, np.int64)
    thread[begins] = thread[ends] = core["thread"][rows]
    until = np.concatenate([time[1:], time[-1:]])
    same_thread = np.concatenate([thread[1:] == thread[:-1], [False]]) if count else np.zeros(0, bool)
    keep = is_head | (same_thread & (until > time))
    until = np.maximum(until, time)
    number = np.cumsum(keep) - 1
    head_of, last_of = np.full(len(timeline), -1, np.int64), np.full(len(timeline), -1, np.int64)
    head_of[rows] = number[begins]
    last_of[rows] = number[ends - 1]
    return HostSegments(
        thread=thread[keep],
        start_ns=time[keep],
        end_ns=until[keep],
        owner=owner[keep],
        is_head=is_head[keep],
        head_of=head_of,
        last_of=last_of,
        parent=parent_row,
        clipped=clipped,
    )


def _clip(start: Integers, end: Integers, parent: Integers, levels: list[Integers]) -> tuple[Integers, Integers, int]:
    """Times inside those of the parent, from the outside in."""
    start, end = start.astype(np.int64), end.astype(np.int64)
    clipped = 0
    for level in levels[1:]:
        above = parent[level]
        clipped += int((end[level] > end[above]).sum())
        start[level] = np.clip(start[level], start[above], end[above])
        end[level] = np.clip(end[level], start[level], end[above])
    return start, end, clipped


_HOST, _THREAD, _LAUNCH, _STREAM, _EVENT, _SYNC, _QUEUE, _COLLECTIVE, _GRAPH, _DATA = range(len(EDGE_KINDS))
_BLOCKING = ("Synchronize",)


@dataclass(frozen=True)
class Sources:
    """What a schedule is made from."""

    timeline: Timeline
    segments: HostSegments
    devices: Integers
    """Rows, in order of start."""
    link: GraphLink | None
    edges: RowEdges | None


HEAD, GAP, REST, DEVICE, DELAY, ROOT = range(6)
FORMS = ("call", "host gap", "after wait", "device", "delay", "begin")


@dataclass(frozen=True)
class ScheduledNodes:
    """Nodes in an order of execution."""

    form: Integers
    """Index into FORMS."""
    row: Integers
    """Row of the timeline: the call, the device event, or the call whose time a gap is; −1."""
    start_ns: Integers
    end_ns: Integers
    thread: Integers
    call_parent: Integers
    """Place of the enclosing call's node; −1 at the top."""
    before: Integers
    """Dependencies, ordered by `after`, then `before`; places."""
    after: Integers


class _Edges(NamedTuple):
    """Dependencies with their kinds: between rows, then (resolved) between nodes: segments, then device events."""

    before: Integers
    after: Integers
    kind: Integers


def schedule(sources: Sources) -> tuple[ScheduledNodes, dict[str, int], dict[str, int]]:
    """The nodes, how many dependencies of each kind they have, and what was left out and why."""
    dropped: dict[str, int] = {}
    places = _Places(sources)
    edges = _gather(sources, dropped)
    to_device = places.is_device(edges.after)
    resolved = [
        _resolve_to_devices(places, _take(edges, to_device), dropped),
        _resolve_to_hosts(places, _take(edges, ~to_device), dropped),
        _stream_order(places),
    ]
    table = _Table(places)
    table.add_threads_order()
    for found in resolved:
        table.add(found)
    table.add_hand_overs()
    table.add_delays()
    nodes = table.finish(dropped)
    counts = {kind: count for kind, count in table.counts.items() if count}
    counts["cut"] = places.cut_count
    return nodes, counts, dropped


def _gather(sources: Sources, dropped: dict[str, int]) -> _Edges:
    """Launches, given edges, calls that return with device work, and data dependencies, as rows."""
    timeline, devices = sources.timeline, sources.devices
    launch = timeline.core["parent"][devices].astype(np.int64)
    known = launch >= 0
    groups = [_Edges(launch[known], devices[known], np.full(int(known.sum()), _LAUNCH))]
    if sources.edges is not None:
        groups.append(_given(sources.edges, sources, dropped))
    else:
        groups.append(_blocking_calls(sources))
    if sources.link is not None:
        found, contradicted = data_edges(sources.link)
        count_reason(dropped, "data dependencies that the times contradict", contradicted)
        groups.append(_Edges(found.before, found.after, found.kind.astype(np.int64)))
    joined = _Edges(*(np.concatenate(parts) for parts in zip(*groups, strict=True)))
    inside = _selected(sources)
    whole = inside[joined.before] & inside[joined.after]
    count_reason(dropped, "dependencies on events outside the part that is converted", int((~whole).sum()))
    return _take(joined, whole)


def _given(edges: RowEdges, sources: Sources, dropped: dict[str, int]) -> _Edges:
    kind = edges.kind.astype(np.int64)
    not_written = np.isin(kind, (_QUEUE, _COLLECTIVE))
    count_reason(dropped, "full launch queues and peers' arrivals, which no node can wait for", int(not_written.sum()))
    # The order of threads, streams and launches is made from the rows, except launches that the rows do not know.
    launched = sources.timeline.core["parent"][edges.after] >= 0
    repeated = np.isin(kind, (_HOST, _STREAM)) | ((kind == _LAUNCH) & launched)
    keep = ~not_written & ~repeated
    if sources.link is not None:
        keep &= kind != _DATA
    return _Edges(edges.before[keep].astype(np.int64), edges.after[keep].astype(np.int64), kind[keep])


def _blocking_calls(sources: Sources) -> _Edges:
    """Without analysis: calls named so, and copies that ended before their call returned, wait for device work."""
    timeline, devices = sources.timeline, sources.devices
    core = timeline.core
    none = np.zeros(0, np.int64)
    if not len(devices):
        return _Edges(none, none, none)
    codes = [code for code, text in enumerate(timeline.texts) if any(word in text for word in _BLOCKING)]
    calls = np.flatnonzero((core["kind"] == RUNTIME) & np.isin(core["name"], codes))
    by_end = devices[np.argsort(core["end_ns"][devices], kind="stable")]
    place = np.searchsorted(core["end_ns"][by_end], core["end_ns"][calls], side="right") - 1
    last = by_end[np.maximum(place, 0)]
    waited = (place >= 0) & (core["end_ns"][last] > core["start_ns"][calls])
    copies = devices[core["kind"][devices] == COPY]
    launch = core["parent"][copies].astype(np.int64)
    held = (launch >= 0) & (core["end_ns"][copies] <= core["end_ns"][np.maximum(launch, 0)])
    before = np.concatenate([last[waited], copies[held]])
    after = np.concatenate([calls[waited], launch[held]])
    return _Edges(before, after, np.full(len(before), _SYNC))


def _selected(sources: Sources) -> Integers:
    inside = sources.segments.head_of >= 0
    inside[sources.devices] = True
    return np.asarray(inside)


def _take(edges: _Edges, wanted: Integers) -> _Edges:
    return _Edges(edges.before[wanted], edges.after[wanted], edges.kind[wanted])


class _Places:
    """Where rows are among the nodes: segments of host time come first, device events after them."""

    def __init__(self, sources: Sources) -> None:
        timeline, segments = sources.timeline, sources.segments
        self.timeline, self.segments, self.devices = timeline, segments, sources.devices
        self.start = timeline.core["start_ns"].astype(np.int64)
        self.end = timeline.core["end_ns"].astype(np.int64)
        self.thread_of_row = timeline.core["thread"].astype(np.int64)
        self.segment_count = len(segments.start_ns)
        self.device_place = np.full(len(timeline), -1, np.int64)
        self.device_place[sources.devices] = self.segment_count + np.arange(len(sources.devices))
        self.cut_ns = segments.start_ns.copy()
        """By segment: when it began once the waiting at its beginning is taken off."""

    @property
    def cut_count(self) -> int:
        return int((self.cut_ns > self.segments.start_ns).sum())

    def is_device(self, rows: Integers) -> Integers:
        return self.device_place[rows] >= 0

    def segments_ending_by(self, rows: Integers, limit_ns: Integers) -> Integers:
        """The last segment, on the thread of each host row and not after the row, that had ended by then; −1: none."""
        place, begin, _ = self._search_ends(rows, limit_ns, "right")
        return np.minimum(np.where(place > begin, place - 1, -1), self.segments.last_of[rows])

    def segments_containing(self, rows: Integers, time_ns: Integers) -> Integers:
        """The segment, on the thread of each host row, that was running just before that time."""
        place, _, end = self._search_ends(rows, time_ns, "left")
        return np.where(place < end, place, -1)

    def _search_ends(
        self, rows: Integers, times: Integers, side: Literal["left", "right"]
    ) -> tuple[Integers, Integers, Integers]:
        """Where times belong among the ends of the segments of each row's thread, which ascend; and their bounds."""
        threads = self.thread_of_row[rows]
        begin = np.searchsorted(self.segments.thread, threads)
        end = np.searchsorted(self.segments.thread, threads, "right")
        place = begin.copy()
        for thread in np.unique(threads).tolist():
            mine = np.flatnonzero(threads == thread)
            first, last = begin[mine[0]], end[mine[0]]
            place[mine] += np.searchsorted(self.segments.end_ns[first:last], times[mine], side)
        return place, begin, end


def _sources_of(places: _Places, before: Integers, limit_ns: Integers) -> tuple[Integers, Integers]:
    """Node and time at which each source row had got far enough by the limit; −1 where it had not."""
    on_device = places.is_device(before)
    node = np.where(on_device, places.device_place[before], -1)
    host = np.flatnonzero(~on_device)
    limit = np.minimum(limit_ns[host], places.end[before[host]])
    node[host] = places.segments_ending_by(before[host], limit)
    time = np.where(on_device, places.end[before], 0)
    segment = node[host]
    time[host] = np.where(segment >= 0, places.segments.end_ns[np.maximum(segment, 0)], 0)
    return node, time


def _resolve_to_devices(places: _Places, edges: _Edges, dropped: dict[str, int]) -> _Edges:
    begin = places.start[edges.after]
    node, time = _sources_of(places, edges.before, begin)
    known = node >= 0
    good = known & (time <= begin)
    count_reason(dropped, "dependencies that the times contradict", int((known & ~good).sum()))
    return _Edges(node[good], places.device_place[edges.after[good]], edges.kind[good])


def _resolve_to_hosts(places: _Places, edges: _Edges, dropped: dict[str, int]) -> _Edges:
    """A call waits from its beginning, or in the middle: then the segment that was waiting is cut."""
    segments = places.segments
    begin, end = places.start[edges.after], places.end[edges.after]
    # Something that began before the call handed over before it; else the call waited for its end.
    earlier = places.start[edges.before] <= begin
    limit = np.where(earlier & ~places.is_device(edges.before), begin, end)
    node, time = _sources_of(places, edges.before, limit)
    same_thread = ~places.is_device(edges.before) & (
        places.thread_of_row[edges.before] == places.thread_of_row[edges.after]
    )
    good = (node >= 0) & (time <= end) & ~same_thread
    count_reason(dropped, "dependencies that the times contradict", int(((node >= 0) & ~good & ~same_thread).sum()))
    rows, node, time, kind = edges.after[good], node[good], time[good], edges.kind[good]
    rows = _waiting_calls(places, edges.before[good], rows, time)
    target = segments.head_of[rows]
    inside = time > places.start[rows]
    holding = places.segments_containing(rows, time)
    target = np.where(inside & (holding >= 0), holding, target)
    # A thread that was handed work was idle before: the gap before the call is waiting up to the hand-over.
    previous = np.maximum(target - 1, 0)
    idle = (
        ~inside
        & (kind == _THREAD)
        & (target > 0)
        & ~segments.is_head[previous]
        & (segments.thread[previous] == segments.thread[target])
        & (segments.start_ns[previous] < time)
    )
    target = np.where(idle, previous, target)
    cut = inside | idle
    np.maximum.at(places.cut_ns, target[cut], np.minimum(time[cut], segments.end_ns[target[cut]]))
    return _Edges(node, target, kind)


def _waiting_calls(places: _Places, before: Integers, rows: Integers, time: Integers) -> Integers:
    """Edges of blocking copies may lead to what came after the call; it is the call with the copy that waited."""
    launch = np.where(places.is_device(before), places.timeline.core["parent"][before], -1).astype(np.int64)
    call = np.maximum(launch, 0)
    same_thread = places.thread_of_row[call] == places.thread_of_row[rows]
    waited = (launch >= 0) & same_thread & (time <= places.end[call]) & (places.end[call] <= places.start[rows])
    return np.where(waited & (places.segments.head_of[call] >= 0), call, rows)


def _stream_order(places: _Places) -> _Edges:
    """Each device event before the next on its stream that began after its end, and after the last that had ended.

    Kernels of one stream may overlap; the last of them is then made to wait for the one before, so that each event but
    the last of a stream has a successor.
    """
    core = places.timeline.core
    before: list[Integers] = [np.zeros(0, np.int64)]
    after: list[Integers] = [np.zeros(0, np.int64)]
    devices = places.devices
    _, device = np.unique(core["device"][devices], return_inverse=True)
    streams, stream = np.unique(core["stream"][devices], return_inverse=True)
    which = device * len(streams) + stream
    for number in np.unique(which):
        rows = devices[which == number]
        node = places.device_place[rows]
        start, end = places.start[rows], places.end[rows]
        here = np.arange(len(rows))
        following = np.maximum(np.searchsorted(start, end, side="left"), here + 1)
        before.append(node[:-1])
        after.append(node[np.minimum(following[:-1], here[-1])])
        by_end = np.argsort(end, kind="stable")
        place = np.searchsorted(end[by_end], start, side="right") - 1
        latest = by_end[np.maximum(place, 0)]
        has = (place >= 0) & (latest < here)
        before.append(node[latest[has]])
        after.append(node[has])
    count = places.segment_count + len(devices)
    pairs = _distinct(np.concatenate(before) * np.int64(count) + np.concatenate(after))
    return _Edges(pairs // count, pairs % count, np.full(len(pairs), _STREAM))


def _distinct(numbers: Integers) -> Integers:
    """Sorted, each once; for columns as long as these quicker than numpy's own, which hashes."""
    numbers = np.sort(numbers)
    first = np.ones(len(numbers), bool)
    first[1:] = numbers[1:] != numbers[:-1]
    return numbers[first]


class _Table:
    """Nodes and dependencies while they are collected."""

    def __init__(self, places: _Places) -> None:
        segments, devices = places.segments, places.devices
        self.places = places
        cut = places.cut_ns > segments.start_ns
        head_cut = np.flatnonzero(cut & segments.is_head)
        segment_form = np.where(segments.is_head, HEAD, GAP)
        segment_start = np.where(segments.is_head, segments.start_ns, places.cut_ns)
        segment_end = segments.end_ns.copy()
        segment_end[head_cut] = segments.start_ns[head_cut]
        count = places.segment_count + len(devices)
        self.last_part = np.arange(count)
        # The time after a wait is a node of its own, so that the call keeps its beginning.
        self.last_part[head_cut] = count + np.arange(len(head_cut))
        self.form = np.concatenate([segment_form, np.full(len(devices), DEVICE), np.full(len(head_cut), REST)])
        self.row = np.concatenate([segments.owner, devices, segments.owner[head_cut]])
        self.start = np.concatenate([segment_start, places.start[devices], places.cut_ns[head_cut]])
        self.end = np.concatenate([segment_end, places.end[devices], segments.end_ns[head_cut]])
        self.thread = np.concatenate([segments.thread, np.full(len(devices), -1), segments.thread[head_cut]])
        self.before: list[Integers] = [head_cut]
        self.after: list[Integers] = [self.last_part[head_cut]]
        self.counts: dict[str, int] = dict.fromkeys(EDGE_KINDS, 0)

    def add(self, found: _Edges) -> None:
        """Sources are what remains of a segment after its wait, and so are targets that were cut."""
        self.before.append(self.last_part[found.before])
        self.after.append(self.last_part[found.after])
        for kind, count in zip(*np.unique(found.kind, return_counts=True), strict=True):
            self.counts[EDGE_KINDS[int(kind)]] += int(count)

    def add_threads_order(self) -> None:
        threads = self.places.segments.thread
        next_ones = np.flatnonzero(threads[1:] == threads[:-1]) + 1
        self.before.append(self.last_part[next_ones - 1])
        self.after.append(next_ones)
        self.counts["host"] += len(next_ones)

    def add_hand_overs(self) -> None:
        """What waits for nothing yet (a thread's first call, work without a launch) follows what had last ended on the
        host."""
        segments = self.places.segments
        waiting = np.ones(len(self.form), bool)
        waiting[np.concatenate(self.after)] = False
        lone = np.flatnonzero(waiting)
        if not self.places.segment_count or len(lone) < 2:
            return
        by_end = np.argsort(segments.end_ns, kind="stable")
        place = np.searchsorted(segments.end_ns[by_end], self.start[lone], side="right") - 1
        source = by_end[np.maximum(place, 0)]
        other = self.thread[source] != self.thread[lone]
        good = (place >= 0) & other
        self.before.append(self.last_part[source[good]])
        self.after.append(lone[good])
        self.counts["thread"] += int(good.sum())
        self.counts["inferred"] = int(good.sum())

    def add_delays(self) -> None:
        """A node for the time between the end of all that was waited for and the beginning; one that begins all."""
        before, after = np.concatenate(self.before), np.concatenate(self.after)
        origin = int(self.start.min())
        ready = np.full(len(self.start), origin, np.int64)
        np.maximum.at(ready, after, self.end[before])
        lone = np.ones(len(self.start), bool)
        lone[after] = False
        root = len(self.start)
        before = np.concatenate([before, np.full(int(lone.sum()), root)])
        after = np.concatenate([after, np.flatnonzero(lone)])
        late = np.flatnonzero(self.start > ready)
        delay_of = np.full(root, -1, np.int64)
        delay_of[late] = root + 1 + np.arange(len(late))
        copied = delay_of[after] >= 0
        self.before = [before, before[copied], delay_of[late]]
        self.after = [after, delay_of[after[copied]], late]
        gap = np.where(self.form[late] == DEVICE, DELAY, GAP)
        self.form = np.concatenate([self.form, [ROOT], gap])
        # A delay belongs to the event it holds up; the gap before a thread's first call to nobody.
        self.row = np.concatenate([self.row, [-1], np.where(gap == DELAY, self.row[late], -1)])
        self.start = np.concatenate([self.start, [origin], ready[late]])
        self.end = np.concatenate([self.end, [origin], self.start[late]])
        self.thread = np.concatenate([self.thread, [-1], self.thread[late]])

    def finish(self, dropped: dict[str, int]) -> ScheduledNodes:
        """Nodes by start, short before long; dependencies that do not point forward are left out."""
        count = len(self.form)
        # The beginning of all stands first; of equal times, the order of making decides, which is that of each thread.
        is_root = self.form == ROOT
        order = np.lexsort((self.end, self.start))
        order = np.concatenate([np.flatnonzero(is_root), order[~is_root[order]]])
        rank = np.empty(count, np.int64)
        rank[order] = np.arange(count)
        before, after = rank[np.concatenate(self.before)], rank[np.concatenate(self.after)]
        forward = before < after
        count_reason(dropped, "dependencies between events of no length at one time", int((~forward).sum()))
        pairs = _distinct(after[forward] * np.int64(count) + before[forward])
        return ScheduledNodes(
            form=self.form[order],
            row=self.row[order],
            start_ns=self.start[order],
            end_ns=self.end[order],
            thread=self.thread[order],
            call_parent=self._call_parents(order, rank),
            before=pairs % count,
            after=pairs // count,
        )

    def _call_parents(self, order: Integers, rank: Integers) -> Integers:
        """The enclosing call of a call, the call itself of its later time, the call around a launch of device work."""
        places = self.places
        form, row = self.form[order], self.row[order]
        above = np.full(len(order), -1, np.int64)
        has_row = row >= 0
        is_head, is_device = form == HEAD, np.isin(form, (DEVICE, DELAY))
        above[is_head] = places.segments.parent[row[is_head]]
        inner = has_row & ~is_head & ~is_device
        above[inner] = row[inner]
        launch = places.timeline.core["parent"][row[is_device]].astype(np.int64)
        above[is_device] = np.where(launch >= 0, places.segments.parent[np.maximum(launch, 0)], -1)
        head = np.where(above >= 0, places.segments.head_of[np.maximum(above, 0)], -1)
        parent = np.where(head >= 0, rank[np.maximum(head, 0)], -1)
        # A parent that would not come first (no length, same time) is no parent.
        return np.where(parent < np.arange(len(order)), parent, -1)
