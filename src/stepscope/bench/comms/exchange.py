"""One operation on one group with data of its own: buffers, call, expected result and check; and a case of it.

Collectives, patterns and overlaps are made of exchanges.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from stepscope.bench.comms.cases import is_in_place, make_shape, read_options
from stepscope.bench.comms.data import DTYPE_BYTES, Recipe, count_wrong, make_values, spoil, torch_dtype
from stepscope.bench.comms.group import Bound, Call, Group, UnsupportedCollectiveError
from stepscope.bench.comms.operations import CollectiveShape, Operation
from stepscope.bench.comms.trial import (
    BURST,
    FEWEST_PLACES,
    CallRotation,
    Facts,
    Room,
    Trial,
    TrialPart,
    WaitingDevice,
    count_places,
    count_wrong_of,
)
from stepscope.core.lazy_torch import torch
from stepscope.records import Case, Notice, Score
from stepscope.records.kinds import CollectiveObserved, PointToPointObserved, PointToPointSpec

FURTHER_SEED = 0x10000
"""Added for the second set of data; seeds are below it."""


class DataSet(NamedTuple):
    input: torch.Tensor
    expected: torch.Tensor


class Exchange(TrialPart):
    """On this rank. `make_call` allocates; nothing before it needs memory, nothing after it computes values again."""

    def __init__(
        self,
        operation: Operation,
        shape: CollectiveShape,
        group: Group,
        *,
        device: str,
        dtype: str = "float32",
        reduction: str = "sum",
        in_place: bool | None = None,
        form: str = "tensor",
        seed: int = 0,
        tag: int = 0,
        twin: Exchange | None = None,
    ) -> None:
        """A `twin` has the same data elsewhere in memory, and takes the other set of them than this exchange."""
        if operation.pairs and shape.members < 2:
            raise UnsupportedCollectiveError(
                f"{operation.name} needs two ranks, and the group has {shape.members}", hint="start more ranks"
            )
        if shape.root >= shape.members:
            raise UnsupportedCollectiveError(f"root {shape.root} is not in a group of {shape.members}", where="--root")
        self.operation, self.traffic, self._shape, self._group = operation, operation.plan(shape), shape, group
        me = group.me
        self._inputs, self._outputs = (0, 0) if me is None else (self.traffic.inputs[me], self.traffic.outputs[me])
        self._device, self._dtype, self._form, self._tag = device, dtype, form, tag
        self._in_place = operation.in_place if in_place is None else in_place
        self._reduction = reduction
        moved = reduction if operation.reduces else None
        # Two sets in turn: a result of an earlier iteration is wrong in the next one.
        recipes = [Recipe(dtype, shape.members, moved, seed + turn * FURTHER_SEED) for turn in range(2)]
        self._recipes: list[Recipe] = recipes if twin is None else twin._recipes
        self._twin = twin
        self._turn: int = 0 if twin is None else 1 - twin._turn
        self.call: Call | None = None
        self._sets: list[DataSet] = []

    @property
    def takes_part(self) -> bool:
        """In a collective every member does, with nothing to send or get too; messages leave some members out."""
        if self._group.me is None:
            return False
        return not self.operation.pairs or bool(self._inputs or self._outputs)

    def needed_bytes(self) -> int:
        """Buffers, two sets of data to refill and to compare them with, and float64 while values are made."""
        if not self.takes_part:
            return 0
        buffers = (self._inputs + self._outputs) * DTYPE_BYTES[self._dtype]
        if self._twin is not None:
            return buffers
        kept = 3 * buffers
        return kept + max(self._inputs, self._outputs) * DTYPE_BYTES["float64"] * 2

    def make_call(self) -> Call:
        """Ready to be bound. Only on a rank that takes part."""
        assert self._group.me is not None
        dtype = torch_dtype(self._dtype)
        self._sets = [self._make_set(recipe) for recipe in self._recipes] if self._twin is None else self._twin._sets
        if self._in_place:
            given, got = self._share_memory(dtype)
        else:
            given = self._sets[self._turn].input.clone()
            got = torch.empty(self._outputs, dtype=dtype, device=self._device)
        self.call = Call(
            operation=self.operation,
            traffic=self.traffic,
            input=given,
            output=got,
            reduction=self._reduction,
            root=self._shape.root,
            form=self._form,
            pattern=self._shape.pattern or "ring",
            tag=self._tag,
            recipe=lambda: self._recipes[self._turn],
        )
        return self.call

    def _make_set(self, recipe: Recipe) -> DataSet:
        assert self._group.me is not None
        pieces = [make_values(recipe, *segment, self._device) for segment in self.traffic.sources[self._group.me]]
        nothing = torch.empty(0, dtype=torch_dtype(self._dtype), device=self._device)
        given = make_values(recipe, self._group.me, 0, self._inputs, self._device)
        return DataSet(given, torch.cat(pieces) if pieces else nothing)

    def _share_memory(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and output in place: the smaller one is this member's own piece of the larger."""
        assert self._group.me is not None
        whole = torch.empty(max(self._inputs, self._outputs), dtype=dtype, device=self._device)
        name, own = self.operation.name, min(self._inputs, self._outputs)
        piece = whole[self._group.me * own : (self._group.me + 1) * own]
        if name in {"all_gather", "reduce_scatter"}:
            return (piece, whole) if name == "all_gather" else (whole, piece)
        return whole, whole

    def bind(self) -> Bound:
        """One call alone."""
        return self._group.bind([self.make_call()])

    def refresh(self) -> None:
        """Spoil the result, so that what nobody writes is found, and put other data in than last time."""
        if self.call is None:
            return
        self._turn = 1 - self._turn
        given = self._sets[self._turn].input
        if not (self._in_place and len(given) == len(self.call.output) == len(self.call.input)):
            spoil(self.call.output, self._dtype)
        if len(given):
            self.call.input[: len(given)].copy_(given)

    def count_wrong(self) -> int | None:
        """None: this member gets nothing that could be checked."""
        if self.call is None or not self._outputs:
            return None
        expected, recipe = self._sets[self._turn].expected, self._recipes[self._turn]
        return count_wrong(self.call.output[: self._outputs], expected, recipe)

    def close(self) -> None:
        self.call = None
        self._sets = []


