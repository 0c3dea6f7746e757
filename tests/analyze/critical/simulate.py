"""A machine whose rules are known: programs of host threads, streams, events, waits and collectives, run step by step.

It shares nothing with the model under test. `run` gives the timeline that a profiler would have written, and its end;
with other costs (`Costs`) it gives what would really have happened.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from stepscope.formats.timeline import COPY, KERNEL, OPERATOR, RUNTIME, SYNC, Timeline, TimelineBuilder
from stepscope.traces.finish import finish

STREAMS = (20, 21, 22)
US = 1_000


@dataclass(frozen=True)
class Op:
    """One thing that a thread of the host does; what its fields mean depends on `what`."""

    what: str
    """host, launch, copy_back, record, wait, stream_sync, device_sync, event_sync, backward, collective."""
    host_ns: int = 0
    """Of the host before the call."""
    stream: int = STREAMS[0]
    work_ns: int = 0
    name: str = "kernel_a"
    event: int = 0
    inner: tuple[Op, ...] = ()
    group: int = 0


@dataclass(frozen=True)
class Costs:
    """What things take; edits multiply."""

    launch_call_ns: int = 6 * US
    launch_ns: int = 9 * US
    stream_ns: int = 1 * US
    sync_ns: int = 4 * US
    sync_call_ns: int = 3 * US
    short_call_ns: int = 1 * US
    gap_ns: int = 2 * US
    handover_ns: int = 30 * US
    queue_limit: int = 0
    jitter_ns: int = 0
    """Up to so much is added to each launch and each return, the same in every run of a program."""
    host: float = 1
    launches: float = 1
    communication: float = 1
    work: Callable[[str, int, int], float] = lambda name, stream, rank: 1.0
    """Factor for a kernel by name, stream and rank."""


@dataclass
class Work:
    """A piece of device work. Times are known once all it depends on is."""

    name: str
    stream: int
    length_ns: int
    issued_ns: int
    before: Work | None
    waits: list[Work] = field(default_factory=list)
    members: list[Work] | None = None
    """Of a collective: those that have come so far."""
    expected: int = 1
    transfer_ns: int = 0
    row_of_call: int = -1
    correlation: int = 0
    _start: int | None = None
    _end: int | None = None

    def start(self, costs: Costs) -> int | None:
        if self._start is None:
            times = [self.issued_ns]
            if self.before is not None:
                end = self.before.end(costs)
                times.append(-1 if end is None else end + costs.stream_ns)
            for other in self.waits:
                end = other.end(costs)
                times.append(-1 if end is None else end)
            self._start = None if min(times) < 0 else max(times)
        return self._start

    def end(self, costs: Costs) -> int | None:
        if self._end is None:
            start = self.start(costs)
            if self.members is None:
                self._end = None if start is None else start + self.length_ns
            elif len(self.members) == self.expected:
                starts = [member.start(costs) for member in self.members]
                if None not in starts:
                    self._end = max(value for value in starts if value is not None) + self.transfer_ns
        return self._end


class Rank:
    """One process: its threads, streams and what was recorded."""

    def __init__(
        self, number: int, costs: Costs, meetings: dict[int, list[Work]], ranks: int, *, sync_rows: bool, records: bool
    ) -> None:
        self.number = number
        self.costs = costs
        self.meetings = meetings
        self.ranks = ranks
        self.sync_rows = sync_rows
        self.records = records
        self.builder = TimelineBuilder()
        self.streams: dict[int, list[Work]] = {}
        self.pending: dict[int, list[Work]] = {}
        self.events: dict[int, tuple[Work | None, int, int]] = {}
        self.correlation = 0
        self.sequence = 0
        self.device_rows: list[Work] = []
        self.end_ns = 0
        self.matches: dict[int, int] = {}

    def host(self, length_ns: int) -> int:
        return round(length_ns * self.costs.host)

    def jitter(self, number: int, what: int) -> int:
        most = self.costs.jitter_ns
        return random.Random(1000 * number + 10 * self.number + what).randrange(most) if most else 0

    def play(
        self, program: Sequence[Op], thread: int, now: int, *, backward: bool = False
    ) -> Generator[None, None, None]:
        """Runs a program; stops at `yield` while it waits for other ranks. `self.now` is the time afterwards."""
        for op in program:
            began = now
            now += self.host(op.host_ns)
            if op.what == "host":
                self.builder.add(OPERATOR, "aten::view", began, now, thread=(0, thread), **self._numbers(backward))
            elif op.what == "backward":
                self.builder.add(OPERATOR, "aten::loss", began, now, thread=(0, thread), **self._numbers(False))
                yield from self.play(op.inner, thread + 1, now + self.host(self.costs.handover_ns), backward=True)
                now = self.now + self.host(self.costs.handover_ns) - self.host(self.costs.gap_ns)
            else:
                inner = self.call(op, thread, now)
                now = yield from inner
                name = "autograd::engine::evaluate_function: A" if backward else "aten::op"
                now += self.host(self.costs.short_call_ns)
                self.builder.add(OPERATOR, name, began, now, thread=(0, thread), **self._numbers(backward))
            now += self.host(self.costs.gap_ns)
        self.now = now - self.host(self.costs.gap_ns)

    def _numbers(self, backward: bool) -> dict[str, int]:
        if backward:
            return {"sequence": max(0, self.sequence - 1), "forward_thread": 1}
        self.sequence += 1
        return {"sequence": self.sequence - 1, "forward_thread": 0}

    def call(self, op: Op, thread: int, now: int) -> Generator[None, None, int]:
        """One call of the runtime: returns when it is over."""
        self.correlation += 1
        number = self.correlation
        end, name, waits = now + self.host(self.costs.short_call_ns), "cudaEventRecord", None
        if op.what in ("launch", "copy_back", "collective"):
            name = "cudaMemcpyAsync" if op.what == "copy_back" else "cudaLaunchKernel"
            work, end = self.launch(op, now, number)
            if self.costs.queue_limit and len(self.streams[op.stream]) > self.costs.queue_limit:
                first = self.streams[op.stream][-1 - self.costs.queue_limit]
                while first.start(self.costs) is None:
                    yield
                end = max(end, first.start(self.costs) or 0)
            waits = [work] if op.what == "copy_back" else None
        elif op.what == "record":
            rows = self.streams.get(op.stream)
            self.events[op.event] = (rows[-1] if rows else None, op.stream, number)
        elif op.what == "wait":
            name = "cudaStreamWaitEvent"
            self.wait(op, now, number)
        elif op.what.endswith("_sync"):
            name = {"stream_sync": "cudaStreamSynchronize", "device_sync": "cudaDeviceSynchronize"}.get(
                op.what, "cudaEventSynchronize"
            )
            end = now + self.host(self.costs.sync_call_ns)
            waits = self.awaited(op)
            self.record_sync(op, number, now)
        for work in waits or []:
            while work.end(self.costs) is None:
                yield
            end = max(end, (work.end(self.costs) or 0) + self.costs.sync_ns + self.jitter(number, 1))
        if self.records or name != "cudaEventRecord":
            self.builder.add(RUNTIME, name, now, end, thread=(0, thread), correlation=number)
        return end

    def launch(self, op: Op, now: int, number: int) -> tuple[Work, int]:
        costs = self.costs
        rows = self.streams.setdefault(op.stream, [])
        name = {"copy_back": "Memcpy DtoH (Device -> Pageable)", "collective": "ncclDevKernel_AllReduce"}.get(
            op.what, op.name
        )
        work = Work(
            name=name,
            stream=op.stream,
            length_ns=round(op.work_ns * costs.work(name, op.stream, self.number)),
            issued_ns=now + round((costs.launch_ns + self.jitter(number, 0)) * costs.launches),
            before=rows[-1] if rows else None,
            waits=self.pending.pop(op.stream, []),
            correlation=number,
        )
        if op.what == "collective":
            work.members = self.meetings.setdefault(op.group, [])
            work.members.append(work)
            work.expected = self.ranks
            work.transfer_ns = round(op.work_ns * costs.communication)
            self.matches[op.group] = len(self.device_rows)
        rows.append(work)
        self.device_rows.append(work)
        return work, now + round(self.host(costs.launch_call_ns) * costs.launches)

    def wait(self, op: Op, now: int, number: int) -> None:
        work, source, record = self.events.get(op.event, (None, 0, 0))
        if work is not None and source != op.stream:
            self.pending.setdefault(op.stream, []).append(work)
        if self.sync_rows:
            values = {"wait_stream": source or None, "wait_correlation": record or None}
            kind = "Stream Wait Event"
            self.builder.add(
                SYNC, kind, now, now + 1, device=0, stream=op.stream, correlation=number, sync_kind=kind, **values
            )

    def awaited(self, op: Op) -> list[Work]:
        if op.what == "event_sync":
            work = self.events.get(op.event, (None, 0, 0))[0]
            return [] if work is None else [work]
        chosen = self.streams if op.what == "device_sync" else {op.stream: self.streams.get(op.stream, [])}
        return [rows[-1] for rows in chosen.values() if rows]

    def record_sync(self, op: Op, number: int, now: int) -> None:
        if not self.sync_rows:
            return
        kind = {"stream_sync": "Stream Sync", "device_sync": "Context Sync"}.get(op.what, "Event Sync")
        values: dict[str, int | None] = {"stream": op.stream if op.what == "stream_sync" else None}
        if op.what == "event_sync":
            _, source, record = self.events.get(op.event, (None, 0, 0))
            values |= {"wait_stream": source or None, "wait_correlation": record or None}
        self.builder.add(SYNC, kind, now, now + 1, device=0, correlation=number, sync_kind=kind, **values)

    def timeline(self) -> tuple[Timeline, dict[int, int], int]:
        """With its device work; also the row of each collective and the end of everything."""
        rows, end = [], self.now
        for work in self.device_rows:
            start, stop = work.start(self.costs), work.end(self.costs)
            assert start is not None
            assert stop is not None
            kind = COPY if work.name.startswith("Memcpy") else KERNEL
            rows.append(
                self.builder.add(
                    kind, work.name, start, stop, device=0, stream=work.stream, correlation=work.correlation
                )
            )
            end = max(end, stop)
        timeline = finish(self.builder.build(rank=self.number))
        return timeline, {group: rows[place] for group, place in self.matches.items()}, end


@dataclass(frozen=True)
class Outcome:
    timelines: list[Timeline]
    matches: list[list[tuple[int, int]]]
    length_ns: int
    """From the first start to the last end."""


def run(
    programs: Sequence[Sequence[Op]], costs: Costs | None = None, *, sync_rows: bool = True, records: bool = True
) -> Outcome:
    """Plays one program a rank. `sync_rows`: the profiler writes waits down; `records`: and calls that mark events."""
    used = costs or Costs()
    meetings: dict[int, list[Work]] = {}
    ranks = [
        Rank(number, used, meetings, len(programs), sync_rows=sync_rows, records=records)
        for number in range(len(programs))
    ]
    playing = {rank.number: rank.play(program, 1, 0) for rank, program in zip(ranks, programs, strict=True)}
    for _ in range(100_000):
        for number in list(playing):
            try:
                next(playing[number])
            except StopIteration:
                del playing[number]
        if not playing:
            break
    assert not playing, "the program waits for itself"
    made = [rank.timeline() for rank in ranks]
    groups = sorted(set().union(*(rows for _, rows, _ in made)))
    matches = [[(index, rows[group]) for index, (_, rows, _) in enumerate(made) if group in rows] for group in groups]
    return Outcome([timeline for timeline, _, _ in made], matches, max(end for _, _, end in made))


def random_program(seed: int, *, length: int = 25, streams: int = 3, groups: int = 0, events: bool = True) -> list[Op]:
    """With launches on several streams, events between them, waits of the host, and backward passes."""
    chance = random.Random(seed)
    program: list[Op] = []
    collectives = sorted(chance.sample(range(length), groups)) if groups else []
    for place in range(length):
        if place in collectives:
            program.append(_collective(chance, collectives.index(place)))
        elif chance.random() < 0.12:
            inner = [_random_op(chance, streams, events) for _ in range(chance.randint(1, 5))]
            program.append(Op("backward", host_ns=_us(chance, 1, 30), inner=tuple(inner)))
        else:
            program.append(_random_op(chance, streams, events))
    return [*program, Op("host", host_ns=4 * US)]


def ordinary_program(seed: int, *, blocks: int = 8) -> list[Op]:
    """As programs are written: work on one stream, now and then a part on another with an event before and one after,
    numbers copied back, waits for what was just launched."""
    chance = random.Random(seed)
    program: list[Op] = []
    for block in range(blocks):
        program.extend(_launches(chance, STREAMS[0], 4))
        draw = chance.random()
        if draw < 0.45:
            program.extend(_fork_and_join(chance, STREAMS[chance.choice((1, 2))], 2 * block))
        elif draw < 0.6:
            program.append(Op("copy_back", host_ns=_us(chance, 1, 10), work_ns=_us(chance, 1, 4)))
            program.append(Op("stream_sync", host_ns=4 * US))
        elif draw < 0.7:
            program.append(Op("record", host_ns=4 * US, event=99))
            program.append(Op("event_sync", host_ns=4 * US, event=99))
        elif draw < 0.8:
            program.append(Op("device_sync", host_ns=4 * US))
        else:
            program.append(Op("backward", host_ns=_us(chance, 1, 30), inner=tuple(_launches(chance, STREAMS[0], 6))))
    return [*program, Op("device_sync", host_ns=4 * US), Op("host", host_ns=4 * US)]


def _launches(chance: random.Random, stream: int, most: int) -> list[Op]:
    names = ("kernel_a", "kernel_b", "gemm_c")
    return [
        Op("launch", host_ns=_us(chance, 1, 8), stream=stream, work_ns=_us(chance, 2, 40), name=chance.choice(names))
        for _ in range(chance.randint(1, most))
    ]


def _fork_and_join(chance: random.Random, side: int, event: int) -> list[Op]:
    return [
        Op("record", host_ns=4 * US, stream=STREAMS[0], event=event),
        Op("wait", host_ns=4 * US, stream=side, event=event),
        *_launches(chance, side, 2),
        Op("record", host_ns=4 * US, stream=side, event=event + 1),
        *_launches(chance, STREAMS[0], 4),
        Op("wait", host_ns=4 * US, stream=STREAMS[0], event=event + 1),
        *_launches(chance, STREAMS[0], 1),
    ]


def _collective(chance: random.Random, group: int) -> Op:
    return Op("collective", host_ns=_us(chance, 1, 60), stream=STREAMS[-1], work_ns=_us(chance, 20, 200), group=group)


def _random_op(chance: random.Random, streams: int, events: bool) -> Op:
    stream = STREAMS[chance.randrange(streams)]
    host = _us(chance, 1, 15)
    draw = chance.random()
    if draw < 0.60:
        name = chance.choice(("kernel_a", "kernel_b", "gemm_c"))
        return Op("launch", host_ns=host, stream=stream, work_ns=_us(chance, 2, 80), name=name)
    if draw < 0.66:
        return Op("host", host_ns=_us(chance, 2, 15))
    if draw < 0.70:
        return Op("copy_back", host_ns=host, stream=stream, work_ns=_us(chance, 2, 20))
    if draw < 0.76:
        return Op(chance.choice(("stream_sync", "device_sync")), host_ns=host, stream=stream)
    event = chance.randrange(3)
    if not events:
        return Op("launch", host_ns=host, stream=stream, work_ns=_us(chance, 2, 80))
    what = chance.choices(("record", "wait", "event_sync"), (5, 4, 1))[0]
    return Op(what, host_ns=host, stream=stream, event=event)


def _us(chance: random.Random, low: int, high: int) -> int:
    return 4 * US * chance.randint(low, high)
