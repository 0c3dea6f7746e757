"""Work that can go on beside other work: kernels, a copy, a collective, all behind one small interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

from stepscope.bench.comms.data import DTYPE_BYTES, Recipe, count_wrong, make_values, spoil, torch_dtype
from stepscope.bench.comms.exchange import Exchange
from stepscope.bench.comms.group import Waitable
from stepscope.core.errors import UsageError, unknown_name
from stepscope.core.units import parse_size

if TYPE_CHECKING:
    import torch

COMPUTE_DTYPES = ("float64", "float32", "bfloat16", "float16")
INDEX_BYTES = 8
CHECKED_ROWS = 64
"""Rows of a kernel's result that are compared: enough to see that it ran and ran right, few enough for float64."""
SEED = 20_260


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


# A kernel, several times in a row


class ComputeSpec(NamedTuple):
    """Which kernel, on what."""

    kind: str
    values: tuple[tuple[str, int], ...]
    dtype: str = "float32"

    @property
    def text(self) -> str:
        """As the command line takes it, with every value written out: the same kernel has the same text."""
        values = [f"{name}={value}" for name, value in self.values]
        return f"{self.kind}:{','.join([*values, *([f'dtype={self.dtype}'] if self.dtype != 'float32' else [])])}"

    def get(self, *names: str) -> tuple[int, ...]:
        values = dict(self.values)
        return tuple(values[name] for name in names)


DEFAULTS = {
    "gemm": {"m": 512, "n": 512, "k": 512},
    "embedding": {"rows": 100_000, "dim": 128, "batch": 512, "pooling": 20},
    "copy": {"size": 64 << 20},
    "add": {"size": 64 << 20},
    "scale": {"size": 64 << 20},
}
"""Values that are not given; those of embedding are PARAM's."""


def parse_compute(text: str, *, where: str = "--compute") -> ComputeSpec:
    """`gemm:m=512,n=512,k=512`, `embedding:rows=100000,dim=128`, `copy:size=64M`, `add:size=64M`, each also with
    `dtype=`."""
    kind, _, rest = text.strip().partition(":")
    if kind not in DEFAULTS:
        raise unknown_name("kernel", kind, DEFAULTS, where=where)
    values, dtype = dict(DEFAULTS[kind]), "float32"
    for part in filter(None, rest.split(",")):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name == "dtype" and value in COMPUTE_DTYPES:
            dtype = value
        elif name in values and equals:
            values[name] = parse_size(value, where=where)
        else:
            hint = f"{kind} has {', '.join(values)}, and dtype: {', '.join(COMPUTE_DTYPES)}"
            raise UsageError(f"{kind} cannot take {part!r}", hint=hint, where=where)
    if any(value < 1 for value in values.values()):
        raise UsageError(f"{text!r} has nothing to compute", hint="every value is 1 or more", where=where)
    if values.get("size", 0) % DTYPE_BYTES[dtype]:
        raise UsageError(f"{values['size']} bytes are no whole number of {dtype} elements", where=where)
    return ComputeSpec(kind, tuple(values.items()), dtype)


class Work(NamedTuple):
    """What one run of a kernel does."""

    flops: int
    moved_bytes: int
    """Every input once, every result once."""


class Kernel(Protocol):
    work: Work

    def needed_bytes(self) -> int: ...

    def open(self, device: str) -> Callable[[], object]:
        """Allocate; what is returned runs the kernel once."""

    def count_wrong(self) -> int:
        """Against float64, in some rows of the result."""


def make_kernel(spec: ComputeSpec) -> Kernel:
    makers: dict[str, Callable[[ComputeSpec], Kernel]] = {
        "gemm": Gemm, "embedding": EmbeddingLookup, "copy": Copy, "add": Elementwise, "scale": Elementwise,
    }  # fmt: skip
    return makers[spec.kind](spec)


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


class Gemm:
    def __init__(self, spec: ComputeSpec) -> None:
        self._m, self._n, self._k = spec.get("m", "n", "k")
        self._dtype = spec.dtype
        size = DTYPE_BYTES[spec.dtype]
        elements = self._m * self._k + self._k * self._n + self._m * self._n
        self.work = Work(2 * self._m * self._n * self._k, size * elements)

    def needed_bytes(self) -> int:
        rows = min(CHECKED_ROWS, self._m)
        checking = DTYPE_BYTES["float64"] * (2 * self._k * self._n + rows * (self._k + 3 * self._n))
        return self.work.moved_bytes + checking

    def open(self, device: str) -> Callable[[], object]:
        import torch

        # Values as they are in training: with small whole numbers a GPU draws less power and keeps higher clocks.
        self._left = _draw((self._m, self._k), self._dtype, device, 0)
        self._right = _draw((self._k, self._n), self._dtype, device, 1)
        self._result = torch.full((self._m, self._n), float("nan"), dtype=torch_dtype(self._dtype), device=device)
        left, right, result = self._left, self._right, self._result
        return lambda: torch.mm(left, right, out=result)

    def count_wrong(self) -> int:
        import torch

        rows = _some(self._m)
        left, right = self._left[rows].double(), self._right.double()
        exact, reach = left @ right, left.abs() @ right.abs()
        accumulated = torch.finfo(torch.float64 if self._dtype == "float64" else torch.float32).eps
        rounded = torch.finfo(self._result.dtype).eps
        if self._result.is_cuda and self._dtype == "float32":
            rounded = 2**-10  # a driver's setting may make it TF32
        wrong = ~((self._result[rows].double() - exact).abs() <= (self._k * accumulated + 4 * rounded) * reach)
        return int(wrong.sum())