def make_seed(case: Case, group: Group) -> int:
    """Each case and group has data of its own: what changes places is wrong."""
    return zlib.crc32(f"{case.key}/{group.ranks}".encode()) & 0xFFFF


def note_rounding(asked_bytes: int, measured_bytes: int, reason: str) -> list[Notice]:
    """Empty where what was asked for was measured; `reason` has a place for what was measured instead."""
    if not measured_bytes or measured_bytes == asked_bytes:
        return []
    return [Notice(kind="rounded", message=f"{asked_bytes:,} bytes {reason.format(f'{measured_bytes:,}')}")]


class PlacesTrial(Trial):
    """Makes the same calls in several places in memory, in turn."""

    def __init__(self, room: Room) -> None:
        super().__init__(room)
        self._places: list[list[Exchange]] = []
        self._rotation: CallRotation | None = None

    def _make_places(self, count: int, calls: int, make: Callable[[int, Exchange | None], Exchange]) -> None:
        """`make` gets the number of the call in a sample, and the exchange of the place before."""
        self.places = count
        self._places = [[make(call, None) for call in range(calls)]]
        while len(self._places) < count:
            self._places.append([make(call, twin) for call, twin in enumerate(self._places[-1])])
        self.active = self._places[0][0].takes_part

    def parts(self) -> Iterable[TrialPart]:
        return chain.from_iterable(self._places)

    def _begin(self, places: Sequence[Sequence[Callable[[], object]]]) -> None:
        self._rotation = CallRotation(places)
        self.body = self._rotation.body

    def refresh(self) -> None:
        super().refresh()
        if self._rotation is not None:
            self._rotation.restart()

    def count_wrong(self) -> int | None:
        """Only in the places that samples have used."""
        used = self._rotation.used if self._rotation is not None else 0
        return count_wrong_of(chain.from_iterable(self._places[:used]))


