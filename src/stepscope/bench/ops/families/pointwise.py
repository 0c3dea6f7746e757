"""Element by element (activations and conversions), and reductions over rows, columns or everything.

Operations are counted one for each addition, multiplication, comparison or function (exp, tanh, erf …) of an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import (
    DTYPE_BYTES,
    FLOATS,
    INDEX_BYTES,
    Call,
    Operator,
    Parameter,
    Shape,
    Sizes,
    UnsupportedError,
    Work,
)
from stepscope.bench.ops.reference import check_elements, seeded_like
from stepscope.core.lazy_torch import functional, torch
from stepscope.run.producer import WrongResultError

ROWS = Parameter("rows", "rows", 8192, "rows")
COLS = Parameter("cols", "elements", 1024, "elements of a row")


class RowOperator(Operator):
    """A function of (rows, cols) whose backward reads the upstream and the kept input or output."""

    differentiable = ("input",)

    def flops_each(self, shape: Shape) -> tuple[int, int]:
        """Operations per element, forward and backward."""
        raise NotImplementedError

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        elements, (forward, backward) = shape["rows"] * shape["cols"], self.flops_each(shape)
        if direction == "forward":
            return Work(forward * elements, DTYPE_BYTES[dtype] * 2 * elements)
        return Work(backward * elements, DTYPE_BYTES[dtype] * 3 * elements)

    def sizes(self, shape: Shape) -> Sizes:
        return {"input": (shape["rows"], shape["cols"])}


LEAKY_SLOPE = 0.01
"""Slope of leaky_relu below zero."""

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


class Activation(RowOperator):
    name = "activation"
    summary = "an activation function of (rows, cols), out of place"
    parameters = (
        ROWS,
        COLS,
        Parameter(
            "function", "", "relu", "which one; gelu_tanh is gelu approximated by tanh", tuple(_ACTIVATION_FLOPS)
        ),
    )
    tiny = {"rows": 16, "cols": 24}

    def flops_each(self, shape: Shape) -> tuple[int, int]:
        return _ACTIVATION_FLOPS[shape["function"]]

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        tensor, function = inputs["input"], shape["function"]
        if function == "gelu_tanh":
            return partial(functional.gelu, tensor, approximate="tanh")
        if function == "leaky_relu":
            return partial(functional.leaky_relu, tensor, LEAKY_SLOPE)
        apply = getattr(torch if function in ("relu", "tanh", "sigmoid") else functional, function)
        return partial(apply, tensor)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
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


class Cast(RowOperator):
    """Conversions are not counted as operations. The check asks for the nearest value, element by element."""

    name = "cast"
    summary = "tensor.to(dtype, copy=True) of (rows, cols)"
    parameters = (
        ROWS,
        COLS,
        Parameter("to", "", "bfloat16", "dtype of the copy; the case's own: a plain copy", FLOATS),
    )
    tiny = {"rows": 16, "cols": 24}

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        if direction == "backward" and shape["to"] == dtype:
            raise UnsupportedError(_PLAIN_COPY)
        # Backward converts the upstream the other way.
        return Work(0, (DTYPE_BYTES[dtype] + DTYPE_BYTES[shape["to"]]) * shape["rows"] * shape["cols"])

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        tensor, to = inputs["input"], getattr(torch, shape["to"])
        if tensor.requires_grad and tensor.dtype == to:
            raise UnsupportedError(_PLAIN_COPY)
        return lambda: tensor.to(to, copy=True)

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> None:
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
    limits = torch.finfo(result.dtype)
    exact = source.detach().double()
    # Half a step of the mantissa, or of the even steps below the smallest normal number.
    allowed = torch.clamp(exact.abs(), min=limits.tiny) * limits.eps / 2
    rule = str(result.dtype).removeprefix("torch.")
    check_elements(f"{name} to {rule}", result, exact, allowed, "are not the nearest value")


class _Reduction(NamedTuple):
    """Operations of one reduction."""

    forward: int
    """An element."""
    result: int
    """A result, on top."""
    backward: int
    """An element; 0: nothing to compute."""
    reads_input: bool
    """Whether backward reads the input."""
    reads_result: bool
    """Whether backward reads the kept result."""


_REDUCTIONS = {
    "sum": _Reduction(1, 0, 0, reads_input=False, reads_result=False),
    "mean": _Reduction(1, 1, 1, reads_input=False, reads_result=False),
    "amax": _Reduction(1, 0, 3, reads_input=True, reads_result=True),
    "argmax": _Reduction(1, 0, 0, reads_input=False, reads_result=False),
    "norm": _Reduction(2, 1, 2, reads_input=True, reads_result=True),
    "cumsum": _Reduction(1, 0, 1, reads_input=False, reads_result=False),
    "var": _Reduction(4, 1, 3, reads_input=True, reads_result=False),
}
"""sum, amax, argmax and cumsum take one an element; norm a square and an addition, then a root; var the mean, then
subtract, square and add. Backward: mean spreads dy/n; amax compares, counts ties and shares out; norm is dy·x/y; var is
the mean anew, x − mean and the scale."""
_NO_BACKWARD = {
    "sum": "the gradient of a sum is the upstream, spread by a view: its backward computes nothing",
    "argmax": "argmax has no derivative",
}
_DIMENSION = {"rows": 0, "cols": 1}
_SUMMED = ("sum", "mean", "cumsum")
_LARGEST_SUM = 2.0**14
"""Bound of summed inputs, which keeps sums of any length inside float16."""


class Reduction(Operator):
    name = "reduction"
    summary = "a reduction or running sum of (rows, cols) along one dimension or over everything"
    parameters = (
        ROWS,
        COLS,
        Parameter("function", "", "sum", "which one; norm is Euclidean, var the sample's (n − 1)", tuple(_REDUCTIONS)),
        Parameter(
            "over", "", "cols", "cols: along each row, one result a row; rows: down each column; all: everything",
            ("rows", "cols", "all"),
        ),
    )  # fmt: skip
    tiny = {"rows": 16, "cols": 24, "function": "norm"}

    def gradient_names(self, shape: Shape) -> tuple[str, ...]:
        if shape["function"] in _NO_BACKWARD:
            raise UnsupportedError(_NO_BACKWARD[shape["function"]])
        return ("input",)

    @staticmethod
    def _reduced(shape: Shape) -> int:
        """Elements that go into one result."""
        rows, cols = shape["rows"], shape["cols"]
        return int({"rows": rows, "cols": cols, "all": rows * cols}[shape["over"]])

    def _results(self, shape: Shape) -> int:
        elements = int(shape["rows"] * shape["cols"])
        return elements if shape["function"] == "cumsum" else elements // self._reduced(shape)

    def check_shape(self, shape: Shape) -> None:
        if shape["function"] == "var" and self._reduced(shape) < 2:
            raise ValueError(f"var over {shape['over']} needs at least 2 elements a result")

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        kind, results = _REDUCTIONS[shape["function"]], self._results(shape)
        elements, size = shape["rows"] * shape["cols"], DTYPE_BYTES[dtype]
        if direction == "forward":
            written = results * (INDEX_BYTES if shape["function"] == "argmax" else size)
            return Work(kind.forward * elements + kind.result * results, size * elements + written)
        self.gradient_names(shape)
        passes = elements * (1 + kind.reads_input) + results * (1 + kind.reads_result)
        return Work(kind.backward * elements, size * passes)

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """The values that summed inputs were made of."""
        return int(shape["rows"] * shape["cols"] * DTYPE_BYTES[dtype]) if shape["function"] in _SUMMED else 0

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        values = maker.values(shape["rows"], shape["cols"])
        if shape["function"] not in _SUMMED:
            return {"input": values}
        # Positive: a sum that cancels has no relative accuracy to be checked.
        return {"input": values.abs().mul_(min(1.0, _LARGEST_SUM / self._reduced(shape)))}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        tensor, function = inputs["input"], shape["function"]
        dim = _DIMENSION.get(shape["over"])
        if function == "cumsum":
            return partial(torch.cumsum, tensor.reshape(-1) if dim is None else tensor, dim or 0)
        apply = torch.linalg.vector_norm if function == "norm" else getattr(torch, function)
        return partial(apply, tensor, **({} if dim is None else {"dim": dim}))

    def added_terms(self, shape: Shape) -> int:
        return self._reduced(shape)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        # What goes into one result is one line.
        tensor, over = inputs["input"], shape["over"]
        lines = {"rows": tensor.T, "cols": tensor, "all": tensor.reshape(1, -1)}[over]
        count = self._reduced(shape)

        def running_sums() -> torch.Tensor:
            after = lines.flip(1).cumsum(1).flip(1) - lines
            sums = lines.sum(1, keepdim=True) - after
            return {"rows": sums.T, "cols": sums, "all": sums.reshape(-1)}[over]

        formulas: dict[str, Call] = {
            "sum": lambda: lines @ torch.ones(count, dtype=lines.dtype, device=lines.device),
            "mean": lambda: lines.sum(1) / count,
            "amax": lambda: lines.amax(1),
            "norm": lambda: lines.square().sum(1).sqrt(),
            "var": lambda: (lines.square().sum(1) - lines.sum(1).square() / count) / (count - 1),
        }
        if shape["function"] == "cumsum":
            return running_sums
        formula = formulas[shape["function"]]
        return (lambda: formula().reshape(())) if over == "all" else formula

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> None:
        if shape["function"] != "argmax":
            super().check(shape, inputs, dtype, direction)
            return
        tensor = inputs["input"]
        places = self.bind(shape, inputs)()
        dim = _DIMENSION.get(shape["over"])
        if dim is None:
            found, largest = tensor.flatten()[places], tensor.max()
        else:
            found, largest = tensor.gather(dim, places.unsqueeze(dim)).squeeze(dim), tensor.amax(dim)
        if not bool((found == largest).all()):
            raise WrongResultError(f"argmax in {dtype} points at elements that are not the largest")
