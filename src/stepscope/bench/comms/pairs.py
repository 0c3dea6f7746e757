"""Messages between two single ranks of the world: latency by ping-pong, bandwidth by a window of messages.

Measured for every ordered pair these make the matrix in which a bad link shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from stepscope.bench.comms.cases import make_benchmark, require_size
from stepscope.bench.comms.data import DTYPE_BYTES
from stepscope.bench.comms.exchange import Exchange, PlacesTrial, make_seed
from stepscope.bench.comms.operations import CollectiveShape, find_operation
from stepscope.bench.comms.trial import BURST, Facts, Room, count_places
from stepscope.records import Case, Score
from stepscope.records.kinds import POINT_TO_POINT, PairObserved, PairSpec

MODEL = "pair"
SUMMARY = "messages from one rank to another"
LARGEST_LATENCY_BYTES = 1 << 10
"""Up to this size a pair is measured by ping-pong; above it by a window of messages one way."""
WINDOW = 8


def make_pair_cases(
    *, ranks: Iterable[int], sizes: Iterable[int], backend: str, world_size: int, device: str, dtype: str = "float32"
) -> list[Case]:
    """Every ordered pair of these ranks at every size; all pairs at one size before the next.

    A rank's pairs are spread over the whole time: a slow phase of the machine must not look like a slow rank.
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


class PairTrial(PlacesTrial):
    """The case's time is that of one message one way: half a round trip, or a window divided by its messages."""

    def __init__(self, case: Case, room: Room) -> None:
        super().__init__(room)
        assert isinstance(case.spec, PairSpec)
        self._options = spec = case.spec
        self._hosts = room.hosts
        self.synchronises = ping_pong = spec.size_bytes <= LARGEST_LATENCY_BYTES
        self.operations = 2 if ping_pong else WINDOW
        self.burst = BURST if ping_pong and not room.device.has_events else 1
        self.judge = spec.target
        window, pattern = (1, "ping_pong") if ping_pong else (WINDOW, "one_to_one")
        elements = spec.size_bytes // DTYPE_BYTES[spec.dtype]
        pair = (spec.source, spec.target)
        shape = CollectiveShape(room.world.size, elements, pattern=pattern, window=window, pairs=(pair,))
        operation = find_operation(POINT_TO_POINT)
        group = room.group(range(room.world.size))
        make = partial(
            Exchange, operation, shape, group, device=room.device.name, dtype=spec.dtype, seed=make_seed(case, group)
        )
        self._make_places(count_places(spec.size_bytes * window), 1, lambda _, twin: make(twin=twin))

    def open(self) -> None:
        if self.active:
            self._begin([[exchange.bind().run] for (exchange,) in self._places])

    def facts(self) -> Facts:
        (source_host, source_nic), (target_host, target_nic) = (
            self._hosts[rank] for rank in (self._options.source, self._options.target)
        )
        observed = PairObserved(
            size_bytes=self._options.size_bytes,
            count=self._options.size_bytes // DTYPE_BYTES[self._options.dtype],
            bus_factor=1.0,
            members=2,
            source_host=source_host,
            target_host=target_host,
            source_nic=source_nic or None,
            target_nic=target_nic or None,
        )
        return Facts(score=Score(unit="GB/s", work=float(self._options.size_bytes)), observed=observed)
