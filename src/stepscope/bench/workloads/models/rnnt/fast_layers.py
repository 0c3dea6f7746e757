"""Recurrent stacks of training, in half precision where autocast asks for it. Loads torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stepscope.bench.workloads.models.rnnt.fast_decoding import PERSISTENT_MULTIPLE
from stepscope.bench.workloads.models.rnnt.network import Rnnt, stack_pairs

GRADIENT_SCALE = 64.0
"""Of gradients inside of the half-precision stacks, a power of two: float16 has no very small numbers."""


def encode(network: Rnnt, features: Tensor) -> Tensor:
    """As the plain encoder."""
    encoder = network.encoder
    hidden = _run_stack(encoder.before, features)
    hidden = stack_pairs(encoder.dropout(hidden))
    return encoder.dropout(_leave_half(_run_stack(encoder.after, hidden)))  # type: ignore[no-any-return]


def predict(network: Rnnt, labels: Tensor) -> Tensor:
    """As the plain prediction network."""
    prediction = network.prediction
    embedded: Tensor = _Lookup.apply(prediction.embedding.weight, labels)  # type: ignore[no-untyped-call]
    if _in_half(embedded):
        embedded = _scale_gradient(embedded, 1 / GRADIENT_SCALE)
    hidden = _run_stack(prediction.recurrent, F.pad(embedded, (0, 0, 1, 0)))
    return prediction.dropout(_leave_half(hidden))  # type: ignore[no-any-return]


class _Lookup(torch.autograd.Function):
    """Rows of a table; the gradient is added up in place, without sorting, which a captured step could not repeat."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.like = table
        return F.embedding(indices, table)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        gradient = torch.zeros_like(ctx.like)
        rows = upstream.reshape(-1, upstream.shape[-1]).to(gradient.dtype)
        return gradient.index_add_(0, indices.reshape(-1), rows), None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream * ctx.factor, None


def _scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    scaled: Tensor = _ScaleGradient.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return scaled


def _in_half(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.is_autocast_enabled("cuda")


def _leave_half(hidden: Tensor) -> Tensor:
    return _scale_gradient(hidden.float(), GRADIENT_SCALE) if _in_half(hidden) else hidden


def _run_stack(lstm: nn.LSTM, hidden: Tensor) -> Tensor:
    """[batch, time, width] through all layers."""
    if not _in_half(hidden):
        return lstm(hidden)[0]  # type: ignore[no-any-return]
    hidden = hidden.transpose(0, 1)
    for number in range(lstm.num_layers):
        if number:
            hidden = F.dropout(hidden, lstm.dropout, lstm.training)
        hidden = _run_layer(lstm, number, hidden)
    return hidden.transpose(0, 1)


def _run_layer(lstm: nn.LSTM, number: int, hidden: Tensor) -> Tensor:
    """One layer in float16 by one call, [time, batch, width]: torch takes cuDNN's persistent kernels only for a single
    layer of float16 whose input is a multiple of 128 wide (and batches that are multiples of 8, up to 128)."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    weights = [_scale_gradient(getattr(lstm, f"{name}_l{number}"), 1 / GRADIENT_SCALE) for name in names]
    missing = -hidden.shape[-1] % PERSISTENT_MULTIPLE
    if missing:
        hidden, weights[0] = F.pad(hidden, (0, missing)), F.pad(weights[0], (0, missing))
    state = hidden.new_zeros(1, hidden.shape[1], lstm.hidden_size)
    # Autocast lays the cast weights out as cuDNN wants them.
    with torch.autocast(hidden.device.type, dtype=torch.float16, cache_enabled=False):
        output: Tensor = torch.lstm(hidden, [state, state], weights, True, 1, 0.0, lstm.training, False, False)[0]
    return output
