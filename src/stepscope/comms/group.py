"""One small adapter between the benchmarks and whatever moves the data."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from stepscope.errors import UsageError

if TYPE_CHECKING:
    import torch

    from stepscope.launch import RankContext

T = TypeVar("T")


class Group(Protocol):
    rank: int
    world_size: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum, in place; returns when the result can be read on this rank (or is queued on its device)."""

    def barrier(self) -> None: ...

    def broadcast_value(self, value: T | None) -> T:
        """Rank 0's value on every rank; for the control of the benchmark, never timed."""

    def gather_values(self, value: T) -> list[T] | None:
        """All ranks' values on rank 0, None elsewhere; never timed."""


class TorchGroup:
    """torch.distributed. Control traffic goes over gloo, so that the measured backend carries only what is measured."""

    def __init__(self, context: RankContext, backend: str, timeout_s: float) -> None:
        import torch.distributed as dist

        if not dist.is_backend_available(backend):
            built = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)]
            raise UsageError(
                f"this torch was built without {backend}", hint=f"built here: {', '.join(built)}", where="--backend"
            )
        self._dist: Any = dist
        self.rank, self.world_size = context.rank, context.world_size
        timeout = timedelta(seconds=timeout_s)
        # One process needs nobody to meet; several meet where the launcher's variables say.
        meeting = {"store": self._dist.HashStore()} if context.world_size == 1 else {"init_method": "env://"}
        dist.init_process_group(backend, rank=context.rank, world_size=context.world_size, timeout=timeout, **meeting)
        self._control: Any = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._dist.all_reduce(tensor)

    def barrier(self) -> None:
        self._dist.barrier(group=self._control)

    def broadcast_value(self, value: T | None) -> T:
        box: list[Any] = [value]
        self._dist.broadcast_object_list(box, src=0, group=self._control)
        received: T = box[0]
        return received

    def gather_values(self, value: T) -> list[T] | None:
        box: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        self._dist.gather_object(value, box, dst=0, group=self._control)
        return box

    def close(self) -> None:
        self._dist.destroy_process_group()


class FakeGroup:
    """A group of one process that plays a whole world; shipped for tests and dry runs.

    The peers it stands for contribute what `contributions` says, so that results can be checked without them.
    """

    def __init__(self, world_size: int = 2, *, corrupt_element: int | None = None) -> None:
        self.rank, self.world_size = 0, world_size
        self._corrupt_element = corrupt_element

    def all_reduce(self, tensor: torch.Tensor) -> None:
        from stepscope.comms.collectives import fill_by_rank

        for rank in range(1, self.world_size):
            tensor += fill_by_rank(rank, tensor.numel(), tensor.dtype, str(tensor.device))
        if self._corrupt_element is not None:
            tensor[self._corrupt_element] += 1

    def barrier(self) -> None:
        return

    def broadcast_value(self, value: T | None) -> T:
        if value is None:
            raise ValueError("rank 0 must have a value to broadcast")
        return value

    def gather_values(self, value: T) -> list[T] | None:
        return [value]

    def close(self) -> None:
        return
