"""A collective, or a pattern of messages, on one rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from stepscope.bench.comms.data import DTYPE_BYTES
from stepscope.bench.comms.exchange import Exchange
from stepscope.bench.comms.group import Bound, UnsupportedCallError
from stepscope.bench.comms.layouts import parse_layout
from stepscope.bench.comms.options import is_in_place, make_shape, read_options
from stepscope.bench.comms.trial import (
    BURST,
    FEWEST_PLACES,
    Facts,
    Room,
    Rotation,
    WaitingDevice,
    WithoutParts,
    count_places,
    idle,
)
from stepscope.measure import Device
from stepscope.records import Case, Notice, Score
from stepscope.records.kinds import WORLD, CollectiveObserved, PointToPointObserved, PointToPointSpec


class CollectiveTrial(WithoutParts):
    def __init__(self, case: Case, room: Room) -> None:
        self._room = room
        self.operation, self.options = read_options(case)
        groups = [room.group(ranks) for ranks in parse_layout(self.options.groups, room.world.size)]
        chosen = groups if self.options.group is None else [groups[self.options.group]]
        self._groups_at_once = len(chosen)
        largest = max(chosen, key=lambda group: len(group.ranks))
        self._members = len(largest.ranks)
        self.iterations = self.options.depth if self.options.mode == "nonblocking" else 1
        self._waiting = WaitingDevice(room.device)
        self.device: Device = self._waiting if self.options.mode == "nonblocking" else room.device
        self._group = next((group for group in chosen if group.me is not None), largest)
        # Each group has data of its own, and so has each outstanding call: what changes places is wrong.
        seed = zlib.crc32(f"{case.key}/{self._group.ranks}".encode()) & 0xFFFF
        copies = range(self.iterations * self.options.coalesce)
        self._exchanges = [self._make_exchange(seed, copy) for copy in copies]
        self.judge = largest.ranks[self.operation.judge(make_shape(self.options, self._members))]
        self.active = self._exchanges[0].takes_part
        ping_pong = self.options.pattern == "ping_pong"
        self.operations = 2 if ping_pong else self.options.window
        # Several groups at once are to stay in step with each other too.
        ping_pong_alone = ping_pong and len(self.options.pairs) <= 1
        self.synchronises = ping_pong_alone or (self.operation.synchronises and self._members == room.world.size)
        direct = self.options.mode == "blocking" and self.synchronises and not room.device.has_events
        self.burst = BURST if direct else 1
        captured = self.options.mode == "graph"  # each place is a graph of its own
        self.places = FEWEST_PLACES if captured else count_places(self.options.size_bytes * self.iterations)
        self._places = [self._exchanges]
        while len(self._places) < self.places:
            twins = [self._make_exchange(seed, copy, twin) for copy, twin in enumerate(self._places[-1])]
            self._places.append(twins)
        self._rotation: Rotation | None = None
        self._bounds: list[Bound] = []
        self.body: Callable[[], object] = idle

    def _make_exchange(self, seed: int, copy: int, twin: Exchange | None = None) -> Exchange:
        return Exchange(
            self.operation,
            make_shape(self.options, len(self._group.ranks)),
            self._group,
            device=self._room.device.name,
            dtype=self.options.dtype,
            reduction=self.options.reduction,
            in_place=is_in_place(self.options, self.operation),
            form=self.options.form,
            seed=seed + copy,
            tag=copy,
            twin=twin,
        )

    def needed_bytes(self) -> int:
        return sum(exchange.needed_bytes() for place in self._places for exchange in place)

    def open(self) -> None:
        if not self.active:
            return
        places = [self._bind(exchanges) for exchanges in self._places]
        self._bounds = [bound for bounds in places for bound in bounds]
        make = {"blocking": lambda bound: bound.run, "nonblocking": self._make_start, "graph": self._capture}
        self._rotation = Rotation([[make[self.options.mode](bound) for bound in bounds] for bounds in places])
        self.body = self._rotation.body

    def _bind(self, exchanges: Sequence[Exchange]) -> list[Bound]:
        together = self.options.coalesce
        firsts = range(0, len(exchanges), together)
        return [self._group.bind([one.open() for one in exchanges[first : first + together]]) for first in firsts]

    def _make_start(self, bound: Bound) -> Callable[[], object]:
        started, start = self._waiting.started, bound.start
        return lambda: started.extend(start())

    def _capture(self, bound: Bound) -> Callable[[], object]:
        import torch

        if not self._room.device.has_events:
            raise UnsupportedCallError("graphs are captured on a GPU only", hint="--mode blocking", where="--mode")
        self.refresh()
        bound.run()  # what a library sets up on its first call cannot be captured
        self._room.device.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on: NCCL's watchdog asks for events while this one captures.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                bound.run()
        except RuntimeError as error:
            raise UnsupportedCallError(f"{self._room.world.backend} cannot be captured: {error}") from error
        replay: Callable[[], object] = graph.replay
        return replay

    def refresh(self) -> None:
        for place in self._places:
            for exchange in place:
                exchange.refresh()
        if self._rotation is not None:
            self._rotation.restart()

    def count_wrong(self) -> int | None:
        used = self._rotation.used if self._rotation is not None else 0
        exchanges = [exchange for place in self._places[:used] for exchange in place]
        counts = [count for exchange in exchanges if (count := exchange.count_wrong()) is not None]
        return sum(counts) if counts else None

    def facts(self) -> Facts:
        """By the largest group, where they differ."""
        traffic = self.operation.plan(make_shape(self.options, self._members))
        size_bytes = traffic.size * DTYPE_BYTES[self.options.dtype] * self.options.coalesce
        factor = traffic.bus / traffic.size if traffic.size else 0.0
        composed = next((bound.composed for bound in self._bounds if bound.composed), None)
        kind = PointToPointObserved if isinstance(self.options, PointToPointSpec) else CollectiveObserved
        observed = kind(
            size_bytes=size_bytes,
            count=traffic.contribution * self.options.coalesce,
            bus_factor=factor,
            members=self._members,
            groups=self._groups_at_once if self.options.groups != WORLD else None,
            composed=composed or None,
        )
        score = Score(unit="GB/s", work=size_bytes * factor) if traffic.size else None
        return Facts(score=score, observed=observed, notices=self._find_notices(size_bytes))

    def _find_notices(self, size_bytes: int) -> list[Notice]:
        if not size_bytes or size_bytes == self.options.size_bytes:
            return []
        asked, got = f"{self.options.size_bytes:,} bytes", f"{size_bytes:,}"
        if self.operation.uneven:
            message = f"{asked} were asked for; with uneven pieces the busiest rank moves {got}"
        else:
            pieces = f"{self.options.coalesce} calls and " if self.options.coalesce > 1 else ""
            # The root of an incast sends nothing.
            senders = self._members - 1 if self.operation.name == "incast" else self._members
            message = f"{asked} do not divide evenly among {pieces}{senders} ranks: {got} were measured"
        return [Notice(kind="rounded", message=message)]

    def close(self) -> None:
        for place in self._places:
            for exchange in place:
                exchange.close()
        self._bounds, self.body = [], idle
