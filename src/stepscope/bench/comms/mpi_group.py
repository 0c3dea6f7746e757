"""MPI through mpi4py behind the adapter: the torch wheels have no MPI of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from stepscope.bench.comms.group import (
    BindingGroup,
    Bound,
    Call,
    Message,
    ObjectCall,
    UnsupportedCollectiveError,
    Waitable,
    after,
    before,
    bind_call,
    bind_together,
)
from stepscope.core.errors import MissingDependencyError, UsageError
from stepscope.core.lazy_torch import torch

if TYPE_CHECKING:
    from stepscope.launch import RankContext

T = TypeVar("T")
_TYPES = {
    "torch.float64": "DOUBLE", "torch.float32": "FLOAT", "torch.int64": "INT64_T", "torch.int32": "INT32_T",
    "torch.int16": "INT16_T", "torch.int8": "INT8_T", "torch.uint8": "UINT8_T", "torch.bool": "C_BOOL",
}  # fmt: skip
_REDUCTIONS = {"sum": "SUM", "avg": "SUM", "min": "MIN", "max": "MAX", "prod": "PROD"}
_BOOL_REDUCTIONS = {"sum": "LOR", "max": "LOR", "min": "LAND", "prod": "LAND"}


class MpiGroups:
    backend = "mpi"

    def __init__(self, context: RankContext) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise MissingDependencyError(
                f"the mpi backend needs mpi4py: {error}", hint="pip install 'stepscope[mpi]'"
            ) from error
        self._mpi: Any = MPI
        self._control: Any = MPI.COMM_WORLD.Dup()
        self._marks: list[Any] = []
        self.rank, self.size = self._control.Get_rank(), self._control.Get_size()
        if (self.rank, self.size) != (context.rank, context.world_size):
            raise UsageError(
                f"mpi4py says rank {self.rank} of {self.size}; the launcher says {context.rank} of "
                f"{context.world_size}",
                hint="start the ranks with the mpirun of the MPI that mpi4py was built for",
                where="--backend",
            )

    def join(self, ranks: Sequence[int], *, fresh: bool = False) -> MpiGroup:
        colour = 0 if self.rank in ranks else self._mpi.UNDEFINED
        key = list(ranks).index(self.rank) if self.rank in ranks else 0
        return MpiGroup(self._mpi, self._control.Split(colour, key), tuple(ranks), self.rank)

    def barrier(self) -> None:
        self._control.Barrier()

    def broadcast_value(self, value: T | None, source: int = 0) -> T:
        received: T = self._control.bcast(value, root=source)
        return received

    def gather_values(self, value: T) -> list[T] | None:
        gathered: list[T] | None = self._control.gather(value, root=0)
        return gathered

    def send_value(self, value: int, to: int) -> None:
        self._control.send(value, dest=to)

    def receive_value(self, source: int) -> int:
        return int(self._control.recv(source=source))

    def set_mark(self, name: str) -> None:
        """MPI has no store: the mark is seen when every rank has set it, which is what marks are for here."""
        self._marks.append(self._control.Ibarrier())

    def has_marks(self, names: list[str]) -> bool:
        return all(mark.Test() for mark in self._marks)

    def renew(self) -> None:
        """Groups are split off anew by those who need them."""

    def describe_library(self) -> dict[str, str]:
        words = self._mpi.Get_library_version().replace("\x00", "").split(",")[0].split()
        digits = [i for i, word in enumerate(words) if any(letter.isdigit() for letter in word)]
        name = " ".join(words[: digits[0]]) if digits else " ".join(words)
        return {"name": name or "MPI", "version": words[digits[0]] if digits else "unknown"}

    def close(self) -> None:
        self._control.Barrier()


class MpiGroup(BindingGroup):
    def __init__(self, mpi: Any, communicator: Any, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(ranks, rank)
        self._mpi, self._comm = mpi, communicator

    def bind(self, calls: Sequence[Call]) -> Bound:
        parts = [self._bind_one(call) for call in calls]
        return parts[0] if len(parts) == 1 else bind_together(parts, "MPI coalesces nothing")

    def _bind_one(self, call: Call) -> Bound:
        if call.input.device.type != "cpu":
            raise UnsupportedCollectiveError("the mpi backend carries host memory only", hint="--device cpu")
        return bind_call(self, call, "the mpi backend")

    def _pair(self, name: str, *arguments: Any, **options: Any) -> Bound:
        """MPI's call of this name, and the one that returns at once: `Allreduce` and `Iallreduce`."""
        going = partial(getattr(self._comm, f"I{name.lower()}"), *arguments, **options)
        return Bound(partial(getattr(self._comm, name), *arguments, **options), lambda: [_Request(going())])

    def _operator(self, call: Call) -> Any:
        names = _BOOL_REDUCTIONS if str(call.output.dtype) == "torch.bool" else _REDUCTIONS
        if str(call.output.dtype) not in _TYPES or call.reduction not in names:
            raise UnsupportedCollectiveError(f"MPI does not reduce {call.output.dtype} by {call.reduction}")
        if call.reduction == "avg" and not call.output.is_floating_point():
            raise UnsupportedCollectiveError(f"averages of {call.output.dtype} are not whole numbers")
        return getattr(self._mpi, names[call.reduction])

    def _averaged(self, call: Call, bound: Bound) -> Bound:
        """MPI has no average: a sum, divided."""
        if call.reduction != "avg":
            return bound
        return after(bound, partial(call.output.div_, len(self.ranks)), "a sum, then divided")

    def _buffer(self, tensor: torch.Tensor) -> list[Any]:
        """Types that MPI lacks travel as bytes."""
        kind = _TYPES.get(str(tensor.dtype))
        if kind is None:
            return [tensor.view(torch.uint8).numpy(), self._mpi.BYTE]
        return [tensor.numpy(), getattr(self._mpi, kind)]

    def _pieces(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[Any]:
        array, kind = self._buffer(tensor)
        width = len(array) // max(1, len(tensor))
        sizes = [count * width for count in counts]
        return [array, sizes, [0, *accumulate(sizes)][:-1], kind]

    def _all_reduce(self, call: Call) -> Bound:
        given = self._mpi.IN_PLACE if _same(call) else self._buffer(call.input)
        bound = self._pair("Allreduce", given, self._buffer(call.output), op=self._operator(call))
        return self._averaged(call, bound)

    def _reduce(self, call: Call) -> Bound:
        at_root = self.me == call.root
        given = self._mpi.IN_PLACE if at_root and _same(call) else self._buffer(call.input)
        into = self._buffer(call.output) if at_root else None
        bound = self._pair("Reduce", given, into, op=self._operator(call), root=call.root)
        return self._averaged(call, bound) if at_root else bound

    def _broadcast(self, call: Call) -> Bound:
        bound = self._pair("Bcast", self._buffer(call.output), root=call.root)
        if self.me != call.root or _same(call):
            return bound
        return before(partial(call.output.copy_, call.input), bound, "a copy, then in place")

    def _all_gather(self, call: Call) -> Bound:
        given = self._mpi.IN_PLACE if _inside(call.input, call.output) else self._buffer(call.input)
        return self._pair("Allgather", given, self._buffer(call.output))

    def _all_gatherv(self, call: Call) -> Bound:
        into = self._pieces(call.output, call.traffic.inputs)
        return self._pair("Allgatherv", self._buffer(call.input), into)

    def _reduce_scatter(self, call: Call) -> Bound:
        if _inside(call.output, call.input):
            raise UnsupportedCollectiveError("MPI leaves in-place results at the front, not in the rank's own piece")
        given, got = self._buffer(call.input), self._buffer(call.output)
        return self._averaged(call, self._pair("Reduce_scatter_block", given, got, op=self._operator(call)))

    def _reduce_scatterv(self, call: Call) -> Bound:
        given, got, counts = self._buffer(call.input), self._buffer(call.output), list(call.traffic.outputs)
        return self._averaged(
            call, self._pair("Reduce_scatter", given, got, recvcounts=counts, op=self._operator(call))
        )

    def _all_to_all(self, call: Call) -> Bound:
        return self._pair("Alltoall", self._buffer(call.input), self._buffer(call.output))

    def _all_to_allv(self, call: Call) -> Bound:
        assert self.me is not None
        sent = self._pieces(call.input, call.traffic.pieces[self.me])
        received = self._pieces(call.output, [row[self.me] for row in call.traffic.pieces])
        return self._pair("Alltoallv", sent, received)

    def _gather(self, call: Call) -> Bound:
        into = self._buffer(call.output) if self.me == call.root else None
        return self._pair("Gather", self._buffer(call.input), into, root=call.root)

    def _scatter(self, call: Call) -> Bound:
        given = self._buffer(call.input) if self.me == call.root else None
        return self._pair("Scatter", given, self._buffer(call.output), root=call.root)

    def _barrier(self, call: Call) -> Bound:
        return self._pair("Barrier")

    def _call(self, message: Message, *, waits: bool) -> Callable[[], Any]:
        name, end = ("send", "dest") if message.sends else ("recv", "source")
        function = getattr(self._comm, name.capitalize() if waits else f"I{name}")
        return partial(function, self._buffer(message.tensor), tag=message.tag, **{end: message.member})

    def _bind_turn(self, message: Message) -> Bound:
        return Bound(self._call(message, waits=True), list)

    def _messages(self, messages: Sequence[Message]) -> Bound:
        starts = [self._call(message, waits=False) for message in messages]

        def start() -> list[Waitable]:
            return [_Request(begin()) for begin in starts]

        def run() -> None:
            self._mpi.Request.Waitall([begin() for begin in starts])

        return Bound(run, start)

    def exchange_objects(self, call: ObjectCall) -> list[Any]:
        """mpi4py pickles too, by its methods with small letters."""
        comm, root, given = self._comm, call.root, call.given[0] if call.given else None
        if call.name == "all_gather_object":
            return list(comm.allgather(given))
        if call.name == "gather_object":
            return list(comm.gather(given, root=root) or ())
        if call.name == "broadcast_object_list":
            return [comm.bcast(given, root=root)]
        return [comm.scatter(call.given or None, root=root)]


class _Request:
    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        self._request.Wait()


def _same(call: Call) -> bool:
    return call.input.data_ptr() == call.output.data_ptr()


def _inside(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, last = other.data_ptr(), other.data_ptr() + other.numel() * other.element_size()
    return one.numel() < other.numel() and first <= one.data_ptr() < last
