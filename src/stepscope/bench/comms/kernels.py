"""Kernels that run beside and between collectives: matmuls, lookups in embedding tables, element-wise kernels."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from stepscope.bench.comms.data import DTYPE_BYTES, torch_dtype
from stepscope.bench.comms.trial import TrialPart
from stepscope.core.errors import UsageError, unknown_name
from stepscope.core.lazy_torch import torch
from stepscope.core.units import parse_size

COMPUTE_DTYPES = ("float64", "float32", "bfloat16", "float16")
INDEX_BYTES = 8
CHECKED_ROWS = 64
"""Rows of a kernel's result that are compared: enough to see that it ran and ran right, few enough for float64."""
SEED = 20_260
LARGEST_EDGE = {"cpu": 256, "cuda": 2048}
"""Small enough that several of them make up a step evenly, large enough that a device is busy."""


class KernelSpec(NamedTuple):
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


def parse_compute(text: str, *, where: str = "--compute") -> KernelSpec:
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
    return KernelSpec(kind, tuple(values.items()), dtype)


class KernelWork(NamedTuple):
    """What one run of a kernel does."""

    flops: int
    moved_bytes: int
    """Every input once, every result once."""


class Kernel(TrialPart):
    """Its results are compared with float64, in some rows."""

    work: KernelWork

    def open(self, device: str) -> Callable[[], object]:
        """Allocate; what is returned runs the kernel once."""
        raise NotImplementedError


def make_kernel(spec: KernelSpec) -> Kernel:
    makers: dict[str, Callable[[KernelSpec], Kernel]] = {"gemm": GemmKernel, "embedding": EmbeddingLookup}
    return makers.get(spec.kind, ElementwiseKernel)(spec)


class GemmKernel(Kernel):
    def __init__(self, spec: KernelSpec) -> None:
        self._m, self._n, self._k = spec.get("m", "n", "k")
        self._dtype = spec.dtype
        size = DTYPE_BYTES[spec.dtype]
        elements = self._m * self._k + self._k * self._n + self._m * self._n
        self.work = KernelWork(2 * self._m * self._n * self._k, size * elements)

    def needed_bytes(self) -> int:
        rows = min(CHECKED_ROWS, self._m)
        checking = DTYPE_BYTES["float64"] * (2 * self._k * self._n + rows * (self._k + 3 * self._n))
        return self.work.moved_bytes + checking

    def open(self, device: str) -> Callable[[], object]:
        # Values as they are in training: with small whole numbers a GPU draws less power and keeps higher clocks.
        self._left = _draw((self._m, self._k), self._dtype, device, 0)
        self._right = _draw((self._k, self._n), self._dtype, device, 1)
        self._result = torch.full((self._m, self._n), float("nan"), dtype=torch_dtype(self._dtype), device=device)
        return partial(torch.mm, self._left, self._right, out=self._result)

    def count_wrong(self) -> int:
        rows = _some(self._m)
        left, right = self._left[rows].double(), self._right.double()
        exact, reach = left @ right, left.abs() @ right.abs()
        accumulated = torch.finfo(torch.float64 if self._dtype == "float64" else torch.float32).eps
        rounded = torch.finfo(self._result.dtype).eps
        if self._result.is_cuda and self._dtype == "float32":
            rounded = 2**-10  # a driver's setting may make it TF32
        wrong = ~((self._result[rows].double() - exact).abs() <= (self._k * accumulated + 4 * rounded) * reach)
        return int(wrong.sum())


