"""Worlds whose groups spoil what others carry: whoever checks must find it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stepscope.bench.comms.fake_group import Done
from stepscope.bench.comms.group import Bound, Call, Group, ObjectCall, Waitable, World

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
