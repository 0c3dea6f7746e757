"""Triton kernels and their launches. Imports triton at its top: import it inside functions, for CUDA tensors alone."""

# Triton's language is typed by its compiler, not by annotations, and its constants are written in capitals.
# ruff: noqa: N803, PLR0917
# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-not-found, import-untyped, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOOKUPS_AT_ONCE = 16
"""Rows that are on their way to one bag at a time."""
UPDATE_BLOCK = 2048


@triton.jit
def _sum_bags(
    table, indices, offsets, out, tables, batch, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    """One program a bag, table after table, so that a small table stays in the cache while it is read."""
    bag = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    place = tl.arange(0, ROWS)
    begin = tl.load(offsets + bag).to(tl.int64)
    end = tl.load(offsets + bag + 1).to(tl.int64)
    total = tl.zeros([COLUMNS], tl.float32)
    for at in range(begin, end, ROWS):
        inside = at + place < end
        row = tl.load(indices + at + place, mask=inside, other=0).to(tl.int64)
        wanted = inside[:, None] & (column < WIDTH)[None, :]
        values = tl.load(table + row[:, None] * WIDTH + column[None, :], mask=wanted, other=0.0)
        total += tl.sum(values.to(tl.float32), axis=0)
    target = (bag % batch) * tables + bag // batch
    tl.store(out + target * WIDTH + column, total.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _add_to_rows(
    target, indices, offsets, gradient, scale, tables, batch,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of a bag, times `scale`, is added to each of its rows."""
    bag = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    place = tl.arange(0, ROWS)
    begin = tl.load(offsets + bag).to(tl.int64)
    end = tl.load(offsets + bag + 1).to(tl.int64)
    source = (bag % batch) * tables + bag // batch
    value = tl.load(gradient + source * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32) * scale
    spread = tl.broadcast_to(value[None, :], [ROWS, COLUMNS])
    for at in range(begin, end, ROWS):
        inside = at + place < end
        row = tl.load(indices + at + place, mask=inside, other=0).to(tl.int64)
        wanted = inside[:, None] & (column < WIDTH)[None, :]
        tl.atomic_add(target + row[:, None] * WIDTH + column[None, :], spread, mask=wanted, sem="relaxed")


@triton.jit
def _count_rows(indices, out, rows, LOOKUPS: tl.constexpr, PLACES: tl.constexpr, BINS: tl.constexpr):
    """How often a bag has each row of its table: one line of the matrix of counts."""
    bag = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    # What is beyond the bag goes to the last bin, which is beyond the table.
    row = tl.load(indices + bag * LOOKUPS + place, mask=place < LOOKUPS, other=BINS - 1)
    counts = tl.histogram(row.to(tl.int32), BINS)
    column = tl.arange(0, BINS)
    tl.store(out + bag * rows + column, counts.to(out.dtype.element_ty), mask=column < rows)


@triton.jit
def _sum_packed_bags(
    records, indices, out, tables, batch,
    LOOKUPS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """Bags of 4-bit rows: a record is scale, offset (floats by their bits), then words of eight codes."""
    bag = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, BLOCK)
    shift = tl.arange(0, 8) * 4
    total = tl.zeros([BLOCK, 8], tl.float32)
    for at in range(LOOKUPS):
        record = records + tl.load(indices + bag * LOOKUPS + at).to(tl.int64) * RECORD
        scale = tl.load(record).to(tl.float32, bitcast=True)
        offset = tl.load(record + 1).to(tl.float32, bitcast=True)
        codes = tl.load(record + 2 + word, mask=word < WORDS, other=0)
        levels = (codes[:, None] >> shift[None, :]) & 15
        total += levels.to(tl.float32) * scale + offset
    target = out + ((bag % batch) * tables + bag // batch) * (WORDS * 8)
    column = word[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(target + column, total.to(out.dtype.element_ty), mask=word[:, None] < WORDS)


@triton.jit
def _descend(master, weight, gradient, count, rate, BLOCK: tl.constexpr):
    """SGD on the full-precision copy, and its rounding for the next step, in one pass."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(master + at, mask=inside) - rate * tl.load(gradient + at, mask=inside).to(tl.float32)
    tl.store(master + at, value, mask=inside)
    tl.store(weight + at, value.to(weight.dtype.element_ty), mask=inside)


def sum_bags(
    table: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, *, tables: int, dtype: torch.dtype
) -> torch.Tensor:
    bags, width = len(offsets) - 1, table.shape[1]
    out = torch.empty(bags // tables, tables, width, dtype=dtype, device=table.device)
    _sum_bags[(bags,)](
        table,
        indices,
        offsets,
        out,
        tables,
        bags // tables,
        **_tile(width, len(indices), bags),
        num_warps=_warps(width),
    )
    return out


def add_to_rows(
    target: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, gradient: torch.Tensor, *, scale: float
) -> None:
    batch, tables, width = gradient.shape
    bags = batch * tables
    _add_to_rows[(bags,)](
        target, indices, offsets, gradient.contiguous(), scale, tables, batch,
        **_tile(width, len(indices), bags), num_warps=_warps(width),
    )  # fmt: skip


def count_rows(indices: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """From [tables, batch, lookups] to [tables, batch, rows]."""
    tables, batch, lookups = indices.shape
    out = torch.empty(tables, batch, rows, dtype=dtype, device=indices.device)
    places, bins = triton.next_power_of_2(lookups), triton.next_power_of_2(rows + 1)
    _count_rows[(tables * batch,)](
        indices, out, rows, LOOKUPS=lookups, PLACES=max(places, 32), BINS=max(bins, 32), num_warps=1
    )
    return out


def sum_packed_bags(
    records: torch.Tensor, indices: torch.Tensor, *, tables: int, lookups: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    bags = len(indices) // lookups
    out = torch.empty(bags // tables, tables, width, dtype=dtype, device=records.device)
    words = width // 8
    _sum_packed_bags[(bags,)](
        records, indices, out, tables, bags // tables,
        LOOKUPS=lookups, WORDS=words, BLOCK=triton.next_power_of_2(words), RECORD=records.shape[1], num_warps=1,
    )  # fmt: skip
    return out


def descend(master: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
    count = master.numel()
    _descend[(triton.cdiv(count, UPDATE_BLOCK),)](
        master, weight, gradient.contiguous(), count, rate, BLOCK=UPDATE_BLOCK, num_warps=8
    )


def _tile(width: int, lookups: int, bags: int) -> dict[str, int]:
    mean = max(1, lookups // bags)
    return {
        "WIDTH": width,
        "COLUMNS": triton.next_power_of_2(width),
        "ROWS": min(LOOKUPS_AT_ONCE, triton.next_power_of_2(mean)),
    }


def _warps(width: int) -> int:
    return 1 if width <= 64 else 2 if width <= 128 else 4
