"""torch.distributed behind the adapter: gloo, nccl, ucc, xccl, as torch was built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from stepscope.bench.comms.group import (
    BindingGroup,
    Bound,
    Call,
    Message,
    ObjectCall,
    Waitable,
    after,
    before,
    bind_call,
    bind_in_turn,
    bind_together,
)
from stepscope.core.lazy_torch import torch
from stepscope.run.control import TorchControl
from stepscope.system.collect import describe_torch_library

T = TypeVar("T")
_REDUCE_OPS = {"sum": "SUM", "avg": "AVG", "min": "MIN", "max": "MAX", "prod": "PRODUCT"}
UNEVEN_LISTS = ("nccl",)
"""Backends whose list forms take pieces of different lengths."""


class TorchWorld(TorchControl):
    def join(self, ranks: Sequence[int], *, fresh: bool = False) -> TorchGroup:
        everybody = list(ranks) == list(range(self.size)) and not fresh
        handle = self._dist.group.WORLD if everybody else self._dist.new_group(list(ranks), timeout=self.timeout)
        return TorchGroup(self._dist, handle, tuple(ranks), self.rank, self.backend)

    def describe_library(self) -> dict[str, str]:
        return describe_torch_library(self.backend)


class TorchGroup(BindingGroup):
    def __init__(self, dist: Any, handle: Any, ranks: tuple[int, ...], rank: int, backend: str) -> None:
        super().__init__(ranks, rank)
        self._dist, self._handle, self._backend = dist, handle, backend

    def bind(self, calls: Sequence[Call]) -> Bound:
        parts = [bind_call(self, call, "torch.distributed") for call in calls]
        return parts[0] if len(parts) == 1 else self._coalesce(calls, parts)

    def _coalesce(self, calls: Sequence[Call], parts: Sequence[Bound]) -> Bound:
        """As one launch where torch knows how, else started together."""
        name = calls[0].operation.name
        manager = getattr(self._dist, "_coalescing_manager", None)
        if manager is None or name not in {"all_reduce", "all_gather", "reduce_scatter"} or calls[0].form == "list":
            return bind_together(parts, "nothing coalesces them here")

        def run() -> None:
            with manager(group=self._handle):
                for part in parts:
                    part.run()

        def start() -> list[Waitable]:
            with manager(group=self._handle, async_ops=True) as works:
                for part in parts:
                    part.run()
            return [works]

        return Bound(run, start, parts[0].composed)

    def _collective(self, function: Callable[..., Any], *arguments: object, **options: object) -> Bound:
        options["group"] = self._handle
        waiting = partial(function, *arguments, **options)
        going = partial(function, *arguments, async_op=True, **options)
        return Bound(waiting, lambda: [going()])

    def _reduce_op(self, call: Call) -> Any:
        return getattr(self._dist.ReduceOp, _REDUCE_OPS[call.reduction])

    def _into_output(self, call: Call, bound: Bound, *, when: bool = True) -> Bound:
        """torch reduces and broadcasts in place only: out of place is a copy first."""
        if not when or call.input.data_ptr() == call.output.data_ptr():
            return bound
        return before(partial(call.output.copy_, call.input), bound, "a copy, then in place")

    def _all_reduce(self, call: Call) -> Bound:
        return self._into_output(call, self._collective(self._dist.all_reduce, call.output, op=self._reduce_op(call)))

    def _reduce(self, call: Call) -> Bound:
        target = call.output if self.me == call.root else call.input
        options = {"dst": self.ranks[call.root], "op": self._reduce_op(call)}
        bound = self._collective(self._dist.reduce, target, **options)
        return self._into_output(call, bound, when=self.me == call.root)

    def _broadcast(self, call: Call) -> Bound:
        bound = self._collective(self._dist.broadcast, call.output, src=self.ranks[call.root])
        return self._into_output(call, bound, when=self.me == call.root)

    def _all_gather(self, call: Call) -> Bound:
        if call.form == "list":
            pieces = _cut(call.output, call.traffic.inputs)
            return self._collective(self._dist.all_gather, pieces, call.input)
        return self._collective(self._dist.all_gather_into_tensor, call.output, call.input)

    def _all_gatherv(self, call: Call) -> Bound:
        pieces = _cut(call.output, call.traffic.inputs)
        if self._backend in UNEVEN_LISTS:
            return self._collective(self._dist.all_gather, pieces, call.input)
        assert self.me is not None
        parts = [
            self._collective(self._dist.broadcast, piece, src=self.ranks[member])
            for member, piece in enumerate(pieces)
            if len(piece)
        ]
        return before(partial(pieces[self.me].copy_, call.input), bind_in_turn(parts), f"{len(parts)} broadcasts")

    def _reduce_scatter(self, call: Call) -> Bound:
        if call.form == "list":
            pieces = _cut(call.input, call.traffic.outputs)
            return self._collective(self._dist.reduce_scatter, call.output, pieces, op=self._reduce_op(call))
        return self._collective(self._dist.reduce_scatter_tensor, call.output, call.input, op=self._reduce_op(call))

    def _reduce_scatterv(self, call: Call) -> Bound:
        pieces = _cut(call.input, call.traffic.outputs)
        if self._backend in UNEVEN_LISTS:
            return self._collective(self._dist.reduce_scatter, call.output, pieces, op=self._reduce_op(call))
        assert self.me is not None
        mine = pieces[self.me]
        parts = [
            self._collective(self._dist.reduce, piece, dst=self.ranks[member], op=self._reduce_op(call))
            for member, piece in enumerate(pieces)
            if len(piece)
        ]
        return after(bind_in_turn(parts), partial(call.output.copy_, mine), f"{len(parts)} reduces")

    def _all_to_all(self, call: Call) -> Bound:
        assert self.me is not None
        sent, received = call.traffic.pieces[self.me], [row[self.me] for row in call.traffic.pieces]
        if call.form == "list" and (not call.operation.uneven or self._backend in UNEVEN_LISTS):
            return self._collective(self._dist.all_to_all, _cut(call.output, received), _cut(call.input, sent))
        if call.operation.uneven:
            bound = self._collective(self._dist.all_to_all_single, call.output, call.input, received, list(sent))
            return bound._replace(composed="the tensor form") if call.form == "list" else bound
        return self._collective(self._dist.all_to_all_single, call.output, call.input)

    _all_to_allv = _all_to_all

    def _gather(self, call: Call) -> Bound:
        pieces = _cut(call.output, call.traffic.inputs) if self.me == call.root else None
        return self._collective(self._dist.gather, call.input, pieces, dst=self.ranks[call.root])

    def _scatter(self, call: Call) -> Bound:
        pieces = _cut(call.input, call.traffic.outputs) if self.me == call.root else None
        return self._collective(self._dist.scatter, call.output, pieces, src=self.ranks[call.root])

    def _barrier(self, call: Call) -> Bound:
        return self._collective(self._dist.barrier)

    def _messages(self, messages: Sequence[Message]) -> Bound:
        if not messages:
            return Bound(list, list)
        dist, handle = self._dist, self._handle
        operations = [
            dist.P2POp(dist.isend if sends else dist.irecv, tensor, self.ranks[member], handle, tag)
            for sends, tensor, member, tag in messages
        ]
        batch = partial(dist.batch_isend_irecv, operations)

        def run() -> None:
            for work in batch():
                work.wait()

        return Bound(run, batch)

    def exchange_objects(self, call: ObjectCall) -> list[Any]:
        root, dist, group, is_root = self.ranks[call.root], self._dist, self._handle, self.me == call.root
        everybody: list[Any] = [None] * len(self.ranks)
        if call.name == "all_gather_object":
            dist.all_gather_object(everybody, call.given[0], group=group)
            return everybody
        if call.name == "gather_object":
            dist.gather_object(call.given[0], everybody if is_root else None, dst=root, group=group)
            return everybody if is_root else []
        received = list(call.given) if is_root and call.name == "broadcast_object_list" else [None]
        if call.name == "broadcast_object_list":
            dist.broadcast_object_list(received, src=root, group=group)
        else:
            dist.scatter_object_list(received, list(call.given) if is_root else None, src=root, group=group)
        return received


def _cut(tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    starts = [0, *accumulate(counts)]
    return [tensor[start:stop] for start, stop in pairwise(starts)]
