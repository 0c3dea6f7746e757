"""Element by element: activations and conversions.

Operations are counted one for each addition, multiplication, comparison or function (exp, tanh, erf …) of an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from stepscope.bench.ops.operator import (
    DTYPE_BYTES,
    FLOATS,
    Call,
    Operator,
    Parameter,
    Shape,
    UnsupportedError,
    Work,
)
from stepscope.bench.ops.reference import seeded_like
from stepscope.run.producer import WrongResultError

if TYPE_CHECKING:
    import torch

    from stepscope.bench.ops.inputs import Maker

ROWS = Parameter("rows", "rows", 8192, "rows")
COLS = Parameter("cols", "elements", 1024, "elements of a row")

LEAKY_SLOPE = 0.01
"""Of leaky_relu below zero."""

_ACTIVATION_FLOPS = {
    "relu": (1, 1),
    "leaky_relu": (2, 2),
    "elu": (2, 3),
    "gelu": (5, 11),
    "gelu_tanh": (9, 17),
    "silu": (5, 9),
    "mish": (4, 13),
    "tanh": (1, 3),
    "sigmoid": (4, 3),
    "softplus": (2, 4),
    "hardswish": (5, 5),
}
"""An element, forward and backward, as the usual formulas are written; what backward computes anew is counted again."""


class Activation(Operator):
    name = "activation"
    summary = "an activation function of (rows, cols), out of place"
    parameters = (
        ROWS,
        COLS,
        Parameter(
            "function", "", "relu", "which one; gelu_tanh is gelu approximated by tanh", tuple(_ACTIVATION_FLOPS)
        ),
    )
    differentiable = ("input",)
    tiny = {"rows": 16, "cols": 24}

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        elements, size = shape["rows"] * shape["cols"], DTYPE_BYTES[dtype]
        forward, backward = _ACTIVATION_FLOPS[shape["function"]]
        if direction == "forward":
            return Work(forward * elements, size * 2 * elements)
        # The upstream and the kept input or output read, the gradient written.
        return Work(backward * elements, size * 3 * elements)

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        return {"input": maker.values(shape["rows"], shape["cols"])}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        import torch
        from torch.nn import functional

        tensor, function = inputs["input"], shape["function"]
        if function == "gelu_tanh":
            return lambda: functional.gelu(tensor, approximate="tanh")
        if function == "leaky_relu":
            return lambda: functional.leaky_relu(tensor, LEAKY_SLOPE)
        apply = getattr(torch if function in ("relu", "tanh", "sigmoid") else functional, function)
        return lambda: apply(tensor)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        import torch

        def softplus(x: torch.Tensor) -> torch.Tensor:
            return (1 + x.exp()).log()

        formulas: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "relu": lambda x: torch.where(x > 0, x, 0),
            "leaky_relu": lambda x: torch.where(x > 0, x, LEAKY_SLOPE * x),
            "elu": lambda x: torch.where(x > 0, x, x.exp() - 1),
            "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
            "gelu_tanh": lambda x: x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
            "silu": lambda x: x / (1 + (-x).exp()),
            "mish": lambda x: x * torch.tanh(softplus(x)),
            "tanh": lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()),
            "sigmoid": lambda x: 1 / (1 + (-x).exp()),
            "softplus": softplus,
            "hardswish": lambda x: x * (x + 3).clamp(0, 6) / 6,
        }
        return lambda: formulas[shape["function"]](inputs["input"])


class Cast(Operator):
    """Conversions are not counted as operations. The check asks for the nearest value, element by element."""

    name = "cast"
    summary = "tensor.to(dtype, copy=True) of (rows, cols)"
    parameters = (
        ROWS,
        COLS,
        Parameter("to", "", "bfloat16", "dtype of the copy; the case's own: a plain copy", FLOATS),
    )
    differentiable = ("input",)
    tiny = {"rows": 16, "cols": 24}

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        if direction == "backward" and shape["to"] == dtype:
            raise UnsupportedError(_PLAIN_COPY)
        # Backward converts the upstream the other way.
        return Work(0, (DTYPE_BYTES[dtype] + DTYPE_BYTES[shape["to"]]) * shape["rows"] * shape["cols"])

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        return {"input": maker.values(shape["rows"], shape["cols"])}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        import torch

        tensor, to = inputs["input"], getattr(torch, shape["to"])
        if tensor.requires_grad and tensor.dtype == to:
            raise UnsupportedError(_PLAIN_COPY)
        return lambda: tensor.to(to, copy=True)

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> None:
        import torch

        tensor = inputs["input"].detach()
        if direction == "forward":
            _check_nearest("cast", self.bind(shape, {"input": tensor})(), tensor)
            return
        with torch.enable_grad():
            result = self.bind(shape, {"input": tensor.requires_grad_()})()
        (upstream,) = seeded_like([result])
        (gradient,) = torch.autograd.grad(result, tensor, upstream)
        _check_nearest("cast backward", gradient, upstream)


_PLAIN_COPY = "the gradient of a plain copy is the upstream itself: its backward computes nothing"


def _check_nearest(name: str, result: torch.Tensor, source: torch.Tensor) -> None:
    import torch

    limits = torch.finfo(result.dtype)
    exact = source.detach().double()
    # Half a step of the mantissa, or of the even steps below the smallest normal number.
    allowed = torch.clamp(exact.abs(), min=limits.tiny) * limits.eps / 2
    wrong = ~((result.detach().double() - exact).abs() <= allowed)
    if bool(wrong.any()):
        rule = str(result.dtype).removeprefix("torch.")
        raise WrongResultError(
            f"{name} to {rule}: {int(wrong.sum())} of {wrong.numel()} elements are not the nearest value"
        )


OPERATORS: tuple[type[Operator], ...] = (Activation, Cast)
