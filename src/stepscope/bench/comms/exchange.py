"""One operation on one group with data of its own: buffers, call, expected result and check.

Collectives, patterns and overlaps are made of these.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from stepscope.bench.comms.data import DTYPE_BYTES, Recipe, count_wrong, make_values, spoil, torch_dtype
from stepscope.bench.comms.group import Bound, Call, Group, UnsupportedCallError
from stepscope.bench.comms.operations import Operation, Shape

if TYPE_CHECKING:
    import torch


FURTHER_SEED = 0x10000
"""Added for the second set of data; seeds are below it."""


class DataSet(NamedTuple):
    input: torch.Tensor
    expected: torch.Tensor


class Exchange:
    """On this rank. `open` allocates; nothing before it needs memory, nothing after it computes values again."""

    def __init__(
        self,
        operation: Operation,
        shape: Shape,
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
            raise UnsupportedCallError(
                f"{operation.name} needs two ranks, and the group has {shape.members}", hint="start more ranks"
            )
        if shape.root >= shape.members:
            raise UnsupportedCallError(f"root {shape.root} is not in a group of {shape.members}", where="--root")
        self.operation, self.traffic, self._shape, self._group = operation, operation.plan(shape), shape, group
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
    def _inputs(self) -> int:
        return self.traffic.inputs[self._group.me] if self._group.me is not None else 0

    @property
    def _outputs(self) -> int:
        return self.traffic.outputs[self._group.me] if self._group.me is not None else 0

    @property
    def takes_part(self) -> bool:
        """In a collective every member does, with nothing to send or get too; messages leave some members out."""
        if self._group.me is None:
            return False
        return not self.operation.pairs or bool(self._inputs or self._outputs)

    @property
    def size_bytes(self) -> int:
        """What the table's size counts, as it is, not as it was asked for."""
        return self.traffic.size * DTYPE_BYTES[self._dtype]

    @property
    def bus_bytes(self) -> float:
        return self.traffic.bus * DTYPE_BYTES[self._dtype]

    def needed_bytes(self) -> int:
        """Buffers, two sets of data to refill and to compare them with, and float64 while values are made."""
        if not self.takes_part:
            return 0
        buffers = (self._inputs + self._outputs) * DTYPE_BYTES[self._dtype]
        if self._twin is not None:
            return buffers
        kept = 3 * buffers
        return kept + max(self._inputs, self._outputs) * DTYPE_BYTES["float64"] * 2

    def open(self) -> Call:
        """The call, ready to be bound. Only on a rank that takes part."""
        import torch

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
        import torch

        assert self._group.me is not None
        pieces = [make_values(recipe, *segment, self._device) for segment in self.traffic.sources[self._group.me]]
        nothing = torch.empty(0, dtype=torch_dtype(self._dtype), device=self._device)
        given = make_values(recipe, self._group.me, 0, self._inputs, self._device)
        return DataSet(given, torch.cat(pieces) if pieces else nothing)

    def _share_memory(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and output in place: the smaller one is this member's own piece of the larger."""
        import torch

        assert self._group.me is not None
        whole = torch.empty(max(self._inputs, self._outputs), dtype=dtype, device=self._device)
        if self.operation.name == "all_gather":
            first = [0, *accumulate(self.traffic.inputs)][self._group.me]
            return whole[first : first + self._inputs], whole
        if self.operation.name == "reduce_scatter":
            first = [0, *accumulate(self.traffic.outputs)][self._group.me]
            return whole, whole[first : first + self._outputs]
        return whole, whole

    def bind(self) -> Bound:
        """Open and bind alone."""
        return self._group.bind([self.open()])

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
