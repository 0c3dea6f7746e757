"""The fake process group: one process in the place of a whole world, for `--backend fake` and tests."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

from stepscope.bench.comms.data import make_values
from stepscope.bench.comms.group import BindingGroup, Bound, Call, ObjectCall, Waitable
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


class FakeGroup(BindingGroup):
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
