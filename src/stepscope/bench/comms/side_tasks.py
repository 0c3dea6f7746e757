"""Work that can go on beside other work: kernels, a copy, a collective, all behind one small interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from stepscope.bench.comms.data import DTYPE_BYTES, Recipe, count_wrong, make_values, spoil
from stepscope.bench.comms.exchange import Exchange
from stepscope.bench.comms.group import Waitable
from stepscope.bench.comms.kernels import KernelSpec, KernelWork, make_kernel
from stepscope.bench.comms.trial import TrialPart
from stepscope.core.lazy_torch import torch


class SideTask(TrialPart):
    def open(self) -> None:
        """Allocate; raises UnsupportedCallError."""

    def start(self) -> Sequence[Waitable]:
        """Begin, and return what must be waited for; nothing where the work is done, or queued, on return.

        On a device with a queue all of it goes into the current stream.
        """
        raise NotImplementedError


class ComputeTask(SideTask):
    """A kernel, `repeat` times in a row, in the calling thread or the current stream. It is checked once."""

    def __init__(self, spec: KernelSpec, device: str) -> None:
        self.spec, self.repeat = spec, 1
        self._kernel, self._device = make_kernel(spec), device
        self._run: Callable[[], object] | None = None
        self._checked = False

    @property
    def work(self) -> KernelWork:
        return KernelWork(self._kernel.work.flops * self.repeat, self._kernel.work.moved_bytes * self.repeat)

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

    def count_wrong(self) -> int | None:
        if self._checked:
            return None
        self._checked = True
        return self._kernel.count_wrong()

    def close(self) -> None:
        self._run, self._kernel = None, make_kernel(self.spec)


class CollectiveTask(Exchange, SideTask):
    """An operation between ranks, started without waiting. A rank that has no part in it has nothing to start."""

    _start: Callable[[], Sequence[Waitable]] = staticmethod(tuple)

    def open(self) -> None:
        if self.takes_part:
            self._start = self.bind().start

    def start(self) -> Sequence[Waitable]:
        return self._start()

    def close(self) -> None:
        self._start = tuple
        super().close()


class ThreadWork:
    """Work of another thread; says when it is done, as torch's works do."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future
        self.wait = future.result

    def get_future(self) -> Future[None]:
        return self._future


class CopyTask(SideTask):
    """A copy within one device's memory: on a GPU in the current stream, on a CPU in a thread of its own."""

    def __init__(self, size_bytes: int, dtype: str, device: str, *, threaded: bool, seed: int = 0) -> None:
        self._elements, self._dtype, self._device = size_bytes // DTYPE_BYTES[dtype], dtype, device
        self.size_bytes = self._elements * DTYPE_BYTES[dtype]
        self._recipe = Recipe(dtype, 1, None, seed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copy") if threaded else None
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = None
        """Source and result."""

    def needed_bytes(self) -> int:
        return 2 * self.size_bytes + 2 * self._elements * DTYPE_BYTES["float64"]

    def open(self) -> None:
        source = make_values(self._recipe, 0, 0, self._elements, self._device)
        self._tensors = source, torch.empty_like(source)

    def _copy(self) -> None:
        assert self._tensors is not None
        source, result = self._tensors
        result.copy_(source)

    def start(self) -> Sequence[Waitable]:
        if self._thread is not None:
            return (ThreadWork(self._thread.submit(self._copy)),)
        self._copy()
        return ()

    def refresh(self) -> None:
        if self._tensors is not None:
            spoil(self._tensors[1], self._dtype)

    def count_wrong(self) -> int | None:
        if self._tensors is None:
            return None
        source, result = self._tensors
        return count_wrong(result, source, self._recipe)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._tensors = None
