"""Work that can go on beside other work: kernels, a copy, a collective, all behind one small interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from stepscope.bench.comms.data import DTYPE_BYTES, Recipe, count_wrong, make_values, spoil
from stepscope.bench.comms.exchange import Exchange
from stepscope.bench.comms.group import Waitable
from stepscope.bench.comms.kernels import ComputeSpec, Work, make_kernel

if TYPE_CHECKING:
    import torch


class Task(Protocol):
    def needed_bytes(self) -> int:
        """Memory of this rank, before anything is allocated."""

    def open(self) -> None:
        """Allocate; raises UnsupportedCallError."""

    def start(self) -> Sequence[Waitable]:
        """Begin, and return what must be waited for; nothing where the work is done, or queued, on return.

        On a device with a queue all of it goes into the current stream.
        """

    def refresh(self) -> None:
        """Fresh inputs, spoiled results; never timed."""

    def count_wrong(self) -> int | None:
        """Wrong elements that the last start left; None where nothing can be checked."""

    def close(self) -> None: ...


class ComputeTask:
    """A kernel, `repeat` times in a row, in the calling thread or the current stream. It is checked once."""

    def __init__(self, spec: ComputeSpec, device: str) -> None:
        self.spec, self.repeat = spec, 1
        self._kernel, self._device = make_kernel(spec), device
        self._run: Callable[[], object] | None = None
        self._checked = False

    @property
    def work(self) -> Work:
        return Work(self._kernel.work.flops * self.repeat, self._kernel.work.moved_bytes * self.repeat)

    def needed_bytes(self) -> int:
        return self._kernel.needed_bytes()

    def open(self) -> None:
        self._run = self._kernel.open(self._device)

    def start(self) -> Sequence[Waitable]:
        run = self._run
        assert run is not None
        for _ in range(self.repeat):
            run()
        return ()

    def refresh(self) -> None:
        return

    def count_wrong(self) -> int | None:
        if self._checked:
            return None
        self._checked = True
        return self._kernel.count_wrong()

    def close(self) -> None:
        self._run, self._kernel = None, make_kernel(self.spec)


class CollectiveTask:
    """An operation between ranks, started without waiting."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._start: Callable[[], Sequence[Waitable]] = tuple

    def needed_bytes(self) -> int:
        return self._exchange.needed_bytes()

    def open(self) -> None:
        """A rank that has no part in the operation has nothing to start."""
        if self._exchange.takes_part:
            self._start = self._exchange.bind().start

    def start(self) -> Sequence[Waitable]:
        return self._start()

    def refresh(self) -> None:
        self._exchange.refresh()

    def count_wrong(self) -> int | None:
        return self._exchange.count_wrong()

    def close(self) -> None:
        self._start = tuple
        self._exchange.close()


class ThreadWork:
    """Work of another thread; says when it is done, as torch's works do."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def get_future(self) -> Future[None]:
        return self._future


class CopyTask:
    """A copy within one device's memory: on a GPU in the current stream, on a CPU in a thread of its own."""

    def __init__(self, size_bytes: int, dtype: str, device: str, *, threaded: bool, seed: int = 0) -> None:
        self._elements, self._dtype, self._device = size_bytes // DTYPE_BYTES[dtype], dtype, device
        self.size_bytes = self._elements * DTYPE_BYTES[dtype]
        self._recipe = Recipe(dtype, 1, None, seed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copy") if threaded else None
        self._source: torch.Tensor | None = None
        self._result: torch.Tensor | None = None

    def needed_bytes(self) -> int:
        return 2 * self.size_bytes + 2 * self._elements * DTYPE_BYTES["float64"]

    def open(self) -> None:
        import torch

        self._source = make_values(self._recipe, 0, 0, self._elements, self._device)
        self._result = torch.empty_like(self._source)

    def _copy(self) -> None:
        assert self._source is not None
        assert self._result is not None
        self._result.copy_(self._source)

    def start(self) -> Sequence[Waitable]:
        if self._thread is not None:
            return (ThreadWork(self._thread.submit(self._copy)),)
        self._copy()
        return ()

    def refresh(self) -> None:
        if self._result is not None:
            spoil(self._result, self._dtype)

    def count_wrong(self) -> int | None:
        if self._source is None or self._result is None:
            return None
        return count_wrong(self._result, self._source, self._recipe)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._source = self._result = None
