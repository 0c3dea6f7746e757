"""The GPU side of the fast loss and of the decoding, in Triton. Loads triton: import it inside functions, for CUDA."""
# What runs on the device is no Python: names of constants are in capitals, values have no types here.
# mypy: ignore-errors
# ruff: noqa: N803, N806, PLR0917, SIM108

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from stepscope.bench.workloads.models.rnnt.fast_loss import Picked, Transcripts

IMPOSSIBLE = tl.constexpr(-1e30)
DECODE_WARPS = 8
DECODE_BLOCK = 64
"""Rows and columns of a weight that a decoding program takes at a time."""


def hide(encoded: Tensor, predicted: Tensor, transcripts: Transcripts, dropout: float) -> Tensor:
    batch, frames, width = encoded.shape
    positions = predicted.shape[1]
    hidden = encoded.new_empty(batch * frames * positions, width)
    # Drawn on the device: a captured step draws another one each time.
    seed = torch.randint(2**30, (1,), device=encoded.device) if dropout else transcripts.frames
    _hide_kernel[(batch * frames,)](
        encoded, predicted, hidden, transcripts.frames, transcripts.label_lengths, seed, dropout,
        frames, positions, width,
        BLOCK_W=triton.next_power_of_2(width), BLOCK_U=8, DROP=dropout > 0, num_warps=4,
    )  # fmt: skip
    return hidden