class EmbeddingLookup:
    def __init__(self, spec: ComputeSpec) -> None:
        self._rows, self._dim, self._batch, self._pooling = spec.get("rows", "dim", "batch", "pooling")
        self._dtype = spec.dtype
        read = self._batch * self._pooling
        values = (read + self._batch) * self._dim * DTYPE_BYTES[spec.dtype]
        self.work = Work(read * self._dim, values + read * INDEX_BYTES)

    def needed_bytes(self) -> int:
        table = self._rows * self._dim * DTYPE_BYTES[self._dtype]
        checking = 2 * CHECKED_ROWS * self._pooling * self._dim * DTYPE_BYTES["float64"]
        return table + self.work.moved_bytes + checking

    def open(self, device: str) -> Callable[[], object]:
        import torch

        self._table = _draw((self._rows, self._dim), self._dtype, device, 0)
        source = torch.Generator().manual_seed(SEED)
        self._places = torch.randint(self._rows, (self._batch, self._pooling), generator=source).to(device)
        self._result = torch.full((1,), float("nan"), device=device)
        table, places, lookup = self._table, self._places, torch.nn.functional.embedding_bag

        def run() -> None:
            self._result = lookup(places, table, mode="sum")

        return run

    def count_wrong(self) -> int:
        import torch

        bags = _some(self._batch)
        read = self._table[self._places[bags]].double()
        if self._result.shape != (self._batch, self._dim):
            return self._batch * self._dim
        limit = self._pooling * torch.finfo(self._result.dtype).eps * read.abs().sum(1)
        return int((~((self._result[bags].double() - read.sum(1)).abs() <= limit)).sum())


class Copy:
    def __init__(self, spec: ComputeSpec) -> None:
        (self._size_bytes,), self._dtype = spec.get("size"), spec.dtype
        self.work = Work(0, 2 * self._size_bytes)

    def needed_bytes(self) -> int:
        return 3 * self._size_bytes

    def open(self, device: str) -> Callable[[], object]:
        import torch

        self._source = _draw((self._size_bytes // DTYPE_BYTES[self._dtype],), self._dtype, device, 0)
        self._result = torch.full_like(self._source, float("nan"))
        source, result = self._source, self._result
        return lambda: result.copy_(source)

    def count_wrong(self) -> int:
        return int((self._result != self._source).sum())


class Elementwise:
    """`add`: the sum of two tensors; `scale`: one tensor times a number. `size` is that of the result."""

    FACTOR = 1.5

    def __init__(self, spec: ComputeSpec) -> None:
        (self._size_bytes,), self._dtype = spec.get("size"), spec.dtype
        self._inputs = 2 if spec.kind == "add" else 1
        self.work = Work(self._size_bytes // DTYPE_BYTES[spec.dtype], (self._inputs + 1) * self._size_bytes)

    def needed_bytes(self) -> int:
        return self.work.moved_bytes + 4 * self._size_bytes * DTYPE_BYTES["float64"] // DTYPE_BYTES[self._dtype]

    def open(self, device: str) -> Callable[[], object]:
        import torch

        count = self._size_bytes // DTYPE_BYTES[self._dtype]
        self._sources = [_draw((count,), self._dtype, device, number) for number in range(self._inputs)]
        self._result = torch.full_like(self._sources[0], float("nan"))
        first, other, result = self._sources[0], self._sources[-1], self._result
        if self._inputs == 2:
            return lambda: torch.add(first, other, out=result)
        return lambda: torch.mul(first, self.FACTOR, out=result)

    def count_wrong(self) -> int:
        import torch

        first, other = self._sources[0].double(), self._sources[-1].double()
        exact = first + other if self._inputs == 2 else first * self.FACTOR
        limit = torch.finfo(self._result.dtype).eps * exact.abs()
        return int((~((self._result.double() - exact).abs() <= limit)).sum())


def _draw(shape: tuple[int, ...], dtype: str, device: str, number: int) -> torch.Tensor:
    import torch

    source = torch.Generator(device).manual_seed(SEED + number)
    return torch.randn(shape, generator=source, device=device, dtype=torch.float32).to(torch_dtype(dtype))


def _some(rows: int) -> torch.Tensor:
    """Rows all over the result, the first and the last among them."""
    import torch

    return torch.linspace(0, rows - 1, min(rows, CHECKED_ROWS)).long()


# What moves data


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
