"""Fake process groups: one process in the place of a whole world, and a group that spoils what others carry.

Shipped for dry runs (`--backend fake`) and tests.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from stepscope.bench.comms.data import make_values
from stepscope.bench.comms.group import Bound, Call, Group, ObjectCall, Waitable, World
from stepscope.run.control import Alone

T = TypeVar("T")


class Done:
    def wait(self) -> None:
        return


class FakeWorld(Alone):
    """One rank of a world whose other ranks put in what the case's recipe says. Moves nothing, takes no time."""

    backend = "fake"

    def __init__(self, size: int = 2, rank: int = 0) -> None:
        self.rank, self.size = rank, size

    def join(self, ranks: Sequence[int], *, fresh: bool = False) -> FakeGroup:
        return FakeGroup(tuple(ranks), self.rank)

    def describe_library(self) -> dict[str, str]:
        return {"name": "fake", "version": "moves nothing: times are those of Python"}


class FakeGroup:
    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        self.ranks = ranks
        self.me = ranks.index(rank) if rank in ranks else None

    def bind(self, calls: Sequence[Call]) -> Bound:
        def run() -> None:
            for call in calls:
                self._play(call)

        def start() -> list[Waitable]:
            run()
            return [Done()]

        return Bound(run, start)

    def _play(self, call: Call) -> None:
        """Everything but what the operation leaves undefined."""
        assert self.me is not None
        assert call.recipe is not None
        recipe, device, place = call.recipe(), str(call.output.device), 0
        for segment in call.traffic.sources[self.me]:
            call.output[place : place + segment.elements] = make_values(recipe, *segment, device)
            place += segment.elements

    def exchange_objects(self, call: ObjectCall) -> list[Any]:
        return list(pickle.loads(pickle.dumps(call.expected)))


Harm = Callable[[Any, int], None]
"""(result, number of the call): changes what the library delivered, a tensor or a list of objects."""


def flip_element(place: int = 0, *, only_call: int | None = None) -> Harm:
    """Changes one element of every result, or of one call's only."""

    def harm(result: Any, number: int) -> None:
        if isinstance(result, list):
            result[:1] = [None] if result else []
        elif result.numel() and only_call in {None, number}:
            at = place % result.numel()
            result[at] = result[at] == 0

    return harm


class SpoiledWorld:
    """Passes everything through, and harms the results: whoever checks must find it."""

    def __init__(self, world: World, harm: Harm) -> None:
        self._world, self._harm = world, harm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def join(self, ranks: Sequence[int], *, fresh: bool = False) -> SpoiledGroup:
        return SpoiledGroup(self._world.join(ranks, fresh=fresh), self._harm)


class SpoiledGroup:
    def __init__(self, group: Group, harm: Harm) -> None:
        self._group, self._harm = group, harm
        self.ranks, self.me = group.ranks, group.me
        self._calls = 0

    def bind(self, calls: Sequence[Call]) -> Bound:
        bound = self._group.bind(calls)

        def harm() -> None:
            self._harm(calls[0].output, self._calls)
            self._calls += 1

        def run() -> None:
            bound.run()
            harm()

        def start() -> list[Waitable]:
            for work in bound.start():
                work.wait()
            harm()
            return [Done()]

        return bound._replace(run=run, start=start)

    def exchange_objects(self, call: ObjectCall) -> list[Any]:
        received = self._group.exchange_objects(call)
        self._harm(received, self._calls)
        self._calls += 1
        return received
