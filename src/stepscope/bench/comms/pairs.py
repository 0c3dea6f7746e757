"""Messages between two single ranks of the world: latency by ping-pong, bandwidth by a window of messages.

Measured for every ordered pair these make the matrix in which a bad link shows.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Callable, Iterable
from functools import partial

from stepscope.bench.comms.cases import make_benchmark, require_size
from stepscope.bench.comms.data import DTYPE_BYTES
from stepscope.bench.comms.exchange import Exchange
from stepscope.bench.comms.operations import Operation, Shape, Traffic, send_messages
from stepscope.bench.comms.trial import BURST, Facts, Room, Rotation, WithoutParts, count_places, idle
from stepscope.measure import Device
from stepscope.records import Case, Score
from stepscope.records.kinds import PairObserved, PairSpec

MODEL = "pair"
SUMMARY = "messages from one rank to another"
LARGEST_LATENCY_BYTES = 1 << 10
"""Up to this size a pair plays ping-pong; above it sends a window of messages one way."""
WINDOW = 8
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def make_pair_cases(
    *, ranks: Iterable[int], sizes: Iterable[int], backend: str, world_size: int, device: str, dtype: str = "float32"
) -> list[Case]:
    """Every ordered pair of these ranks at every size; all pairs at one size before the next.

    A rank's pairs are spread over the whole time: a slow spell of the machine must not look like a slow rank.
    """
    chosen, points = list(ranks), list(sizes)
    for size in points:
        require_size(size, dtype)
    benchmark = make_benchmark(MODEL, backend, world_size, SUMMARY)
    return [
        Case(
            benchmark=benchmark,
            spec=PairSpec(source=source, target=target, size_bytes=size, dtype=dtype, device=device),
            world_size=world_size,
        )
        for size in points
        for distance in range(1, len(chosen))
        for source, target in zip(chosen, [*chosen[distance:], *chosen[:distance]], strict=True)
    ]


def plan_pair(source: int, target: int, shape: Shape) -> Traffic:
    """Of the whole world: everybody but the two is idle."""
    there_and_back = shape.pattern == "ping_pong"
    partners: list[tuple[int | None, int | None]] = [(None, None)] * shape.members
    partners[source] = (target, target if there_and_back else None)
    partners[target] = (source if there_and_back else None, source)
    return send_messages(partners, shape)


class PairTrial(WithoutParts):
    """The case's time is that of one message one way: half a round trip, or a window divided by its messages."""

    iterations = 1

    def __init__(self, case: Case, room: Room) -> None:
        self._room = room
        assert isinstance(case.spec, PairSpec)
        self._options = case.spec
        self._hosts = room.ask_everybody("hosts", socket.gethostname)
        self._interfaces = room.ask_everybody("interfaces", find_interface)
        ping_pong = self._options.size_bytes <= LARGEST_LATENCY_BYTES
        self.operations = 2 if ping_pong else WINDOW
        self.synchronises = ping_pong
        self.burst = BURST if ping_pong and not room.device.has_events else 1
        self.places = count_places(self._options.size_bytes * (1 if ping_pong else WINDOW))
        shape = Shape(
            room.world.size,
            self._options.size_bytes // DTYPE_BYTES[self._options.dtype],
            self._options.source,
            pattern="ping_pong" if ping_pong else "one_to_one",
            window=1 if ping_pong else WINDOW,
        )
        operation = Operation(
            "send_recv", SUMMARY, partial(plan_pair, self._options.source, self._options.target), pairs=True
        )
        group = room.group(range(room.world.size))
        seed = zlib.crc32(case.key.encode()) & 0xFFFF
        make = partial(Exchange, operation, shape, group, device=room.device.name, dtype=self._options.dtype, seed=seed)
        self._exchanges: list[Exchange] = [make()]
        while len(self._exchanges) < self.places:
            self._exchanges.append(make(twin=self._exchanges[-1]))
        self.judge = self._options.target
        self._rotation: Rotation | None = None
        self.active = self._exchanges[0].takes_part
        self.device: Device = room.device
        self.body: Callable[[], object] = idle

    def needed_bytes(self) -> int:
        return sum(exchange.needed_bytes() for exchange in self._exchanges)

    def open(self) -> None:
        if self.active:
            self._rotation = Rotation([[exchange.bind().run] for exchange in self._exchanges])
            self.body = self._rotation.body

    def refresh(self) -> None:
        for exchange in self._exchanges:
            exchange.refresh()
        if self._rotation is not None:
            self._rotation.restart()

    def count_wrong(self) -> int | None:
        used = self._exchanges[: self._rotation.used] if self._rotation is not None else []
        counts = [count for exchange in used if (count := exchange.count_wrong()) is not None]
        return sum(counts) if counts else None

    def facts(self) -> Facts:
        source, target = self._options.source, self._options.target
        observed = PairObserved(
            size_bytes=self._options.size_bytes,
            count=self._options.size_bytes // DTYPE_BYTES[self._options.dtype],
            bus_factor=1.0,
            members=2,
            source_host=self._hosts[source],
            target_host=self._hosts[target],
            source_nic=self._interfaces[source] or None,
            target_nic=self._interfaces[target] or None,
        )
        return Facts(score=Score(unit="GB/s", work=float(self._options.size_bytes)), observed=observed)

    def close(self) -> None:
        for exchange in self._exchanges:
            exchange.close()
        self.body = idle


def find_interface() -> str:
    """What the environment names; empty where the library chooses."""
    return next((os.environ[name] for name in INTERFACES if os.environ.get(name)), "")
