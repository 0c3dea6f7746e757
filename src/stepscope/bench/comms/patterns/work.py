"""What ranks compute in a step: matmuls of a stated size, and lookups in embedding tables."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

DOUBLE_BYTES = INDEX_BYTES = 8
VALUE_BYTES = 4
LARGEST_EDGE = {"cpu": 256, "cuda": 2048}
"""Small enough that several of them make up a step evenly, large enough that a device is busy."""


class Matmuls(NamedTuple):
    """`repeats` matmuls of two square matrices."""

    edge: int
    repeats: int


def plan_matmuls(flops: float, device: str) -> Matmuls:
    """As many operations as asked for, to within the last matmul."""
    largest = LARGEST_EDGE["cuda" if device.startswith("cuda") else "cpu"]
    edge = max(1, min(largest, round((flops / 2) ** (1 / 3))))
    return Matmuls(edge, max(1, round(flops / (2 * edge**3))))


def matmul_bytes(sizes: Iterable[float], device: str) -> int:
    edges = {plan_matmuls(flops, device).edge for flops in sizes}
    return sum(3 * edge * edge * VALUE_BYTES for edge in edges)


def make_matmuls(flops: float, device: str) -> Callable[[], None]:
    """Every call does the same, into the same memory."""
    import torch

    edge, repeats = plan_matmuls(flops, device)
    left, right = (torch.ones(edge, edge, device=device) for _ in range(2))
    into = torch.empty(edge, edge, device=device)

    def work() -> None:
        for _ in range(repeats):
            torch.mm(left, right, out=into)

    return work


CHECKED_BAGS = 64
"""Bags of each table that are compared: enough to see that the lookup ran and ran right, few enough for float64."""


class Lookups(NamedTuple):
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
        row = self.width * VALUE_BYTES
        return [rows * (row + INDEX_BYTES) + bags * row for rows, bags in zip(read, sums, strict=True)]


def draw_rows(count: int, rows: int, zipf: float | None, seed: int) -> torch.Tensor:
    """Indices of rows. With an exponent s the i-th most wanted row is wanted as i^-s; which one that is, is random."""
    import torch

    source = torch.Generator().manual_seed(seed)
    if zipf is None:
        return torch.randint(rows, (count,), generator=source)
    limits = torch.arange(1, rows + 1, dtype=torch.float64).pow_(-zipf).cumsum_(0)
    drawn = torch.rand(count, generator=source, dtype=torch.float64) * limits[-1]
    return torch.randperm(rows, generator=source)[torch.searchsorted(limits, drawn).clamp_(max=rows - 1)]


class EmbeddingTables:
    """The tables of one rank and the bags that are looked up in them, the same in every step."""

    def __init__(self, lookups: Lookups, rank: int) -> None:
        self._lookups, self._rank = lookups, rank
        self._bags = lookups.list_bags(rank)
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._results: list[torch.Tensor] = []

    def needed_bytes(self) -> int:
        tables = len(self._bags) * self._lookups.rows * self._lookups.width * VALUE_BYTES
        indices = sum(sum(bags) + len(bags) for bags in self._bags) * INDEX_BYTES
        drawing = (2 * self._lookups.rows + 2 * max(map(sum, self._bags), default=0)) * DOUBLE_BYTES
        return tables + 2 * indices + self._lookups.list_moved_bytes()[self._rank] + drawing

    def open(self, device: str) -> Callable[[], None]:
        import torch

        rows, width = self._lookups.rows, self._lookups.width
        for number, bags in enumerate(self._bags):
            seed = (self._lookups.seed * 1_000_003 + self._rank * 1009 + number) & 0x7FFFFFFF
            source = torch.Generator(device).manual_seed(seed)
            table = torch.randn(rows, width, generator=source, device=device)
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
        import torch

        wrong = 0
        for number, (bags, (indices, table, starts)) in enumerate(zip(self._bags, self._parts, strict=True)):
            for bag in torch.linspace(0, len(bags) - 1, min(len(bags), CHECKED_BAGS)).long().tolist():
                if number >= len(self._results):
                    wrong += self._lookups.width
                    continue
                first = int(starts[bag])
                read = table[indices[first : first + bags[bag]]].double()
                limit = bags[bag] * torch.finfo(torch.float32).eps * read.abs().sum(0)
                wrong += int((~((self._results[number][bag].double() - read.sum(0)).abs() <= limit)).sum())
        return wrong

    def close(self) -> None:
        self._parts, self._results = [], []
