"""How the ranks of a run agree on what to do next; never timed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from stepscope.launch.join import open_store, require_backend
from stepscope.launch.worker import BACKSTOP_S, Session

T = TypeVar("T")
GROUP_EXTRA_S = 30.0
"""A group's own time limit is the last resort: the watchdogs, which know more, ring first."""


class Control(Protocol):
    """As it stands, one process that agrees with itself."""

    rank: int = 0
    size: int = 1

    def barrier(self) -> None:
        return

    def broadcast_value(self, value: T | None, source: int = 0) -> T:
        """That rank's value on every rank."""
        return value  # type: ignore[return-value]

    def gather_values(self, value: T) -> list[T] | None:
        """All ranks' values on rank 0, None elsewhere."""
        return [value]

    def send_value(self, value: int, to: int) -> None:
        raise ValueError("a single process has nobody to send to")

    def receive_value(self, source: int) -> int:
        raise ValueError("a single process has nobody to receive from")

    def set_mark(self, name: str) -> None:
        """Leave a mark that all ranks see, without waiting for them."""
        return

    def has_marks(self, names: list[str]) -> bool:
        """Raises RuntimeError where marks cannot be seen any more."""
        return True

    def renew(self) -> None:
        """All ranks at once: groups in which nothing is under way, after ranks left an exchange at different places."""
        return

    def close(self) -> None:
        return


class Alone(Control):
    """One process."""


class TorchControl:
    """torch.distributed: the group of all ranks by `backend`, and beside it one over gloo for what is said here, so
    that the measured backend carries only what is measured, and a rank that gave up in the middle of an exchange is
    not taken for one that takes part."""

    def __init__(self, session: Session, backend: str) -> None:
        import torch.distributed as dist

        require_backend(backend)
        self._dist: Any = dist
        context, limit_s = session.context, session.hang_limit_s
        self.rank, self.size, self.backend = context.rank, context.world_size, backend
        self.timeout = timedelta(seconds=limit_s + GROUP_EXTRA_S)
        # Where ranks have a supervisor, it knows best which one is missing.
        join_limit_s = limit_s + BACKSTOP_S if context.launcher == "self" else limit_s
        self._store = open_store(context, join_limit_s, lambda: session.heartbeat.beat("joining"))
        self._joins = 0
        self._join()

    def _join(self) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._joins += 1
        store = PrefixStore(f"groups/{self._joins}", self._store)
        self._dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.size, timeout=self.timeout
        )
        self._group = self._dist.new_group(backend="gloo", timeout=self.timeout)

    def renew(self) -> None:
        # Waits for no exchange, where torch knows how.
        leave: Callable[[], None] = getattr(
            self._dist.distributed_c10d, "_abort_process_group", self._dist.destroy_process_group
        )
        leave()
        self._join()

    def barrier(self) -> None:
        self._dist.barrier(group=self._group)

    def broadcast_value(self, value: T | None, source: int = 0) -> T:
        box: list[Any] = [value]
        self._dist.broadcast_object_list(box, src=source, group=self._group)
        received: T = box[0]
        return received

    def gather_values(self, value: T) -> list[T] | None:
        box: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._dist.gather_object(value, box, dst=0, group=self._group)
        return box

    def send_value(self, value: int, to: int) -> None:
        import torch

        self._dist.send(torch.tensor([value]), dst=to, group=self._group)

    def receive_value(self, source: int) -> int:
        import torch

        box = torch.zeros(1, dtype=torch.int64)
        self._dist.recv(box, src=source, group=self._group)
        return int(box)

    def set_mark(self, name: str) -> None:
        self._store.set(name, "1")

    def has_marks(self, names: list[str]) -> bool:
        return bool(self._store.check(names))

    def close(self) -> None:
        self._dist.destroy_process_group()