class ElementwiseKernel(Kernel):
    """`copy`: one tensor into another; `add`: the sum of two; `scale`: one times a number. `size` is the result's."""

    FACTOR = 1.5

    def __init__(self, spec: KernelSpec) -> None:
        (self._size_bytes,), self._dtype, self._kind = spec.get("size"), spec.dtype, spec.kind
        self._inputs = 2 if spec.kind == "add" else 1
        flops = 0 if spec.kind == "copy" else self._size_bytes // DTYPE_BYTES[spec.dtype]
        self.work = KernelWork(flops, (self._inputs + 1) * self._size_bytes)

    def needed_bytes(self) -> int:
        return self.work.moved_bytes + 4 * self._size_bytes * DTYPE_BYTES["float64"] // DTYPE_BYTES[self._dtype]

    def open(self, device: str) -> Callable[[], object]:
        count = self._size_bytes // DTYPE_BYTES[self._dtype]
        self._sources = [_draw((count,), self._dtype, device, number) for number in range(self._inputs)]
        self._result = torch.full_like(self._sources[0], float("nan"))
        first, other, result = self._sources[0], self._sources[-1], self._result
        if self._kind == "copy":
            return partial(result.copy_, first)
        if self._kind == "add":
            return partial(torch.add, first, other, out=result)
        return partial(torch.mul, first, self.FACTOR, out=result)

    def count_wrong(self) -> int:
        first, other = self._sources[0].double(), self._sources[-1].double()
        exact = {"copy": first, "add": first + other, "scale": first * self.FACTOR}[self._kind]
        limit = (0.0 if self._kind == "copy" else torch.finfo(self._result.dtype).eps) * exact.abs()
        return int((~((self._result.double() - exact).abs() <= limit)).sum())


def _draw(shape: tuple[int, ...], dtype: str, device: str, number: int) -> torch.Tensor:
    source = torch.Generator(device).manual_seed(SEED + number)
    return torch.randn(shape, generator=source, device=device, dtype=torch.float32).to(torch_dtype(dtype))


def _some(rows: int) -> torch.Tensor:
    """Rows all over the result, the first and the last among them."""
    return torch.linspace(0, rows - 1, min(rows, CHECKED_ROWS)).long()


# Matmuls of a step


def plan_matmuls(flops: float, device: str) -> tuple[int, int]:
    """Edge of two square matrices, and how often they are multiplied: as many operations as asked for, to within the
    last matmul."""
    largest = LARGEST_EDGE["cuda" if device.startswith("cuda") else "cpu"]
    edge = max(1, min(largest, round((flops / 2) ** (1 / 3))))
    return edge, max(1, round(flops / (2 * edge**3)))


def matmul_bytes(sizes: Iterable[float], device: str) -> int:
    edges = {plan_matmuls(flops, device)[0] for flops in sizes}
    return sum(3 * edge * edge * DTYPE_BYTES["float32"] for edge in edges)


def make_matmuls(flops: float, device: str) -> Callable[[], None]:
    """Every call does the same, into the same memory."""
    edge, repeats = plan_matmuls(flops, device)
    left, right = (torch.ones(edge, edge, device=device) for _ in range(2))
    multiply = partial(torch.mm, left, right, out=torch.empty(edge, edge, device=device))

    def work() -> None:
        for _ in range(repeats):
            multiply()

    return work


# Lookups in embedding tables


class LookupKernel(NamedTuple):
    """What all ranks look up in one step of the job."""

    tables: tuple[int, ...]
    """Tables of each rank."""
    rows: int
    """Per table; 0: nothing is looked up, though indices travel."""
    width: int
    batch: int
    """Examples per rank."""
    pooling: int
    """Rows that one bag sums up, at most where lengths are random."""
    random_lengths: bool
    zipf: float | None
    """Exponent of the distribution of the indices; None: all rows are equally likely."""
    seed: int

    def list_lengths(self) -> list[list[list[int]]]:
        """Rows per bag where they are random: for the examples of rank i in the tables of rank j, table by table."""
        draw = random.Random(self.seed)
        lengths = range(1, self.pooling + 1)
        return [[draw.choices(lengths, k=count * self.batch) for count in self.tables] for _ in self.tables]

    def count_indices(self) -> tuple[tuple[int, ...], ...]:
        """Rows that the examples of rank i look up in the tables of rank j."""
        if self.random_lengths:
            return tuple(tuple(map(sum, of_source)) for of_source in self.list_lengths())
        return (tuple(count * self.batch * self.pooling for count in self.tables),) * len(self.tables)

    def list_bags(self, rank: int) -> list[list[int]]:
        """Rows per bag of each table of one rank, for the examples of all ranks."""
        tables = range(self.tables[rank])
        if not self.random_lengths:
            return [[self.pooling] * (self.batch * len(self.tables)) for _ in tables]
        lengths = [of_source[rank] for of_source in self.list_lengths()]
        return [[one for row in lengths for one in row[i * self.batch : (i + 1) * self.batch]] for i in tables]

    def list_moved_bytes(self) -> list[int]:
        """Rows and indices that each rank reads, and sums that it writes; rows count as often as they are wanted."""
        sums = [count * self.batch * len(self.tables) for count in self.tables]
        read = map(sum, zip(*self.count_indices(), strict=True))
        row = self.width * DTYPE_BYTES["float32"]
        return [rows * (row + INDEX_BYTES) + bags * row for rows, bags in zip(read, sums, strict=True)]


