"""The one small adapter between the benchmarks and whatever moves the data.

A `World` is all ranks of the run, with what the benchmark itself says to them (never timed). A `Group` is ranks that
act together; it binds calls: what can be prepared is prepared then, and only the operation itself is left to be timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from stepscope.bench.comms.data import Recipe
from stepscope.bench.comms.operations import Operation, Traffic, find_operation
from stepscope.core.errors import StepscopeError
from stepscope.core.lazy_torch import torch
from stepscope.run.control import Control

T = TypeVar("T")


class UnsupportedCollectiveError(StepscopeError):
    """The backend has no such operation, dtype or reduction: a recorded skip."""

    kind = "unsupported"


class Waitable(Protocol):
    def wait(self) -> object: ...


class Call(NamedTuple):
    """One operation on this rank's buffers: flat, contiguous, as long as `traffic` says for this member."""

    operation: Operation
    traffic: Traffic
    input: torch.Tensor
    output: torch.Tensor
    reduction: str = "sum"
    root: int = 0
    form: str = "tensor"
    """`tensor` or `list`, for operations that cut."""
    pattern: str = "ring"
    tag: int = 0
    """Tells outstanding messages between two ranks apart."""
    recipe: Callable[[], Recipe] | None = None
    """What the members put in just now, for a fake process group."""


class ObjectCall(NamedTuple):
    """One exchange of Python objects."""

    name: str
    given: list[Any]
    """One object per receiver where the root scatters, else one; none on members that only receive."""
    root: int
    expected: list[Any]
    """What this member must get; a fake process group delivers it."""


class Bound(NamedTuple):
    """A call ready to be made as often as wanted."""

    run: Callable[[], object]
    """Returns when the result can be read on this rank (or is queued on its device)."""
    start: Callable[[], Sequence[Waitable]]
    """Returns at once; the result is there when all that it returns has been waited for."""
    composed: str | None = None
    """What the operation was composed of, where the backend lacks it."""


class Group(Protocol):
    ranks: tuple[int, ...]
    """Ranks of the world, by member."""
    me: int | None
    """Which member this rank is; None: it is not one."""

    def bind(self, calls: Sequence[Call]) -> Bound:
        """Several calls are made as one, coalesced where the backend can. Raises UnsupportedCallError."""

    def exchange_objects(self, call: ObjectCall) -> list[Any]:
        """What this member gets; empty where that is nothing."""


class World(Control, Protocol):
    """All ranks of the run, with what the benchmark itself tells them (never timed)."""

    backend: str

    def join(self, ranks: Sequence[int], *, fresh: bool = False) -> Group:
        """A group of these ranks; every rank of the world must ask for every group, in the same order.

        `fresh`: with connections that no other group uses, so that two operations at once do not wait for each other.
        """

    def describe_library(self) -> dict[str, str]:
        """What really carries the data, as loaded: name, version, file where known."""


def bind_in_turn(parts: Sequence[Bound], composed: str | None = None, *, refusal: str | None = None) -> Bound:
    """One after the other when waited for; all under way at once when not, or refused with this reason."""

    def run() -> None:
        for part in parts:
            part.run()

    def start() -> list[Waitable]:
        if refusal is not None:
            raise UnsupportedCollectiveError(refusal)
        return [work for part in parts for work in part.start()]

    return Bound(run, start, composed)


def bind_together(parts: Sequence[Bound], note: str) -> Bound:
    """All started before the first is waited for."""
    together = bind_in_turn(parts, f"{len(parts)} started together; {note}")

    def run() -> None:
        for work in together.start():
            work.wait()

    return together._replace(run=run)


def bind_call(group: Any, call: Call, backend: str) -> Bound:
    """By the group's method of the operation's name, else composed of what the operation is made of."""
    name, made_of = call.operation.name, call.operation.made_of
    binder: Callable[[Call], Bound] | None = getattr(group, f"_{name}", None)
    if binder is not None:
        return binder(call)
    if not made_of:
        raise UnsupportedCollectiveError(f"{backend} has no {name}")
    parts = [bind_call(group, call._replace(operation=find_operation(step)), backend) for step in made_of]
    refusal = f"{name} is several steps, each of which waits: it has no non-blocking mode"
    return bind_in_turn(parts, ", then ".join(made_of), refusal=refusal)


class BindingGroup:
    """A group that binds an operation by its method of that name; what all libraries do alike."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        self.ranks = ranks
        self.me = ranks.index(rank) if rank in ranks else None

    def _messages(self, messages: Sequence[Message]) -> Bound:
        """All at once."""
        raise NotImplementedError

    def _bind_turn(self, message: Message) -> Bound:
        """One alone, waited for."""
        return self._messages([message])

    def _send_recv(self, call: Call) -> Bound:
        """In a ping-pong the openers send first, and the others answer."""
        assert self.me is not None
        messages = list_messages(call, self.me)
        if call.pattern != "ping_pong":
            return self._messages(messages)
        turns = sorted(messages, key=lambda message: message.sends != (self.me in call.traffic.openers))
        refusal = "a ping-pong waits for its answer: it has no non-blocking mode"
        return bind_in_turn([self._bind_turn(message) for message in turns], refusal=refusal)

    _incast = _multicast = _send_recv


def before(action: Callable[[], Any], bound: Bound, composed: str | None = None) -> Bound:
    """Do `action` first, each time, as part of the call."""

    def run() -> None:
        action()
        bound.run()

    def start() -> Sequence[Waitable]:
        action()
        return bound.start()

    return Bound(run, start, composed or bound.composed)


def after(bound: Bound, action: Callable[[], object], composed: str) -> Bound:
    """Do `action` last, each time: when what was started has been waited for."""

    def run() -> None:
        bound.run()
        action()

    return Bound(run, lambda: [Then(bound.start(), action)], composed)


class Then(NamedTuple):
    works: Sequence[Waitable]
    action: Callable[[], object]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.action()


class Message(NamedTuple):
    """One tensor from or to one member."""

    sends: bool
    tensor: torch.Tensor
    member: int
    tag: int


def list_messages(call: Call, me: int) -> list[Message]:
    """What this member has to send and to receive in an operation between single members, all at once."""
    name, root, size = call.operation.name, call.root, call.traffic.contribution
    if name in {"incast", "multicast"}:
        sends = (name == "multicast") == (me == root)
        if me != root:
            return [Message(sends, call.input if sends else call.output, root, call.tag)]
        others = [member for member in range(len(call.traffic.inputs)) if member != root]
        pieces = [call.input if sends else _piece(call.output, i, size) for i in range(len(others))]
        return [Message(sends, piece, other, call.tag) for piece, other in zip(pieces, others, strict=True)]
    to, sender = call.traffic.partners[me]
    size = call.traffic.size
    window = max(len(segments) for segments in call.traffic.sources)
    messages = []
    for i in range(window):
        tag = call.tag * window + i
        if sender is not None:
            messages.append(Message(False, _piece(call.output, i, size), sender, tag))
        if to is not None:
            messages.append(Message(True, _piece(call.input, i, size), to, tag))
    return messages


def _piece(tensor: torch.Tensor, number: int, size: int) -> torch.Tensor:
    return tensor[number * size : (number + 1) * size]