class CollectiveTrial(PlacesTrial):
    def __init__(self, case: Case, room: Room) -> None:
        super().__init__(room)
        self.operation, self.options = read_options(case)
        self._chosen = room.choose_groups(self.options.groups, self.options.group)
        ranks = self._chosen.largest.ranks
        self._members = len(ranks)
        self.judge = ranks[self.operation.judge(make_shape(self.options, self._members))]
        self._waiting = WaitingDevice(room.device)
        self._bounds: list[Bound] = []
        if self.options.mode == "nonblocking":
            self.iterations, self.device = self.options.depth, self._waiting
        captured = self.options.mode == "graph"  # each place is a graph of its own
        places = FEWEST_PLACES if captured else count_places(self.options.size_bytes * self.iterations)
        seed = make_seed(case, self._chosen.mine)
        self._make_places(places, self.iterations * self.options.coalesce, partial(self._make_exchange, seed))
        ping_pong = self.options.pattern == "ping_pong"
        self.operations = 2 if ping_pong else self.options.window
        # Several groups at once are to stay in step with each other too.
        ping_pong_alone = ping_pong and len(self.options.pairs) <= 1
        self.synchronises = ping_pong_alone or (self.operation.synchronises and self._members == room.world.size)
        direct = self.options.mode == "blocking" and self.synchronises and not room.device.has_events
        self.burst = BURST if direct else 1

    def _make_exchange(self, seed: int, call: int, twin: Exchange | None) -> Exchange:
        options, group = self.options, self._chosen.mine
        return Exchange(
            self.operation, make_shape(options, len(group.ranks)), group, device=self.room.device.name,
            dtype=options.dtype, reduction=options.reduction, in_place=is_in_place(options, self.operation),
            form=options.form, seed=seed + call, tag=call, twin=twin,
        )  # fmt: skip

    def open(self) -> None:
        if not self.active:
            return
        places = [self._bind(exchanges) for exchanges in self._places]
        self._bounds = [bound for bounds in places for bound in bounds]
        make = {"blocking": lambda bound: bound.run, "nonblocking": self._make_start, "graph": self._capture}
        self._begin([[make[self.options.mode](bound) for bound in bounds] for bounds in places])

    def _bind(self, exchanges: Sequence[Exchange]) -> list[Bound]:
        together = self.options.coalesce
        firsts = range(0, len(exchanges), together)
        calls = [exchange.make_call() for exchange in exchanges]
        return [self._chosen.mine.bind(calls[first : first + together]) for first in firsts]

    def _make_start(self, bound: Bound) -> Callable[[], object]:
        started, start = self._waiting.started, bound.start
        return lambda: started.extend(start())

    def _capture(self, bound: Bound) -> Callable[[], object]:
        if not self.room.device.has_events:
            raise UnsupportedCollectiveError(
                "graphs are captured on a GPU only", hint="--mode blocking", where="--mode"
            )
        self.refresh()
        bound.run()  # what a library sets up on its first call cannot be captured
        self.room.device.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on: NCCL's watchdog asks for events while this one captures.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                bound.run()
        except RuntimeError as error:
            raise UnsupportedCollectiveError(f"{self.room.world.backend} cannot be captured: {error}") from error
        replay: Callable[[], object] = graph.replay
        return replay

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
            groups=self._chosen.at_once,
            composed=composed or None,
        )
        score = Score(unit="GB/s", work=size_bytes * factor) if traffic.size else None
        return Facts(score=score, observed=observed, notices=self._find_notices(size_bytes))

    def _find_notices(self, size_bytes: int) -> list[Notice]:
        if self.operation.uneven:
            reason = "were asked for; with uneven pieces the busiest rank moves {}"
            return note_rounding(self.options.size_bytes, size_bytes, reason)
        pieces = f"{self.options.coalesce} calls and " if self.options.coalesce > 1 else ""
        # The root of an incast sends nothing.
        senders = self._members - 1 if self.operation.name == "incast" else self._members
        reason = f"do not divide evenly among {pieces}{senders} ranks: {{}} were measured"
        return note_rounding(self.options.size_bytes, size_bytes, reason)