def draw_rows(count: int, rows: int, zipf: float | None, seed: int) -> torch.Tensor:
    """Indices of rows. With an exponent s the i-th most wanted row is wanted as i^-s; which one that is, is random."""
    source = torch.Generator().manual_seed(seed)
    if zipf is None:
        return torch.randint(rows, (count,), generator=source)
    limits = torch.arange(1, rows + 1, dtype=torch.float64).pow_(-zipf).cumsum_(0)
    drawn = torch.rand(count, generator=source, dtype=torch.float64) * limits[-1]
    return torch.randperm(rows, generator=source)[torch.searchsorted(limits, drawn).clamp_(max=rows - 1)]


class EmbeddingTables(Kernel):
    """The tables of one rank and the bags that are looked up in them, the same in every step."""

    def __init__(self, lookups: LookupKernel, rank: int, dtype: str = "float32") -> None:
        self._lookups, self._rank, self._dtype = lookups, rank, dtype
        self._bags = lookups.list_bags(rank)
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._results: list[torch.Tensor] = []

    def needed_bytes(self) -> int:
        tables = len(self._bags) * self._lookups.rows * self._lookups.width * DTYPE_BYTES[self._dtype]
        indices = sum(sum(bags) + len(bags) for bags in self._bags) * INDEX_BYTES
        drawing = (2 * self._lookups.rows + 2 * max(map(sum, self._bags), default=0)) * INDEX_BYTES
        return tables + 2 * indices + self._lookups.list_moved_bytes()[self._rank] + drawing

    def open(self, device: str) -> Callable[[], None]:
        rows, width = self._lookups.rows, self._lookups.width
        for number, bags in enumerate(self._bags):
            seed = (self._lookups.seed * 1_000_003 + self._rank * 1009 + number) & 0x7FFFFFFF
            source = torch.Generator(device).manual_seed(seed)
            table = torch.randn(rows, width, generator=source, device=device).to(torch_dtype(self._dtype))
            indices = draw_rows(sum(bags), rows, self._lookups.zipf, seed).to(device)
            self._parts.append((indices, table, torch.tensor([0, *accumulate(bags)][:-1], device=device)))
        look_up = torch.nn.functional.embedding_bag

        def run() -> None:
            self._results = [look_up(*part, mode="sum") for part in self._parts]

        return run

    def refresh(self) -> None:
        """Sums of an earlier step are gone, so that a step without lookups is found."""
        self._results = []

    def count_wrong(self) -> int:
        """Sums that are not those of float64, in some bags of each table."""
        wrong = 0
        for number, (bags, (indices, table, starts)) in enumerate(zip(self._bags, self._parts, strict=True)):
            for bag in _some(len(bags)).tolist():
                if number >= len(self._results):
                    wrong += self._lookups.width
                    continue
                first = int(starts[bag])
                read = table[indices[first : first + bags[bag]]].double()
                limit = bags[bag] * torch.finfo(table.dtype).eps * read.abs().sum(0)
                wrong += int((~((self._results[number][bag].double() - read.sum(0)).abs() <= limit)).sum())
        return wrong

    def close(self) -> None:
        self._parts, self._results = [], []


class EmbeddingLookup(EmbeddingTables):
    """One table, and one bag per example of one rank."""

    def __init__(self, spec: KernelSpec) -> None:
        rows, dim, batch, pooling = spec.get("rows", "dim", "batch", "pooling")
        super().__init__(
            LookupKernel((1,), rows, dim, batch, pooling, random_lengths=False, zipf=None, seed=SEED), 0, spec.dtype
        )
        read = batch * pooling
        self.work = KernelWork(read * dim, (read + batch) * dim * DTYPE_BYTES[spec.dtype] + read * INDEX_BYTES)
