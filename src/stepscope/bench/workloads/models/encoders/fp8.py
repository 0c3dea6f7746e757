"""Linear layers whose matmuls are taken between 8-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from stepscope.bench.workloads.precision import to_device
from stepscope.bench.workloads.protocol import Mode, Precision, Setting, Task

KIND = torch.float8_e4m3fn
SLOPES = torch.float8_e5m2
"""Dtype of gradients: they have a larger range, and need less of a mantissa."""
EVEN = 16
"""Matrices whose sides are no multiples of this are not multiplied in 8 bits by the device."""
SMALLEST = 1e-12
"""Least scale: what is nothing but zeros has one, too."""
HEADROOM = 1.5
"""Inputs may be so many times as large as those that were looked at, before they are cut off."""
EXAMPLES, EXAMPLES_SEED = 16, 99
"""That are looked at; others than those of any measurement."""


Ranges = dict[nn.Module, torch.Tensor]
"""The largest input of each linear layer."""


def find_ranges(plain: Task, module: nn.Module, *, mode: Mode, precision: Precision) -> Ranges | None:
    """For inference in this precision; None else. Training finds them as it goes: they change with the weights."""
    if precision != "fp8" or mode == "train":
        return None
    batch = plain.make_batch(EXAMPLES, seed=EXAMPLES_SEED, mode="infer")
    there = to_device(batch, Setting("infer", "fp32", str(next(module.parameters()).device)))
    return find_largest_inputs(module, lambda: plain.infer(module, there))


def find_largest_inputs(plain: nn.Module, read: Callable[[], Any]) -> Ranges:
    """By letting a plain module read some examples."""
    largest: dict[nn.Module, torch.Tensor] = {}

    def note(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen = inputs[0].detach().abs().amax().float()
        largest[layer] = torch.maximum(seen, largest.get(layer, seen))

    hooks = [one.register_forward_pre_hook(note) for one in plain.modules() if isinstance(one, nn.Linear)]
    try:
        with torch.inference_mode():
            read()
    finally:
        for hook in hooks:
            hook.remove()
    return {layer: one.clone() for layer, one in largest.items()}


class Fp8Linear(nn.Module):
    """Inputs and weights have one scale each, known beforehand, so that casting an input needs no look at all of it.

    Weights and scales are kept as bits of whole numbers, so that a cast of the module leaves them alone.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, *, largest_input: torch.Tensor) -> None:
        super().__init__()
        weight_scale = scale_for(weight.detach().abs().amax())
        self.register_buffer("weight_bits", quantise(weight.detach(), weight_scale).view(torch.uint8))
        self.register_buffer("scale_bits", _bits(weight_scale))
        self.register_buffer("input_scale_bits", _bits(scale_for(HEADROOM * largest_input)))
        self.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        input_scale = self.get_buffer("input_scale_bits").view(torch.float32)
        values = quantise(inputs.reshape(-1, inputs.shape[-1]), input_scale)
        weight_scale = self.get_buffer("scale_bits").view(torch.float32)
        weight = _Narrow(self.get_buffer("weight_bits").view(KIND), weight_scale)
        product = _multiply(_Narrow(values, input_scale), weight, bias=self.bias, fast=True)
        return product.view(*inputs.shape[:-1], -1)


class Fp8TrainedLinear(nn.Module):
    """Holds the plain weights; each matmul of a step is taken in 8 bits, forward and backward.

    Every tensor has one scale, found as it comes.
    """

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        if plain.in_features % EVEN or plain.out_features % EVEN:
            raise NotImplementedError(f"fp8 wants widths that are multiples of {EVEN}: {plain}")
        self.weight = plain.weight
        self.bias = plain.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        count = rows.shape[0]
        # Backward sums over rows, whose number must be even, too.
        padded = nn.functional.pad(rows, (0, 0, 0, -count % EVEN))
        product: torch.Tensor = _Fp8Matmul.apply(padded, self.weight)  # type: ignore[no-untyped-call]
        return product[:count].view(*inputs.shape[:-1], -1) + self.bias.to(product.dtype)


class _Fp8Matmul(torch.autograd.Function):
    """[rows, in] × [out, in] → [rows, out], in bfloat16."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return _multiply(_narrow(inputs, KIND), _narrow(weight, KIND), fast=True)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, weight = ctx.saved_tensors
        narrow = _narrow(slope, SLOPES)
        back = _multiply(narrow, _turn(_narrow(weight, KIND)), fast=False)
        change = _multiply(_turn(narrow), _turn(_narrow(inputs, KIND)), fast=False)
        return back.to(inputs.dtype), change.to(weight.dtype)


class _Narrow(NamedTuple):
    values: torch.Tensor
    scale: torch.Tensor


def _narrow(values: torch.Tensor, kind: torch.dtype) -> _Narrow:
    scale = scale_for(values.detach().abs().amax(), kind)
    return _Narrow(quantise(values.detach(), scale, kind), scale)


def _turn(matrix: _Narrow) -> _Narrow:
    return _Narrow(matrix.values.t().contiguous(), matrix.scale)


def _multiply(left: _Narrow, right: _Narrow, *, fast: bool, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[a, k] × [b, k] → [a, b]; the device wants both with `k` next to each other in memory."""
    multiply = torch._scaled_mm if left.values.is_cuda else multiply_slowly
    return multiply(
        left.values.contiguous(), right.values.contiguous().t(), scale_a=left.scale, scale_b=right.scale, bias=bias,
        out_dtype=torch.bfloat16, use_fast_accum=fast,
    )  # fmt: skip


def scale_for(largest: torch.Tensor, kind: torch.dtype = KIND) -> torch.Tensor:
    return largest.float().clamp(min=SMALLEST) / torch.finfo(kind).max


def quantise(values: torch.Tensor, scale: torch.Tensor, kind: torch.dtype = KIND) -> torch.Tensor:
    """Value × scale is the original again, or the largest there is."""
    most = torch.finfo(kind).max
    return (values.float() / scale).clamp(-most, most).to(kind)


def multiply_slowly(
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """The same matmul where the device has none for 8-bit floats."""
    product = (left.float() @ right.float()) * scale_a * scale_b
    return (product if bias is None else product + bias.float()).to(out_dtype)


def _bits(scale: torch.Tensor) -> torch.Tensor:
    return scale.reshape(1).view(torch.int32)
