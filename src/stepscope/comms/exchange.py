"""One operation on one group with data of its own: buffers, call, expected result and check.

Collectives, patterns and overlaps are made of these.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from stepscope.comms.data import DTYPE_BYTES, Recipe, count_wrong, make_values, spoil, torch_dtype
from stepscope.comms.group import Bound, Call, Group, UnsupportedCallError
from stepscope.comms.operations import Operation, Shape

if TYPE_CHECKING:
    import torch


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
    ) -> None:
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
        self._recipe = Recipe(dtype, shape.members, reduction if operation.reduces else None, seed)
        self.call: Call | None = None
        self._expected: torch.Tensor | None = None
        self._pristine: torch.Tensor | None = None

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
        """Inputs twice (one to refill from), outputs twice (one expected), and float64 while values are made."""
        if not self.takes_part:
            return 0
        kept = (self._inputs + self._outputs) * 2 * DTYPE_BYTES[self._dtype]
        return kept + max(self._inputs, self._outputs) * DTYPE_BYTES["float64"] * 2

    def open(self) -> Call:
        """The call, ready to be bound. Only on a rank that takes part."""
        import torch

        assert self._group.me is not None
        dtype = torch_dtype(self._dtype)
        segments = self.traffic.sources[self._group.me]
        pieces = [make_values(self._recipe, *segment, self._device) for segment in segments]
        self._expected = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype, device=self._device)
        values = make_values(self._recipe, self._group.me, 0, self._inputs, self._device)
        if self._in_place:
            given, got = self._share_memory(dtype)
            self._pristine = values
        else:
            given, got = values, torch.empty(self._outputs, dtype=dtype, device=self._device)
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
            recipe=self._recipe,
        )
        return self.call

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

    def keep_input(self, bound: Bound) -> None:
        """After binding: a composed call may use its input as scratch, which is then refilled too."""
        if bound.spoils_input and self._pristine is None and self.call is not None:
            self._pristine = self.call.input.clone()

    def bind(self) -> Bound:
        """Open and bind alone."""
        bound = self._group.bind([self.open()])
        self.keep_input(bound)
        return bound

    def refresh(self) -> None:
        """Spoil the result, so that what nobody writes is found, and put fresh data in."""
        if self.call is None:
            return
        spoil(self.call.output, self._dtype)
        if self._pristine is not None and len(self._pristine):
            self.call.input[: len(self._pristine)].copy_(self._pristine)

    def count_wrong(self) -> int | None:
        """None: this member gets nothing that could be checked."""
        if self.call is None or self._expected is None or not self._outputs:
            return None
        return count_wrong(self.call.output[: self._outputs], self._expected, self._recipe)

    def close(self) -> None:
        self.call = self._expected = self._pristine = None
