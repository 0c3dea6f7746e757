"""A collective, or a pattern of messages, on one rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import cycle

from stepscope.comms.data import DTYPE_BYTES
from stepscope.comms.exchange import Exchange
from stepscope.comms.group import Bound, UnsupportedCallError
from stepscope.comms.layouts import parse_layout
from stepscope.comms.options import read_options
from stepscope.comms.trial import BURST, LARGEST_BURST_BYTES, Facts, Room, WaitingDevice, WithoutParts, idle
from stepscope.measure import Device
from stepscope.records import Case, Notice, Scalar, Score
from stepscope.units import format_bytes


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
        self._exchanges = [
            Exchange(
                self.operation,
                self.options.shape(len(self._group.ranks)),
                self._group,
                device=room.device.name,
                dtype=self.options.dtype,
                reduction=self.options.reduction,
                in_place=self.options.is_in_place(self.operation),
                form=self.options.form,
                seed=seed + copy,
                tag=copy,
            )
            for copy in range(self.iterations * self.options.coalesce)
        ]
        self.judge = largest.ranks[self.operation.judge(self.options.shape(self._members))]
        self.active = self._exchanges[0].takes_part
        ping_pong = self.options.pattern == "ping_pong"
        self.operations = 2 if ping_pong else self.options.window
        # Several groups at once are to stay in step with each other too.
        ping_pong_alone = ping_pong and len(self.options.pairs) <= 1
        self.synchronises = ping_pong_alone or (self.operation.synchronises and self._members == room.world.size)
        brief = self.options.mode == "blocking" and self.options.size_bytes <= LARGEST_BURST_BYTES
        self.burst = BURST if brief and self.synchronises else 1
        self._bounds: list[Bound] = []
        self.body: Callable[[], object] = idle

    def needed_bytes(self) -> int:
        return sum(exchange.needed_bytes() for exchange in self._exchanges)

    def open(self) -> None:
        if not self.active:
            return
        together = self.options.coalesce
        for first in range(0, len(self._exchanges), together):
            exchanges = self._exchanges[first : first + together]
            bound = self._group.bind([exchange.open() for exchange in exchanges])
            self._bounds.append(bound)
        if self.options.mode == "nonblocking":
            self.body = self._make_starting_body()
        elif self.options.mode == "graph":
            self.body = self._capture()
        else:
            self.body = self._bounds[0].run

    def _make_starting_body(self) -> Callable[[], object]:
        started, turns = self._waiting.started, cycle([bound.start for bound in self._bounds])

        def start_one() -> None:
            started.extend(next(turns)())

        return start_one

    def _capture(self) -> Callable[[], object]:
        import torch

        if not self._room.device.has_events:
            raise UnsupportedCallError("graphs are captured on a GPU only", hint="--mode blocking", where="--mode")
        self.refresh()
        self._bounds[0].run()  # what a library sets up on its first call cannot be captured
        self._room.device.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on: NCCL's watchdog asks for events while this one captures.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._bounds[0].run()
        except RuntimeError as error:
            raise UnsupportedCallError(f"{self._room.world.backend} cannot be captured: {error}") from error
        replay: Callable[[], object] = graph.replay
        return replay

    def refresh(self) -> None:
        for exchange in self._exchanges:
            exchange.refresh()

    def count_wrong(self) -> int | None:
        counts = [count for exchange in self._exchanges if (count := exchange.count_wrong()) is not None]
        return sum(counts) if counts else None

    def facts(self) -> Facts:
        """By the largest group, where they differ."""
        traffic = self.operation.plan(self.options.shape(self._members))
        size_bytes = traffic.size * DTYPE_BYTES[self.options.dtype] * self.options.coalesce
        factor = traffic.bus / traffic.size if traffic.size else 0.0
        composed = next((bound.composed for bound in self._bounds if bound.composed), None)
        observed: dict[str, Scalar] = {
            "size_bytes": size_bytes,
            "count": traffic.contribution * self.options.coalesce,
            "bus_factor": factor,
            "members": self._members,
            **({"groups": self._groups_at_once} if self.options.groups != "world" else {}),
            **({"composed": composed} if composed else {}),
        }
        score = Score(unit="GB/s", work=size_bytes * factor) if traffic.size else None
        return Facts(score=score, observed=observed, notices=self._find_notices(size_bytes))

    def _find_notices(self, size_bytes: int) -> list[Notice]:
        if not size_bytes or size_bytes == self.options.size_bytes:
            return []
        asked, got = format_bytes(self.options.size_bytes), format_bytes(size_bytes)
        if self.operation.uneven:
            message = f"{asked} were asked for; with uneven pieces the busiest rank moves {got}"
        else:
            pieces = f"{self.options.coalesce} calls and " if self.options.coalesce > 1 else ""
            message = f"{asked} do not divide evenly among {pieces}{self._members} ranks: {got} were measured"
        return [Notice(kind="rounded", message=message)]

    def close(self) -> None:
        for exchange in self._exchanges:
            exchange.close()
        self._bounds, self.body = [], idle