@triton.jit
def _hide_kernel(
    encoded, predicted, hidden, frames, label_lengths, seed, dropout, T, U, W,
    BLOCK_W: tl.constexpr, BLOCK_U: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """One program a frame of an utterance."""
    row = tl.program_id(0).to(tl.int64)
    b, t = row // T, row % T
    inside = t < tl.load(frames + b)
    said = tl.load(label_lengths + b)
    w = tl.arange(0, BLOCK_W)
    heard = tl.load(encoded + row * W + w, mask=w < W, other=0.0).to(tl.float32)
    for begin in range(0, U, BLOCK_U):
        u = begin + tl.arange(0, BLOCK_U)
        there = (u[:, None] < U) & (w[None, :] < W)
        known = tl.load(predicted + (b * U + u[:, None]) * W + w[None, :], mask=there, other=0.0).to(tl.float32)
        value = tl.maximum(heard[None, :] + known, 0.0)
        if DROP:
            place = ((t * U + u[:, None]) * W + w[None, :]).to(tl.int32)
            kept = tl.rand(tl.load(seed) + b, place) >= dropout
            value = tl.where(kept, value / (1.0 - dropout), 0.0)
        value = tl.where(inside & (u[:, None] <= said), value, 0.0)
        tl.store(hidden + (row * U + u[:, None]) * W + w[None, :], value.to(hidden.dtype.element_ty), mask=there)


def pick(logits: Tensor, transcripts: Transcripts) -> tuple[Tensor, ...]:
    batch, frames, positions, classes = logits.shape
    shape = (batch, frames, positions)
    picked = tuple(torch.empty(shape, dtype=torch.float32, device=logits.device) for _ in range(3))
    _pick_kernel[(batch * frames * positions,)](
        logits, transcripts.labels, transcripts.frames, transcripts.label_lengths, *picked,
        frames, positions, classes, transcripts.labels.stride(0),
        BLOCK=triton.next_power_of_2(classes), num_warps=2,
    )  # fmt: skip
    return picked


@triton.jit
def _pick_kernel(
    logits, labels, frames, label_lengths, normaliser, blank, label, T, U, V, LABEL_STRIDE, BLOCK: tl.constexpr
):
    """One program a cell; nothing is written outside of the lengths, and nothing reads there."""
    cell = tl.program_id(0).to(tl.int64)
    u = cell % U
    t = (cell // U) % T
    b = cell // (U * T)
    said = tl.load(label_lengths + b)
    if (t < tl.load(frames + b)) & (u <= said):
        v = tl.arange(0, BLOCK)
        row = tl.load(logits + cell * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
        top = tl.max(row, 0)
        total = top + tl.log(tl.sum(tl.exp(row - top), 0))
        tl.store(normaliser + cell, total)
        tl.store(blank + cell, tl.load(logits + cell * V + V - 1).to(tl.float32) - total)
        chosen = tl.load(labels + b * LABEL_STRIDE + u, mask=u < said, other=0)
        next_one = tl.load(logits + cell * V + chosen).to(tl.float32) - total
        tl.store(label + cell, tl.where(u < said, next_one, IMPOSSIBLE))


def sum_alignments(picked: Picked, transcripts: Transcripts) -> tuple[Tensor, ...]:
    """For each cell the sum over all ways to it, and that over all ways from it to the end; then the costs."""
    batch, frames, positions = picked.blank.shape
    wide = {"dtype": torch.float64, "device": picked.blank.device}
    sums = *(torch.empty(batch, frames, positions, **wide) for _ in range(2)), torch.empty(batch, **wide)
    _lattice_kernel[(batch, 2)](
        picked.blank, picked.label, *sums, transcripts.frames, transcripts.label_lengths, frames, positions,
        BLOCK=triton.next_power_of_2(positions), num_warps=1,
    )  # fmt: skip
    return sums


@triton.jit
def _join_logs(a, b):
    top = tl.maximum(a, b)
    return top + tl.log(1.0 + tl.exp(tl.minimum(a, b) - top))


@triton.jit
def _chain(step, value, next_step, next_value):
    """Two neighbours in a row as one: what it costs to cross both, and what arrives behind the second."""
    return step + next_step, _join_logs(value + next_step, next_value)


@triton.jit
def _lattice_kernel(blank, label, alpha, beta, costs, frames, label_lengths, T, U, BLOCK: tl.constexpr):
    """One program an utterance and direction, one row (frame) after the other. Within a row each cell needs its
    neighbour: an associative scan."""
    b = tl.program_id(0).to(tl.int64)
    heard, said = tl.load(frames + b), tl.load(label_lengths + b)
    place = tl.arange(0, BLOCK)
    inside = place <= said
    origin = b * T * U
    # What comes from the row before: there, the way begins in the corner.
    arriving = tl.where(place == 0, 0.0, IMPOSSIBLE).to(tl.float64)
    if tl.program_id(1) == 0:
        for t in range(heard):
            row = origin + t * U + place
            step = tl.load(label + row - 1, mask=inside & (place > 0), other=0.0).to(tl.float64)
            _, here = tl.associative_scan((step, arriving), 0, _chain)
            tl.store(alpha + row, here, mask=inside)
            arriving = here + tl.load(blank + row, mask=inside, other=IMPOSSIBLE).to(tl.float64)
        tl.store(costs + b, -tl.sum(tl.where(place == said, arriving, 0.0), 0))
    else:
        for i in range(heard):
            row = origin + (heard - 1 - i) * U + said - place
            stay = arriving + tl.load(blank + row, mask=inside, other=IMPOSSIBLE).to(tl.float64)
            step = tl.load(label + row, mask=inside & (place > 0), other=0.0).to(tl.float64)
            _, arriving = tl.associative_scan((step, stay), 0, _chain)
            tl.store(beta + row, arriving, mask=inside)


def differentiate(
    logits: Tensor, picked: Picked, sums: tuple[Tensor, ...], transcripts: Transcripts, upstream: Tensor
) -> None:
    batch, frames, positions, classes = logits.shape
    _gradient_kernel[(batch * frames * positions,)](
        logits, *picked, *sums, upstream, transcripts.labels, transcripts.frames, transcripts.label_lengths,
        frames, positions, classes, transcripts.labels.stride(0),
        BLOCK=triton.next_power_of_2(classes), num_warps=2,
    )  # fmt: skip


@triton.jit
def _gradient_kernel(
    logits, normaliser, blank, label, alpha, beta, costs, upstream, labels, frames, label_lengths,
    T, U, V, LABEL_STRIDE, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a cell, in place."""
    cell = tl.program_id(0).to(tl.int64)
    u = cell % U
    t = (cell // U) % T
    b = cell // (U * T)
    heard, said = tl.load(frames + b), tl.load(label_lengths + b)
    v = tl.arange(0, BLOCK)
    if (t < heard) & (u <= said):
        begun = tl.load(alpha + cell) + tl.load(costs + b)
        last = t == heard - 1
        outside = tl.where(u == said, 0.0, IMPOSSIBLE).to(tl.float64)
        after_blank = tl.where(last, outside, tl.load(beta + cell + U, mask=t < heard - 1, other=0.0))
        after_label = tl.load(beta + cell + 1, mask=u < said, other=IMPOSSIBLE)
        by_blank = tl.exp((begun + tl.load(blank + cell) + after_blank).to(tl.float32))
        by_label = tl.exp((begun + tl.load(label + cell) + after_label).to(tl.float32))
        share = tl.load(upstream + b)
        chosen = tl.load(labels + b * LABEL_STRIDE + u, mask=u < said, other=0)
        row = tl.load(logits + cell * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(row - tl.load(normaliser + cell)) * (by_blank + by_label)
        gradient -= tl.where(v == V - 1, by_blank, 0.0)
        gradient -= tl.where(v == chosen, by_label, 0.0)
        tl.store(logits + cell * V + v, (gradient * share).to(logits.dtype.element_ty), mask=v < V)
    else:
        tl.store(logits + cell * V + v, tl.zeros([BLOCK], logits.dtype.element_ty), mask=v < V)


def unhide(
    of_hidden: Tensor, hidden: Tensor, shape: tuple[int, int, int], transcripts: Transcripts, dropout: float
) -> tuple[Tensor, Tensor]:
    batch, frames, positions = shape
    width = hidden.shape[1]
    of_encoded = hidden.new_empty(batch, frames, width)
    of_predicted = hidden.new_empty(batch, positions, width)
    how = {"BLOCK_W": triton.next_power_of_2(width), "BLOCK": 8, "num_warps": 4}
    scale = 1.0 / (1.0 - dropout)
    lengths = transcripts.frames, transcripts.label_lengths
    _sum_kernel[(batch * frames,)](
        of_hidden, hidden, of_encoded, *lengths, scale, frames, positions, width, OVER_FRAMES=False, **how
    )
    _sum_kernel[(batch * positions,)](
        of_hidden, hidden, of_predicted, *lengths, scale, frames, positions, width, OVER_FRAMES=True, **how
    )
    return of_encoded, of_predicted


@triton.jit
def _sum_kernel(
    of_hidden, hidden, out, frames, label_lengths, scale, T, U, W,
    BLOCK_W: tl.constexpr, BLOCK: tl.constexpr, OVER_FRAMES: tl.constexpr,
):  # fmt: skip
    """One program a frame (sums over positions) or a position (sums over frames); only valid cells are read."""
    own = tl.program_id(0).to(tl.int64)
    N = U if OVER_FRAMES else T
    b, mine = own // N, own % N
    heard, said = tl.load(frames + b), tl.load(label_lengths + b) + 1
    w = tl.arange(0, BLOCK_W)
    total = tl.zeros([BLOCK_W], tl.float32)
    count = heard if OVER_FRAMES else said
    limit = said if OVER_FRAMES else heard
    count = tl.where(mine < limit, count, 0)
    for begin in range(0, count, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        if OVER_FRAMES:
            cell = (b * T + other) * U + mine
        else:
            cell = (b * T + mine) * U + other
        there = (other[:, None] < count) & (w[None, :] < W)
        at = cell[:, None] * W + w[None, :]
        value = tl.load(of_hidden + at, mask=there, other=0.0).to(tl.float32)
        shown = tl.load(hidden + at, mask=there, other=0.0)
        total += tl.sum(tl.where(shown > 0, value, 0.0), 0)
    tl.store(out + own * W + w, (total * scale).to(out.dtype.element_ty), mask=w < W)


def decode(
    encoded: Tensor, lengths: Tensor, weights: dict[str, Tensor], *, most_a_frame: int, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `fast_decoding.decode`, in one kernel: each utterance is a program that runs its own loop to its own end."""
    batch, frames, joint = encoded.shape
    classes = weights["output"].shape[0]
    width = weights["recurrent_0"].shape[1]
    floats = {"dtype": torch.float32, "device": encoded.device}
    labels, scores = torch.full((batch, most), -1.0, **floats), torch.zeros(batch, most, **floats)
    counts = torch.empty(batch, **floats)
    # Hidden and cell states of two layers, twice: a step reads one half and writes the other.
    scratch = torch.zeros(batch, 8 * width + joint, **floats)
    _decode_kernel[(batch,)](
        encoded, lengths, weights["table"], weights["recurrent_0"], weights["inputs_1"], weights["recurrent_1"],
        weights["bias_1"], weights["projection"], weights["output"], weights["output_bias"],
        scratch, labels, scores, counts, frames, most, most_a_frame,
        P=width, J=joint, V=classes, BLOCK_P=_divisor(width), BLOCK_J=_divisor(joint),
        WHOLE_J=triton.next_power_of_2(joint), WHOLE_V=triton.next_power_of_2(classes), num_warps=DECODE_WARPS,
    )  # fmt: skip
    return labels, scores, counts


def _divisor(width: int) -> int:
    """The largest power of two up to the block that divides a width."""
    return min(DECODE_BLOCK, width & -width)


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _gates(weight, vector, n, P: tl.constexpr, BLOCK: tl.constexpr, i, f, g, o):
    """Adds to the products of the four gates of units `n`, which are not summed up yet, what a vector brings through a
    weight [4 P, P]. Unrolled, so that many loads are under way at once."""
    for begin in tl.static_range(0, P, BLOCK):
        k = begin + tl.arange(0, BLOCK)
        x = tl.load(vector + k)[None, :]
        at = weight + n[:, None] * P + k[None, :]
        i += tl.load(at).to(tl.float32) * x
        f += tl.load(at + P * P).to(tl.float32) * x
        g += tl.load(at + 2 * P * P).to(tl.float32) * x
        o += tl.load(at + 3 * P * P).to(tl.float32) * x
    return i, f, g, o


@triton.jit
def _layer(base, inputs, x, recurrent, old, new, P: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    """One step of an LSTM layer: `base` holds what reaches the gates from outside; states lie as hidden then cell."""
    for begin in range(0, P, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        none = tl.zeros([BLOCK, BLOCK], tl.float32)
        i, f, g, o = _gates(recurrent, old, n, P, BLOCK, none, none, none, none)
        if not FIRST:
            i, f, g, o = _gates(inputs, x, n, P, BLOCK, i, f, g, o)
        write = tl.sigmoid(tl.sum(i, 1) + tl.load(base + n).to(tl.float32))
        keep = tl.sigmoid(tl.sum(f, 1) + tl.load(base + P + n).to(tl.float32))
        fresh = _tanh(tl.sum(g, 1) + tl.load(base + 2 * P + n).to(tl.float32))
        show = tl.sigmoid(tl.sum(o, 1) + tl.load(base + 3 * P + n).to(tl.float32))
        cell = keep * tl.load(old + P + n) + write * fresh
        tl.store(new + P + n, cell)
        tl.store(new + n, show * _tanh(cell))
    # The next reader needs all units, which other threads wrote.
    tl.debug_barrier()


@triton.jit
def _predict(
    symbol, turn, table, recurrent_0, inputs_1, recurrent_1, bias_1, projection, states, projected,
    P: tl.constexpr, J: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """The prediction network after one more symbol, and its share of the joint."""
    old = states + (turn % 2) * 4 * P
    new = states + (1 - turn % 2) * 4 * P
    _layer(table + symbol * 4 * P, inputs_1, old, recurrent_0, old, new, P, BLOCK_P, True)
    _layer(bias_1, inputs_1, new, recurrent_1, old + 2 * P, new + 2 * P, P, BLOCK_P, False)
    for begin in range(0, J, BLOCK_J):
        j = begin + tl.arange(0, BLOCK_J)
        total = tl.zeros([BLOCK_J, BLOCK_P], tl.float32)
        for inner in tl.static_range(0, P, BLOCK_P):
            k = inner + tl.arange(0, BLOCK_P)
            x = tl.load(new + 2 * P + k)[None, :]
            total += tl.load(projection + j[:, None] * P + k[None, :]).to(tl.float32) * x
        tl.store(projected + j, tl.sum(total, 1))
    tl.debug_barrier()


@triton.jit
def _decode_kernel(
    encoded, lengths, table, recurrent_0, inputs_1, recurrent_1, bias_1, projection, output, output_bias,
    scratch, labels, scores, counts, T, MOST, MOST_A_FRAME,
    P: tl.constexpr, J: tl.constexpr, V: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_J: tl.constexpr,
    WHOLE_J: tl.constexpr, WHOLE_V: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    states = scratch + b * (8 * P + J)
    projected = states + 8 * P
    heard = tl.load(lengths + b).to(tl.int32)
    j, v = tl.arange(0, WHOLE_J), tl.arange(0, WHOLE_V)
    bias = tl.load(output_bias + v, mask=v < V, other=0.0).to(tl.float32)
    turn = 0
    # The last row of the table stands for what comes before the first label.
    _predict(
        V - 1, turn, table, recurrent_0, inputs_1, recurrent_1, bias_1, projection, states, projected,
        P, J, BLOCK_P, BLOCK_J,
    )  # fmt: skip
    t = 0
    here = 0
    while t < heard:
        frame = tl.load(encoded + (b * T + t) * J + j, mask=j < J, other=0.0).to(tl.float32)
        known = tl.load(projected + j, mask=j < J, other=0.0)
        hidden = tl.maximum(frame + known, 0.0)
        weight = tl.load(output + v[:, None] * J + j[None, :], mask=(v[:, None] < V) & (j[None, :] < J), other=0.0)
        logits = tl.sum(weight.to(tl.float32) * hidden[None, :], 1) + bias
        logits = tl.where(v < V, logits, float("-inf"))
        # Logits that are no numbers must not lead out of the table.
        best = tl.minimum(tl.argmax(logits, 0), V - 1)
        if (best != V - 1) & (turn < MOST):
            tl.store(labels + b * MOST + turn, best.to(tl.float32))
            tl.store(scores + b * MOST + turn, tl.max(logits, 0))
            turn += 1
            here += 1
            _predict(
                best, turn, table, recurrent_0, inputs_1, recurrent_1, bias_1, projection, states, projected,
                P, J, BLOCK_P, BLOCK_J,
            )  # fmt: skip
            if here == MOST_A_FRAME:
                t += 1
                here = 0
        else:
            t += 1
            here = 0
    tl.store(counts + b, turn.to(tl.float32))
