"""Joint and transducer loss as one function with its own gradient. Loads torch; the CUDA side is in `kernels`.

The logits exist once, in the dtype of the inputs, and become their own gradient in place. Of the log-softmax only the
normaliser and the two entries that the lattice needs are ever formed. The lattice is summed in float64: it is small,
and sums of hundreds of log-probabilities lose in float32 what the gradients need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.bench.workloads.models.rnnt.ootb import HALVES, IMPOSSIBLE, lattice_costs


class Transcripts(NamedTuple):
    """What a batch is to say, and how long it is."""

    labels: Tensor
    """[batch, labels]."""
    frames: Tensor
    label_lengths: Tensor


class Picked(NamedTuple):
    """What the lattice needs of the log-softmax of every cell, [batch, frames, positions]."""

    normaliser: Tensor
    blank: Tensor
    label: Tensor


def joint_transducer_costs(
    encoded: Tensor,
    predicted: Tensor,
    weight: Tensor,
    bias: Tensor,
    transcripts: Transcripts,
    *,
    dropout: float = 0.0,
) -> Tensor:
    """Costs [batch] of logits that are `relu(encoded[t] + predicted[u]) @ weight.T + bias`.

    encoded: [batch, frames, width] and predicted: [batch, labels + 1, width], already projected, of one dtype, in which
    the matmuls are taken; dropout falls on what the relu gives.
    """
    costs: Tensor = _JointTransducer.apply(encoded, predicted, weight, bias, transcripts, dropout)  # type: ignore[no-untyped-call]
    return costs


class _JointTransducer(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        encoded: Tensor,
        predicted: Tensor,
        weight: Tensor,
        bias: Tensor,
        transcripts: Transcripts,
        dropout: float,
    ) -> Tensor:
        parts = _parts_for(encoded)
        shape = (len(encoded), encoded.shape[1], predicted.shape[1])
        cast, cast_bias = weight.to(encoded.dtype), bias.to(encoded.dtype)
        hidden = parts.hide(encoded.contiguous(), predicted.contiguous(), transcripts, dropout)
        logits = torch.addmm(cast_bias, hidden, cast.t())
        picked = Picked(*parts.pick(logits.view(*shape, -1), transcripts))
        sums = parts.sum_alignments(picked, transcripts)
        ctx.parts, ctx.shape, ctx.dropout, ctx.transcripts = parts, shape, dropout, transcripts
        ctx.of_bias = bias.dtype
        ctx.logits = logits
        ctx.save_for_backward(hidden, weight, cast, cast_bias, *picked, *sums)
        return sums[-1].to(picked.normaliser.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, cast, cast_bias, *rest = ctx.saved_tensors
        picked, sums = Picked(*rest[:3]), tuple(rest[3:])
        # A second way back finds the logits overwritten and makes them anew.
        logits = ctx.logits if ctx.logits is not None else torch.addmm(cast_bias, hidden, cast.t())
        ctx.logits = None
        batch, frames, positions = ctx.shape
        parts: Parts = ctx.parts
        cells = logits.view(batch, frames, positions, -1)
        parts.differentiate(cells, picked, sums, ctx.transcripts, upstream.contiguous())

        # One matmul an utterance and a sum: one matmul over all cells has few rows and columns to share out.
        by_utterance = logits.view(batch, frames * positions, -1)
        of_weight = torch.bmm(by_utterance.transpose(1, 2), hidden.view(batch, frames * positions, -1))
        of_bias = by_utterance.sum(dim=(0, 1), dtype=picked.normaliser.dtype).to(ctx.of_bias)
        of_hidden = logits @ cast
        of_encoded, of_predicted = parts.unhide(of_hidden, hidden, ctx.shape, ctx.transcripts, ctx.dropout)
        return of_encoded, of_predicted, of_weight.sum(dim=0, dtype=weight.dtype), of_bias, None, None


class Parts(NamedTuple):
    """The pieces that differ between a CPU and a GPU."""

    hide: Callable[[Tensor, Tensor, Transcripts, float], Tensor]
    """relu of the sums with dropout, [cells, width]; zeros outside of the lengths."""
    pick: Callable[[Tensor, Transcripts], tuple[Tensor, ...]]
    """The fields of `Picked`."""
    sum_alignments: Callable[[Picked, Transcripts], tuple[Tensor, ...]]
    """What `differentiate` needs of all alignments, and last the costs."""
    differentiate: Callable[[Tensor, Picked, tuple[Tensor, ...], Transcripts, Tensor], None]
    """Puts the gradient of the costs in place of the logits."""
    unhide: Callable[[Tensor, Tensor, tuple[int, int, int], Transcripts, float], tuple[Tensor, Tensor]]
    """Gradients of both sides of the sums from that of what `hide` gave."""


def _parts_for(tensor: Tensor) -> Parts:
    if not tensor.is_cuda:
        return ON_CPU
    from stepscope.bench.workloads.models.rnnt import kernels

    return Parts(kernels.hide, kernels.pick, kernels.sum_alignments, kernels.differentiate, kernels.unhide)


def valid_cells(frames: int, positions: int, transcripts: Transcripts) -> Tensor:
    """[batch, frames, positions]."""
    device = transcripts.frames.device
    inside = torch.arange(frames, device=device) < transcripts.frames[:, None]
    said = torch.arange(positions, device=device) <= transcripts.label_lengths[:, None]
    return inside[:, :, None] & said[:, None]


def hide(encoded: Tensor, predicted: Tensor, transcripts: Transcripts, dropout: float) -> Tensor:
    both = torch.relu(encoded[:, :, None] + predicted[:, None])
    both = torch.nn.functional.dropout(both, dropout)
    both = both * valid_cells(encoded.shape[1], predicted.shape[1], transcripts)[..., None]
    return both.view(-1, both.shape[-1])


def pick(logits: Tensor, transcripts: Transcripts) -> Picked:
    wide = logits.float() if logits.dtype in HALVES else logits
    normaliser = wide.logsumexp(dim=-1)
    frames, positions = wide.shape[1:3]
    chosen = transcripts.labels[:, None, :, None].expand(-1, frames, -1, 1)
    label = torch.full_like(normaliser, IMPOSSIBLE)
    label[:, :, :-1] = wide[:, :, :-1].gather(3, chosen).squeeze(3) - normaliser[:, :, :-1]
    last = torch.arange(positions, device=wide.device) >= transcripts.label_lengths[:, None]
    return Picked(normaliser, wide[..., -1] - normaliser, label.masked_fill(last[:, None], IMPOSSIBLE))


def sum_alignments(picked: Picked, transcripts: Transcripts) -> tuple[Tensor, ...]:
    """How often alignments leave each cell by the blank and by the label: the gradient of the costs says it."""
    with torch.enable_grad():
        blank, label = (one.detach().double().requires_grad_() for one in (picked.blank, picked.label))
        costs = lattice_costs(blank, label, transcripts.frames, transcripts.label_lengths)
        by_blank, by_label = torch.autograd.grad(-costs.sum(), (blank, label), materialize_grads=True)
    return by_blank, by_label, costs.detach()


def differentiate(
    logits: Tensor, picked: Picked, sums: tuple[Tensor, ...], transcripts: Transcripts, upstream: Tensor
) -> None:
    """A cell's gradient: how often alignments pass through it, times its softmax, less how often they leave it by the
    blank or by the label."""
    by_blank, by_label = ((one * upstream[:, None, None].double()).to(picked.blank.dtype) for one in sums[:2])
    gradient = (logits - picked.normaliser[..., None]).exp_().mul_((by_blank + by_label)[..., None])
    gradient[..., -1] -= by_blank
    chosen = transcripts.labels[:, None, :, None].expand(-1, logits.shape[1], -1, 1)
    gradient[:, :, :-1].scatter_add_(3, chosen, -by_label[:, :, :-1, None])
    logits.copy_(gradient)


def unhide(
    of_hidden: Tensor, hidden: Tensor, shape: tuple[int, int, int], transcripts: Transcripts, dropout: float
) -> tuple[Tensor, Tensor]:
    # What is zero was cut by the relu, dropped, or lies outside of the lengths: no mask need be kept.
    both = (of_hidden * (hidden > 0) / (1 - dropout)).view(*shape, -1)
    wide = torch.float32 if both.dtype in HALVES else both.dtype
    return both.sum(dim=2, dtype=wide).to(hidden.dtype), both.sum(dim=1, dtype=wide).to(hidden.dtype)


ON_CPU = Parts(hide, pick, sum_alignments, differentiate, unhide)
