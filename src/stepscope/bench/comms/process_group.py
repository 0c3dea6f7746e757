"""How long ranks take to become a process group: rendezvous, creation, the first collective, and the end.

Every sample forms the default group of torch.distributed anew, as a job does when it starts. What the ranks tell each
other meanwhile goes through the store in which they met, so that no other group exists beside the measured one.
"""

from __future__ import annotations

import pickle
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from stepscope.bench.comms.cases import make_benchmark
from stepscope.bench.comms.exchange import Exchange
from stepscope.bench.comms.fake_group import FakeWorld
from stepscope.bench.comms.group import Group, UnsupportedCollectiveError
from stepscope.bench.comms.operations import CollectiveShape, find_operation
from stepscope.bench.comms.torch_group import TorchGroup
from stepscope.bench.comms.trial import Facts, Room, Trial
from stepscope.core.lazy_torch import torch
from stepscope.launch.join import open_store, require_backend
from stepscope.launch.worker import BACKSTOP_S, Session
from stepscope.records import Case
from stepscope.records.kinds import LATER_PHASES, SETUP_PHASES, ProcessGroupObserved, ProcessGroupSpec
from stepscope.run.control import GROUP_EXTRA_S
from stepscope.system.collect import describe_torch_library

T = TypeVar("T")
MODEL = "process_group"
SUMMARY = "ranks become a process group, communicate once, and leave it"
ELEMENTS = 1024
"""Float32 values of the two collectives: what they take is connecting and latency."""
LAZY_BACKENDS = ("nccl", "xccl")
"""Backends that connect in the first collective, unless the group is created with `device_id`."""


def make_process_group_cases(*, backend: str, world_size: int, device: str) -> list[Case]:
    """As torch does it unless told otherwise, and connected eagerly where the backend knows both."""
    benchmark = make_benchmark(MODEL, backend, world_size, SUMMARY)
    ways = (False, True) if backend in LAZY_BACKENDS else (False,)
    specs = [ProcessGroupSpec(device=device, eager=eager) for eager in ways]
    return [Case(benchmark=benchmark, spec=spec, world_size=world_size) for spec in specs]


class FakeForming(FakeWorld):
    """Nobody to meet: takes no time."""

    def prepare(self) -> None:
        return

    rendezvous = destroy = prepare

    def create(self, device_id: Any | None) -> Group:
        return self.join(range(self.size))


