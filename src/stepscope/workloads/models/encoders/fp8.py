"""Linear layers whose products are taken between 8-bit floats."""

from __future__ import annotations

import torch
from torch import nn

KIND = torch.float8_e4m3fn
LARGEST = torch.finfo(KIND).max
SMALLEST = 1e-12
"""A row of zeros has some scale, too."""


class Fp8Linear(nn.Module):
    """Each row of inputs and each output's weights have a scale of their own, found from their largest value.

    Weights and scales are kept as bits of whole numbers, so that a cast of the module leaves them alone.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        values, scales = quantise(weight.detach())
        self.register_buffer("weight_bits", values.view(torch.uint8))
        self.register_buffer("scale_bits", scales.t().contiguous().view(torch.int32))
        self.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values, scales = quantise(inputs.reshape(-1, inputs.shape[-1]))
        weight = self.get_buffer("weight_bits").view(KIND).t()
        weight_scales = self.get_buffer("scale_bits").view(torch.float32)
        multiply = torch._scaled_mm if inputs.is_cuda else multiply_slowly
        product = multiply(
            values, weight, scale_a=scales, scale_b=weight_scales, bias=self.bias, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip
        return product.view(*inputs.shape[:-1], -1)


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and one scale a row, as a column: value × scale is the row again."""
    wide = rows.float()
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    return (wide / scales).clamp(-LARGEST, LARGEST).to(KIND), scales


def multiply_slowly(
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """The same product where the device has none for 8-bit floats."""
    product = (left.float() @ right.float()) * scale_a * scale_b + bias.float()
    return product.to(out_dtype)
