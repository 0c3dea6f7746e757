"""Matrix products: plain and as a linear layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.ops.operator import DTYPE_BYTES, Built, Operator, Shape, ShapeParameter, Work
from stepscope.ops.reference import check_close

if TYPE_CHECKING:
    import torch

SEED = 20211013


class Gemm(Operator):
    name = "gemm"
    summary = "torch.mm: (m, k) · (k, n) → (m, n)"
    parameters = (
        ShapeParameter("m", "rows", 1024, "rows of the left matrix"),
        ShapeParameter("n", "columns", 1024, "columns of the right matrix"),
        ShapeParameter("k", "elements", 1024, "inner dimension"),
    )
    unit = "TFLOP/s"

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        m, n, k = shape["m"], shape["n"], shape["k"]
        size = DTYPE_BYTES[dtype]
        if direction == "forward":
            return Work(flops=2 * m * n * k, bytes=size * (m * k + k * n + m * n))
        # Two products, dC·Bᵀ and Aᵀ·dC: dC, A and B read, dA and dB written.
        return Work(flops=4 * m * n * k, bytes=size * (m * n + 2 * m * k + 2 * k * n))

    def memory_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        m, n, k = shape["m"], shape["n"], shape["k"]
        elements = m * k + k * n + m * n
        return elements * (DTYPE_BYTES[dtype] * (2 if direction == "backward" else 1) + 8)

    def build(self, shape: Shape, dtype: torch.dtype, device: str, direction: str) -> Built:
        import torch

        m, n, k = shape["m"], shape["n"], shape["k"]
        generator = torch.Generator(device).manual_seed(SEED)
        left = torch.randn(m, k, dtype=dtype, device=device, generator=generator)
        right = torch.randn(k, n, dtype=dtype, device=device, generator=generator)
        if direction == "forward":
            out = torch.empty(m, n, dtype=dtype, device=device)
            return Built(
                body=lambda: torch.mm(left, right, out=out),
                check=lambda: check_close("gemm", torch.mm(left, right, out=out), left.double() @ right.double()),
            )
        upstream = torch.randn(m, n, dtype=dtype, device=device, generator=generator)
        product = torch.mm(left.requires_grad_(), right.requires_grad_())

        def gradients() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(product, (left, right), upstream, retain_graph=True)

        def check() -> None:
            left_gradient, right_gradient = gradients()
            with torch.no_grad():
                check_close("gemm backward (left)", left_gradient, upstream.double() @ right.double().T)
                check_close("gemm backward (right)", right_gradient, left.double().T @ upstream.double())

        return Built(body=gradients, check=check)


class Linear(Operator):
    name = "linear"
    summary = "torch.nn.functional.linear with bias: (batch, in) → (batch, out)"
    parameters = (
        ShapeParameter("batch", "rows", 512, "rows of the input"),
        ShapeParameter("in", "elements", 1024, "input features"),
        ShapeParameter("out", "elements", 1024, "output features"),
    )
    unit = "TFLOP/s"

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        batch, wide, out = shape["batch"], shape["in"], shape["out"]
        size = DTYPE_BYTES[dtype]
        if direction == "forward":
            traffic = batch * wide + wide * out + out + batch * out
            return Work(flops=2 * batch * wide * out + batch * out, bytes=size * traffic)
        # Input and weight gradients are a product each; the bias gradient sums the upstream over the batch.
        traffic = batch * out + 2 * batch * wide + 2 * wide * out + out
        return Work(flops=4 * batch * wide * out + batch * out, bytes=size * traffic)

    def memory_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        batch, wide, out = shape["batch"], shape["in"], shape["out"]
        elements = batch * wide + wide * out + out + batch * out
        return elements * (DTYPE_BYTES[dtype] * (2 if direction == "backward" else 1) + 8)

    def build(self, shape: Shape, dtype: torch.dtype, device: str, direction: str) -> Built:
        import torch
        from torch.nn.functional import linear

        batch, wide, out = shape["batch"], shape["in"], shape["out"]
        generator = torch.Generator(device).manual_seed(SEED)
        inputs = torch.randn(batch, wide, dtype=dtype, device=device, generator=generator)
        weight = torch.randn(out, wide, dtype=dtype, device=device, generator=generator) / wide**0.5
        bias = torch.randn(out, dtype=dtype, device=device, generator=generator)
        if direction == "forward":
            return Built(
                body=lambda: linear(inputs, weight, bias),
                check=lambda: check_close(
                    "linear", linear(inputs, weight, bias), linear(inputs.double(), weight.double(), bias.double())
                ),
            )
        upstream = torch.randn(batch, out, dtype=dtype, device=device, generator=generator)
        leaves = (inputs.requires_grad_(), weight.requires_grad_(), bias.requires_grad_())
        product = linear(*leaves)

        def gradients() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(product, leaves, upstream, retain_graph=True)

        def check() -> None:
            input_gradient, weight_gradient, bias_gradient = gradients()
            with torch.no_grad():
                wide_upstream = upstream.double()
                check_close("linear backward (input)", input_gradient, wide_upstream @ weight.double())
                check_close("linear backward (weight)", weight_gradient, wide_upstream.T @ inputs.double())
                check_close("linear backward (bias)", bias_gradient, wide_upstream.sum(0))

        return Built(body=gradients, check=check)
