"""Grouped convolutions over clips stored channels last, as matmuls of one window position at a time.

Imports torch and triton: load it on CUDA only. Tensors are [N, T, H, W, C] in memory. `tiles` are the weights as
[groups, window positions, channels in, channels out], so that each program reads plain matrices.
"""

# Kernels are written in Triton's dialect: constants in capitals, everything an argument, no annotations.
# ruff: noqa: N803, PLR0917
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LAST = torch.channels_last_3d
ROWS = 128
"""Output positions of one program."""
WIDEST = 128
PROGRAMS = 132 * 8
"""About how many keep a large device busy; sums over positions are split to reach it."""


@triton.jit  # type: ignore[untyped-decorator]
def _source(row, tap, frames, height, width, src_frames, src_height, src_width, KH: tl.constexpr, KW: tl.constexpr,
            ST: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
            TRANSPOSED: tl.constexpr):  # fmt: skip
    """Where a window position of an output row reads, and whether that lies inside."""
    x = row % width
    y = (row // width) % height
    t = (row // (width * height)) % frames
    n = row // (width * height * frames)
    dt = tap // (KH * KW)
    dy = (tap // KW) % KH
    dx = tap % KW
    if TRANSPOSED:
        t, y, x = t + PT - dt, y + PH - dy, x + PW - dx
        inside = (t >= 0) & (y >= 0) & (x >= 0) & (t % ST == 0) & (y % SH == 0) & (x % SW == 0)
        t, y, x = t // ST, y // SH, x // SW
    else:
        t, y, x = t * ST - PT + dt, y * SH - PH + dy, x * SW - PW + dx
        inside = (t >= 0) & (y >= 0) & (x >= 0)
    inside = inside & (t < src_frames) & (y < src_height) & (x < src_width)
    place = ((n.to(tl.int64) * src_frames + t) * src_height + y) * src_width + x
    return place, inside


@triton.jit  # type: ignore[untyped-decorator]
def _gather(src, tiles, dst, rows, frames, height, width, src_frames, src_height, src_width, GROUPS: tl.constexpr,
            CIN: tl.constexpr, COUT: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
            ST: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
            TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """dst[row, group, :] = sum over window positions of src[source, group, :] · tiles[group, position]."""
    columns: tl.constexpr = GROUPS * ((COUT + BN - 1) // BN)
    # Programs of one group after another read neighbouring channels of the same rows.
    pid = tl.program_id(0)
    column = pid % columns
    group = column % GROUPS
    out = (column // GROUPS) * BN + tl.arange(0, BN)
    row = (pid // columns) * BM + tl.arange(0, BM)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for tap in range(KT * KH * KW):
        place, inside = _source(row, tap, frames, height, width, src_frames, src_height, src_width, KH, KW,
                                ST, SH, SW, PT, PH, PW, TRANSPOSED)  # fmt: skip
        inside = inside & (row < rows)
        for start in range(0, CIN, BK):
            into = start + tl.arange(0, BK)
            a = tl.load(src + place[:, None] * (GROUPS * CIN) + group * CIN + into[None, :],
                        mask=inside[:, None] & (into[None, :] < CIN), other=0.0)  # fmt: skip
            b = tl.load(tiles + ((group * (KT * KH * KW) + tap) * CIN + into[:, None]) * COUT + out[None, :],
                        mask=(into[:, None] < CIN) & (out[None, :] < COUT), other=0.0)  # fmt: skip
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(dst + row.to(tl.int64)[:, None] * (GROUPS * COUT) + group * COUT + out[None, :],
             acc.to(dst.dtype.element_ty), mask=(row[:, None] < rows) & (out[None, :] < COUT))  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _correlate(src, slope, parts, rows, chunk, frames, height, width, src_frames, src_height, src_width,
               GROUPS: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr,
               KW: tl.constexpr, ST: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PT: tl.constexpr,
               PH: tl.constexpr, PW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """parts[split, group, position] = sum over the split's rows of src[source, group, :]ᵀ · slope[row, group, :]."""
    taps: tl.constexpr = KT * KH * KW
    outs: tl.constexpr = (COUT + BN - 1) // BN
    intos: tl.constexpr = (CIN + BK - 1) // BK
    # Programs of one split after another read the same rows.
    pid = tl.program_id(0)
    group = pid % GROUPS
    tap = (pid // GROUPS) % taps
    out = ((pid // (GROUPS * taps)) % outs) * BN + tl.arange(0, BN)
    into = ((pid // (GROUPS * taps * outs)) % intos) * BK + tl.arange(0, BK)
    split = pid // (GROUPS * taps * outs * intos)
    acc = tl.zeros((BK, BN), dtype=tl.float32)
    for start in range(split * chunk, tl.minimum((split + 1) * chunk, rows), BM):
        row = start + tl.arange(0, BM)
        place, inside = _source(row, tap, frames, height, width, src_frames, src_height, src_width, KH, KW,
                                ST, SH, SW, PT, PH, PW, False)  # fmt: skip
        inside = inside & (row < rows)
        a = tl.load(src + place[:, None] * (GROUPS * CIN) + group * CIN + into[None, :],
                    mask=inside[:, None] & (into[None, :] < CIN), other=0.0)  # fmt: skip
        b = tl.load(slope + row.to(tl.int64)[:, None] * (GROUPS * COUT) + group * COUT + out[None, :],
                    mask=inside[:, None] & (out[None, :] < COUT), other=0.0)  # fmt: skip
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
    tl.store(parts + (((split * GROUPS + group) * taps + tap) * CIN + into[:, None]) * COUT + out[None, :], acc,
             mask=(into[:, None] < CIN) & (out[None, :] < COUT))  # fmt: skip


def forward(
    x: Tensor, weight: Tensor, shape: tuple[int, ...], stride: list[int], padding: list[int], groups: int, tf32: bool
) -> Tensor:
    """The outputs, which have `shape`."""
    tiles = make_tiles(weight, groups).to(x.dtype)
    return gather(x, tiles, shape, weight.shape[2:], stride, padding, transposed=False, tf32=tf32)


def backward_input(
    slope: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], groups: int, tf32: bool
) -> Tensor:
    tiles = make_tiles(weight, groups).transpose(2, 3).contiguous().to(x.dtype)
    return gather(slope.to(x.dtype), tiles, x.shape, weight.shape[2:], stride, padding, transposed=True, tf32=tf32)


def make_tiles(weight: Tensor, groups: int) -> Tensor:
    """[groups, window positions, channels in, channels out]."""
    out, wide = weight.shape[:2]
    return weight.reshape(groups, out // groups, wide, -1).permute(0, 3, 2, 1).contiguous()


def gather(
    src: Tensor,
    tiles: Tensor,
    shape: Any,
    window: Any,
    stride: list[int],
    padding: list[int],
    *,
    transposed: bool,
    tf32: bool,
) -> Tensor:
    src = src.contiguous(memory_format=LAST)
    dst = torch.empty(shape, dtype=src.dtype, device=src.device, memory_format=LAST)
    groups, _, into, out = tiles.shape
    count, _, frames, height, width = shape
    rows = count * frames * height * width
    across = min(block(out), WIDEST)
    grid = (triton.cdiv(rows, ROWS) * groups * triton.cdiv(out, across),)
    _gather[grid](
        src, tiles, dst, rows, frames, height, width, *src.shape[2:], groups, into, out, *window, *stride, *padding,
        transposed, ROWS, across, min(block(into), 64), _products(tf32),
        num_warps=8 if across >= 128 else 4, num_stages=3,
    )  # fmt: skip
    return dst


def backward_weight(
    slope: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], groups: int, tf32: bool
) -> Tensor:
    x = x.contiguous(memory_format=LAST)
    slope = slope.to(x.dtype).contiguous(memory_format=LAST)
    count, outs, frames, height, width = slope.shape
    into, out = weight.shape[1], outs // groups
    window = weight.shape[2:]
    taps = window.numel()
    across, down = min(block(out), WIDEST), min(block(into), 64)
    rows = count * frames * height * width
    programs = groups * taps * triton.cdiv(out, across) * triton.cdiv(into, down)
    splits = max(1, min(PROGRAMS // programs, triton.cdiv(rows, 4 * ROWS)))
    chunk = triton.cdiv(rows, splits * ROWS) * ROWS
    parts = torch.empty((splits, groups, taps, into, out), dtype=torch.float32, device=x.device)
    _correlate[(programs * splits,)](
        x, slope, parts, rows, chunk, frames, height, width, *x.shape[2:], groups, into, out, *window, *stride,
        *padding, ROWS // 2, across, down, _products(tf32), num_warps=4, num_stages=3,
    )  # fmt: skip
    return parts.sum(0).permute(0, 3, 2, 1).reshape(weight.shape).to(weight.dtype).contiguous()


def block(channels: int) -> int:
    """Matrix units take no fewer than 16."""
    return max(16, int(triton.next_power_of_2(channels)))


def _products(tf32: bool) -> str:
    """How float32 is rounded; halves are multiplied exactly in any case."""
    return "tf32" if tf32 else "ieee"