class TorchForming:
    """Ranks without a group, which can form one as often as wanted: torch.distributed, with a store of its own for
    every group."""

    def __init__(self, session: Session, backend: str) -> None:
        import torch.distributed as dist

        require_backend(backend)
        self._dist: Any = dist
        self._context, limit_s = session.context, session.hang_limit_s
        self.rank, self.size, self.backend = self._context.rank, self._context.world_size, backend
        self._timeout = timedelta(seconds=limit_s + GROUP_EXTRA_S)
        join_limit_s = limit_s + BACKSTOP_S if self._context.launcher == "self" else limit_s
        self._messages = open_store(self._context, join_limit_s, lambda: session.heartbeat.beat("joining"))
        self._messages.set_timeout(self._timeout)
        self._round = self._turn = 0
        self._port, self._listener = 0, -1
        self._store: Any = None

    def _next_key(self) -> str:
        self._turn += 1
        return f"{self._round}/{self._turn}"

    def barrier(self) -> None:
        key = self._next_key()
        if self._messages.add(key, 1) == self.size:
            self._messages.set(f"{key}/all", "1")
        self._messages.get(f"{key}/all")

    def broadcast_value(self, value: T | None, source: int = 0) -> T:
        key = self._next_key()
        if self.rank == source:
            self._messages.set(key, pickle.dumps(value))
        received: T = pickle.loads(self._messages.get(key))
        return received

    def gather_values(self, value: T) -> list[T] | None:
        key = self._next_key()
        self._messages.set(f"{key}/{self.rank}", pickle.dumps(value))
        if self.rank:
            return None
        return [pickle.loads(self._messages.get(f"{key}/{rank}")) for rank in range(self.size)]

    def send_value(self, value: int, to: int) -> None:
        self._messages.set(self._next_message(self.rank, to), str(value))

    def receive_value(self, source: int) -> int:
        return int(self._messages.get(self._next_message(source, self.rank)))

    def _next_message(self, source: int, target: int) -> str:
        """Both ends count the messages of their direction, in the store: the number of turns differs between ranks."""
        end = "sent" if source == self.rank else "received"
        number = self._messages.add(f"{self._round}/{end}/{source}/{target}", 1)
        return f"{self._round}/message/{source}/{target}/{number}"

    def set_mark(self, name: str) -> None:
        self._messages.set(name, "1")

    def has_marks(self, names: list[str]) -> bool:
        return bool(self._messages.check(names))

    def renew(self) -> None:
        """Ranks may have left their exchanges at different places: the counting begins anew."""
        self._round, self._turn = self._round + 1, 0
        self.destroy()

    def close(self) -> None:
        self.barrier()

    def join(self, ranks: Sequence[int], *, fresh: bool = False) -> Group:
        raise UnsupportedCollectiveError("groups are formed by the case itself here")

    def describe_library(self) -> dict[str, str]:
        return describe_torch_library(self.backend)

    def prepare(self) -> None:
        """Agree on where to meet; not timed. Rank 0 opens the port, so that nobody else takes it before that."""
        self._store = None  # only now: other ranks may have needed it until they were done
        if self.rank == 0 and self._listener < 0:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            listening = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
            self._port, self._listener = listening.getsockname()[1], listening.detach()
        self._port = self.broadcast_value(self._port)

    def rendezvous(self) -> None:
        """Returns when all ranks have met."""
        given = {"master_listen_fd": self._listener} if self.rank == 0 else {}
        self._listener = -1  # the store closes it
        self._store = self._dist.TCPStore(
            self._context.master_addr if self.size > 1 else "localhost", self._port, self.size, self.rank == 0,
            timeout=self._timeout, **given,
        )  # fmt: skip

    def create(self, device_id: Any | None) -> Group:
        self._dist.init_process_group(
            self.backend, store=self._store, rank=self.rank, world_size=self.size, timeout=self._timeout,
            device_id=device_id,
        )  # fmt: skip
        return TorchGroup(self._dist, self._dist.group.WORLD, tuple(range(self.size)), self.rank, self.backend)

    def destroy(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group()


class ProcessGroupTrial(Trial):
    """One sample forms the group once. The case's time is that until the first collective is done."""

    def __init__(self, case: Case, room: Room) -> None:
        super().__init__(room, (*SETUP_PHASES, *LATER_PHASES))
        assert isinstance(case.spec, ProcessGroupSpec)
        self._world: Any = room.world
        self._eager, self._seed = case.spec.eager, zlib.crc32(case.key.encode()) & 0xFFFF
        self._cold_s: dict[str, float] = {}
        self._wrong = 0
        self.body = self._form

    def _time(self, phase: str, action: Callable[[], T]) -> T:
        begin_s = time.perf_counter()
        found = action()
        self.device.synchronize()
        self.times_s[phase].append(time.perf_counter() - begin_s)
        return found

    def _form(self) -> None:
        world = self._world
        device_id = torch.device(self.device.name) if self._eager else None
        world.prepare()
        world.barrier()
        self._time("rendezvous", world.rendezvous)
        group = self._time("create", lambda: world.create(device_id))
        try:
            self._communicate(group)
        finally:
            self._time("destroy", world.destroy)

    def _communicate(self, group: Group) -> None:
        shape = CollectiveShape(len(group.ranks), ELEMENTS)
        exchange = Exchange(find_operation("all_reduce"), shape, group, device=self.device.name, seed=self._seed)
        call = exchange.bind().run
        for phase in ("first_collective", "next_collective"):
            exchange.refresh()
            self._time(phase, call)
            self._wrong += exchange.count_wrong() or 0

    def refresh(self) -> None:
        self._wrong = 0

    def count_wrong(self) -> int:
        return self._wrong

    def facts(self) -> Facts:
        return Facts(observed=ProcessGroupObserved(members=self._world.size, cold=self._cold_s))

    def own_s(self) -> list[float]:
        """What prepares a sample, and the end of the group, are no part of the time until the ranks can work."""
        return [sum(phases) for phases in zip(*(self.times_s[name] for name in SETUP_PHASES), strict=True)]

    def forget(self) -> None:
        """The rehearsal was the processes' first time."""
        self._cold_s = {name: values[0] for name, values in self.times_s.items() if values}
        super().forget()
